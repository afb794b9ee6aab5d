"""Attention calls that read outside the memory's lock: nobody waits for one that has ended, however it did."""

from __future__ import annotations

import threading

import pytest
import torch

from kvtier import TieredKVCache, TieredMemory
from kvtier.testing import with_doubles
from kvtier.transfer.engine import Event, InlineTransfers

pytestmark = pytest.mark.usefixtures("on_the_host")


class Failed(InlineTransfers):
    """As a device whose driver has failed seems to the CPU, now and then."""

    asynchronous = True
    fails = False

    def mark(self) -> Event | None:
        """No point that anything is behind."""
        if self.fails:
            raise RuntimeError("no mark")
        return None


def test_a_call_ends_though_the_device_does_not_say_when_its_kernels_do() -> None:
    memory = with_doubles(TieredMemory(device_budget="1MiB", host_budget="1MiB"), Failed)
    with memory, TieredKVCache(memory=memory, block_size=4) as cache:
        x = torch.randn(1, 1, 8, 8)
        cache.update(x, x, 0)
        reader, found = cache._forward.readers[0], list[bool]()

        def waits() -> None:
            with memory.lock:
                found.append(memory.readers.wait())

        with memory.lock:
            reading = reader.begin()
        waiting = threading.Thread(target=waits, daemon=True)
        waiting.start()
        while not memory.readers._ended._waiters:
            waiting.join(0.01)
        engine = reader.device.engine
        assert isinstance(engine, Failed)
        engine.fails = True
        with pytest.raises(RuntimeError, match="no mark"):
            reader.end(reading)
        engine.fails = False
        waiting.join(120)
        assert found == [True]
        assert not memory.readers.mine()
