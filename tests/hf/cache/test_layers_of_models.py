"""Layers of a class that a model brings: nobody here knows what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_types import VOCAB, tiny_model_of_type, types
from transformers import PreTrainedModel

from kvtier import InterruptedStepError, TieredKVCache, UnsupportedError
from kvtier.hf.cache.resident import _is_inherited, check_crop, is_models_own

pytestmark = pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")


@pytest.fixture
def model() -> PreTrainedModel:
    if "deepseek_v4" not in types():
        pytest.skip("not in this Transformers")
    return tiny_model_of_type("deepseek_v4")


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB - 2, (2, tokens), generator=torch.Generator().manual_seed(seed))


def used(model: PreTrainedModel) -> TieredKVCache:
    cache = TieredKVCache(model.config, block_size=4)
    with torch.no_grad():
        model(ids(5), past_key_values=cache)
    return cache


@torch.no_grad()
def test_a_forward_that_ended_early_is_not_taken_back_from_layers_that_nobody_knows(model: PreTrainedModel) -> None:
    """They keep compressed keys too, which `DynamicCache` leaves as they are."""
    cache = used(model)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.get_decoder().layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(ids(1, seed=1), past_key_values=cache)
    hook.remove()
    for call in (lambda: cache.crop(0), lambda: model(ids(1, seed=1), past_key_values=cache)):
        with pytest.raises(InterruptedStepError, match="of a class that the model brings"):
            call()
    cache.reset()
    expected = model(ids(7, seed=2)).logits
    assert torch.allclose(model(ids(7, seed=2), past_key_values=cache).logits, expected, atol=1e-4)


@torch.no_grad()
def test_a_layer_that_keeps_more_than_its_crop_knows_of_is_not_cropped(model: PreTrainedModel) -> None:
    cache, other = used(model), used(model)
    with pytest.raises(UnsupportedError, match="keeps more than its `crop` knows of"):
        cache.crop(-2)
    new = ids(3, seed=1)
    expected = model(new, past_key_values=other).logits
    assert torch.equal(model(new, past_key_values=cache).logits, expected)
    assert cache.keep_prefix(ids(8), torch.cat([ids(5), new], 1)) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon_h1", "jamba", "deepseek_v4"])
def test_rows_of_states_are_picked_with_those_of_keys_or_not_at_all(name: str) -> None:
    """`DynamicCache` leaves the states of Falcon-H1 as they were, next to other rows of keys."""
    if name not in types():
        pytest.skip("not in this Transformers")
    model = tiny_model_of_type(name)
    cache, other = used(model), used(model)
    reorders = not any(is_models_own(x) and _is_inherited(x, "reorder_cache") for x in cache.layers)
    for call in (lambda: cache.batch_select_indices(torch.tensor([1, 0])), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(UnsupportedError, match="Nothing was changed") as refused:
            call()
        assert ("`reorder_cache(rows)`" in str(refused.value)) == reorders
    new = ids(1, seed=1)
    expected = model(new, past_key_values=other).logits
    # In Transformers 5.17 that of DeepSeek V4 knows of keys only.
    for rows in ([0, 1], [1, 0, 0], [1]) if reorders else ():
        picked = used(model)
        picked.reorder_cache(torch.tensor(rows))
        assert torch.allclose(model(new[rows], past_key_values=picked).logits, expected[rows], atol=1e-4)
    assert torch.equal(model(new, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("decoded", [0, 3, 20])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_with_a_crop_of_its_own_is_cropped_by_that(recorded: bool, decoded: int) -> None:
    module = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    layer = module.UnlimitedOcrDynamicReferenceSlidingWindowLayer(sliding_window=8)
    layer.record_past = recorded
    for tokens in (12, *[1] * decoded):
        layer.update(*torch.zeros(2, 2, 2, tokens, 4))
    if decoded > 8 and not recorded:
        with pytest.raises(UnsupportedError, match="keeps no more of the past than its window"):
            check_crop([layer], -1)
    else:
        check_crop([layer], -1)
        layer.crop(-1)
        assert layer.get_seq_length() == 12 + decoded - 1
