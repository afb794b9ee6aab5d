"""What a cache holds lives as long as anything of it is held: the cache, a layer, a view."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from placements import ON_HOST

import kvtier
from kvtier import ClosedError, TieredKVCache


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, 1, 2, count, 8, generator=torch.Generator().manual_seed(seed))
    return keys, values


@pytest.mark.parametrize("shared", [False, True], ids=["own_memory", "shared_memory"])
def test_a_layer_and_its_views_outlive_the_cache(shared: bool) -> None:
    memory = kvtier.TieredMemory(host_budget="1MiB") if shared else None
    cache = TieredKVCache(memory=memory, block_size=4)
    keys, values = tokens(9)
    cache.update(keys, values, 0)
    layer, gone = cache.layers[0], weakref.ref(cache)
    view = layer.values
    del cache
    gc.collect()
    assert gone() is None
    assert layer.keys is not None
    assert torch.equal(layer.keys.clone(), keys)
    assert torch.equal(view.clone(), values)
    new = tokens(1, seed=1)
    out = F.scaled_dot_product_attention(new[0], *layer.update(*new))
    expected = F.scaled_dot_product_attention(new[0], torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2))
    assert torch.allclose(out, expected, atol=1e-5)
    if memory is not None:
        assert (memory.stats.host if ON_HOST else memory.stats.device).used_blocks == 3
        del layer, view
        gc.collect()
        with memory.lock:
            memory.recovery.collect()
        assert memory.stats.host.used_blocks == memory.stats.device.used_blocks == 0
        memory.close()


def test_a_layer_taken_from_a_cache_that_nobody_keeps_works() -> None:
    layer = TieredKVCache(block_size=4, host_budget="1MiB")
    layer.update(*tokens(9), 0)
    layer = layer.layers[0]
    gc.collect()
    assert layer.get_seq_length() == 9
    assert torch.equal(layer.keys.clone(), tokens(9)[0])


def test_after_close_a_layer_and_a_view_say_so() -> None:
    cache = TieredKVCache(block_size=4)
    cache.update(*tokens(9), 0)
    layer, view = cache.layers[0], cache.layers[0].keys
    cache.close()
    with pytest.raises(ClosedError):
        view.clone()
    with pytest.raises(ClosedError):
        layer.update(*tokens(1))
