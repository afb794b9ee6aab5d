"""Laws of the seam through which bytes move: both ends are protected, failure leaves the source, order is kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from kvtier.errors import TransferError
from kvtier.metrics import Counters
from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.transfer import Copy, InlineTransfers, State, Transfer, TransferEngine, join
from kvtier.testing import FailingTransfers, HeldTransfers
from kvtier.types import Direction

LAYOUT = BlockLayout(1, 1, 4, 4, 2, torch.float32)


def make_pool(slots: int, *, poison: bool = True) -> BlockPool:
    """A pool of `slots` free slots."""
    pool = BlockPool(LAYOUT, Memory(torch.device("cpu"), Budget("host", slots * LAYOUT.nbytes)), poison=poison)
    pool.grow(slots)
    return pool


def take(pool: BlockPool, count: int, mark: int | None = None) -> list[int]:
    """`count` neighbouring slots; the n-th filled with `mark + n`."""
    slots: list[int] = []
    for n in range(count):
        slot = pool.allocate(slots[-1] if slots else None)
        assert slot is not None
        slots.append(slot)
        if mark is not None:
            pool.bytes(slot, 1).fill_(mark + n)
    return slots


def marks(pool: BlockPool, slots: list[int]) -> list[int]:
    """The byte that fills each slot."""
    for slot in slots:
        assert len(pool.bytes(slot, 1).unique()) == 1, "a slot was copied in part"
    return [int(pool.bytes(slot, 1)[0]) for slot in slots]


ENGINES: dict[str, Callable[[], TransferEngine]] = {
    "inline": lambda: InlineTransfers(Counters()),
    "held": lambda: HeldTransfers(Counters(), seed=3, eagerness=0.0),
    "held_some": lambda: HeldTransfers(Counters(), seed=3, eagerness=0.5),
    "held_none": lambda: HeldTransfers(Counters(), seed=3, eagerness=1.0),
    "failing_never": lambda: FailingTransfers(Counters(), lambda transfer: False),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> TransferEngine:
    """Every engine that runs without an accelerator."""
    return ENGINES[request.param]()


@pytest.mark.parametrize("end", ["wait", "synchronize", "drain", "close"])
def test_after_waiting_the_bytes_are_there_and_the_owner_was_told_once(engine: TransferEngine, end: str) -> None:
    near, far = make_pool(8), make_pool(8)
    sources, targets = take(near, 5, mark=10), take(far, 5)
    told: list[str] = []
    transfer = engine.submit(
        join(near, sources, far, targets),
        Direction.WRITE_BACK,
        on_done=lambda: told.append("done"),
        on_failed=lambda: told.append("failed"),
    )
    for _ in range(2):
        getattr(transfer if end in ("wait", "synchronize") else engine, end)()
    assert transfer.state is State.DONE
    assert marks(far, targets) == marks(near, sources) == [10, 11, 12, 13, 14]
    assert told == ["done"]
    assert [near.references(s) for s in sources] == [far.references(s) for s in targets] == [1] * 5
    assert not engine.in_flight()


def test_prepare_protects_both_ends_even_from_their_owners() -> None:
    engine = HeldTransfers(Counters(), eagerness=0.0)
    near, far = make_pool(6), make_pool(6)
    sources, targets = take(near, 3, mark=20), take(far, 3)
    transfer = engine.submit(join(near, sources, far, targets), Direction.WRITE_BACK)
    assert engine.pending_slots(near) == engine.pending_slots(far) == 3
    for pool, slots in ((near, sources), (far, targets)):
        for slot in slots:
            pool.release(slot)
        others = take(pool, 3)
        assert not set(others) & set(slots)
        assert pool.allocate() is None, "a slot was handed out while a transfer still used it"
        pool.check_integrity()
    assert marks(near, sources) == [20, 21, 22], "the source must last until it was read"
    transfer.wait()
    assert near.free == far.free == 3, "what nobody owns is free as soon as the transfer ends"
    assert not engine.pending_slots(near)


def test_a_failed_transfer_leaves_the_source_and_lets_go_of_both_ends() -> None:
    counters = Counters()
    engine = FailingTransfers(counters, lambda transfer: transfer.direction is Direction.FETCH)
    near, far = make_pool(4), make_pool(4)
    sources, targets = take(far, 4, mark=30), take(near, 4)
    told: list[str] = []
    transfer = engine.submit(
        join(far, sources, near, targets),
        Direction.FETCH,
        on_done=lambda: told.append("done"),
        on_failed=lambda: told.append("failed"),
    )
    assert transfer.state is State.FAILED
    for wait in (transfer.wait, transfer.synchronize, transfer.wait):
        with pytest.raises(TransferError, match="fetch"):
            wait()
    assert marks(far, sources) == [30, 31, 32, 33]
    assert [far.references(s) for s in sources] == [near.references(s) for s in targets] == [1] * 4
    assert told == ["failed"]
    assert counters.failed_transfers == 1
    others = make_pool(4)
    engine.submit(join(far, sources, others, take(others, 4)), Direction.WRITE_BACK).wait()


@pytest.mark.parametrize("error", [RuntimeError, OSError, MemoryError])
def test_a_copy_that_raises_is_a_failed_transfer(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(self: Copy, non_blocking: bool = False) -> None:
        raise error("no link")

    engine = InlineTransfers(Counters())
    near, far = make_pool(2), make_pool(2)
    copies = join(near, take(near, 2, mark=1), far, take(far, 2))
    monkeypatch.setattr(Copy, "run", broken)
    transfer = engine.submit(copies, Direction.WRITE_BACK)
    with pytest.raises(TransferError, match="no link") as raised:
        transfer.wait()
    assert isinstance(raised.value.__cause__, error)
    assert {near.references(c.src_slot) for c in copies} == {far.references(c.dst_slot) for c in copies} == {1}


@pytest.mark.parametrize("seed", range(20))
def test_joined_copies_move_the_same_pairs_and_cannot_be_joined_further(seed: int) -> None:
    rng = random.Random(seed)
    near, far = make_pool(40), make_pool(40)
    count = rng.randint(0, 12)
    sources, targets = (sorted(rng.sample(range(40), count)) for _ in range(2))
    if seed % 3 == 0:
        rng.shuffle(targets)
    copies = join(near, sources, far, targets)
    pairs = [(c.src_slot + i, c.dst_slot + i) for c in copies for i in range(c.count)]
    assert pairs == list(zip(sources, targets, strict=True))
    for one, two in itertools.pairwise(copies):
        assert (one.src_slot + one.count, one.dst_slot + one.count) != (two.src_slot, two.dst_slot)
    assert all(c.src is near and c.dst is far and c.nbytes == c.count * LAYOUT.nbytes for c in copies)


def test_every_byte_and_every_copy_is_counted_by_direction(engine: TransferEngine) -> None:
    near, far = make_pool(32), make_pool(32)
    down, up = take(near, 5, mark=1), take(far, 3, mark=1)
    engine.submit(join(near, down, far, take(far, 5)), Direction.WRITE_BACK)
    engine.submit(join(far, up[::-1], near, take(near, 3)), Direction.FETCH)
    counters = engine.counters
    assert (counters.bytes_down, counters.bytes_up) == (5 * LAYOUT.nbytes, 3 * LAYOUT.nbytes)
    assert (counters.copies_down, counters.copies_up) == (1, 3)
    engine.drain()
    assert (counters.bytes_down, counters.bytes_up) == (5 * LAYOUT.nbytes, 3 * LAYOUT.nbytes)


def test_a_held_destination_is_nan_until_it_is_waited_for() -> None:
    engine = HeldTransfers(Counters(), eagerness=0.0)
    near, far = make_pool(4, poison=False), make_pool(4, poison=False)
    sources = take(far, 2, mark=7)
    first, second = take(near, 2, mark=0), take(near, 2, mark=0)
    transfers = [engine.submit(join(far, sources, near, to), Direction.FETCH) for to in (first, second)]
    for _ in range(3):
        engine.poll()
        for slot in first + second:
            assert near.keys(slot, 1).isnan().all()
            assert near.values(slot, 1).isnan().all()
    transfers[1].wait()
    assert marks(near, second) == [7, 8]
    assert near.keys(first[0], 1).isnan().all(), "nobody waited for this one"
    transfers[0].wait()
    assert marks(near, first) == [7, 8]


@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_runs_behind_all_that_it_comes_after_in_whatever_order_it_is_waited_for(
    seed: int, eagerness: float
) -> None:
    """A chain up and down between two pools; each link reads what the one before wrote."""
    rng = random.Random(seed)
    engine = HeldTransfers(Counters(), seed, eagerness)
    near, far = make_pool(40), make_pool(40)
    chains: list[tuple[list[Transfer], list[int]]] = []
    for n in range(4):
        place, links, source = near, [], take(near, 2, mark=40 + 2 * n)
        for _ in range(rng.randint(1, 4)):
            other = far if place is near else near
            target = take(other, 2)
            direction = Direction.WRITE_BACK if place is near else Direction.FETCH
            after = links[-1:]
            links.append(engine.submit(join(place, source, other, target), direction, after=after))
            place, source = other, target
        chains.append((links, source))
    for n in rng.sample(range(4), 4):
        links, last = chains[n]
        links[-1].wait()
        assert marks(far if len(links) % 2 else near, last) == [40 + 2 * n, 41 + 2 * n]
        assert all(link.state is State.DONE for link in links)
    engine.close()
    assert not engine.in_flight()
