"""Keys and values in different dtypes, as autocast gives them where a norm or a rotation makes one of them fp32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import build_model, dynamic_cache, prompt_ids, tiny_model
from placements import ON_HOST, ROOMY, alike, check_invariants, tiered_cache
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.qwen3 import modeling_qwen3

import kvtier
from kvtier import MismatchError, TieredKVCache

WIDE, NARROW, HALF = torch.float32, torch.bfloat16, torch.float16
#: What autocast is asked for: the device on which the models are.
DEVICE = torch.get_default_device().type
PAIRS = [(WIDE, NARROW), (NARROW, WIDE), (HALF, NARROW)]


@pytest.mark.parametrize("budget", [None, 4000])
@pytest.mark.parametrize(("k_dtype", "v_dtype"), PAIRS, ids=str)
def test_they_are_kept_exactly_in_the_dtype_that_holds_both(
    k_dtype: torch.dtype, v_dtype: torch.dtype, budget: int | None
) -> None:
    torch.manual_seed(0)
    cache, theirs = TieredKVCache(device_budget=budget, host_budget=10**6, block_size=4), DynamicCache()
    for count in (9, 1, 1, 5):
        keys, values = torch.randn(1, 2, count, 8).to(k_dtype), torch.randn(1, 2, count, 8).to(v_dtype)
        ours, expected = cache.update(keys, values, 0), theirs.update(keys, values, 0)
        for x, y in zip(ours, expected, strict=True):
            assert x.dtype == WIDE
            assert torch.equal(x + 0, y.to(WIDE)), "bit for bit"
    assert cache.layers[0].dtype == WIDE
    cache.check_integrity()


@pytest.mark.parametrize("budget", [None, ROOMY])
@pytest.mark.parametrize("dtype", [WIDE, NARROW], ids=str)
def test_attention_under_autocast_answers_in_its_dtype(dtype: torch.dtype, budget: int | None) -> None:
    torch.manual_seed(0)
    keys, values, query = (torch.randn(1, 2, n, 8) for n in (21, 21, 1))
    cache = TieredKVCache(device_budget=budget, host_budget=10**6, block_size=4)
    cache.update(keys[:, :, :20], values[:, :, :20].to(NARROW), 0)
    views = cache.update(keys[:, :, 20:], values[:, :, 20:].to(NARROW), 0)
    with torch.autocast(DEVICE, NARROW):
        out = F.scaled_dot_product_attention(query.to(dtype), *views)
        expected = F.scaled_dot_product_attention(query.to(dtype), keys, values)
    assert out.dtype == expected.dtype == NARROW
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert cache.stats.dense_fallbacks == 0


def test_what_no_dtype_holds_is_refused_with_what_to_do() -> None:
    cache = TieredKVCache()
    with pytest.raises(MismatchError, match="one dtype"):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8, dtype=torch.int32), 0)


@pytest.mark.parametrize("budget", [None, ROOMY, 28_000])
@pytest.mark.parametrize("host_attention", [False, True])
@pytest.mark.parametrize("wide", ["keys", "values"])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_model_under_autocast_gives_the_logits_of_dynamic_cache(
    enabled: bool, wide: str, host_attention: bool, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fp32 keys, as norms of heads and rotations that are kept in fp32 give, and with fp32 values."""
    rotate = modeling_qwen3.apply_rotary_pos_emb

    def rotated(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        query, key = rotate(query, key, *args, **kwargs)
        return (query.float(), key.float()) if wide == "keys" else (query.to(NARROW), key.to(NARROW))

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotated)
    model = tiny_model("qwen3")
    if wide == "values":
        for layer in model.model.layers:
            project = layer.self_attn.v_proj.forward
            monkeypatch.setattr(layer.self_attn.v_proj, "forward", lambda x, project=project: project(x).float())
    outcomes = []
    caches = [dynamic_cache(model), tiered_cache(model, budget, block_size=4, host_attention=host_attention)]
    for cache in caches:
        ours = kvtier.enable(model) if enabled and cache is caches[1] else nullcontext()
        with ours, torch.no_grad(), torch.autocast(DEVICE, NARROW):
            outcomes.append(
                [
                    model(input_ids=prompt_ids(rows=2, length=n, seed=i), past_key_values=cache).logits.float()
                    for i, n in enumerate((30, 1, 1, 4, 1))
                ]
            )
    assert caches[1].layers[0].dtype == WIDE
    for theirs, ours in zip(*outcomes, strict=True):
        if host_attention or enabled or not ON_HOST:
            scale = theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 * scale)
        else:
            assert torch.equal(ours, theirs)
    assert (caches[1].stats.evictions > 0) == (budget == 28_000)
    assert caches[1].stats.dense_fallbacks == 0
    if host_attention:
        all_on_device = budget == ROOMY or (budget is None and not ON_HOST)
        served = 0 if all_on_device else 4 * model.config.num_hidden_layers
        assert caches[1].stats.host_attended >= served, "what host threads can serve"
    check_invariants(caches[1])


@pytest.mark.parametrize("autocast", [NARROW, HALF], ids=str)
@pytest.mark.parametrize("weights", [WIDE, HALF], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "mistral_sliding"])
def test_layers_that_transformers_keeps_take_them_as_well(
    name: str, weights: torch.dtype, autocast: torch.dtype
) -> None:
    model = build_model(name, "sdpa").to(weights)
    logits = []
    for cache in (dynamic_cache(model), TieredKVCache(model.config, host_attention=False)):
        with torch.no_grad(), torch.autocast(DEVICE, autocast):
            lengths = (20, *[1] * 7)
            ids = [prompt_ids(rows=1, length=n, seed=i) for i, n in enumerate(lengths)]
            logits.append([model(input_ids=x, past_key_values=cache).logits for x in ids])
    assert alike(*logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("host_attention", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "jamba"])
def test_autocast_may_begin_behind_forwards_without_it(name: str, host_attention: bool, attention: str) -> None:
    """Its narrower keys and values are kept in the dtype of those before, with which torch widens them, too."""
    model = build_model(name, attention)
    logits = []
    caches = [dynamic_cache(model), *(tiered_cache(model, x, host_attention=host_attention) for x in (None, ROOMY))]
    for cache in caches:
        logits.append([])
        for i, (length, on) in enumerate([(21, False), (1, True), (1, True), (1, False), (4, True), (1, True)]):
            with torch.no_grad(), torch.autocast(DEVICE, NARROW, enabled=on):
                ids = prompt_ids(rows=2, length=length, seed=i)
                logits[-1].append(model(input_ids=ids, past_key_values=cache).logits.float())
    for ours in logits[1:]:
        for x, y in zip(ours, logits[0], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0.05 * y.abs().max().item() if host_attention else 0)
    for cache in caches[1:]:
        check_invariants(cache)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_layer_does_not_hold_exactly_is_refused(autocast: bool) -> None:
    cache = TieredKVCache(block_size=4)
    narrow = torch.zeros(1, 2, 3, 8, dtype=NARROW)
    cache.update(narrow, narrow, 0)
    with torch.autocast(DEVICE, NARROW, enabled=autocast):
        for dtype in (WIDE, HALF, torch.int32):
            with pytest.raises(MismatchError, match="one dtype"):
                cache.update(narrow.to(dtype), narrow.to(dtype), 0)
    assert cache.get_seq_length() == 3


def test_without_autocast_they_refuse_another_dtype_before_they_change() -> None:
    model = build_model("mistral_sliding", "sdpa")
    cache = TieredKVCache(model.config)
    with torch.no_grad():
        model(prompt_ids(rows=1, length=5), past_key_values=cache)
        with pytest.raises(MismatchError, match="one model, dtype"):
            model.to(NARROW)(prompt_ids(rows=1, length=1), past_key_values=cache)
    assert cache.get_seq_length() == 5
