"""Models that count positions in each forward, attend ahead, or keep states in themselves: tokens are those of a new
cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import _draw_wide_weights, build_model
from model_types import VOCAB, WINDOW, tiny_config
from test_interrupted_hybrids import model_of
from test_store import GREEDY, fresh, ones, some_ids, store_of
from transformers import AutoModelForCausalLM, WhisperConfig, WhisperForConditionalGeneration
from transformers.cache_utils import DynamicIndexedLayer

from kvtier import Engine
from kvtier.hf.models import generation as of
from kvtier.hf.models.names import CACHE


def made(name: str, **settings: Any) -> Any:
    config = tiny_config(name)
    for key, value in settings.items():
        setattr(config, key, value)
    return drawn(AutoModelForCausalLM.from_config, config)


def drawn(make: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = make(config).float().eval()
    _draw_wide_weights(model, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    return model


def some(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB - 2, (1, tokens), generator=torch.Generator("cpu").manual_seed(seed))


def of_images(name: str, text: dict[str, Any], vision: dict[str, Any], **settings: Any) -> Any:
    """A tiny model of images and text, where this Transformers has it."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this Transformers does not have it")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "num_key_value_heads": 4, "head_dim": 8, "bos_token_id": 1, "eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(text_config=sizes | text, vision_config=vision, **settings)
    return drawn(getattr(transformers, f"{name}ForConditionalGeneration"), config)


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


@pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")
def test_a_model_that_computes_prompts_in_a_way_of_its_own_re_uses_nothing() -> None:
    text = {"sliding_window": WINDOW, "mlp_layer_types": ["dense"] * 2, "n_routed_experts": 2}
    sam = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16, "output_channels": 8}
    encoder = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"sam_config": sam | {"image_size": 64, "downsample_channels": [8, 16]}, "encoder_config": encoder}
    assert talk(of_images("UnlimitedOcr", text, vision)) == [0, 0, 0]


def test_a_model_that_is_told_no_positions_counts_the_padding() -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    tokens = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2, "tie_word_embeddings": False}
    model = of_images("HyperCLOVAXVisionV2", {"model_type": "hyperclovax"}, vision, **tokens)
    assert talk(model) == [0, 35, 46]
    ids = torch.nn.functional.pad(some(30), (12, 0))
    with store_of(model) as store:
        for inputs in ({"input_ids": ids, "attention_mask": (ids != 0).long()}, ones(some(30))):
            assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
            assert store.reuse[0].cached == 0


@pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")
@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpForCausalLM"), reason="this Transformers does not have it")
def test_a_model_that_keeps_positions_of_tokens_continues() -> None:
    model, ids = model_of("qwen4_exp"), some_ids(24, rows=2)
    in_layers = hasattr(DynamicIndexedLayer(), "indexer_position_ids")  # in Transformers 5.17 they are in the cache
    with store_of(model) as store:
        for cached in (0, 23 if in_layers else 0):
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
            assert store.reuse[1].cached == cached


@pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")
@pytest.mark.parametrize("mask", [True, False], ids=["with a mask", "without one"])
@pytest.mark.parametrize(("name", "options"), [("mamba2", {}), ("llama", {"use_cache": False})])
def test_padding_is_no_part_of_a_history_where_a_call_re_uses_nothing(
    name: str, options: dict[str, Any], mask: bool
) -> None:
    model = made(name)
    model.generation_config.pad_token_id = 0
    ids = torch.nn.functional.pad(some(9), (5, 0))
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    right = model.generate(**inputs, **GREEDY, **options)
    with store_of(model) as store:
        chat = store.open("a")
        assert torch.equal(chat.generate(**(inputs if mask else {"input_ids": ids}), **GREEDY, **options), right)
        assert chat.reuse is not None
        assert (chat.reuse.prompt, chat.reuse.cached) == (9, 0)
        assert chat.ids == right[0, 5:].tolist()


def test_what_is_dropped_in_between_is_computed_at_its_own_positions() -> None:
    model = made("roberta", is_decoder=True, max_position_embeddings=200)  # which begins at 1 where it is told none
    with store_of(model) as store:
        ids = some(80)
        store.generate(**ones(ids), **GREEDY)
        store.drop(ids[0].tolist(), 16, 32)
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert 0 < store.reuse[0].cached < 79
        assert store.verify(9) > 0


def test_a_prompt_whose_positions_depend_on_the_length_is_computed_at_once() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    model, twin = (
        build_model("mistral_sliding", "sdpa", max_position_embeddings=256, rope_parameters=rope) for _ in range(2)
    )
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    with store_of(model) as store:
        for tokens in (65, 60, 50):  # beyond the length where they change, and up to it, and below
            ids = some_ids(tokens)
            right = twin.generate(**ones(ids), **options).logits
            torch.testing.assert_close(store.generate(**ones(ids), **options).logits, right)


@pytest.mark.parametrize("before", [True, False])
def test_keys_of_a_stretched_embedding_are_not_kept_at_the_limit_where_that_begins(before: bool) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model, twin = (build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=48) for _ in range(2))
    if before:
        fresh(model, ones(some_ids(70)))
    with store_of(model) as store:
        for tokens, new in ((70, 6), (48, 1), (40, 6)):
            inputs = ones(some_ids(tokens, seed=tokens // 50))
            out = store.generate(**inputs, **(GREEDY | {"max_new_tokens": new}))
            assert torch.equal(out, fresh(twin, inputs, max_new_tokens=new))


def test_keys_of_candidates_beyond_the_limit_are_not_kept_below_it() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model, ids = build_model("llama", "sdpa", rope_parameters=rope, max_position_embeddings=48), some_ids(44)

    def own(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        cache = inputs[CACHE]
        model(input_ids=torch.cat([input_ids, some_ids(9)], 1), use_cache=True, **{CACHE: cache})
        cache.crop(-9)
        return input_ids

    with store_of(model) as store:
        store.generate(**ones(ids), custom_generate=own, **GREEDY)
        assert store.stats.sequences == 0


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


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_a_model_whose_cache_has_another_name_generates(name: str) -> None:
    """In Transformers 5.17 it is `cache_params`, for `generate` too."""
    model, inputs = made(name), ones(some(30))
    with store_of(model) as store:
        for _ in range(2):
            assert torch.equal(store.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


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


def test_a_model_whose_ids_are_not_its_first_argument_generates_from_text_alone() -> None:
    """Kosmos-2, of which pixels are the first."""
    text = {"vocab_size": VOCAB, "embed_dim": 32, "layers": 2, "ffn_dim": 32, "attention_heads": 2, "eos_token_id": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Kosmos2Config(
        text_config=text | {"max_position_embeddings": 64}, vision_config=vision | {"image_size": 8, "patch_size": 4}
    )
    model, ids = transformers.Kosmos2ForConditionalGeneration(config).eval(), some(20)
    try:
        right = model.generate(input_ids=ids, **GREEDY)
    except ValueError as error:
        pytest.skip(f"this Transformers needs an image: {error}")
    with store_of(model) as store:
        for _ in range(2):
            assert torch.equal(store.generate(input_ids=ids, **GREEDY), right)
            assert store.reuse[0].why == "the model has a way of its own to generate"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_adds_to_masks_that_may_miss_is_right(attention: str) -> None:
    """In Transformers 5.17 the tokens of its prompts attend ahead, but for "eager"."""
    model = made("doge", _attn_implementation=attention)
    ahead = attention == "sdpa" and of.adds_to_missing_masks(model)
    assert talk(model) == ([0, 0, 0] if ahead else [0, 35, 46])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_model_whose_processes_wait_for_each_other_computes_as_many_forwards_as_without_a_store(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a process has kept: another one, with other prompts, would wait for a forward that this one leaves out,
    or does not know of."""
    monkeypatch.setattr(of, "waits_for_others", lambda model: True)
    model, ids, forwards = build_model(name, "sdpa"), some_ids(60), [0]
    right = fresh(model, ones(ids))
    model.register_forward_pre_hook(lambda *_: forwards.append(forwards.pop() + 1))
    with store_of(model) as store:
        for turn in range(3):
            forwards[0] = 0
            assert torch.equal(store.generate(**ones(ids), **GREEDY), right)
            assert forwards[0] == GREEDY["max_new_tokens"]
            cached, why = store.reuse[0].cached, store.reuse[0].why
            assert (cached > 0) == (turn > 0 and name == "llama")
            assert name == "llama" or "weights are sharded" in why
            assert bool(store.stats.sequences) == (name == "llama")
            store.drop(ids[0].tolist(), 16, 32)


def test_processes_wait_for_each_other_where_weights_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama", "sdpa")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not of.waits_for_others(model)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
        assert of.waits_for_others(model)
        patch.setattr(torch.distributed, "get_world_size", lambda: 1)
        assert not of.waits_for_others(model)


def test_a_model_that_continues_one_by_one_computes_whole_prompts() -> None:
    model = made("prophetnet", is_decoder=True)
    assert of.continues_one_by_one(model)
    assert talk(model) == [0, 0, 0]


def test_a_text_config_is_looked_at_behind_one_that_says_it_is_no_decoder() -> None:
    text = SimpleNamespace(use_bidirectional_attention=True)
    config = SimpleNamespace(is_decoder=False, get_text_config=lambda decoder: text)
    assert of.attends_ahead(SimpleNamespace(config=config, modules=list))
    text.use_bidirectional_attention = False
    assert not of.attends_ahead(SimpleNamespace(config=config, modules=list))
