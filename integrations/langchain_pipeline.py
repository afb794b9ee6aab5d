"""LangChain's `HuggingFacePipeline`: it passes no cache of yours on, so the model is tiered around it.

pip install langchain-huggingface
python integrations/langchain_pipeline.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import kvtier

PYLM = Path(__file__).resolve().parent.parent / "examples" / "pylm"
NAMES = [{"name": "area"}, {"name": "read_lines"}, {"name": "main"}]


def main() -> int:
    """Returns 0 if the answers are those without a tiered cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PYLM), help="a folder, or a name on the hub")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=40, do_sample=False)
    chain = PromptTemplate.from_template("def {name}(") | HuggingFacePipeline(pipeline=write)

    expected = chain.batch(NAMES)
    with kvtier.tiered(model) as used:
        found = chain.batch(NAMES)
        streamed = "".join(chain.stream(NAMES[0]))
    same = found == expected and bool(streamed)
    print(used.stats.summary())
    print(f"{used.calls} calls of generate; the same answers: {'yes' if same else 'no'}")
    return 0 if same and used.calls >= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
