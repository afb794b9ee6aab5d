"""Defragmentation: blocks move within a tier, so that whole slabs become free bytes, or free slots become neighbours.

Whoever asks for it holds the memory's lock, and no attention call of another thread is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import Run
from kvtier.memory.storage.pool import BlockPool, Fence, Slab


class Placed(NamedTuple):
    """A run, and its first slot in the tier at hand."""

    slot: int
    run: Run


#: Gives the runs with slots in a pool.
Placing = Callable[[BlockPool], Iterable[Placed]]


def free_bytes(pools: Collection[BlockPool]) -> int:
    """Bytes of one budget that are free, or would be if free slots were whole slabs."""
    for pool in pools:
        return pool.allocator.budget.free + sum(pool.free * pool.layout.nbytes for pool in pools)
    return 0


def reclaim(pools: Collection[BlockPool], placed: Placing, nbytes: int) -> bool:
    """Give slabs back until `nbytes` of their budget are free. False if that many cannot be had.

    Slabs with the fewest used slots go first; their blocks move to free slots of other slabs. Where there are too few
    of these, a slab is cut behind its blocks; or, where memory cannot be cut, they move into a smaller one, if the
    budget and the machine have room for both: no byte of it goes before its blocks are elsewhere, and none is taken
    that the budget does not have.

    Args:
        pools: of one budget.
        placed: gives the runs with slots in a pool.
        nbytes: needed.
    """
    if not pools:
        return False
    budget = next(iter(pools)).allocator.budget
    for pool in pools:
        if budget.free < nbytes:
            pool.retire_free()
    slabs = [(slab.slots - pool.free_in(slab), slab.base, pool, slab) for pool in pools for slab in pool.slabs]
    for used, _, pool, slab in sorted(slabs, key=lambda x: x[:2]):
        if budget.free >= nbytes:
            break
        if used < slab.slots:
            _empty(pool, slab, placed)
    return budget.free >= nbytes


def _empty(pool: BlockPool, slab: Slab, placed: Placing) -> None:
    """Move what is in a slab elsewhere and give it back, unless a copy or a reader still uses some of its slots."""
    inside = sorted(x for x in placed(pool) if slab.base <= x.slot < slab.base + slab.slots)
    used, free = sum(x.run.count for x in inside), pool.free_in(slab)
    if not free or used + free < slab.slots or not all(residency.can_move(x.run) for x in inside):
        return
    missing = used - (pool.free - free)
    if missing > 0 and pool.allocator.divisible:
        _compact(pool, slab, inside)
        pool.cut(slab, used)
        return
    if missing > 0 and not (
        pool.allocator.budget.free >= missing * pool.layout.nbytes and pool.grow(missing, optional=True)
    ):
        return
    for _, run in inside:
        rest: Run | None = run
        while rest is not None:
            found = pool.take(rest.count, avoid=slab)
            assert found is not None, "there were as many free slots elsewhere"
            moved, rest = residency.cut(rest, found[1]) if found[1] < rest.count else (rest, None)
            pool.give(*residency.move(moved, pool, found[0]))
    pool.retire(slab)


def _compact(pool: BlockPool, slab: Slab, inside: list[Placed]) -> None:
    """Move what is at the end of a slab into the gaps between what is at its beginning."""
    used = sum(x.run.count for x in inside)
    end = slab.base + used
    gaps = [(start, min(count, end - start)) for start, count in pool.ranges() if slab.base <= start < end]
    for slot, run in inside:
        if slot + run.count <= end:
            continue
        rest = run if slot >= end else residency.cut(run, end - slot)[1]
        while True:
            start, size = gaps.pop(0)
            count = min(rest.count, size)
            moved, behind = residency.cut(rest, count) if count < rest.count else (rest, None)
            pool.claim(start, count)
            pool.give(*residency.move(moved, pool, start))
            if size > count:
                gaps.insert(0, (start + count, size - count))
            if behind is None:
                break
            rest = behind


def pack(pool: BlockPool, placed: Iterable[Placed], blocks: int, fence: Callable[[], Fence | None]) -> None:
    """Move some blocks from the end of a pool into gaps nearer its beginning, so that free slots become neighbours.

    Blocks come and go, and what is free between them is soon single slots: each of them a copy of its own when blocks
    are fetched there, for every layer of every step. A block that moves is one copy within the tier.

    Args:
        placed: runs with slots in this pool that may move.
        blocks: to move, at the most.
        fence: what holds slots whose bytes were just copied away.
    """
    gaps = list(pool.ranges())
    for slot, run in sorted(placed, reverse=True):
        if not gaps or blocks <= 0 or gaps[0][0] > slot:
            return
        start, size = gaps.pop(0)
        count = min(run.count, size, blocks)
        # Its end goes first: what stays is nearer the beginning.
        moved = run if count == run.count else residency.cut(run, run.count - count)[1]
        pool.claim(start, count)
        pool.give(*residency.move(moved, pool, start), fence())
        blocks -= count
        if size > count:
            gaps.insert(0, (start + count, size - count))
