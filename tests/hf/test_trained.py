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


def written(model: PreTrainedModel, past: object, tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    out = model.generate(
        source(tokens).to(torch.get_default_device()),
        past_key_values=past,
        max_new_tokens=16,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, out.logits


def written_after_little(model: PreTrainedModel, past: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return written(model, past, 40)


def written_after_much(model: PreTrainedModel, past: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    return written(model, past, 500)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("block_size", "attention"), [(1, "sdpa"), (16, "sdpa"), (64, "sdpa"), (16, "eager")])
def test_a_trained_model_writes_what_it_writes_with_dynamic_cache(
    placement: Placement, block_size: int, attention: str
) -> None:
    run = written_after_little if block_size == 1 else written_after_much
    assert_same_as_dynamic_cache(trained(attention), run, placement, block_size=block_size)
