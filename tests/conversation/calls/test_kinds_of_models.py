"""Models that count positions in each forward, attend ahead, or keep states in themselves: tokens are those of a new
cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import _draw_wide_weights
from model_types import VOCAB, tiny_config
from test_store import GREEDY, fresh, ones, store_of
from transformers import AutoModelForCausalLM, WhisperConfig, WhisperForConditionalGeneration

from kvtier import Engine
from kvtier.hf.models import generation as of


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


@pytest.mark.parametrize("window", [8, 64])
def test_a_model_whose_masks_show_what_its_cache_has_let_go_of_is_run_as_it_is(window: int) -> None:
    model = made("moshi", sliding_window=window)
    assert talk(model) == [0, 0, 0]
    with Engine(model, host_budget="64MiB", block_size=16) as engine:
        assert engine.runner == "single"
        for tokens in (20, 70):
            ids = some(tokens)
            right = model.generate(ids, **GREEDY)[0, tokens:].tolist()
            name = engine.add_request(ids[0].tolist(), **GREEDY)
            assert engine.wait(name).generated_tokens == right


def test_a_model_that_takes_no_cache_is_run_without_one() -> None:
    for name in ("openai-gpt", "minimax"):
        model, ids = made(name), some(30)
        with store_of(model) as store:
            for _ in range(2):
                assert torch.equal(store.generate(**ones(ids), **GREEDY), model.generate(**ones(ids), **GREEDY))
            assert store.reuse[0].why == "the model takes no cache"


def test_a_model_whose_first_argument_is_something_else_is_given_what_it_was_given() -> None:
    config = WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, num_mel_bins=8,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20, pad_token_id=0,
        max_target_positions=40, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(1, 8, 40)
    with store_of(model) as store:
        for given in ({"input_features": sound}, {"inputs": sound}):
            assert torch.equal(store.generate(**given, **GREEDY), model.generate(input_features=sound, **GREEDY))


def test_a_text_config_is_looked_at_behind_one_that_says_it_is_no_decoder() -> None:
    text = SimpleNamespace(use_bidirectional_attention=True)
    config = SimpleNamespace(is_decoder=False, get_text_config=lambda decoder: text)
    assert of.attends_ahead(SimpleNamespace(config=config, modules=list))
    text.use_bidirectional_attention = False
    assert not of.attends_ahead(SimpleNamespace(config=config, modules=list))
