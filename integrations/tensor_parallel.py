"""One model split over processes by heads (Transformers' tensor parallelism), and an engine in each that decides alike.

torchrun --nproc-per-node 2 integrations/tensor_parallel.py     # or plain python, which starts two processes

Each process has its share of the heads, and so of the keys and values: budgets are each process's own. All get the same
requests in the same order. Their engines take the clock of the first process, and so decide the same in every step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PROMPTS = ["def area(radius):\n", "class Stack:\n    def push", "import os\n", "def area(radius):\n    return"]
NEW = 24


def split_model(name: str) -> torch.nn.Module:
    """The model, of which this process has its share."""
    try:
        from transformers.distributed import DistributedConfig

        return AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
        )
    except TypeError:  # before Transformers 5.18
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, tp_plan="auto")


def by_generate(name: str, prompts: list[list[int]]) -> list[list[int]]:
    """What a whole model generates for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    found = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        found.append(out[0, len(ids) :].tolist())
    return found


def run(name: str) -> bool:
    """In each process. Whether its tokens are those of `generate`, and it has its share of the heads only."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = split_model(name)
    size = torch.distributed.get_world_size()

    with kvtier.TieredKVCache(model.config, host_budget="64MiB") as cache:
        model.generate(torch.tensor([prompts[0]]), past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        heads = cache.layers[0].keys.shape[1]
    engine = kvtier.Engine(model, host_budget="64MiB", max_batch_tokens=16)
    outputs = list(engine.generate_batch(prompts, max_new_tokens=NEW, do_sample=False).values())
    found = [output.generated_tokens for output in outputs]
    engine.close()

    everywhere: list[list[list[int]]] = [[] for _ in range(size)]
    torch.distributed.all_gather_object(everywhere, found)
    same = all(each == found for each in everywhere) and found == by_generate(name, prompts)
    share = heads * size == model.config.num_key_value_heads
    print(
        f"process {torch.distributed.get_rank()} of {size}: {heads} heads of keys and values, {engine.runner}",
        flush=True,
    )
    return same and share


def main() -> int:
    """Returns 0 if the tokens are those of `generate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        return subprocess.run([*launch, "--model", args.model], env={"OMP_NUM_THREADS": "1", **os.environ}).returncode
    torch.distributed.init_process_group("gloo" if not torch.cuda.is_available() else None)
    try:
        fine = run(args.model)
        verdicts: list[bool] = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(verdicts, fine)
        if torch.distributed.get_rank() == 0:
            print(f"the same tokens: {'yes' if all(verdicts) else 'no'}", flush=True)
    finally:
        torch.distributed.destroy_process_group()
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
