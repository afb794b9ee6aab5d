"""Every decoder-only type of Transformers, on a cache with and without the model's config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from model_types import VOCAB, tiny_model_of_type, types
from placements import outcome
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from kvtier import KVTierError, TieredKVCache
from kvtier.hf.models.generation import cache_argument

# Some of these types keep all KV next to something else: that the cache then saves nothing is told elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")

# fmt: off
#: Types with layers that keep more than keys and values. Each asks for it in its own words.
HYBRIDS = (
    "axk2", "bailing_hybrid", "bamba", "deepseek_v32", "deepseek_v4", "falcon_h1", "falcon_mamba",
    "glm_moe_dsa", "granitemoehybrid", "hy_v4", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "zamba", "zamba2", "zaya",
)
#: Types that cache latents and expand them themselves.
LATENT = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash",
    "minicpm3", "mistral4", "mistral_large4_text", "youtu",
)
# fmt: on
#: Those always run that are quick and have something of their own; others are slow, or like these.
ALWAYS = {*HYBRIDS, *LATENT, "gpt2", "llama", "gemma2", "gpt_oss", "mpt"} - {"kimi_linear"}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in sorted(names)]


def model_of(name: str) -> PreTrainedModel:
    """The model, if it can be built and works with Transformers' own cache."""
    try:
        model = tiny_model_of_type(name)
        logits(model, DynamicCache(config=model.config))
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: {error}"[:100])
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any) -> list[torch.Tensor]:
    """Of a prefill and of three tokens after it, `[rows, tokens, vocab]` each."""
    ids = torch.randint(2, VOCAB - 2, (2, 15), generator=torch.Generator().manual_seed(0))
    given = {cache_argument(model): cache, "use_cache": True}
    return [model(part, **given).logits for part in (ids[:, :12], *ids[:, 12:].split(1, 1))]


def alike(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Whether logits agree up to rounding."""
    return all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(expected, actual, strict=True))


@pytest.mark.parametrize("name", cases(types()))
def test_with_its_config_every_type_gets_the_logits_of_dynamic_cache(name: str) -> None:
    model = model_of(name)
    with TieredKVCache(model.config, block_size=8) as cache:
        assert alike(logits(model, DynamicCache(config=model.config)), logits(model, cache))
        cache.check_integrity()


@pytest.mark.parametrize("name", cases(types()))
def test_without_a_config_it_is_what_dynamic_cache_is_or_asks_for_the_config(name: str) -> None:
    model = model_of(name)
    expected = outcome(lambda: logits(model, DynamicCache()))
    with TieredKVCache(block_size=8) as cache:
        actual = outcome(lambda: logits(model, cache))
    if isinstance(expected, Exception):
        assert isinstance(actual, KVTierError), repr(actual)[:300]
        assert "TieredKVCache(model.config)" in str(actual)
    else:
        assert not isinstance(actual, Exception), repr(actual)[:300]
        assert alike(expected, actual)


@pytest.mark.parametrize("name", cases({*HYBRIDS} - {"recurrent_gemma"}))  # which keeps its state in the model (5.17)
def test_the_config_of_another_model_is_refused_by_name_on_hybrids(name: str) -> None:
    model = model_of(name)
    layers = model.config.num_hidden_layers
    cache = TieredKVCache(LlamaConfig(num_hidden_layers=layers), block_size=8)
    refused = outcome(lambda: logits(model, cache))
    assert isinstance(refused, KVTierError), type(refused)
    assert "TieredKVCache(model.config)" in str(refused)


@pytest.mark.parametrize("name", cases(LATENT))
def test_latents_are_read_by_design_and_are_no_surprise(name: str) -> None:
    if name not in types():
        pytest.skip("not in this Transformers")
    model = model_of(name)
    for config in (model.config, None):
        cache = TieredKVCache(config, block_size=8)
        if not isinstance(outcome(lambda cache=cache: logits(model, cache)), list):
            assert config is None, "a hybrid"
            continue
        stats, tiered = cache.stats, len(cache._forward.readers)
        assert tiered
        assert (stats.dense_fallbacks, stats.dense_reads) == (0, 3 * tiered)
        assert stats.dense_read_bytes > 0


def test_most_types_can_be_built() -> None:
    """Or the other tests would skip everything without a word."""
    built = [
        name
        for name in sorted(ALWAYS & set(types()))
        if not isinstance(outcome(lambda n=name: tiny_model_of_type(n)), Exception)
    ]
    assert len(built) >= 0.8 * len(ALWAYS & set(types()))
    assert {"qwen3_next", "jamba", "lfm2", "falcon_h1", "mamba2", "deepseek_v32", "deepseek_v3"} <= set(built)
