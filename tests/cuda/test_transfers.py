"""The CUDA engine under load: what it promises about order, on a real device."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier import TieredKVCache
from kvtier.metrics import Counters
from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.transfer import Copy, CudaTransfers, State
from kvtier.types import Direction

pytestmark = pytest.mark.cuda

LAYOUT = BlockLayout(8, 8, 128, 128, 64, torch.bfloat16)


def pools(slots: int) -> tuple[BlockPool, BlockPool]:
    """A device pool and a page-locked host pool of `slots` slots each."""
    near = BlockPool(LAYOUT, Memory(torch.device("cuda", 0), Budget("device", 10**9)))
    far = BlockPool(LAYOUT, Memory(torch.device("cpu"), Budget("host", 10**9), lock_for=torch.device("cuda", 0)))
    near.grow(slots)
    far.grow(slots)
    return near, far


def busy(stream_ms: int) -> None:
    """Keep the compute stream busy for about `stream_ms` milliseconds."""
    torch.cuda._sleep(stream_ms * 1_500_000)


@pytest.mark.parametrize("seed", range(4))
def test_copies_see_what_the_compute_stream_wrote_and_readers_see_the_copies(seed: int) -> None:
    generator = random.Random(seed)
    near, far = pools(32)
    engine = CudaTransfers(torch.device("cuda", 0), Counters())
    for round_number in range(30):
        source, middle, target = near.allocate(), far.allocate(), near.allocate()
        busy(generator.randint(0, 3))
        value = float(round_number)
        near.keys(source, 1).fill_(value)  # queued behind the sleep: a copy that does not wait sees the past
        down = engine.submit([Copy(near, source, far, middle, 1)], Direction.WRITE_BACK)
        near.release(source)
        up = engine.submit([Copy(far, middle, near, target, 1)], Direction.FETCH, after=[down])
        up.wait()
        read = near.keys(target, 1).clone()
        near.release(target)
        again = near.allocate()
        near.keys(again, 1).fill_(-1.0)  # may be the slot just read
        assert bool((read == value).all())
        near.release(again)
        far.release(middle)
        engine.poll()
    engine.drain()
    assert engine.in_flight() == ()
    assert near.used == far.used == 0
    engine.close()
    near.close()
    far.close()


def test_a_pending_transfer_keeps_its_slots() -> None:
    near, far = pools(4)
    engine = CudaTransfers(torch.device("cuda", 0), Counters())
    a, b = near.allocate(), far.allocate()
    busy(50)
    transfer = engine.submit([Copy(near, a, far, b, 1)], Direction.WRITE_BACK)
    near.release(a)
    assert transfer.state is State.PENDING
    assert near.used == 1
    transfer.synchronize()
    assert near.used == 0
    far.release(b)
    engine.close()
    near.close()
    far.close()


def test_host_slabs_are_page_locked_at_exactly_their_size() -> None:
    memory = Memory(torch.device("cpu"), Budget("host", 10**8), lock_for=torch.device("cuda", 0))
    slab = memory.allocate(3 * 2**20 + 4096)
    assert slab is not None
    assert slab.is_pinned()
    assert memory.budget.used == 3 * 2**20 + 4096
    memory.release(slab)


@pytest.mark.parametrize("budget", [2**21, 2**22, 2**24])
def test_decoding_under_pressure_gives_the_numbers_of_a_dense_cache(budget: int) -> None:
    torch.manual_seed(0)
    cache = TieredKVCache(device_budget=budget, block_size=16, write_through=0.0)
    layers, dense = 4, []
    options = {"device": "cuda", "dtype": torch.float16}
    for i in range(layers):
        k, v = torch.randn(2, 4, 200, 64, **options), torch.randn(2, 4, 200, 64, **options)
        cache.update(k, v, i)
        dense.append((k, v))
    for step in range(100):
        busy(step % 3)
        for i in range(layers):
            k, v = torch.randn(2, 4, 1, 64, **options), torch.randn(2, 4, 1, 64, **options)
            q = torch.randn(2, 8, 1, 64, **options)
            keys, values = cache.update(k, v, i)
            dense[i] = (torch.cat([dense[i][0], k], 2), torch.cat([dense[i][1], v], 2))
            ours = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            theirs = torch.nn.functional.scaled_dot_product_attention(q, *dense[i], enable_gqa=True)
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    cache.check_integrity()
    assert cache.stats.device.peak_bytes <= budget
    cache.close()


def test_a_refused_page_lock_leaves_no_error_for_the_next_launch() -> None:
    memory = Memory(torch.device("cpu"), Budget("host", 2**20), lock_for=torch.device("cuda", 0))
    slab = memory.allocate(2**16)
    assert slab is not None
    with pytest.warns(RuntimeWarning, match="cannot be page-locked"):
        memory._lock(slab, torch.device("cuda", 0))  # it is locked already
    assert memory.lock_for is None
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    memory.release(slab)
    assert memory.page_locked == 0
