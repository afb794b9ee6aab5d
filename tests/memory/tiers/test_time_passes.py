"""A device goes on while memory looks for room: what it comes by meanwhile is room."""

from __future__ import annotations

import pytest
import torch

from kvtier import TieredKVCache
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.transfer.engine import Event


class Later:
    """A fence that is over once somebody says so."""

    def __init__(self) -> None:
        self.over = False

    @property
    def event(self) -> Event | None:
        return None

    def passed(self) -> bool:
        return self.over

    def settle(self) -> None:
        raise AssertionError("nobody has to wait for it")


def held_by_a_fence(cache: TieredKVCache) -> tuple[ComputeDevice, BlockSet, Later]:
    """A device on which one slot waits for a fence, and nothing else is free."""
    (device,) = cache._forward.memory.devices
    assert isinstance(device, ComputeDevice)
    (blocks,) = device.sets
    pool, fence = blocks.pools.home, Later()
    run = blocks.resident[0]
    device.eviction._write_back_run(run)
    residency.evict(run, fence)
    while pool.free or device.home.budget.free >= blocks.pools.layout.nbytes:
        device.room.take_free(pool, 1, None, [])
    assert not pool.obtainable(ordered=True)
    return device, blocks, fence


@pytest.fixture
def cache() -> TieredKVCache:
    cache = TieredKVCache(device_budget=8 * 256, host_budget=64 * 256, block_size=4)
    kv = torch.randn(1, 2, 24, 4)
    cache.update(kv, kv, 0)
    return cache


def test_a_slot_that_becomes_free_while_others_are_asked_is_room(
    cache: TieredKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache._forward.memory.lock:
        device, blocks, fence = held_by_a_fence(cache)

        def little(*args: object, **options: object) -> bool:
            fence.over = True
            device.poll()
            return False

        monkeypatch.setattr(device.eviction, "evict", lambda *args: 0)
        monkeypatch.setattr(device.room, "_reclaim", little)
        assert device.room._make_slots(blocks.pools, 1, blocks)
        assert blocks.pools.home.obtainable(ordered=True)


def test_a_slot_that_becomes_free_while_slabs_are_given_back_counts(
    cache: TieredKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache._forward.memory.lock:
        device, blocks, fence = held_by_a_fence(cache)

        def nothing(*args: object) -> int:
            fence.over = True
            device.poll()
            return 0

        monkeypatch.setattr(device.eviction, "evict", nothing)
        looked = []
        monkeypatch.setattr("kvtier.memory.blocks.reclaim.reclaim", lambda pools, *args: looked.append(pools) or True)
        assert device.room._reclaim(blocks.pools.layout.nbytes, blocks)
        assert looked
