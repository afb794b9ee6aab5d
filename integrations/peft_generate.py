"""A model with adapters (peft): `kvtier.tiered` finds the model inside, before and after the adapters are merged.

pip install peft
python integrations/peft_generate.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PROMPT = "def area(radius):\n"


def main() -> int:
    """Returns 0 if the tokens are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    inputs = AutoTokenizer.from_pretrained(args.model)(PROMPT, return_tensors="pt")
    same = True
    torch.manual_seed(0)
    for config in (
        LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    ):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), config).eval()
        expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        with kvtier.tiered(model) as used:
            found = model.generate(**inputs, max_new_tokens=40, do_sample=False)
            if isinstance(config, LoraConfig):
                merged = model.merge_and_unload().generate(**inputs, max_new_tokens=40, do_sample=False)
                same &= used.calls == 2 and merged.shape == found.shape
        same &= torch.equal(found, expected)
        print(f"{type(config).__name__}: {used.stats.summary()}")
    print(f"the same tokens: {'yes' if same else 'no'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
