"""What a step was promised to be read through is there when it reads, whatever was fetched into it meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.memory.blocks.block import State
from kvtier.testing import held, with_doubles

HEADS, DIM, BLOCK = 1, 4, 4
SLOT = 2 * HEADS * DIM * BLOCK * 4


def smallest(tokens: int) -> int:
    """The least device budget that two caches of two layers are admitted with."""
    budget = SLOT
    while True:
        try:
            caches(budget, tokens)
            return budget
        except BudgetError as error:
            budget = max(error.needed, budget + 1)


def caches(budget: int, tokens: int) -> tuple[list[TieredKVCache], list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Two caches, and what the last forward of each returned, which nobody has read yet."""
    memory = with_doubles(TieredMemory(device_budget=budget, host_budget=10**6), held(0, 0.0))
    found = [TieredKVCache(memory=memory, block_size=BLOCK, host_attention=False) for _ in range(2)]
    x = torch.arange(float(tokens * DIM)).view(1, HEADS, tokens, DIM)
    for cache in found:
        for layer in range(2):
            cache.update(x, x, layer)
    views = [[cache.update(x[:, :, :1], x[:, :, :1], layer) for layer in range(2)] for cache in found]
    return found, views


@pytest.mark.parametrize("spare", [0, 1, 3, 10])
@pytest.mark.parametrize("who", ["another cache", "the same cache", "both"])
def test_what_is_fetched_into_promised_room_gives_way(who: str, spare: int) -> None:
    tokens = 30
    both, views = caches(smallest(tokens) + spare * SLOT, tokens)
    memory = both[0]._forward.memory
    device = memory.devices[0]
    assert all(space.nbytes == 0 for cache in both for space in cache._forward._held.owner.workspaces.values())
    for cache in {"another cache": both[1:], "the same cache": both[:1], "both": both}[who]:
        for reader in cache._forward.readers.values():
            with memory.lock:
                runs = [run for run in reader.layer.runs() if run.state is State.HOST]
                reader.expect(device.fetch(runs, 100, None, evict=False))
    assert device.slabs is not None
    assert any(x.blocks.counts[State.ARRIVING] for c in both for x in [r.layer for r in c._forward.readers.values()])
    for cache, pairs in zip(both, views, strict=True):
        for keys, values in pairs:
            query = torch.randn(1, HEADS, 1, DIM)
            out = F.scaled_dot_product_attention(query, keys, values)
            assert "attention" not in cache.stats.dense_fallback_ops, "it was read through the promised room"
            dense = [x.dense() for x in (keys, values)]
            torch.testing.assert_close(out, F.scaled_dot_product_attention(query, *dense))
        assert cache.stats.device.workspace_bytes > 0
    memory.check_integrity()
    assert memory.stats.device.peak_bytes <= memory.stats.device.budget
