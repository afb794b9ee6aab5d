"""A chat that a later process goes on with: run it twice, and the second run computes the new message only.

python examples/resume_chat.py
python examples/resume_chat.py --model Qwen/Qwen3-0.6B --store chats --say "And in French?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "pylm"), help="default: the example model")
    parser.add_argument("--store", default="chats", help="a directory (default: chats)")
    parser.add_argument("--say", default="\n\ndef first(items):\n", help="a message")
    args = parser.parse_args()

    try:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        parser.error(f"--model {args.model} cannot be loaded: {error}")
    with kvtier.ConversationStore(model, directory=args.store, disk_budget="10GiB") as store:
        chat = store.open("alice")
        print(f"turns so far: {len(chat.messages) // 2}")
        print(chat.send(args.say, tokenizer=tokenizer, max_new_tokens=32))
        print(chat.reuse)  # tokens of the prompt: read from the disk, and computed
    # Leaving the store saved it.


if __name__ == "__main__":
    main()
