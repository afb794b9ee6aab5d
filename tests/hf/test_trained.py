"""The exactness law on weights that were really trained, reading real text."""

from __future__ import annotations

import inspect
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
from placements import PLACEMENTS, Placement, assert_same_as_dynamic_cache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PYLM = Path(__file__).parents[2] / "examples" / "pylm"


@cache
def trained(attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32, attn_implementation=attention).eval()


@cache
def source(tokens: int) -> torch.Tensor:
    """The beginning of a module of the standard library, `[1, tokens]`."""
    text = inspect.getsource(textwrap)
    return AutoTokenizer.from_pretrained(PYLM)(text, return_tensors="pt").input_ids[:, :tokens]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_trained_model_writes_what_it_writes_with_dynamic_cache(
    placement: Placement, block_size: int, attention: str
) -> None:
    model, prompt = trained(attention), source(100 if block_size == 1 else 500).to(torch.get_default_device())

    def run(past: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out = model.generate(
            prompt,
            past_key_values=past,
            max_new_tokens=16,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences, out.logits

    assert_same_as_dynamic_cache(model, run, placement, block_size=block_size)
