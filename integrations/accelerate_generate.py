"""Generate with a tiered KV cache in every process of Accelerate.

    accelerate launch integrations/accelerate_generate.py --model DIR

The prompts are split over the processes; each generates for its own with a cache of its own, and once more with
Transformers' own cache. The first process prints all answers in order, and whether they are the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvtier import TieredKVCache

EXAMPLE_MODEL = Path(__file__).resolve().parent.parent / "examples" / "pylm"

PROMPTS = [
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n",
    "import argparse\n\ndef main():\n",
    "def is_prime(n):\n",
    "    try:\n        value = int(text)\n    except ",
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EXAMPLE_MODEL), help="a folder or the name of a hub model")
    parser.add_argument("--prompt", action="append", help="may be repeated; default: a few beginnings of code")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--device-budget", help="KV on the device, per process: bytes, '4GiB', ...")
    parser.add_argument("--host-budget", default="auto", help="KV in host memory, per process")
    return parser.parse_args()


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], args: argparse.Namespace
) -> tuple[list[str], bool]:
    """The continuations of a batch of prompts, prompts included; and whether they are those of `DynamicCache`."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    options = {**inputs, "max_new_tokens": args.max_new_tokens, "do_sample": False}
    with TieredKVCache(model.config, device_budget=args.device_budget, host_budget=args.host_budget) as cache:
        tokens = model.generate(**options, past_key_values=cache)
    same = torch.equal(tokens, model.generate(**options))
    return tokenizer.batch_decode(tokens, skip_special_tokens=True), same


def main() -> int:
    """Returns 0 if the tokens are those without a tiered cache."""
    args = parse_args()
    accelerator = Accelerator()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # In fp32 the tokens are equal; in bf16 either cache may choose another where two are nearly as likely.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(accelerator.device).eval()

    prompts = args.prompt or PROMPTS
    with accelerator.split_between_processes(prompts) as mine, torch.inference_mode():
        texts, same = generate(model, tokenizer, mine, args) if mine else ([], True)

    texts, equal = gather_object(texts), all(gather_object([same]))
    if accelerator.is_main_process:
        for text in texts:
            print(f"{'-' * 80}\n{text}")
        print(f"{'-' * 80}\nthe same tokens: {'yes' if equal else 'no'}")
    accelerator.end_training()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
