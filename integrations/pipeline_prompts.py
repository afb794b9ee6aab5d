"""A Transformers pipeline with several prompts: every call gets a tiered cache, and the answers are the same.

python integrations/pipeline_prompts.py
python integrations/pipeline_prompts.py --model DIR --device-budget 4GiB
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PROMPTS = ["def area(radius):\n", "class Stack:\n    def push(self, item):\n", "import os\n\nfor name in", "x = ["]


def main() -> int:
    """Returns 0 if all answers are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    parser.add_argument("--device-budget", help="such as 4GiB (what is free; on a CPU model no device tier)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 40, "do_sample": False, "return_full_text": False}

    expected = [write(PROMPTS, **options), write(PROMPTS, batch_size=4, **options)]
    with kvtier.tiered(model, device_budget=args.device_budget) as used:
        found = [write(PROMPTS, **options), write(PROMPTS, batch_size=4, **options)]
    print(used.stats)
    print(f"\n{used.calls} calls of generate; the same answers: {'yes' if found == expected else 'no'}")
    return 0 if found == expected and used.calls == len(PROMPTS) + 1 else 1


if __name__ == "__main__":
    sys.exit(main())
