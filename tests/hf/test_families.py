"""Greedy decoding gives the tokens and the logits of ``DynamicCache``, whatever the model family and the placement."""

import functools
import itertools
from typing import Any

import pytest
import torch
from families import FAMILIES, attentions, dynamic_cache, family_attention_pairs, prompt_ids, tiny_model
from placements import (
    ON_HOST,
    PLACEMENTS,
    ROOMY,
    Placement,
    assert_same_as_dynamic_cache,
    outcome,
    smallest_budget,
    tiered_cache,
)
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from kvtier import BudgetError
from kvtier.hf.models.names import CACHE

NEW_TOKENS = 12
BLOCK_SIZES = (1, 16, 64)
#: A plain decoder, one that mixes windows with full attention, and one whose K and V differ in head size.
CROSSED_WHOLLY = ("llama", "gemma3", "deepseek_v3")
#: For the other families, one case per placement and per block size.
SAMPLED = ((16, "host"), (1, "host"), (64, "device"), (16, "smallest"), (16, "between"))
#: With eager attention where there is sdpa as well: all that differs is that it makes tensors of the views.
EAGER = ((1, "host"), (16, "smallest"))
TIERED = [name for name, family in FAMILIES.items() if family.tiered]


def model_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": prompt_ids()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt_ids(length=10, seed=5)
    return inputs


def greedy(model: PreTrainedModel, cache: Cache, new_tokens: int = NEW_TOKENS) -> tuple[torch.Tensor, ...]:
    """Tokens ``[rows, length]``, then the logits ``[rows, vocab]`` of each step."""
    output = model.generate(
        **model_inputs(model),
        **{CACHE: cache},
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, *output.logits


@functools.cache
def reference(name: str, attention: str, with_config: bool = True) -> Any:
    model = tiny_model(name, attention)
    return outcome(lambda: greedy(model, dynamic_cache(model, with_config=with_config)))


def cases() -> list[Any]:
    crossed = tuple(itertools.product(BLOCK_SIZES, PLACEMENTS))
    return [
        pytest.param(name, attention, block_size, placement, id=f"{name}-{attention}-{block_size}-{placement}")
        for name, attention in family_attention_pairs()
        for block_size, placement in (
            EAGER if attention != attentions(name)[-1] else crossed if name in CROSSED_WHOLLY else SAMPLED
        )
    ]


@pytest.mark.parametrize(("name", "attention", "block_size", "placement"), cases())
def test_any_placement_gives_the_tokens_and_logits_of_dynamic_cache(
    name: str, attention: str, block_size: int, placement: Placement
) -> None:
    model = tiny_model(name, attention)
    expected = reference(name, attention)
    assert not isinstance(expected, Exception)
    assert_same_as_dynamic_cache(model, greedy, placement, block_size=block_size, expected=expected)


@pytest.mark.parametrize("placement", ["host", "smallest"])
@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_config_it_does_what_dynamic_cache_does_without_one(name: str, placement: Placement) -> None:
    attention = attentions(name)[-1]
    model = tiny_model(name, attention)
    expected = reference(name, attention, False)
    assert_same_as_dynamic_cache(model, greedy, placement, with_config=False, expected=expected)


@pytest.mark.parametrize(
    ("name", "block_size"), [("llama", 1), ("llama", 16), ("llama", 64), ("gemma3", 16), ("deepseek_v3", 1)]
)
def test_one_byte_less_than_the_smallest_budget_is_refused(name: str, block_size: int) -> None:
    model = tiny_model(name)

    def make(budget: int) -> Cache:
        return tiered_cache(model, budget, block_size=block_size)

    smallest = smallest_budget(make, functools.partial(greedy, model))
    with pytest.raises(BudgetError) as refusal:
        greedy(model, make(smallest - 1))
    assert refusal.value.needed == smallest


@pytest.mark.parametrize("name", CROSSED_WHOLLY)
def test_blocks_move_only_where_the_budget_is_short(name: str) -> None:
    model = tiny_model(name)

    spilled = assert_same_as_dynamic_cache(model, greedy, "smallest", block_size=1).stats
    assert spilled.bytes_down > 0
    assert spilled.bytes_up > 0
    for budget in (ROOMY, None):
        roomy = tiered_cache(model, budget, block_size=1)
        greedy(model, roomy)
        assert (roomy.stats.bytes_down, roomy.stats.bytes_up) == (0, 0)
        assert (roomy.stats.device.bytes == 0) == (budget is None and ON_HOST)


def _layer_with_whole_past(model: PreTrainedModel, cache: Cache) -> Any:
    """A layer of ``DynamicCache`` that holds every position of the prompt; cross-attention if there is an encoder."""
    layers = cache.cross_attention_cache.layers if isinstance(cache, EncoderDecoderCache) else cache.layers
    prompt_length = prompt_ids().shape[1]
    return next(
        layer
        for layer in reversed(layers)
        if getattr(layer, "keys", None) is not None and layer.keys.shape[-2] >= prompt_length
    )


def _continue_after(name: str, damage: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and first logits of a generation whose ``DynamicCache`` was damaged after a first step."""
    model = tiny_model(name, attentions(name)[-1])
    cache = dynamic_cache(model)
    sequences, *_ = greedy(model, cache, new_tokens=2)
    if damage is not None:
        damage(_layer_with_whole_past(model, cache))
    inputs = model_inputs(model)
    inputs["decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"] = sequences
    output = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, output.logits[0]


@pytest.mark.parametrize("name", TIERED)
def test_the_oracle_notices_one_wrong_position(name: str) -> None:
    def negate_one_value(layer: Any) -> None:
        layer.values[:, :, 20].neg_()

    _, logits = _continue_after(name, None)
    _, damaged = _continue_after(name, negate_one_value)
    assert not torch.equal(logits, damaged)


@pytest.mark.parametrize("name", TIERED)
def test_the_oracle_notices_one_wrong_block_in_the_tokens(name: str) -> None:
    def exchange_two_blocks(layer: Any) -> None:
        layer.values = torch.cat([layer.values[:, :, 16:32], layer.values[:, :, :16], layer.values[:, :, 32:]], dim=2)

    tokens, _ = _continue_after(name, None)
    damaged, _ = _continue_after(name, exchange_two_blocks)
    assert not torch.equal(tokens, damaged)
