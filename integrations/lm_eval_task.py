"""lm-eval with statistics: a small local task, once without and once with tiered caches.

pip install "lm-eval[hf]"
python integrations/lm_eval_task.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
ROWS = [
    {"text": "import os\nimport sy", "answer": "s"},
    {"text": "def area(self", "answer": "):"},
    {"text": "for i in ran", "answer": "ge"},
    {"text": "class Stack:\n    def __in", "answer": "it__"},
]


def evaluate(model: torch.nn.Module, tokenizer: object, folder: str) -> object:
    """What lm-eval finds on the task: the answers, too."""
    data = Path(folder) / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    task = {
        "task": "pieces",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return [x["resps"] for x in found["samples"]["pieces"]], found["results"]["pieces"]["exact_match,none"]


def main() -> int:
    """Returns 0 if the answers are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        expected = evaluate(model, tokenizer, folder)
        with kvtier.tiered(model) as used:
            found = evaluate(model, tokenizer, folder)
    print(used.stats.summary())
    print(f"{used.calls} calls of generate; the same answers: {'yes' if found == expected else 'no'}")
    return 0 if found == expected and used.calls == len(ROWS) // 2 else 1


if __name__ == "__main__":
    sys.exit(main())
