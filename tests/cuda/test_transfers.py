"""The CUDA engine under load: what it promises about order, on a real device."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier import Policy, TieredKVCache
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.transfer.copies import Copy, TensorCopy
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction, Event, State

pytestmark = pytest.mark.cuda

LAYOUT = BlockLayout(8, 8, 128, 128, 64, torch.bfloat16)


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def pools(slots: int) -> tuple[BlockPool, BlockPool]:
    """A device pool and a page-locked host pool of `slots` slots each."""
    device = BlockPool(LAYOUT, SlabAllocator(CUDA, Budget("device", 10**9)))
    host = BlockPool(LAYOUT, SlabAllocator(CPU, Budget("host", 10**9), lock_for=CUDA))
    device.grow(slots)
    host.grow(slots)
    return device, host


def take(pool: BlockPool, behind: list[Event] | None = None) -> int:
    """A slot that must be there."""
    found = pool.take(1, behind=behind)
    assert found is not None
    return found[0]


def busy(stream_ms: int) -> None:
    """Keep the compute stream busy for about `stream_ms` milliseconds."""
    torch.cuda._sleep(stream_ms * 1_500_000)


@pytest.mark.parametrize("seed", range(4))
def test_copies_see_what_the_compute_stream_wrote_and_readers_see_the_copies(seed: int) -> None:
    generator = random.Random(seed)
    device, host = pools(32)
    engine = CudaTransfers(CUDA)
    for round_number in range(30):
        source, middle, target = take(device), take(host), take(device)
        busy(generator.randint(0, 3))
        value = float(round_number)
        device.keys(source, 1).fill_(value)  # queued behind the sleep: a copy that does not wait sees the past
        down = engine.submit([Copy(device.span(source, 1), host.span(middle, 1))], Direction.WRITE_BACK, Counters())
        up = engine.submit(
            [Copy(host.span(middle, 1), device.span(target, 1))], Direction.FETCH, Counters(), after=[down]
        )
        up.wait()
        read = device.keys(target, 1).clone()
        device.give(target, 1)
        again = take(device)
        device.keys(again, 1).fill_(-1.0)  # may be the slot just read
        assert bool((read == value).all())
        down.synchronize()
        for slot in (source, again):
            device.give(slot, 1)
        host.give(middle, 1)
        engine.poll()
    engine.drain()
    assert engine.in_flight() == ()
    assert device.used == host.used == 0
    engine.close()
    device.close()
    host.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_into_held_slots_waits_for_their_readers_and_for_nothing_later(seed: int) -> None:
    """The compute stream reads some slots, then is busy for long: the copies come after the one, before the other."""
    generator = random.Random(seed)
    device, host = pools(8)
    engine = CudaTransfers(CUDA)
    source = take(host)
    host.keys(source, 1).fill_(7.0)
    slots = [take(device) for _ in range(8)]
    for slot in slots:
        device.keys(slot, 1).fill_(1.0)
    torch.cuda.synchronize()
    busy(generator.randint(5, 20))
    reads = [device.keys(slot, 1).float().sum() for slot in slots]  # behind the sleep
    fence = engine.mark()
    for slot in slots:
        device.give(slot, 1, fence)
    busy(500)
    end = engine.mark()
    behind: list[Event] = []
    target = take(device, behind)
    assert behind == [fence]
    fetch = engine.submit(
        [Copy(host.span(source, 1), device.span(target, 1))], Direction.FETCH, Counters(), behind=behind
    )
    fetch.synchronize()
    assert fence.passed()
    assert not end.passed(), "it waited for the end of the stream"
    fetch.wait()
    assert bool((device.keys(target, 1) == 7.0).all())
    whole = float(device.keys(slots[0], 1).numel())
    assert [float(x) for x in reads] == [whole] * 8
    engine.close()
    device.close()
    host.close()


def test_a_pending_transfer_says_so_until_the_cpu_has_waited() -> None:
    device, host = pools(4)
    engine = CudaTransfers(CUDA)
    a, b = take(device), take(host)
    device.keys(a, 1).fill_(3.0)
    busy(50)
    told: list[str] = []
    transfer = engine.submit(
        [Copy(device.span(a, 1), host.span(b, 1))],
        Direction.WRITE_BACK,
        Counters(),
        on_done=lambda: told.append("done"),
    )
    engine.poll()
    assert transfer.state is State.PENDING
    assert told == []
    transfer.synchronize()
    assert told == ["done"]
    assert bool((host.keys(b, 1) == 3.0).all())
    engine.close()
    device.close()
    host.close()


def test_seconds_of_copies_and_of_waits_are_those_of_the_device() -> None:
    engine, counters = CudaTransfers(CUDA), Counters()
    host = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cpu").pin_memory()
    target = torch.empty_like(host, device=CUDA)
    for _ in range(2):
        fetch = engine.submit([TensorCopy(host, target)], Direction.FETCH, counters)
        fetch.wait()
    assert counters.stall_seconds == 0.0, "nobody has looked"
    torch.cuda.synchronize()
    engine.poll()
    assert 64 * 2**20 / 1e12 < counters.seconds_up < 10.0
    assert 0.0 < counters.stall_seconds < 2 * counters.seconds_up + 1.0
    engine.close()


def test_host_slabs_are_page_locked_at_exactly_their_size() -> None:
    slabs = SlabAllocator(CPU, Budget("host", 10**8), lock_for=CUDA)
    slab = slabs.allocate(3 * 2**20 + 4096)
    assert slab is not None
    assert slab.is_pinned()
    assert slabs.budget.used == 3 * 2**20 + 4096
    slabs.release(slab)


@pytest.mark.parametrize("budget", [2**21, 2**22, 2**24])
def test_decoding_under_pressure_gives_the_numbers_of_a_dense_cache(budget: int) -> None:
    torch.manual_seed(0)
    cache = TieredKVCache(device_budget=budget, block_size=16, policy=Policy(write_through=0.0))
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


def test_a_registration_that_was_left_is_made_again_and_leaves_no_error_for_the_next_launch() -> None:
    slabs = SlabAllocator(CPU, Budget("host", 2**20), lock_for=CUDA)
    slab = slabs.allocate(2**16)
    assert slab is not None
    slabs._lock(slab, CUDA)  # it is locked already
    assert slab.is_pinned()
    assert slabs.lock_for == CUDA
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
    slabs.release(slab)
    assert slabs.page_locked == 0


def test_a_refused_page_lock_leaves_no_error_for_the_next_launch() -> None:
    slabs = SlabAllocator(CPU, Budget("host", 2**20))
    slab = slabs.allocate(2**16)
    assert slab is not None
    part = slab.data_ptr() + 2**15
    assert int(torch.cuda.cudart().cudaHostRegister(part, 2**15, 3)) == 0
    try:
        with pytest.warns(RuntimeWarning, match="cannot be page-locked, for a part of them is already"):
            slabs._lock(slab, CUDA)
        assert int(torch.ones(1000, device="cuda").sum()) == 1000
    finally:
        assert int(torch.cuda.cudart().cudaHostUnregister(part)) == 0
    assert slabs.page_locked == 0
    slabs.release(slab)
