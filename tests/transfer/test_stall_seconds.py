"""A stall is a wait for blocks: not for a query on its way to the host's threads, nor for their result."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import kvtier
from kvtier import TieredKVCache
from kvtier.stats import Counters
from kvtier.transfer import engine as module
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.doubles import HeldTransfers
from kvtier.transfer.engine import Direction, InlineTransfers, TransferEngine

CPU = torch.device("cpu")
BLOCKS = {Direction.FETCH, Direction.WRITE_BACK}


@pytest.fixture(autouse=True)
def _ticking(monkeypatch: pytest.MonkeyPatch, on_the_host: None) -> None:
    """A clock that moves a second each time that it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.parametrize("engine", [InlineTransfers, HeldTransfers])
@pytest.mark.parametrize("direction", Direction)
def test_only_waits_for_blocks_are_stalls(engine: type[TransferEngine], direction: Direction) -> None:
    counters = Counters()
    copy = TensorCopy(torch.ones(4), torch.zeros(4))
    transfer = engine(CPU).submit([copy], direction, counters)
    transfer.synchronize()
    assert (counters.stall_seconds > 0) == (direction in BLOCKS)


@pytest.mark.parametrize("host_attention", [True, False])
def test_attention_on_the_host_is_no_stall(host_attention: bool) -> None:
    """Blocks are on the host: with host attention nothing waits for them, without it everything does."""
    memory = kvtier.TieredMemory(device_budget="40KiB", host_budget="1MiB")
    memory.set_up(lambda device: HeldTransfers(device, eagerness=0.0))
    cache = TieredKVCache(memory=memory, block_size=4, host_attention=host_attention)
    new = torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        cache.update(new, new, layer)
    before = cache.stats.stall_seconds
    for i, layer in itertools.product(range(3), range(3)):
        token = new[:, :, i : i + 1]
        F.scaled_dot_product_attention(token, *cache.update(token, token, layer))
    assert cache.stats.host_attended == (9 if host_attention else 0)
    assert (cache.stats.stall_seconds == before) is host_attention
