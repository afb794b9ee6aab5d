"""Blocks come back to the device where it has room again, whoever attends to them on the host meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvtier import TieredKVCache
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.sizing import eviction_batch

pytestmark = pytest.mark.usefixtures("on_the_host")

LAYERS, HEADS, DIM, BLOCK_SIZE = 3, 2, 8, 4
BLOCK = BLOCK_SIZE * 2 * HEADS * DIM * 4


def step(cache: TieredKVCache, tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """One forward of one row: each layer is updated, then attended to. The error against its tensors is checked."""
    rng = torch.Generator().manual_seed(seed)
    out = []
    for i in range(LAYERS):
        new = torch.randn(2, 1, HEADS, tokens, DIM, generator=rng)
        keys, values = cache.update(new[0], new[1], i)
        if cache.get_seq_length(i) > tokens:
            query = torch.randn(1, HEADS, 1, DIM, generator=rng)
            out.append(F.scaled_dot_product_attention(query, keys, values))
    return out


def on_device(cache: TieredKVCache) -> list[float]:
    """The share of each layer's blocks that are on the device."""
    return [x.device_blocks / -(-x.tokens // BLOCK_SIZE) for x in cache.residency().layers]


@pytest.mark.parametrize("host_attention", [True, False])
def test_after_a_crop_blocks_are_promoted_to_the_room_that_is_free(host_attention: bool) -> None:
    cache = TieredKVCache(
        device_budget=180 * BLOCK, host_budget=10**7, block_size=BLOCK_SIZE, host_attention=host_attention
    )
    step(cache, 400)
    for n in range(3):
        step(cache, 1, n)
    assert max(on_device(cache)) < 0.8
    # What stays are the oldest blocks, which were the first to be evicted.
    cache.crop(-340)
    assert min(on_device(cache)) < 0.5
    for n in range(6):
        step(cache, 1, n)
    assert min(on_device(cache)) == 1
    assert cache.stats.promotions > 0
    cache.check_integrity()


def test_while_the_host_attends_nothing_comes_back_that_has_to_leave_again() -> None:
    cache = TieredKVCache(device_budget=90 * BLOCK, host_budget=10**7, block_size=BLOCK_SIZE)
    step(cache, 300)
    for n in range(60):
        step(cache, 1, n)
    assert cache.stats.host_attended > 0
    assert cache.stats.bytes_up == 0


def test_what_an_eviction_frees_besides_is_not_brought_back() -> None:
    budget, freed = 3000 * BLOCK, eviction_batch(3000)
    cache = TieredKVCache(
        device_budget=budget, host_budget=10**7, block_size=BLOCK_SIZE, policy=FixedShare(0.0), host_attention=True
    )
    step(cache, 5000)
    for n in range(40):
        step(cache, 1, n)
    assert freed > LAYERS, "one eviction frees no more than one new block of each layer takes"
    assert cache.stats.evictions > 0
    assert cache.stats.bytes_up == 0
