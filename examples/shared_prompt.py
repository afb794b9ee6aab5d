"""Many conversations on one system prompt: it is computed once, and its keys and values are there once.

python examples/shared_prompt.py
python examples/shared_prompt.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

SYSTEM = '"""Functions for lists."""\n\n\n' + "def first(items):\n    return items[0]\n\n\n" * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "pylm"), help="default: the example model")
    args = parser.parse_args()

    try:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        parser.error(f"--model {args.model} cannot be loaded: {error}")
    with kvtier.ConversationStore(model, host_budget="1GiB") as store:
        print("conversation  prompt  cached  computed  blocks in memory")
        for name in ("last", "length", "reverse", "unique", "sum", "sort"):
            chat = store.open(name)
            chat.send(f"def {name}(items):\n", system=SYSTEM, tokenizer=tokenizer, max_new_tokens=8)
            took, blocks = chat.reuse, store.memory.stats.host.used_blocks
            print(f"{name:<12}  {took.prompt:>6}  {took.cached:>6}  {took.computed:>8}  {blocks:>16}")


if __name__ == "__main__":
    main()
