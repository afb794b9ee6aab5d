"""A device goes on while memory looks for room: what it comes by meanwhile is room."""

from __future__ import annotations

import pytest
import torch

from kvtier import TieredKVCache
from kvtier.memory import residency
from kvtier.memory.device import ComputeDevice
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


@pytest.mark.parametrize("when", ["evict", "_reclaim"])
def test_a_slot_that_becomes_free_while_others_are_asked_is_room(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TieredKVCache(device_budget=8 * 256, host_budget=64 * 256, block_size=4)
    kv = torch.randn(1, 2, 24, 4)
    cache.update(kv, kv, 0)
    forward = cache._forward
    (device,) = forward.memory.devices
    assert isinstance(device, ComputeDevice)
    (blocks,) = device.sets
    pool = blocks.pools.home
    fence = Later()
    with forward.memory.lock:
        run = blocks.resident[0]
        device._write_back_run(run)
        residency.evict(run, fence)
        while pool.free or device.home.budget.free >= blocks.pools.layout.nbytes:
            device._take_free(pool, 1, None, [])  # nothing else is free

        def nothing(*args: object, **options: object) -> int:
            fence.over = when == "evict" or fence.over
            return 0

        def little(*args: object, **options: object) -> bool:
            fence.over = True
            device.poll()
            return False

        monkeypatch.setattr(device, "evict", nothing)
        monkeypatch.setattr(device, "_reclaim", little)
        assert not pool.obtainable(ordered=True)
        assert device._make_slots(blocks.pools, 1, blocks)
        assert pool.obtainable(ordered=True)
