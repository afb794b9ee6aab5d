"""Layers with an indexer keep its keys next to their own: both are of the same tokens, or the cache says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_types import VOCAB, tiny_model_of_type, types
from transformers import DynamicCache, PreTrainedModel

from kvtier import InterruptedStepError, TieredKVCache

pytestmark = pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")


@pytest.fixture
def model() -> PreTrainedModel:
    if "deepseek_v32" not in types():
        pytest.skip("not in this Transformers")
    return tiny_model_of_type("deepseek_v32")


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, tokens: int, seed: int) -> torch.Tensor:
    ids = torch.randint(2, VOCAB - 2, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return model(ids, past_key_values=cache).logits


@contextmanager
def cut_short(cache: TieredKVCache, method: str, layer: int) -> Iterator[None]:
    """Ctrl-C comes behind a method of the cache, called for this layer."""
    whole = getattr(cache, method)

    def cut(*args: Any, **kwargs: Any) -> Any:
        answer = whole(*args, **kwargs)
        if layer in [x for x in args if type(x) is int]:
            raise KeyboardInterrupt
        return answer

    setattr(cache, method, cut)
    with pytest.raises(KeyboardInterrupt):
        yield
    delattr(cache, method)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("method", "layer"), [("update", 0), ("update", 2), ("update", -1), ("update_indexer", 0), ("update_indexer", 2)]
)
def test_a_forward_that_is_cut_short_is_dropped_from_both(
    model: PreTrainedModel, method: str, layer: int, tokens: int
) -> None:
    cache, plain = TieredKVCache(model.config), DynamicCache(config=model.config)
    for each in (cache, plain):
        logits(model, each, 9, 0)
    with cut_short(cache, method, layer % len(cache.layers)):
        logits(model, cache, tokens, 1)
    with pytest.raises(InterruptedStepError, match=r"crop\(0\)"):
        logits(model, cache, 1, 2)
    cache.crop(0)
    assert cache.get_seq_length() == 9
    for seed, more in enumerate((tokens, 1, 2)):
        expected = logits(model, plain, more, seed + 3)
        assert torch.allclose(logits(model, cache, more, seed + 3), expected, atol=1e-5)


def test_what_was_never_indexed_is_noticed(model: PreTrainedModel) -> None:
    cache, plain = TieredKVCache(model.config), DynamicCache(config=model.config)
    with cut_short(cache, "update", len(cache.layers) - 1):
        logits(model, cache, 9, 0)
    for _ in range(2):
        with pytest.raises(InterruptedStepError, match=r"`reset\(\)`"):
            logits(model, cache, 1, 1)
        cache.crop(0)
    cache.reset()
    for seed, tokens in enumerate((9, 1, 3)):
        expected = logits(model, plain, tokens, seed)
        assert torch.allclose(logits(model, cache, tokens, seed), expected, atol=1e-5)
