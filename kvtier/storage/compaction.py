"""Closing gaps: so that whole slabs become free bytes and can be given back, and so that what is free lies together and
what is fetched into it is a few long copies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvtier.errors import BudgetError, TransferError
from kvtier.planning import placement
from kvtier.storage.block import Block
from kvtier.storage.pool import BlockPool, Slab, runs

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.tiers import Tiers


#: Blocks that move at one fetch; fetches after which it is looked again whether what is free lies scattered.
MOVES, REST = 8, 64


def reclaim(tiers: Tiers, nbytes: int, keep: LayerStore | None) -> bool:
    """Give slabs back until `nbytes` of the near budget are free. False if that many cannot be had.

    What was fetched ahead stays if it can.
    """
    try:
        if _reclaim(tiers, nbytes, keep):
            return True
    except BudgetError:
        pass  # the far tier is full: what was fetched ahead must go first
    tiers.drop_staged()
    return _reclaim(tiers, nbytes, keep)


def _reclaim(tiers: Tiers, nbytes: int, keep: LayerStore | None) -> bool:
    # Slabs with least in use go first. What cannot leave the tier moves, if need be into a new small slab.
    for layout, pool in tiers.near_pools.items():
        # First leave evenly, over all layers; then close the gaps.
        wanted = -(-(nbytes - tiers.near.budget.free) // layout.nbytes)
        while pool.free < wanted and tiers.evict_one(layout, keep):
            pass
    slabs = [
        (slab.slots - slab.free, slab.base, pool, slab) for pool in tiers.near_pools.values() for slab in pool.slabs
    ]
    for _, _, pool, slab in sorted(slabs, key=lambda x: x[:2]):
        if tiers.near.budget.free >= nbytes:
            break
        _retire(tiers, pool, slab, keep)
    return tiers.near.budget.free >= nbytes


def _retire(tiers: Tiers, pool: BlockPool, slab: Slab, keep: LayerStore | None) -> bool:
    """Empty one slab, by eviction or by moving its blocks within the tier, and give it back."""
    for slot in range(slab.base, slab.base + slab.slots):
        if not pool.references(slot):
            continue
        block = _movable(pool, slot)
        if block is None or not _move_out(tiers, pool, slab, block, keep):
            return False
    # Whoever remembers where blocks lay would keep the slab's memory alive.
    for layer in tiers.layers:
        layer.forget_plan()
    pool.shrink(slab)
    return True


def _move_out(tiers: Tiers, pool: BlockPool, slab: Slab, block: Block, keep: LayerStore | None) -> bool:
    target = pool.allocate(None, block, avoid=slab)
    try:
        while target is None and tiers.evict_one(pool.layout, keep):
            if block.near is None:  # it was this block's turn
                return True
            target = pool.allocate(None, block, avoid=slab)
    except (BudgetError, TransferError):
        pass  # nothing can leave: it moves into a slab of its own
    if target is None and pool.grow(1):
        target = pool.allocate(None, block, avoid=slab)
    if target is None:
        return False
    _move(tiers, pool, block, target)
    block.layer.forget_plan()
    return True


def _movable(pool: BlockPool, slot: int) -> Block | None:
    """The block that lies in a slot; None if none does, or the slot is staged or in a transfer's hands."""
    block = pool.owner.get(slot)
    return block if isinstance(block, Block) and block.near == slot and pool.references(slot) == 1 else None


def _move(tiers: Tiers, pool: BlockPool, block: Block, target: int) -> None:
    """Let a block lie in a slot that was allocated for it. Its layer is told by the caller."""
    assert block.near is not None
    try:
        pool.bytes(target, 1).copy_(pool.bytes(block.near, 1))
    except BaseException:
        pool.release(target)
        raise
    pool.release(block.near)
    block.near = target
    tiers.counters.moved_blocks += 1


class Tidying:
    """Moves blocks of one pool from its end into gaps nearer its beginning, a few at each fetch.

    Blocks come and go one by one, and what is free between them is soon single slots: each of them a copy of its own
    when blocks are fetched there, for every layer of every step. A block that moves is one copy within the device.
    """

    def __init__(self, tiers: Tiers, pool: BlockPool) -> None:
        self._tiers = tiers
        self._pool = pool
        self._pairs: deque[tuple[int, int]] = deque()  # (slot of a block, free slot before it), as they were
        self._scattered = False
        self._rest = 0

    def fetched(self, slots: list[int]) -> None:
        """Told where a fetch found room, in rising order."""
        self._scattered = placement.scattered(sum(1 for _ in runs(slots)), len(slots))

    def step(self, keep: LayerStore) -> None:
        """Before a fetch: move a few blocks, but none of `keep`, which is being read where its blocks lie."""
        pool = self._pool
        self._rest = max(self._rest - 1, 0)
        if self._scattered and not self._pairs and not self._rest:
            free, taken = pool.free_slots(), pool.owned_slots()
            self._pairs.extend((slot, gap) for slot, gap in zip(reversed(taken), free, strict=False) if gap < slot)
            self._rest = REST
        for _ in range(min(len(self._pairs), MOVES)):
            slot, gap = self._pairs.popleft()
            block = _movable(pool, slot)
            if block is None or block.layer is keep:
                continue
            target = pool.allocate(gap - 1, block) if pool.is_free(gap) else None
            if target is not None:
                _move(self._tiers, pool, block, target)
                if block.sealed:
                    block.layer.block_moved(block)
                else:
                    block.layer.forget_plan()  # its writer, too, knows where it lies
