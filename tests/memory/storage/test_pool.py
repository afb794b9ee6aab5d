"""`BlockPool`: exact bytes, free + held + used == total, ranges of neighbours, fences, poison."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch

from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import EXTENT, BlockPool, Slab
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.transfer.engine import Event

LAYOUT = BlockLayout(k_heads=2, v_heads=2, k_dim=4, v_dim=3, block_size=4, dtype=torch.float32)
CPU = torch.device("cpu")


def make_pool(slots: int, *, spare: int = 0, poison: bool = False, layout: BlockLayout = LAYOUT) -> BlockPool:
    """A pool whose budget is `slots` slots and `spare` bytes."""
    return BlockPool(layout, SlabAllocator(CPU, Budget("host", slots * layout.nbytes + spare)), poison=poison)


def take(pool: BlockPool, after: int | None = None, avoid: Slab | None = None) -> int:
    """A slot that must be there."""
    found = pool.take(1, after, avoid=avoid)
    assert found is not None
    assert found[1] == 1
    return found[0]


class Point(Event):
    """A point of a compute stream that passes when it is told to."""

    def __init__(self, *, over: bool = False) -> None:
        self.over = over

    def passed(self) -> bool:
        return self.over

    def settle(self) -> None:
        self.over = True


class CopyInFlight(Point):
    """A fence behind which nobody can order a write: the slots wait until it has passed."""

    @property
    def event(self) -> None:  # type: ignore[override]
        return None


# Bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("heads", [(1, 1, 5, 3), (2, 3, 4, 4), (1, 0, 9, 0)], ids=str)
def test_keys_and_values_of_all_slots_are_apart_and_inside_the_slot(
    heads: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    k_heads, v_heads, k_dim, v_dim = heads
    layout = BlockLayout(k_heads, v_heads, k_dim, v_dim, 3, dtype)
    used = 3 * layout.token_bytes
    assert used <= layout.nbytes < used + 64
    assert layout.nbytes % 64 == 0
    pool = make_pool(4, layout=layout)
    pool.grow(4)
    slots = [take(pool) for _ in range(4)]
    for slot in slots:
        pool.bytes(slot, 1).zero_()
    for n, slot in enumerate(slots, 1):
        pool.keys(slot, 1).fill_(2 * n)
        pool.values(slot, 1).fill_(2 * n + 1)
    for n, slot in enumerate(slots, 1):
        assert (pool.keys(slot, 1) == 2 * n).all()
        assert (pool.values(slot, 1) == 2 * n + 1).all()
        assert not pool.bytes(slot, 1)[used:].any(), "something was written into the padding"


def test_the_bytes_of_a_range_are_those_of_its_slots_in_order() -> None:
    layout = BlockLayout(2, 2, 4, 4, 4, torch.float32)
    pool = make_pool(12, layout=layout)
    for _ in range(2):
        pool.grow(6)
    for slab in pool.slabs:
        slab.data.copy_(torch.randint(0, 256, slab.data.shape, dtype=torch.uint8))
        assert pool.slab(slab.base) is pool.slab(slab.base + 5) is slab
        start, count = slab.base + 1, 4
        span = pool.span(start, count)
        assert (span.nbytes, span.block, span.address) == (4 * layout.nbytes, layout.nbytes, pool.address(start))
        assert torch.equal(span.bytes(), pool.bytes(start, count))
        each = [pool.bytes(start + i, 1) for i in range(count)]
        assert torch.equal(torch.cat(each), pool.bytes(start, count))
        assert [x.data_ptr() for x in each] == [pool.address(start + i) for i in range(count)]
        pairs = pool.pairs(start, count)
        assert pairs[:, 0].data_ptr() == pool.keys(start, count).data_ptr()
        assert pairs[:, 1].data_ptr() == pool.values(start, count).data_ptr()


def test_a_pool_takes_the_exact_bytes_of_its_slots_and_never_more_than_its_budget() -> None:
    pool = make_pool(7, spare=LAYOUT.nbytes - 1)
    budget = pool.allocator.budget
    assert (pool.nbytes, budget.used) == (0, 0)
    assert pool.grow(3) == 3
    assert pool.nbytes == budget.used == 3 * LAYOUT.nbytes
    assert pool.grow(100) == 4, "as many as the budget still holds"
    assert pool.grow(1) == 0
    assert pool.nbytes == budget.used == budget.peak == 7 * LAYOUT.nbytes
    slots = [s for slab in pool.slabs for s in range(slab.base, slab.base + slab.slots)]
    assert sorted(take(pool) for _ in range(7)) == slots
    assert pool.take(1) is None
    pool.check_integrity()
    pool.close()
    assert (pool.nbytes, budget.used, pool.slots) == (0, 0, 0)


# Slabs


def test_a_slab_is_given_back_whole_and_at_once_and_its_numbers_never_come_again() -> None:
    pool = make_pool(32)
    pool.grow(16)
    pool.grow(16)
    first, second = pool.slabs
    alive = weakref.ref(first.data)
    slot = first.base + 3
    pool.claim(slot, 1)
    assert pool.slab(slot) is first
    with pytest.raises(AssertionError, match="in use"):
        pool.retire(first)
    point = Point()
    pool.give(slot, 1, point)
    with pytest.raises(AssertionError, match="in use"):
        pool.retire(first)
    assert pool.retire_free() == 16 * LAYOUT.nbytes, "only the slab that nobody waits for"
    assert pool.slabs == [first]
    pool.grow(16)
    second = pool.slabs[-1]
    point.settle()
    pool.poll()
    seen = set(range(1, second.base + second.slots))
    pool.retire(first)
    assert alive() is None
    assert pool.nbytes == pool.allocator.budget.used == 16 * LAYOUT.nbytes
    assert pool.grow(100) == 16
    assert not seen & set(range(pool.slabs[-1].base, pool.slabs[-1].base + 16))
    pool.check_integrity()


def test_no_range_crosses_from_one_slab_into_the_next() -> None:
    pool = make_pool(30)
    for _ in range(3):
        pool.grow(10)
    found = [pool.take(100) for _ in range(3)]
    assert sorted(x for x in found if x) == [(slab.base, 10) for slab in pool.slabs]
    for slab in pool.slabs:
        pool.give(slab.base, 10)
    assert list(pool.ranges()) == [(slab.base, 10) for slab in pool.slabs]
    pool.check_integrity()


def test_a_slab_to_avoid_is_avoided_even_by_neighbours() -> None:
    pool = make_pool(40)
    pool.grow(20)
    pool.grow(20)
    first, second = pool.slabs
    slot = take(pool, avoid=second)
    assert pool.slab(slot) is first
    for _ in range(20):
        slot = take(pool, after=slot, avoid=first)
        assert pool.slab(slot) is second
    assert pool.take(1, slot, avoid=first) is None
    pool.give(slot, 1, Point())
    assert pool.take(1, avoid=second, behind=[]) is not None
    rest = pool.free
    assert pool.take(rest, avoid=second, behind=[]) is not None
    assert pool.free == 0
    assert pool.take(1, avoid=second, behind=[]) is None, "not even where it is held"


# Ranges


@pytest.mark.parametrize("owners", [1, 2, 5, 9])
def test_owners_that_interleave_get_ranges_of_neighbours(owners: int) -> None:
    each = 3 * EXTENT + 5
    # A range leaves a gap before it of up to a 64th of what is free.
    slots = max(owners * 4 * EXTENT, 64 * EXTENT * 2)
    pool = make_pool(slots)
    pool.grow(slots)
    taken: list[list[int]] = [[] for _ in range(owners)]
    for _ in range(each):
        for mine in taken:
            mine.append(take(pool, after=mine[-1] if mine else None))
    for mine in taken:
        starts = [0, *(i for i in range(1, each) if mine[i] != mine[i - 1] + 1), each]
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        assert all(count >= EXTENT for count in lengths[:-1]), lengths
    assert len({slot for mine in taken for slot in mine}) == owners * each


def test_a_range_is_taken_behind_its_owner_else_where_it_fits_best() -> None:
    pool = make_pool(30)
    pool.grow(30)
    base = pool.slabs[0].base
    pool.claim(base, 30)
    for start, count in ((2, 3), (10, 8), (22, 5)):
        pool.give(base + start, count)
    assert pool.take(4, base + 9) == (base + 10, 4), "behind the owner's last slot"
    pool.give(base + 10, 4)
    assert pool.take(5) == (base + 22, 5), "the smallest range that holds all"
    assert pool.take(20) == (base + 10, 8), "else as many as there are"
    assert pool.take(20, base + 1) == (base + 2, 3)
    assert pool.take(1) is None


def test_free_ranges_that_become_neighbours_become_one() -> None:
    pool = make_pool(9)
    pool.grow(9)
    base = pool.slabs[0].base
    pool.claim(base, 9)
    for start, count in ((0, 2), (4, 2), (7, 2), (2, 2), (6, 1)):
        pool.give(base + start, count)
        pool.check_integrity()
    assert list(pool.ranges()) == [(base, 9)]
    assert pool.free_in(pool.slabs[0]) == 9


def test_slots_that_are_free_cannot_be_given_back_or_taken_again() -> None:
    pool = make_pool(8)
    pool.grow(8)
    base = pool.slabs[0].base
    pool.claim(base + 2, 4)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(base + 1, 1)
    pool.reset([(base + 2, 4)])
    for start, count in ((base + 2, 1), (base + 1, 2), (base + 5, 2), (base, 8)):
        with pytest.raises(AssertionError, match="not free"):
            pool.claim(start, count)
        pool.reset([(base + 2, 4)])
    assert (pool.free, pool.used) == (4, 4)
    pool.check_integrity()


def test_after_a_reset_exactly_what_is_named_is_used() -> None:
    pool = make_pool(20)
    pool.grow(10)
    pool.grow(10)
    first, second = (slab.base for slab in pool.slabs)
    pool.claim(first, 7)
    pool.give(first, 2, Point())
    pool.claim(second, 10)
    pool.reset([(second + 3, 4), (first, 1)])
    assert list(pool.ranges()) == [(first + 1, 9), (second, 3), (second + 7, 3)]
    assert (pool.used, pool.free, pool.held) == (5, 15, 0)
    pool.check_integrity()


# Fences


@pytest.mark.parametrize("kind", [Point, CopyInFlight])
def test_held_slots_are_not_handed_out_before_their_fence_has_passed(kind: type[Point]) -> None:
    pool = make_pool(6, poison=True)
    pool.grow(6)
    found = pool.take(6)
    assert found is not None
    start = found[0]
    pool.bytes(start, 6).zero_()
    early, late = kind(), kind()
    pool.give(start, 2, early)
    pool.give(start + 2, 3, late)
    assert (pool.used, pool.held, pool.free, pool.obtainable(ordered=False)) == (1, 5, 0, 0)
    assert set(pool.fences()) == {early, late}
    for _ in range(2):
        pool.poll()
        assert pool.take(1) is None
        assert not pool.bytes(start, 6).any(), "who reads them still finds what was there"
    early.settle()
    assert pool.take(1) is None, "nobody has asked yet"
    pool.poll()
    assert (pool.used, pool.held, pool.free) == (1, 3, 2)
    assert pool.keys(start, 2).isnan().all()
    assert not pool.keys(start + 2, 4).isnan().any()
    pool.check_integrity()
    assert pool.take(6) == (start, 2)
    assert pool.take(1) is None


def test_who_orders_its_writes_gets_held_slots_and_is_told_behind_what() -> None:
    pool = make_pool(8)
    pool.grow(8)
    base = pool.slabs[0].base
    pool.claim(base, 8)
    read, copied = Point(), CopyInFlight()
    pool.give(base, 3, read)
    pool.give(base + 3, 2, copied)
    pool.give(base + 5, 1, read)
    assert pool.obtainable(ordered=True) == 4, "not those under a copy"
    assert pool.obtainable(ordered=False) == 0
    behind: list[Event] = []
    assert pool.take(2, behind=behind) == (base, 2)
    assert behind == [read]
    assert (pool.held, pool.obtainable(ordered=True)) == (4, 2)
    pool.check_integrity()
    rest = {pool.take(5, behind=behind) for _ in range(2)}
    assert rest == {(base + 2, 1), (base + 5, 1)}
    assert behind == [read], "each point once"
    assert pool.take(1, behind=behind) is None, "a copy cannot be ordered behind a copy that way"
    assert pool.used == 6
    copied.settle()
    pool.poll()
    assert pool.take(1, behind=behind) == (base + 3, 1)
    assert behind == [read], "what is free needs no point"


def test_free_slots_go_before_held_ones() -> None:
    pool = make_pool(4)
    pool.grow(4)
    base = pool.slabs[0].base
    pool.claim(base, 4)
    pool.give(base, 3, Point())
    pool.give(base + 3, 1)
    behind: list[Event] = []
    assert pool.take(3, base - 1, behind=behind) == (base + 3, 1)
    assert behind == []


# Poison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_fills_what_nobody_owns_with_nan(dtype: torch.dtype) -> None:
    layout = BlockLayout(1, 1, 4, 4, 2, dtype)
    pool = make_pool(2, poison=True, layout=layout)
    pool.grow(2)
    slot, other = take(pool), take(pool)
    assert pool.keys(slot, 1).isnan().all(), "new slots"
    for x in (slot, other):
        pool.bytes(x, 1).zero_()
    point = Point()
    pool.give(slot, 1, point)
    assert not pool.keys(slot, 1).isnan().any(), "somebody may still read it"
    point.settle()
    pool.poll()
    assert pool.keys(slot, 1).isnan().all()
    assert pool.values(slot, 1).isnan().all()
    assert not pool.keys(other, 1).isnan().any(), "not ours"


# Everything


@pytest.mark.parametrize("seed", range(6))
def test_any_walk_keeps_every_byte_and_every_count(seed: int) -> None:
    """Compared with a dict from slot to the byte that fills it, and one from held slot to its fence."""
    rng = random.Random(seed)
    pool = make_pool(90, poison=seed % 2 == 0)
    owned: dict[int, int] = {}
    held: dict[int, Point] = {}
    total = 0
    acts = (
        "take",
        "take",
        "take",
        "after",
        "after",
        "give",
        "give",
        "give",
        "fence",
        "fence",
        "pass",
        "grow",
        "retire",
    )
    for _ in range(500):
        act = rng.choice(acts)
        if act == "grow":
            total += pool.grow(rng.randint(1, 40))
        elif act == "retire":
            for slab in pool.slabs:
                if pool.is_free(slab):
                    total -= slab.slots
                    pool.retire(slab)
                    break
        elif act == "pass" and held:
            rng.choice(list(held.values())).settle()
            pool.poll()
            held = {slot: point for slot, point in held.items() if not point.over}
        elif act in ("take", "after"):
            after = rng.choice(sorted(owned)) if act == "after" and owned else None
            avoid = rng.choice(pool.slabs) if pool.slabs and rng.random() < 0.2 else None
            behind: list[Event] | None = [] if rng.random() < 0.3 else None
            count = rng.choice((1, 1, 2, 5, 20))
            found = pool.take(count, after, avoid=avoid, behind=behind)
            allowed = {s for slab in pool.slabs if slab is not avoid for s in range(slab.base, slab.base + slab.slots)}
            allowed -= owned.keys()
            ordered = {s for s, point in held.items() if point.event is not None} & allowed
            allowed -= held.keys()
            if found is None:
                assert not allowed
                assert behind is None or not ordered
            else:
                slots = set(range(found[0], found[0] + found[1]))
                assert 1 <= found[1] <= count
                assert slots <= allowed or (behind and slots <= ordered and not allowed)
                assert {held[s] for s in slots & held.keys()} == set(behind or [])
                if after is not None and after + 1 in allowed:
                    assert found[0] == after + 1
                for s in slots:
                    held.pop(s, None)
                    owned[s] = rng.randrange(255)
                    pool.bytes(s, 1).fill_(owned[s])
        elif act in ("give", "fence") and owned:
            start = rng.choice(sorted(owned))
            count = 1
            while start + count in owned and count < 6:
                count += 1
            fence = None if act == "give" else rng.choice((Point, CopyInFlight))()
            pool.give(start, count, fence)
            for s in range(start, start + count):
                del owned[s]
                if fence is not None:
                    held[s] = fence
        assert (pool.used, pool.held, pool.used + pool.held + pool.free, pool.slots) == (
            len(owned),
            len(held),
            total,
            total,
        )
        assert pool.nbytes == pool.allocator.budget.used == total * LAYOUT.nbytes
        pool.check_integrity()
        for slot, mark in owned.items():
            assert (pool.bytes(slot, 1) == mark).all(), "somebody wrote into a slot that was not theirs"
