"""GRPO of trl, two steps: the trainer's own calls of `generate` get tiered caches.

pip install trl
python integrations/trl_grpo.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PROMPTS = ["def area(radius):\n", "class Stack:\n", "import os\n", "x = ["] * 2


def train(model_name: str, folder: str, *, tiered: bool) -> tuple[list[str], kvtier.CacheStats | None]:
    """What two steps generate, and the statistics of it."""
    seen: list[str] = []

    def reward(completions: list[str], **others: object) -> list[float]:
        seen.extend(completions)
        return [float(len(set(text))) for text in completions]

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    options = GRPOConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=24,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    if not tiered:
        trainer.train()
        return seen, None
    with kvtier.tiered(trainer.model) as used:
        trainer.train()
    return seen, used.stats


def main() -> int:
    """Returns 0 if the completions are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected, _ = train(args.model, folder, tiered=False)
        found, stats = train(args.model, folder, tiered=True)
    assert stats is not None
    print(stats.summary())
    print(f"{len(found)} completions, the same: {'yes' if found == expected else 'no'}")
    return 0 if found == expected and stats.steps else 1


if __name__ == "__main__":
    sys.exit(main())
