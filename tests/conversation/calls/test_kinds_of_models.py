"""Models that count positions in each forward, attend ahead, or keep states in themselves: tokens are those of a new
cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import _draw_wide_weights
from model_types import VOCAB, tiny_config
from test_store import GREEDY, fresh, ones, store_of
from transformers import AutoModelForCausalLM


def made(name: str, **settings: Any) -> Any:
    config = tiny_config(name)
    for key, value in settings.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    _draw_wide_weights(model, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model


def some(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB - 2, (1, tokens), generator=torch.Generator("cpu").manual_seed(seed))


def talk(model: Any, turns: int = 3) -> list[int]:
    """Turns of which each has the tokens of a new cache. What each continued."""
    cached, ids = [], some(30)
    with store_of(model) as store:
        for turn in range(turns):
            right = fresh(model, ones(ids))
            assert torch.equal(store.generate(**ones(ids), **GREEDY), right)
            cached.append(store.reuse[0].cached)
            ids = torch.cat([right, some(5, turn + 1)], 1)
    return cached


def test_a_model_that_counts_positions_in_each_forward_is_told_them() -> None:
    assert talk(made("bamba")) == [0, 35, 46]


def test_what_is_dropped_in_between_is_computed_at_its_own_positions() -> None:
    model = made("roberta", is_decoder=True, max_position_embeddings=200)  # which begins at 1 where it is told none
    with store_of(model) as store:
        ids = some(80)
        store.generate(**ones(ids), **GREEDY)
        store.drop(ids[0].tolist(), 16, 32)
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert 0 < store.reuse[0].cached < 79
        assert store.verify(9) > 0


@pytest.mark.parametrize("name", ["bert", "roberta", "big_bird", "roformer"])
def test_an_encoder_that_generates_re_uses_nothing(name: str) -> None:
    assert talk(made(name, is_decoder=False)) == [0, 0, 0]


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt_neox"])
def test_an_encoder_that_was_made_a_decoder_re_uses(name: str) -> None:
    assert talk(made(name, **({} if name == "gpt_neox" else {"is_decoder": True}))) == [0, 35, 46]


def test_a_decoder_whose_code_masks_nothing_re_uses_nothing() -> None:
    model, ids = made("roformer", is_decoder=True), some(30)
    with torch.no_grad():
        last = model(input_ids=ids).logits[0, :20]
        alone = model(input_ids=ids[:, :20]).logits[0]
    ahead = not torch.allclose(last, alone, atol=1e-4)  # with some versions of Transformers
    assert talk(model) == ([0, 0, 0] if ahead else [0, 35, 46])


def test_a_model_that_keeps_states_in_itself_re_uses_nothing() -> None:
    model, ids = made("recurrent_gemma"), some(30)
    assert talk(model) == [0, 0, 0]
    with store_of(model) as store:
        store.generate(**ones(ids), **GREEDY)
        assert store.reuse[0].why == "the model keeps states in itself"
