"""A shared system prompt, several conversations, an answer that is generated again: what of each prompt is computed.

    python examples/conversations.py

The model is the small trained one of this folder, a Python autocomplete; its tokens are those of a new cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

FOLDER = Path(__file__).parent / "pylm"
SYSTEM = '"""Functions for lists."""\n\n\n' + "def first(items):\n    return items[0]\n\n\n" * 12


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    with kvtier.ConversationStore(model, host_budget="1GiB") as store:

        def say(what: str, text: str) -> torch.Tensor:
            inputs = tokenizer(text, return_tensors="pt")
            out = store.generate(**inputs, max_new_tokens=16, do_sample=False)
            (row,) = store.reuse
            fresh = model.generate(**inputs, max_new_tokens=16, do_sample=False)
            same = "equal" if torch.equal(out, fresh) else "DIFFERENT"
            print(f"{what:<34} {row.prompt:>6} {row.cached:>7} {row.computed:>9}   {same}")
            return out

        print(f"{'':<34} {'prompt':>6} {'cached':>7} {'computed':>9}   tokens")
        say("a first prompt", SYSTEM + "def last(items):\n")
        out = say("the same beginning, another end", SYSTEM + "def length(items):\n")
        say("a turn that goes on", tokenizer.decode(out[0]) + "\n\ndef reverse(items):\n")
        say("the same again", SYSTEM + "def length(items):\n")
        say("an edit in the middle", SYSTEM.replace("items[0]", "items[1]", 1) + "def last(items):\n")
        kept, blocks = store.stats, store.memory.stats.host.used_blocks
        print(f"\n{kept.sequences} sequences of {kept.tokens} tokens are kept in {blocks} blocks.")


if __name__ == "__main__":
    main()
