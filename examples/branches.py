"""Another answer, another question, a step back: what branches share is kept once, and only what is new is computed.

python examples/branches.py
python examples/branches.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import kvtier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "pylm"), help="default: the example model")
    args = parser.parse_args()

    try:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        parser.error(f"--model {args.model} cannot be loaded: {error}")
    options = {"tokenizer": tokenizer, "max_new_tokens": 12, "do_sample": True}
    set_seed(0)
    with kvtier.ConversationStore(model, host_budget="1GiB") as store:

        def show(what: str, chat: kvtier.Conversation, answer: str) -> None:
            print(f"{what:<16} cached {chat.reuse.cached:>3}, computed {chat.reuse.computed:>3}   {answer!r}")

        chat = store.open("chat")
        show("a question", chat, chat.send("def first(items):\n    return items[0]\n\n\ndef last(items):\n", **options))
        for _ in range(2):
            show("another answer", chat, chat.regenerate(**options))
        other = chat.fork("another way")
        show("it goes on", chat, chat.send("\n\ndef length(items):\n", **options))
        show("and its fork", other, other.send("\n\ndef reverse(items):\n", **options))
        chat.rewind(turns=1)
        show("a step back", chat, chat.send("\n\ndef is_empty(items):\n", **options))


if __name__ == "__main__":
    main()
