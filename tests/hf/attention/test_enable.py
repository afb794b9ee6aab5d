"""A model whose attention goes through kvtier gives what it gave, with any cache and with none; and it can be undone.

What the attention function itself computes is the matter of `test_attention_forward.py`.
"""

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, PAD, attentions, build_model, dynamic_cache, prompt_ids
from placements import ON_HOST, ROOMY, smallest_budget, tiered_cache, tiered_parts
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

import kvtier
from kvtier import UnsupportedError
from kvtier.hf.attention import enable

BYPASSING = ("falcon",)
NAMES = [name for name in FAMILIES if name not in BYPASSING]
CACHES = ("tiered on host", "tiered on device", "tiered in little", "dynamic", "none")
#: A plain decoder, one with softcap and windows, one with sinks and windows, and one whose K and V differ in head size.
CROSSED = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
NEW_TOKENS = 8
#: Fused kernels of accelerators round more.
TOLERANCE = 1e-4 if ON_HOST else 5e-4
#: Its random gains amplify rounding: Transformers' own eager and sdpa differ by 6e-4 here.
TOLERANCES = {"bart": 6 * TOLERANCE}

Run = Callable[[PreTrainedModel, Any], Any]


@functools.cache
def family_model(name: str) -> PreTrainedModel:
    """The family's model with the implementation that Transformers would choose, if that computes what it should."""
    return build_model(name, "eager" if name == "gemma2" else attentions(name)[-1])  # 5.17's sdpa ignores its softcap


def make_cache(kind: str, model: PreTrainedModel, run: Run) -> Any:
    if kind == "tiered in little":
        budget = smallest_budget(functools.partial(tiered_cache, model), functools.partial(run, model))
        return tiered_cache(model, budget)
    if kind == "dynamic":
        return dynamic_cache(model)
    return {"none": None, "tiered on device": tiered_cache(model, ROOMY)}.get(kind, tiered_cache(model))


def generate(model: PreTrainedModel, cache: Any, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Tokens, and the logits `[rows, vocab]` of each step."""
    inputs = {"input_ids": prompt_ids()}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt_ids(length=10, seed=5)
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    cached = {"use_cache": False} if cache is None else {"past_key_values": cache}
    output = model.generate(**(inputs | defaults | {"output_logits": True} | cached | options))
    return output.sequences, output.logits


def assert_close(expected: Any, actual: Any, tolerance: float = TOLERANCE) -> None:
    assert torch.equal(expected[0], actual[0]), "other tokens"
    assert len(expected[1]) == len(actual[1])
    for old, new in zip(expected[1], actual[1], strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=tolerance)


@functools.cache
def reference(name: str, run: Run) -> Any:
    model = family_model(name)
    return run(model, dynamic_cache(model))


# ------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_enabled_models_give_the_tokens_and_logits_of_their_own_attention(name: str, kind: str) -> None:
    model, expected = family_model(name), reference(name, generate)
    with kvtier.enable(model):
        assert_close(expected, generate(model, make_cache(kind, model, generate)), TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize("name", [n for n in NAMES if FAMILIES[n].tiered and n != "deepseek_v3"])  # expands latents
def test_enabled_models_attend_to_views_and_make_nothing_dense(name: str) -> None:
    model = family_model(name)
    cache = tiered_cache(model, ROOMY)
    with kvtier.enable(model):
        generate(model, cache)
    for part in tiered_parts(cache):
        assert part.stats.views_attended >= NEW_TOKENS - 1
        assert part.stats.dense_fallbacks == 0


def left_padded(model: PreTrainedModel, cache: Any) -> Any:
    ids, mask = prompt_ids(length=21), torch.ones((2, 21), dtype=torch.long)
    mask[1, :17] = 0
    return generate(model, cache, input_ids=ids.masked_fill(mask == 0, PAD), attention_mask=mask)


def beams(model: PreTrainedModel, cache: Any) -> Any:
    return generate(model, cache, num_beams=4, num_return_sequences=2)


def chunked_prefill(model: PreTrainedModel, cache: Any) -> Any:
    return generate(model, cache, prefill_chunk_size=7)


def chunked_prefill_of_padded_rows(model: PreTrainedModel, cache: Any) -> Any:
    ids, mask = prompt_ids(length=21), torch.ones((2, 21), dtype=torch.long)
    mask[1, :9] = 0
    return generate(model, cache, input_ids=ids.masked_fill(mask == 0, PAD), attention_mask=mask, prefill_chunk_size=6)


def prompt_lookup(model: PreTrainedModel, cache: Any) -> Any:
    return generate(model, cache, input_ids=prompt_ids(rows=1, length=7).repeat(1, 4), prompt_lookup_num_tokens=3)


def assisted(model: PreTrainedModel, cache: Any) -> Any:
    assistant = build_model("llama", "sdpa", seed=3, num_hidden_layers=1)
    return generate(model, cache, input_ids=prompt_ids(rows=1), assistant_model=assistant)


def second_turn(model: PreTrainedModel, cache: Any) -> Any:
    """Several tokens at once on a cache that holds a conversation."""
    first, _ = generate(model, cache, max_new_tokens=3)
    return generate(model, cache, input_ids=torch.cat([first, prompt_ids(length=9, seed=7)], 1))


MODES = (left_padded, beams, chunked_prefill, chunked_prefill_of_padded_rows, prompt_lookup, assisted, second_turn)


@pytest.mark.parametrize("kind", ["tiered on host", "tiered in little", "dynamic"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", CROSSED)
def test_enabled_models_give_the_same_in_every_mode(name: str, mode: Run, kind: str) -> None:
    model = family_model(name)
    try:
        expected = reference(name, mode)
    except Exception as error:
        with kvtier.enable(model), pytest.raises((type(error), UnsupportedError)):
            mode(model, make_cache(kind, model, mode))
        return
    with kvtier.enable(model):
        assert_close(expected, mode(model, make_cache(kind, model, mode)))


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("kind", CACHES[:4])
def test_enabled_encoder_decoders_give_the_same_on_padded_rows_and_beams(name: str, kind: str) -> None:
    model = family_model(name)
    for mode in (left_padded, beams):
        expected = reference(name, mode)
        with kvtier.enable(model):
            assert_close(expected, mode(model, make_cache(kind, model, mode)), TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_static_cache_with_room_behind_its_tokens_gives_the_same(name: str) -> None:
    model, expected = family_model(name), reference(name, generate)
    with kvtier.enable(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=96)
        assert_close(expected, generate(model, cache, disable_compile=True))


def test_attention_weights_are_refused() -> None:
    model = family_model("llama")
    with kvtier.enable(model), pytest.raises(UnsupportedError, match="disable"):
        model(prompt_ids(), output_attentions=True)
    asking = build_model("llama", "eager")
    asking.config.output_attentions = True
    with pytest.raises(UnsupportedError, match="output_attentions"):
        kvtier.enable(asking)
    assert asking.config._attn_implementation == "eager"


# ---------------------------------------------------------------------------------- what it undoes


def settings(model: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """All attributes of all configs, nested ones included, and which the model has."""

    def plain(config: PretrainedConfig) -> dict[str, Any]:
        return {k: plain(v) if isinstance(v, PretrainedConfig) else copy.deepcopy(v) for k, v in vars(config).items()}

    found = [
        (name, plain(module.config))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "config", None), PretrainedConfig)
    ]
    return [*found, ("model", dict.fromkeys(vars(model)))]


def implementations(model: torch.nn.Module) -> set[str]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return {config._attn_implementation for config in configs if isinstance(config, PretrainedConfig)}


def llava(text: str = "llama") -> PreTrainedModel:
    """A tiny model of three configs: vision, text and the whole."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        ),
        text_config=build_model(text, "eager").config,
        image_token_id=1,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = prompt_ids()
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("name", NAMES)
def test_disabling_restores_every_config_and_every_bit(name: str) -> None:
    model = family_model(name)
    before, expected = settings(model), logits(model)
    kvtier.enable(model)
    assert implementations(model) == {"kvtier"}
    kvtier.disable(model)
    assert settings(model) == before
    assert torch.equal(logits(model), expected)


def test_nested_configs_get_back_what_each_had() -> None:
    model = llava()
    vision, text = model.config.vision_config, model.config.text_config
    vision._attn_implementation, text._attn_implementation = "eager", "sdpa"
    before = settings(model)
    with kvtier.enable(model):
        assert implementations(model) == {"kvtier"}
    assert settings(model) == before
    assert (vision._attn_implementation, text._attn_implementation) == ("eager", "sdpa")


def test_multimodal_models_give_the_same_from_an_image() -> None:
    model = llava()
    generator = torch.Generator().manual_seed(0)
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = prompt_ids(length=20).clamp(min=2)
    ids[:, 3:7] = 1

    def run(cache: Any) -> Any:
        return generate(model, cache, input_ids=ids, **inputs)

    expected = run(dynamic_cache(model))
    with kvtier.enable(model):
        for cache in (tiered_cache(model, with_config=False), dynamic_cache(model), None):
            assert_close(expected, run(cache))


def test_an_exception_restores_too() -> None:
    model = family_model("gemma2")
    before = settings(model)
    with pytest.raises(ZeroDivisionError), kvtier.enable(model):
        raise ZeroDivisionError
    assert settings(model) == before


class User:
    """Holds a model that is enabled."""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_user_that_is_dropped_in_the_midst_of_a_change_is_heard_of_at_its_end(elsewhere: bool) -> None:
    model, user = build_model("llama", "eager"), User()
    before = settings(model)
    kvtier.enable(model).end_with(user)
    users = [user]
    del user
    with enable.settled, enable.unchanged():
        if elsewhere:
            thread = threading.Thread(target=users.clear)
            thread.start()
            thread.join(60)
        else:
            users.clear()
        assert not users
        assert implementations(model) == {"kvtier"}
    assert settings(model) == before


def test_enabling_twice_is_harmless() -> None:
    model = build_model("llama", "eager")
    before = settings(model)
    with kvtier.enable(model):
        with kvtier.enable(model):
            pass
        assert implementations(model) == {"kvtier"}, "the outer one wants it"
    assert settings(model) == before
    first, second = kvtier.enable(model), kvtier.enable(model)
    first.disable()
    first.disable()
    assert implementations(model) == {"kvtier"}, "the second one wants it"
    second.disable()
    assert settings(model) == before
    kvtier.enable(model)
    handle = kvtier.enable(model)
    kvtier.disable(model)
    assert settings(model) == before
    handle.disable()
    kvtier.disable(model)
    assert settings(model) == before


def test_a_choice_made_since_is_kept() -> None:
    model = build_model("llama", "sdpa")
    kvtier.enable(model)
    model.set_attn_implementation("eager")
    kvtier.disable(model)
    assert implementations(model) == {"eager"}
    with kvtier.enable(model):
        assert implementations(model) == {"kvtier"}
    assert implementations(model) == {"eager"}
    kvtier.enable(model)
    model.set_attn_implementation("sdpa")
    with kvtier.enable(model):
        pass
    assert implementations(model) == {"sdpa"}, "what the first one wanted ended with the choice"


def test_a_part_of_a_model_and_then_the_whole() -> None:
    model = llava()
    before = settings(model)
    kvtier.enable(model.get_decoder())
    with kvtier.enable(model):
        assert implementations(model) == {"kvtier"}
    assert model.config.text_config._attn_implementation == "kvtier"
    kvtier.disable(model.get_decoder())
    assert settings(model) == before


def test_a_copy_of_an_enabled_model_can_be_disabled() -> None:
    model = build_model("llama", "eager")
    with kvtier.enable(model):
        clone = copy.deepcopy(model)
    kvtier.disable(clone)
    assert implementations(clone) == {"eager"}


def test_a_pickle_of_an_enabled_model_generates_in_a_process_that_has_enabled_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model("llama", "sdpa")
    expected = model.generate(prompt_ids(), max_new_tokens=3)
    with kvtier.enable(model):
        pickled = pickle.dumps(model)
    for names in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.delitem(names._global_mapping, "kvtier")
    clone = pickle.loads(pickled)
    assert torch.equal(clone.generate(prompt_ids(), max_new_tokens=3), expected)
    kvtier.disable(clone)
    assert implementations(clone) == {"sdpa"}


def test_a_saved_config_says_nothing_of_it(tmp_path: Any) -> None:
    model = build_model("llama", "sdpa")
    model.save_pretrained(tmp_path / "before")
    with kvtier.enable(model):
        model.save_pretrained(tmp_path / "enabled")
    assert (tmp_path / "before/config.json").read_text() == (tmp_path / "enabled/config.json").read_text()


# ------------------------------------------------------------------------------- what it refuses

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
ATTENDING_BY_THEMSELVES = {
    "Bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}),
    "Falcon": ("FalconForCausalLM", SMALL),
    "Mpt": ("MptForCausalLM", {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 32}),
}
if not transformers.GPTJPreTrainedModel._supports_attention_backend:  # until 5.24
    ATTENDING_BY_THEMSELVES["GPTJ"] = (
        "GPTJForCausalLM",
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "vocab_size": 32},
    )


def attending_by_itself(name: str) -> PreTrainedModel:
    model_class, arguments = ATTENDING_BY_THEMSELVES[name]
    return getattr(transformers, model_class)(getattr(transformers, f"{name}Config")(**arguments)).eval()


@pytest.mark.parametrize("name", ATTENDING_BY_THEMSELVES)
def test_models_that_attend_by_themselves_are_refused(name: str) -> None:
    model = attending_by_itself(name)
    before = settings(model)
    with pytest.raises(UnsupportedError, match="TieredKVCache works with it anyway"):
        kvtier.enable(model)
    assert settings(model) == before


@pytest.mark.parametrize("name", ATTENDING_BY_THEMSELVES)
def test_loading_them_with_it_is_an_error_and_not_wrong_tokens(name: str, tmp_path: Any) -> None:
    attending_by_itself(name).save_pretrained(tmp_path)
    kvtier.register_attention()
    # Some look their own attention class up by the name, while they are built.
    with pytest.raises((UnsupportedError, KeyError), match=r"TieredKVCache works with it anyway|^'kvtier'$"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvtier")(prompt_ids() % 32)


def test_a_model_whose_decoder_attends_by_itself_is_refused() -> None:
    model = llava("falcon")
    before = settings(model)
    with pytest.raises(UnsupportedError, match="Falcon"):
        kvtier.enable(model)
    assert settings(model) == before


def test_another_part_that_attends_by_itself_is_left_and_named() -> None:
    decoder = transformers.BertConfig(**SMALL, intermediate_size=16, is_decoder=True, add_cross_attention=True)
    encoder = transformers.FalconConfig(**SMALL)
    model = transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    )
    before = settings(model)
    with kvtier.enable(model):
        assert model.decoder.config._attn_implementation == "kvtier"
        assert model.encoder.config._attn_implementation != "kvtier"
    assert kvtier.enable(model).left == ("FalconModel",)
    kvtier.disable(model)
    assert settings(model) == before


def test_something_without_a_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no Transformers model"):
        kvtier.enable(torch.nn.Linear(2, 2))
    for function in (kvtier.enable, kvtier.disable):
        with pytest.raises(kvtier.ConfigError, match="loaded model"):
            function("model")  # type: ignore[arg-type]


def test_a_registered_name_serves_loading(tmp_path: Any) -> None:
    family_model("gemma2").save_pretrained(tmp_path)
    kvtier.register_attention()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvtier")
    loaded.generation_config = family_model("gemma2").generation_config
    assert_close(reference("gemma2", generate), generate(loaded, tiered_cache(loaded)))
    with pytest.raises(UnsupportedError, match="nothing to go back to"):
        kvtier.disable(loaded)
