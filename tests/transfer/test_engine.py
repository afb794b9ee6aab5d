"""The seam through which bytes move: the bytes are there after waiting, failure leaves the source, order is kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from kvtier.errors import TransferError
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.testing import FailingTransfers, HeldTransfers, failing, held, throttled
from kvtier.transfer.copies import Copy, TensorCopy, joined
from kvtier.transfer.engine import Direction, InlineTransfers, State, Transfer, TransferEngine

LAYOUT = BlockLayout(1, 1, 4, 4, 2, torch.float32)
CPU = torch.device("cpu")


def make_pool(slots: int, *, poison: bool = True) -> BlockPool:
    """A pool of `slots` free slots."""
    pool = BlockPool(LAYOUT, SlabAllocator(CPU, Budget("host", slots * LAYOUT.nbytes)), poison=poison)
    pool.grow(slots)
    return pool


def take(pool: BlockPool, count: int, mark: int | None = None) -> list[int]:
    """`count` slots; the n-th filled with `mark + n`."""
    slots: list[int] = []
    while len(slots) < count:
        found = pool.take(count - len(slots), slots[-1] if slots else None)
        assert found is not None
        slots += range(found[0], found[0] + found[1])
    for n, slot in enumerate(slots):
        if mark is not None:
            pool.bytes(slot, 1).fill_(mark + n)
    return slots


def marks(pool: BlockPool, slots: list[int]) -> list[int]:
    """The byte that fills each slot."""
    for slot in slots:
        assert len(pool.bytes(slot, 1).unique()) == 1, "a slot was copied in part"
    return [int(pool.bytes(slot, 1)[0]) for slot in slots]


def copies(src: BlockPool, sources: list[int], dst: BlockPool, targets: list[int]) -> list[Copy]:
    """Slot by slot, joined where they are neighbours."""
    return joined(Copy(src.span(a, 1), dst.span(b, 1)) for a, b in zip(sources, targets, strict=True))


ENGINES: dict[str, Callable[[], TransferEngine]] = {
    "inline": lambda: InlineTransfers(CPU),
    "held": lambda: held(3, 0.0)(CPU),
    "held_some": lambda: held(3, 0.5)(CPU),
    "held_none": lambda: held(3, 1.0)(CPU),
    "held_late": lambda: held(3, 0.5, late=True)(CPU),
    "failing_never": lambda: failing(0.0)(CPU),
    "throttled": lambda: throttled(up=1e6, down=1e6, poison=True)(CPU),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> TransferEngine:
    """Every engine that runs without an accelerator."""
    return ENGINES[request.param]()


@pytest.mark.parametrize("end", ["wait", "synchronize", "drain", "close"])
def test_after_waiting_the_bytes_are_there_and_the_owner_is_told_once(engine: TransferEngine, end: str) -> None:
    device, host = make_pool(8), make_pool(8)
    sources, targets = take(device, 5, mark=10), take(host, 5)
    told: list[str] = []
    transfer = engine.submit(
        copies(device, sources, host, targets),
        Direction.WRITE_BACK,
        Counters(),
        on_done=lambda: told.append("done"),
        on_failed=lambda: told.append("failed"),
    )
    for _ in range(2):
        getattr(transfer if end in ("wait", "synchronize") else engine, end)()
    assert marks(host, targets) == marks(device, sources) == [10, 11, 12, 13, 14]
    engine.poll()  # a wait of the compute stream may leave it to this
    assert transfer.state is State.DONE
    assert told == ["done"]
    assert not engine.in_flight()
    transfer.wait()
    transfer.synchronize()
    assert told == ["done"]


def test_a_failed_transfer_leaves_the_source_and_tells_the_owner_and_whoever_waits() -> None:
    counters = Counters()
    engine = FailingTransfers(CPU, lambda transfer: transfer.direction is Direction.FETCH)
    device, host = make_pool(4), make_pool(4)
    sources, targets = take(host, 4, mark=30), take(device, 4)
    told: list[str] = []
    transfer = engine.submit(
        copies(host, sources, device, targets),
        Direction.FETCH,
        counters,
        on_done=lambda: told.append("done"),
        on_failed=lambda: told.append("failed"),
    )
    assert transfer.state is State.FAILED
    for wait in (transfer.wait, transfer.synchronize, transfer.wait):
        with pytest.raises(TransferError, match="fetch"):
            wait()
    assert marks(host, sources) == [30, 31, 32, 33]
    assert told == ["failed"]
    assert counters.failed_transfers == 1
    others = make_pool(4)
    engine.submit(copies(host, sources, others, take(others, 4)), Direction.WRITE_BACK, counters).wait()
    assert counters.failed_transfers == 1


@pytest.mark.parametrize("error", [RuntimeError, OSError, MemoryError])
def test_a_copy_that_raises_is_a_failed_transfer(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(self: Copy, non_blocking: bool = False) -> None:
        raise error("no link")

    device, host = make_pool(2), make_pool(2)
    some = copies(device, take(device, 2, mark=1), host, take(host, 2))
    monkeypatch.setattr(Copy, "run", broken)
    transfer = InlineTransfers(CPU).submit(some, Direction.WRITE_BACK, Counters())
    with pytest.raises(TransferError, match="no link") as raised:
        transfer.wait()
    assert isinstance(raised.value.__cause__, error)


def test_an_interrupt_reaches_the_caller_and_settles_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Copy, non_blocking: bool = False) -> None:
        raise KeyboardInterrupt

    device, host = make_pool(2), make_pool(2)
    monkeypatch.setattr(Copy, "run", interrupted)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        InlineTransfers(CPU).submit(
            copies(device, take(device, 1), host, take(host, 1)),
            Direction.WRITE_BACK,
            Counters(),
            on_failed=lambda: told.append("failed"),
        )
    assert told == ["failed"]


@pytest.mark.parametrize("seed", range(20))
def test_joined_copies_move_the_same_pairs_and_cannot_be_joined_further(seed: int) -> None:
    rng = random.Random(seed)
    device, host = make_pool(20), make_pool(40)
    device.allocator.budget.limit *= 2
    device.grow(20)  # two slabs: no copy goes from one into the other
    slots = [[slab.base + i for slab in pool.slabs for i in range(slab.slots)] for pool in (device, host)]
    count = rng.randint(0, 40)
    sources, targets = (sorted(rng.sample(numbers, count)) for numbers in slots)
    if seed % 3 == 0:
        rng.shuffle(targets)
    found = copies(device, sources, host, targets)
    n = LAYOUT.nbytes
    pairs = [
        (copy.source.address + i * n, copy.target.address + i * n) for copy in found for i in range(copy.nbytes // n)
    ]
    assert pairs == [(device.address(a), host.address(b)) for a, b in zip(sources, targets, strict=True)]
    for copy in found:
        assert copy.source.nbytes == copy.target.nbytes == copy.nbytes
        assert copy.source.offset + copy.nbytes <= copy.source.slab.numel()
    for one, two in itertools.pairwise(found):
        assert not (one.source.precedes(two.source) and one.target.precedes(two.target))


def test_copies_of_different_slabs_are_not_joined() -> None:
    device, host = make_pool(8), make_pool(16)
    host.retire_free()
    host.grow(8)
    host.grow(8)
    first, second = (slab.base for slab in host.slabs)
    base = device.slabs[0].base
    assert len(copies(host, [first + 2, first + 3], device, [base, base + 1])) == 1
    assert len(copies(host, [first + 2, second + 3], device, [base, base + 1])) == 2
    assert len(copies(device, [base, base + 1], host, [first + 2, second + 3])) == 2


def test_a_transfer_that_has_settled_stays_as_it_is() -> None:
    device, host = make_pool(2), make_pool(2)
    counters, told = Counters(), []
    transfer = InlineTransfers(CPU).submit(
        copies(device, take(device, 1), host, take(host, 1)),
        Direction.WRITE_BACK,
        counters,
        on_failed=lambda: told.append("failed"),
    )
    transfer.settle(RuntimeError("too late"))
    assert transfer.state is State.DONE
    transfer.wait()
    assert (told, counters.failed_transfers) == ([], 0)


def test_every_byte_and_every_copy_is_counted_for_its_owner_by_direction(engine: TransferEngine) -> None:
    device, host = make_pool(32), make_pool(32)
    down, up = take(device, 5, mark=1), take(host, 3, mark=1)
    mine, other = Counters(), Counters()
    n = LAYOUT.nbytes

    def seen(counters: Counters) -> tuple[int, ...]:
        c = counters
        return c.bytes_down, c.copies_down, c.bytes_up, c.copies_up, c.attention_bytes

    engine.submit(copies(device, down, host, take(host, 5)), Direction.WRITE_BACK, mine)
    engine.submit(copies(host, up[::-1], device, take(device, 3)), Direction.FETCH, mine)
    assert seen(mine) == (5 * n, 1, 3 * n, 3, 0)
    for direction in (Direction.QUERY, Direction.RESULT):
        engine.submit([TensorCopy(torch.zeros(7), torch.zeros(7))], direction, other)
    engine.drain()
    assert seen(mine) == (5 * n, 1, 3 * n, 3, 0)
    assert seen(other) == (0, 0, 0, 0, 2 * 28)


def test_a_held_destination_is_nan_until_it_is_waited_for() -> None:
    engine = HeldTransfers(CPU, eagerness=0.0)
    device, host = make_pool(4, poison=False), make_pool(4, poison=False)
    sources = take(host, 2, mark=7)
    first, second = take(device, 2, mark=0), take(device, 2, mark=0)
    transfers = [
        engine.submit(copies(host, sources, device, to), Direction.FETCH, Counters()) for to in (first, second)
    ]
    for _ in range(3):
        engine.poll()
        for slot in first + second:
            assert device.keys(slot, 1).isnan().all()
            assert device.values(slot, 1).isnan().all()
    transfers[1].wait()
    assert marks(device, second) == [7, 8]
    assert device.keys(first[0], 1).isnan().all(), "nobody waited for this one"
    transfers[0].wait()
    assert marks(device, first) == [7, 8]


def test_a_late_transfer_that_was_waited_for_is_in_flight_until_somebody_asks() -> None:
    """As on a CUDA stream: the compute stream's wait says nothing to the CPU."""
    engine = HeldTransfers(CPU, eagerness=0.0, late=True)
    device, host = make_pool(2), make_pool(2)
    target = take(device, 2)
    transfer = engine.submit(copies(host, take(host, 2, mark=5), device, target), Direction.FETCH, Counters())
    transfer.wait()
    assert marks(device, target) == [5, 6]
    assert transfer.pending
    assert engine.in_flight() == (transfer,)
    engine.poll()
    assert transfer.state is State.DONE
    assert not engine.in_flight()


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_runs_behind_all_that_it_comes_after_in_whatever_order_it_is_waited_for(
    seed: int, eagerness: float
) -> None:
    """A chain up and down between two pools; each link reads what the one before wrote."""
    rng = random.Random(seed)
    engine = HeldTransfers(CPU, seed, eagerness)
    device, host = make_pool(40), make_pool(40)
    chains: list[tuple[list[Transfer], list[int]]] = []
    for n in range(4):
        place, source = device, take(device, 2, mark=40 + 2 * n)
        links: list[Transfer] = []
        for _ in range(rng.randint(1, 4)):
            other = host if place is device else device
            target = take(other, 2)
            direction = Direction.WRITE_BACK if place is device else Direction.FETCH
            some = copies(place, source, other, target)
            links.append(engine.submit(some, direction, Counters(), after=links[-1:]))
            place, source = other, target
        chains.append((links, source))
    for n in rng.sample(range(4), 4):
        links, last = chains[n]
        links[-1].wait()
        assert marks(host if len(links) % 2 else device, last) == [40 + 2 * n, 41 + 2 * n]
        assert all(link.state is State.DONE for link in links)
    engine.close()
    assert not engine.in_flight()
