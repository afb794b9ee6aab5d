"""Giving slabs back: blocks leave evenly, what is left closes the gaps, and whole slabs become free bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import BudgetError, TransferError
from kvtier.storage.block import Block
from kvtier.storage.pool import BlockPool, Slab

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.tiers import Tiers


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
        block = pool.owner[slot]
        if not isinstance(block, Block) or block.near != slot or pool.references(slot) > 1:
            return False  # staged, or in a transfer's hands
        if not _move_out(tiers, pool, slab, block, keep):
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
    assert block.near is not None
    pool.bytes(target, 1).copy_(pool.bytes(block.near, 1))
    pool.release(block.near)
    block.near = target
    block.layer.forget_plan()
    tiers.counters.moved_blocks += 1
    return True
