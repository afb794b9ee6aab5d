"""Outlines: text that matches a pattern, from a model that is tiered around it.

pip install outlines
python integrations/outlines_regex.py
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import outlines
import torch
from outlines.types import Regex
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
PATTERN = r"[a-z]{3,8} = [0-9]{2,4}"


def main() -> int:
    """Returns 0 if the answer is that without a tiered cache, and matches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    write = outlines.from_transformers(model, AutoTokenizer.from_pretrained(args.model))
    options = {"max_new_tokens": 30, "do_sample": False}

    expected = write("# a number\n", Regex(PATTERN), **options)
    with kvtier.tiered(model) as used:
        found = write("# a number\n", Regex(PATTERN), **options)
    same = found == expected and re.fullmatch(PATTERN, found) is not None
    print(used.stats.summary())
    print(f"{found!r}, the same: {'yes' if same else 'no'}")
    return 0 if same and used.calls == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
