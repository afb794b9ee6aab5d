"""Drafts of every kind, tried and cropped: tokens and logits are those of ``DynamicCache``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, _draw_wide_weights, prompt_ids, tiny_model
from model_types import tiny_model_of_type, types
from placements import Placement, assert_same_as_dynamic_cache
from transformers import Cache, PreTrainedModel

from kvtier.hf.models.names import CACHE

PLACEMENTS: tuple[Placement, ...] = ("host", "device", "smallest")


def generate(model: PreTrainedModel, cache: Cache, *, length: int = 21, **options: Any) -> Any:
    """Tokens and logits of a generation of 16 tokens."""
    torch.manual_seed(0)
    given = {"max_new_tokens": 16, "do_sample": False, CACHE: cache} | options
    ids = prompt_ids(rows=1, length=length) % model.config.vocab_size
    output = model.generate(ids, return_dict_in_generate=True, output_logits=True, **given)
    return output.sequences, output.logits


def check(model: PreTrainedModel, run: Callable[[PreTrainedModel, Cache], Any], placement: Placement) -> None:
    """A run ends, and with what it gives on ``DynamicCache``."""
    assert assert_same_as_dynamic_cache(model, run, placement, block_size=4).get_seq_length() >= 16


@functools.cache
def drafter_of_gemma4(attention: str) -> PreTrainedModel:
    """A model that drafts from the keys and values that the last forward of a Gemma 4 returned, and has none itself."""
    of_a_layer = {name: FAMILIES["gemma4"].settings[name] for name in ("head_dim", "global_head_dim", "sliding_window")}
    kinds = ["sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": kinds}
    no_inputs = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    target = tiny_model("gemma4").config
    sizes = {
        name: getattr(target, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**of_a_layer, **layers, **no_inputs, **sizes),
        backbone_hidden_size=target.hidden_size,
    )
    config._attn_implementation = attention
    torch.manual_seed(2)
    model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    _draw_wide_weights(model, 2)
    model.generation_config.num_assistant_tokens = 4
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gemma4_is_drafted_for_from_what_its_last_forward_returned(
    attention: str, sampled: bool, placement: Placement
) -> None:
    """Behind a draft that was rejected the cache is cropped, and the next drafts are made of what it held before."""

    def run(model: PreTrainedModel, cache: Cache) -> Any:
        return generate(model, cache, assistant_model=drafter_of_gemma4(attention), do_sample=sampled)

    check(tiny_model("gemma4", attention), run, placement)


@functools.cache
def convolutional(seed: int) -> PreTrainedModel:
    """A tiny LFM2."""
    if "lfm2" not in types():
        pytest.skip("not in this Transformers")
    model = copy.deepcopy(tiny_model_of_type("lfm2"))
    _draw_wide_weights(model, seed)
    model.generation_config.num_assistant_tokens = 5
    return model


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("agrees", [False, True])
def test_convolutions_go_back_behind_prompts_that_are_shorter_than_their_kernel(agrees: bool, length: int) -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        return generate(model, cache, length=length, assistant_model=copy.deepcopy(convolutional(1 if agrees else 2)))

    check(convolutional(1), run, "host")
