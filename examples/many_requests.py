"""Many requests at a time: batched at each step, what they share computed once, answers streamed as they come.

python examples/many_requests.py
python examples/many_requests.py --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

SHARED = '"""Functions for lists."""\n\n\n' + "def first(items):\n    return items[0]\n\n\n" * 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "pylm"), help="default: the example model")
    args = parser.parse_args()

    try:
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        parser.error(f"--model {args.model} cannot be loaded: {error}")
    names = ("last", "length", "reverse", "unique", "sum", "sort", "head", "tail")
    prompts = [tokenizer(f"{SHARED}def {name}(items):\n")["input_ids"] for name in names]
    with kvtier.Engine(model, tokenizer, host_budget="1GiB") as engine:
        requests = [engine.add_request(ids, max_new_tokens=12, do_sample=False) for ids in prompts]
        first = list(engine.stream(requests[0]))  # token by token, while the others are computed too
        print(f"the first answer: {tokenizer.decode(first)!r}")
        print("request     prompt  cached  generated  ended by")
        for name, request in zip(names, requests, strict=True):
            out = engine.wait(request)
            tokens = len(out.generated_tokens)
            print(f"{name:<10}  {len(out.prompt_ids):>6}  {out.cached_tokens:>6}  {tokens:>9}  {out.finish_reason:>8}")


if __name__ == "__main__":
    main()
