"""In which form a model gets a layer's KV: views where its attention can read them, else tensors; and which model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, build_model, dynamic_cache, for_architecture, prompt_ids
from placements import outcome, tiered_parts
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    EncoderDecoderCache,
    Florence2Config,
    Florence2ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    masking_utils,
)
from transformers.integrations import flex_attention as flex

import kvtier
from kvtier import ConfigError, KVView, MismatchError, TieredKVCache, UnknownOptionError, UnsupportedError
from kvtier.hf.models.names import CACHE

LAYERS = 2
TENSORS = ("flex_attention", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "paged|sdpa")
VIEWS = ("sdpa", "eager", "kvtier", None, "my_own_attention")


def config_of(kind: str = "llama", layers: int = LAYERS, **settings: Any) -> PretrainedConfig:
    """A small config of a type."""
    return CONFIG_MAPPING[kind](
        num_hidden_layers=layers, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, **settings
    )


class Attention(torch.nn.Module):
    """What a cache sees of a model's attention layer."""

    def __init__(self, config: PretrainedConfig | None) -> None:
        super().__init__()
        if config is not None:
            self.config = config

    def forward(
        self, cache: Any, layer: int, tokens: int = 1, shape: tuple[int, ...] = (2, 8, 8), cross: bool = False
    ) -> Any:
        is_cross_attention = cross  # noqa: F841 - as models call it
        heads, k_dim, v_dim = shape
        return cache.update(torch.ones(1, heads, tokens, k_dim), torch.ones(1, heads, tokens, v_dim), layer)


def step(cache: Any, config: PretrainedConfig | None, tokens: int = 1, **more: Any) -> list[bool]:
    """A forward; of each layer, whether it got tensors."""
    given = [Attention(config)(cache, i, tokens, **more) for i in range(LAYERS)]
    assert all(type(x) in (KVView, torch.Tensor) for pair in given for x in pair)
    assert all(x.shape[2] == cache.get_seq_length() for pair in given for x in pair)
    return [type(pair[0]) is torch.Tensor and type(pair[1]) is torch.Tensor for pair in given]


@pytest.mark.parametrize("given", ["config", "none"])
@pytest.mark.parametrize("name", TENSORS + VIEWS)
def test_only_attention_that_cannot_read_views_gets_tensors(name: str | None, given: str) -> None:
    config = config_of()
    config._attn_implementation = name
    cache = TieredKVCache(config if given == "config" else None)
    step(cache, config, 3)
    assert step(cache, config) == [name in TENSORS] * LAYERS
    assert cache.stats.dense_reads == (LAYERS if name in TENSORS else 0)
    assert cache.stats.dense_fallbacks == 0


@pytest.mark.parametrize("given", ["config", "none"])
def test_an_implementation_that_changes_is_followed_from_the_next_forward_on(given: str) -> None:
    config = config_of()
    cache = TieredKVCache(config if given == "config" else None)
    step(cache, config, 3)
    for name in ("flex_attention", "sdpa", "flash_attention_2", "eager"):
        config._attn_implementation = name
        assert step(cache, config) == [name in TENSORS] * LAYERS


def test_it_is_the_config_of_the_module_that_counts_and_else_the_given_one() -> None:
    """T5 holds a copy of the model's config, which `set_attn_implementation` may not reach."""
    config = config_of()
    own = copy.deepcopy(config)
    own._attn_implementation = "flex_attention"
    cache = TieredKVCache(config)
    step(cache, own, 3)
    assert step(cache, own) == [True] * LAYERS
    config._attn_implementation, own._attn_implementation = "flex_attention", "sdpa"
    assert step(cache, own) == [False] * LAYERS
    assert step(cache, None) == [True] * LAYERS, "no module says otherwise"


def test_a_config_inside_the_given_one_counts() -> None:
    config = CONFIG_MAPPING["gemma3"](
        text_config={"num_hidden_layers": LAYERS, "hidden_size": 16, "layer_types": ["full_attention"] * LAYERS}
    )
    config._attn_implementation = {"text_config": "flex_attention", "vision_config": "sdpa"}
    cache = TieredKVCache(config)
    step(cache, None, 3)
    assert step(cache, None) == [True] * LAYERS


def test_tensors_given_are_what_was_cached_and_writing_into_them_changes_nothing() -> None:
    config = config_of()
    config._attn_implementation = "flex_attention"
    cache, expected = TieredKVCache(config, block_size=4), DynamicCache(config=config)
    rng = torch.Generator().manual_seed(0)
    for tokens in (6, 1, 3, 1):
        k, v = (torch.randn(2, 2, tokens, 8, generator=rng) for _ in range(2))
        for layer in range(LAYERS):
            for x, y in zip(cache.update(k, v, layer), expected.update(k, v, layer), strict=True):
                assert torch.equal(x, y)
                assert x.is_contiguous()
                x.zero_() if tokens == 1 else None


def test_what_cross_attention_reads_again_is_a_tensor_and_made_once_for_both_halves() -> None:
    config = config_of()
    config._attn_implementation = "flex_attention"
    cache = TieredKVCache(config)
    step(cache, config, 5)
    layer = cache.layers[1]
    assert (type(layer.keys), type(layer.values)) == (torch.Tensor, torch.Tensor)
    assert cache.stats.dense_reads == 1
    config._attn_implementation = "sdpa"
    assert (type(layer.keys), type(layer.values)) == (KVView, KVView)
    config._attn_implementation = "flex_attention"
    keys = layer.keys
    step(cache, config)
    assert keys.shape[2] == 5
    assert layer.values.shape[2] == 6, "the half of an older length is not given out"


@pytest.mark.parametrize(
    ("shape", "dense"), [((1, 8, 4), True), ((1, 4, 8), True), ((2, 8, 8), False), ((1, 6, 6), False)]
)
def test_latents_are_known_by_their_width(shape: tuple[int, ...], dense: bool) -> None:
    """A model with latents may cache what it expanded from them: that is attended like any other KV."""
    config = config_of()
    config.kv_lora_rank = 8
    for given in (config, None):
        cache = TieredKVCache(given)
        step(cache, config, 3, shape=shape)
        assert step(cache, config, shape=shape) == [dense] * LAYERS


# flex_attention itself


def generated(model: PreTrainedModel, cache: Any, new_tokens: int = 4) -> tuple[torch.Tensor, ...]:
    inputs = {"input_ids": prompt_ids(length=20)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt_ids(length=6, seed=5)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, *out.logits


@pytest.fixture
def dynamo_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is traced as a whole graph, but runs as it is: compiling it to C++, and masks at all, takes long."""
    compile_, create_mask = torch.compile, masking_utils.create_block_mask
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **options: compile_(f, **(options | {"backend": "eager"})))
        patch.setattr(
            masking_utils, "create_block_mask", lambda *a, **kw: create_mask(*a, **(kw | {"_compile": False}))
        )
        patch.setattr(flex.WrappedFlexAttention, "_instance", None)
        yield
    torch._dynamo.reset()


def check_flex(name: str, *, with_config: bool, **settings: Any) -> None:
    try:
        model = build_model(name, "flex_attention", **settings)
    except ValueError as error:  # Transformers has none for it
        pytest.skip(str(error)[:100])
    expected = outcome(lambda: generated(model, dynamic_cache(model, with_config=with_config), 3))
    if isinstance(expected, Exception):
        pytest.skip(f"{type(expected).__name__}: {expected}"[:100])
    config = model.config if with_config else None
    cache = for_architecture(model, lambda: TieredKVCache(config, block_size=16))
    actual = generated(model, cache, 3)
    assert all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True))
    for part in tiered_parts(cache):
        assert part.stats.dense_fallbacks == 0
        assert part.stats.dense_reads > 0 or not part._forward.readers


#: Families with as few layers as still have something of their own.
FEW: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
}


@pytest.mark.parametrize(("name", "with_config"), [("llama", False), ("gemma3", True), ("bart", True)])
def test_flex_attention_gets_the_tokens_and_logits_of_dynamic_cache(
    name: str, with_config: bool, dynamo_only: None
) -> None:
    check_flex(name, with_config=with_config, **FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_flex_attention_gets_the_tokens_and_logits_of_dynamic_cache(name: str, with_config: bool) -> None:
    if not getattr(transformers, FAMILIES[name].model)._supports_flex_attn:
        pytest.skip("Transformers refuses it")
    torch._dynamo.reset()
    check_flex(name, with_config=with_config)


# Whose model


def test_a_config_with_another_number_of_layers_is_refused_before_anything_changes() -> None:
    for made_for, model in ((4, 2), (2, 4)):
        cache = TieredKVCache(config_of(layers=made_for))
        attention = Attention(config_of("qwen3", layers=model))
        for _ in range(2):
            with pytest.raises(MismatchError, match=f"LlamaConfig of {made_for} layers.* has {model} .Qwen3Config"):
                attention(cache, 0, 3)
        assert cache.get_seq_length() == 0
        assert cache.stats.steps == 0
        step(cache, config_of(layers=made_for), 3)


def test_a_window_where_the_model_has_none_is_refused_and_none_where_it_has_one_is_not() -> None:
    full, window = config_of("mistral", sliding_window=None), config_of("mistral", sliding_window=4)
    with pytest.raises(MismatchError, match=r"layer 0 is a DynamicSlidingWindowLayer.* it is a DynamicLayer"):
        step_of(TieredKVCache(window), full)
    step_of(TieredKVCache(full), window)


def step_of(cache: TieredKVCache, config: PretrainedConfig) -> None:
    """A first layer's update."""
    Attention(config)(cache, 0, 3)


def test_a_cache_that_was_reset_may_serve_another_model() -> None:
    cache = TieredKVCache()
    step(cache, config_of(), 3)
    cache.reset()
    flexible = config_of("qwen3")
    flexible._attn_implementation = "flex_attention"
    step(cache, flexible, 3)
    assert step(cache, flexible) == [True] * LAYERS


def test_modules_without_a_config_and_callers_that_are_none_are_served() -> None:
    cache = TieredKVCache(config_of())
    step(cache, None, 3)
    for layer in range(LAYERS):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), layer)
    assert cache.get_seq_length() == 4


# Encoder-decoders


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_one_cache_for_an_encoder_decoder_is_refused_with_what_to_write(name: str, with_config: bool) -> None:
    model = build_model(name, "sdpa")
    config = model.config if with_config else None
    ids = prompt_ids(length=6)
    for run in (
        lambda cache: generated(model, cache),
        lambda cache: model(input_ids=ids, decoder_input_ids=ids, past_key_values=cache),
    ):
        cache = TieredKVCache(config)
        with pytest.raises(UnsupportedError, match=r"EncoderDecoderCache\(TieredKVCache") as refused:
            run(cache)
        words = str(refused.value).split(f"{CACHE}=")[1].split(", with")[0]
        names = {"EncoderDecoderCache": EncoderDecoderCache, "TieredKVCache": kvtier.TieredKVCache, "model": model}
        actual = generated(model, eval(words, names))
        expected = generated(model, dynamic_cache(model))
        assert torch.equal(actual[0], expected[0]), "what it says to write works"
        cache.reset()


def test_generate_on_whisper_does_not_replace_the_cache_in_silence() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(0))

    def generate(cache: Any) -> torch.Tensor:
        return model.generate(sound, past_key_values=cache, max_new_tokens=4, do_sample=False)

    for given in (config, None):
        with pytest.raises(UnsupportedError, match="EncoderDecoderCache"):
            generate(TieredKVCache(given))
    halves = TieredKVCache(config), TieredKVCache(config)
    assert torch.equal(generate(EncoderDecoderCache(*halves)), generate(None))
    assert all(half.stats.steps for half in halves)


def test_the_halves_of_an_encoder_decoder_cache_are_missing_with_words() -> None:
    cache = TieredKVCache()
    for name in ("is_updated", "self_attention_cache", "cross_attention_cache"):
        assert not hasattr(cache, name)
        with pytest.raises(UnsupportedError, match="EncoderDecoderCache"):
            getattr(cache, name)
    with pytest.raises(AttributeError, match="key_cache"):
        cache.key_cache  # noqa: B018


@pytest.mark.parametrize(("encoder", "decoder"), [(4, 2), (2, 4)])
def test_the_decoders_layers_are_those_that_count(encoder: int, decoder: int) -> None:
    model = build_model("t5", "sdpa", num_layers=encoder, num_decoder_layers=decoder)
    half = TieredKVCache(model.config)
    assert len(half.layers) == decoder
    actual = generated(model, EncoderDecoderCache(half, TieredKVCache(model.config)))
    assert torch.equal(actual[0], generated(model, EncoderDecoderCache(DynamicCache(), DynamicCache()))[0])


def test_a_text_config_of_an_encoder_decoder_says_the_decoders_layers() -> None:
    """Florence-2, of an image and text: its config is that of Bart."""
    bart = FAMILIES["bart"].settings | {"encoder_layers": 2, "decoder_layers": 3, "eos_token_id": 2}
    vision = {"embed_dim": [8] * 4, "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4, "window_size": 4}
    vision |= {"projection_dim": 48, "max_temporal_embeddings": 8, "max_position_embeddings": 8}
    text = {"model_type": "bart"} | bart
    model = Florence2ForConditionalGeneration(
        Florence2Config(text_config=text, vision_config=vision, image_token_id=5)
    ).eval()
    ids = torch.cat([torch.full((1, 5), 5), prompt_ids(length=6)[:1]], 1)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def generate(**cache: Any) -> torch.Tensor:
        return model.generate(input_ids=ids, pixel_values=image, max_new_tokens=4, do_sample=False, **cache)

    expected = generate()
    halves = TieredKVCache(model.config, block_size=4), TieredKVCache(model.config, block_size=4)
    assert torch.equal(generate(past_key_values=EncoderDecoderCache(*halves)), expected)
    assert [len(half.layers) for half in halves] == [3, 3]
    with kvtier.tiered(model) as used:
        assert torch.equal(generate(), expected)
    assert used.calls == 1


def test_a_model_that_makes_its_cross_attention_cache_itself_says_what_to_write() -> None:
    names = ("head_dim", "query_pre_attn_scalar", "layer_types", "sliding_window", "num_hidden_layers")
    part = {name: FAMILIES["gemma2"].settings[name] for name in names} | {"eos_token_id": 2, "bos_token_id": 1}
    part |= {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "pad_token_id": 0}
    part |= {"num_key_value_heads": 1}
    config = T5GemmaConfig(encoder=part, decoder=part, vocab_size=128, decoder_start_token_id=1)
    model = T5GemmaForConditionalGeneration(config).eval()

    def generate(**cache: Any) -> torch.Tensor:
        return model.generate(prompt_ids(length=12), max_new_tokens=4, do_sample=False, **cache)

    expected = generate()
    both = EncoderDecoderCache(TieredKVCache(config), TieredKVCache(config))
    with pytest.raises(UnknownOptionError, match="offloading") as refused:
        generate(past_key_values=both)
    words = str(refused.value).split("let it have ")[1].split(", or call")[0]
    given = {"EncoderDecoderCache": EncoderDecoderCache, "TieredKVCache": TieredKVCache, "DynamicCache": DynamicCache}
    cache = eval(words, given | {"model": model})
    assert torch.equal(generate(past_key_values=cache), expected)
    assert cache.self_attention_cache.stats.steps
    with kvtier.tiered(model) as used:
        assert torch.equal(generate(), expected)
    assert used.calls == 1


# Configs


def test_a_class_is_no_config() -> None:
    for config in (CONFIG_MAPPING["llama"], "llama", {"num_hidden_layers": 2}, build_model("llama", "sdpa")):
        with pytest.raises(ConfigError, match=r"model\.config"):
            TieredKVCache(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_config_makes_a_cache_or_is_refused_with_words(every: int) -> None:
    made = refused = 0
    for kind in sorted(CONFIG_MAPPING)[::every]:
        config = outcome(CONFIG_MAPPING[kind])
        if isinstance(config, Exception):
            continue
        cache = outcome(lambda config=config: TieredKVCache(config))
        if isinstance(cache, TieredKVCache):
            made += 1
            continue
        refused += 1
        assert isinstance(cache, ConfigError), (kind, repr(cache)[:200])
        assert type(config).__name__ in str(cache)
        assert "model.config" in str(cache)
    assert made > 300 / every
    assert refused > 30 / every
