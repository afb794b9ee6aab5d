"""`Tiers`: the memories that serve the layers of one compute device, and every move between them.

It makes room, writes through, evicts and gives slabs back. What to evict and when to write through is asked of
`planning.placement`; this file only carries it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import BudgetError, TransferError
from kvtier.metrics import Counters
from kvtier.planning import placement
from kvtier.storage import compaction
from kvtier.storage.block import Block, BlockLayout
from kvtier.storage.memory import Memory
from kvtier.storage.pool import EXTENT, BlockPool
from kvtier.storage.staging import HandoverArea, StagingArea, Workspace
from kvtier.storage.transfer import State, Transfer, TransferEngine, join
from kvtier.types import Direction

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore


class Tiers:
    """Near and far memory for the layers of one device.

    Args:
        near: where attention runs.
        far: the tier below, or None if `near` is the host.
        engine: moves the bytes.
        counters: counts them.
        write_through: share of the near budget in use from which sealed blocks are copied down.
        poison: pools fill free slots with NaN (tests).
        far_pools: pools of the far memory by layout, shared with the other devices' tiers.
    """

    def __init__(
        self,
        near: Memory,
        far: Memory | None,
        engine: TransferEngine,
        counters: Counters,
        *,
        write_through: float,
        poison: bool = False,
        far_pools: dict[BlockLayout, BlockPool] | None = None,
    ) -> None:
        self.near = near
        self.far = far
        self.engine = engine
        self.counters = counters
        self.write_through = write_through
        self.poison = poison
        self.device = near.device
        self.near_pools: dict[BlockLayout, BlockPool] = {}
        self.far_pools = {} if far_pools is None else far_pools
        self.layers: list[LayerStore] = []
        self._tidying: dict[BlockLayout, compaction.Tidying] = {}
        self.staging = StagingArea(self)
        self.workspace = Workspace(self)
        self.handover = HandoverArea(self)
        if far is not None:
            far.yielding.append(self.handover)

    # Pools

    def near_pool(self, layout: BlockLayout) -> BlockPool:
        """The near pool for a layout, made on first use."""
        if layout not in self.near_pools:
            self.near_pools[layout] = BlockPool(layout, self.near, poison=self.poison)
        return self.near_pools[layout]

    def far_pool(self, layout: BlockLayout) -> BlockPool | None:
        """The far pool for a layout, or None if there is no far tier."""
        if self.far is None:
            return None
        if layout not in self.far_pools:
            self.far_pools[layout] = BlockPool(layout, self.far, poison=self.poison)
        return self.far_pools[layout]

    def tidying(self, layout: BlockLayout) -> compaction.Tidying:
        """What keeps the near slots of one layout in order."""
        if layout not in self._tidying:
            self._tidying[layout] = compaction.Tidying(self, self.near_pool(layout))
        return self._tidying[layout]

    def obtainable(self, layout: BlockLayout) -> int:
        """Near slots to be had without evicting anything."""
        return self.near_pool(layout).free + self.near.budget.free // layout.nbytes

    # Room

    def take(self, layer: LayerStore, near: int | None, owner: Block | None, keep: LayerStore | None = None) -> int:
        """A near slot for `layer`, making room if need be.

        Args:
            layer: who asks.
            near: prefer the neighbour of this slot.
            owner: the block it is for; None for staging.
            keep: a layer whose blocks must not be evicted for it.

        Raises:
            BudgetError: everything in the near tier is in use and nothing may be evicted.
        """
        pool = self.near_pool(layer.layout)
        self._grow_run(pool, near)
        slot = pool.allocate(near, owner)
        while slot is None:
            if not self._make_room(pool, keep, reading=owner is None):
                raise self.near_shortage(layer.layout.nbytes)
            slot = pool.allocate(near, owner)
        return slot

    def _make_room(self, pool: BlockPool, keep: LayerStore | None, *, reading: bool) -> bool:
        """Free at least one slot of `pool`, the cheapest way first. False if there is none left."""
        self.engine.poll()
        if pool.free or self._grow(pool) or self._outgrow_handovers(pool):
            return True
        if not reading and self.workspace.release_surplus() and self._grow(pool):
            return True
        try:
            if self.evict_one(pool.layout, keep) or (self.reclaim(pool.layout.nbytes, keep) and self._grow(pool)):
                return True
        except BudgetError:
            # The far tier is full too: what was fetched ahead must go before anything is refused.
            if not self.drop_staged():
                raise
            return True
        if self.drop_staged():
            return True
        near = pool.memory
        return near.insist(near.budget.used + pool.layout.nbytes) and pool.grow(1) > 0

    def drop_staged(self) -> bool:
        """Forget every prefetch, wait until nothing is in flight, forgotten or not. True if there was any of either."""
        dropped = self.staging.drop()
        in_flight = bool(self.engine.in_flight())
        self.engine.drain()
        return dropped or in_flight

    def near_shortage(self, missing: int) -> BudgetError:
        """The error for a near tier that is short of `missing` bytes."""
        budget = self.near.budget
        if self.near.shrunk:
            return BudgetError(
                f"{self.device} has no memory for more than the {budget.limit} bytes that the cache holds there, and "
                f"nothing of it can move; {missing} more are needed. Leave the device more room, or drop tokens with "
                "`crop`.",
                tier=budget.tier,
                needed=budget.limit + missing,
                budget=budget.limit,
            )
        needed = self.minimum()
        if needed <= budget.limit:
            needed = budget.limit + missing
        return BudgetError(
            f"The {budget.tier} budget of {budget.limit} bytes is full and nothing in it can move. The smallest "
            f"{budget.tier}_budget that works for this step is {needed} bytes. Give more, or drop tokens with `crop`.",
            tier=budget.tier,
            needed=needed,
            budget=budget.limit,
        )

    def minimum(self) -> int:
        """Bytes of the smallest near budget that serves what the layers hold now.

        With a far tier: the workspace, one unsealed block per sequence and layer, and one slot more to seal and stage
        through. Without one: every block.
        """
        room = max((x.workspace_bytes(x.length) for x in self.layers if x.dense), default=0)
        if self.far is None:
            return room + sum(x.count * x.layout.nbytes for x in self.layers)
        tails = sum(len(x.tables()) * x.layout.nbytes for x in self.layers if x.length % x.layout.block_size)
        spare = max((x.layout.nbytes for x in self.layers if x.length >= x.layout.block_size), default=0)
        return room + tails + spare

    def _grow(self, pool: BlockPool, wanted: int = 1) -> int:
        return pool.grow(placement.slab_slots(pool.memory.budget.limit, pool.layout.nbytes, pool.nbytes, wanted))

    def _grow_run(self, pool: BlockPool, near: int | None) -> None:
        """Before a run of blocks would be broken up: begin a new extent, where that is little against the budget."""
        size = pool.layout.nbytes
        if not pool.has_run(near) and placement.may_begin_extent(pool.memory.budget.limit, EXTENT * size):
            with contextlib.suppress(BudgetError):  # a luxury: there may be single slots
                self._grow(pool, EXTENT)

    def prepare(self, layout: BlockLayout, slots: int) -> None:
        """Told that `slots` near slots are wanted next to each other: grow once rather than often."""
        pool = self.near_pool(layout)
        if pool.free < slots:
            self._grow(pool, slots - pool.free)

    # Eviction

    def evict_one(self, layout: BlockLayout, keep: LayerStore | None) -> bool:
        """Give up the near slot of the oldest block of the fullest layer. False if there is none to give up."""
        if self.far is None:
            return False
        candidates = ((i, len(x.resident)) for i, x in enumerate(self.layers) if x.layout == layout and x is not keep)
        chosen = placement.victim_layer(candidates)
        if chosen is None:
            return False
        self.evict(next(iter(self.layers[chosen].resident)))
        return True

    def evict(self, block: Block) -> None:
        """Free the near slot of a sealed block. Moves no bytes if its far copy exists; else makes the copy first.

        Raises:
            BudgetError: the far tier has no room for the copy.
            TransferError: the copy failed; the block stays.
        """
        if block.far is None:
            self.write_back([block], required=True)
        if block.pending is not None:
            block.pending.synchronize()
        assert block.near is not None
        assert block.far is not None
        pool = self.near_pool(block.layer.layout)
        slot, block.near = block.near, None
        block.layer.resident.pop(block, None)
        block.layer.block_moved(block)
        pool.release(slot)
        self.counters.evictions += 1

    def sealed(self, layer: LayerStore, count: int) -> None:
        """Told after `count` blocks of `layer` were sealed: write through what is due."""
        if self.far is None:
            return
        used = sum(pool.used * pool.layout.nbytes for pool in self.near_pools.values())
        due = placement.write_through_count(used, self.near.budget.limit, self.write_through, count)
        if due:
            blocks = []
            for block in layer.unwritten:
                blocks.append(block)
                if len(blocks) == due:
                    break
            # Ahead of need: what cannot be copied now stays in the backlog, and who must evict it will hear of it.
            with contextlib.suppress(BudgetError, TransferError):
                self.write_back(blocks, required=False)

    def keep_reserve(self, layout: BlockLayout) -> None:
        """Once blocks are missing, keep as many slots free as staging wants, so that fetching evicts nobody."""
        reserve = self.reserve(layout)
        try:
            while reserve and self.obtainable(layout) < reserve and self.evict_one(layout, None):
                pass
        except (BudgetError, TransferError):
            pass  # no room below: staging makes do with less

    def reserve(self, layout: BlockLayout) -> int:
        """Near slots that staging wants free for the layer that misses most."""
        missing = max((x.missing_estimate() for x in self.layers if x.layout == layout), default=0)
        return placement.staging_slots(self.near.budget.limit // layout.nbytes, missing) if missing else 0

    def write_back(self, blocks: Sequence[Block], *, required: bool) -> None:
        """Copy sealed near blocks of one layer to the far tier, in the background.

        Args:
            blocks: without far copies.
            required: raise if the far tier is full; otherwise copy what fits.
        """
        if not blocks:
            return
        layer = blocks[0].layer
        far = self.far_pool(layer.layout)
        assert far is not None
        slots: list[int] = []
        try:
            for block in blocks:
                slot = self._far_slot(far, layer, block, required)
                if slot is None:
                    break
                slots.append(slot)
                layer.last_far = slot
            if required and not slots:
                raise self._far_shortage(layer)
            if not slots:
                return
            written = blocks[: len(slots)]
            sources = [block.near for block in written if block.near is not None]

            def done() -> None:
                for block in written:
                    if block.pending is transfer:
                        block.pending = None

            def failed() -> None:
                for block in written:
                    if block.pending is transfer and block.far is not None:
                        far.release(block.far)
                        block.far = block.pending = None
                        layer.unwritten[block] = None

            transfer: Transfer | None = None
            copies = join(self.near_pool(layer.layout), sources, far, slots)
            transfer = self.engine.submit(copies, Direction.WRITE_BACK, on_done=done, on_failed=failed)
            if transfer.state is State.FAILED and required:
                transfer.wait()  # raises
        except BaseException:
            for slot in slots:
                far.release(slot)
            raise
        if transfer.state is State.FAILED:
            for slot in slots:
                far.release(slot)
            return
        # Only now do the blocks have a copy, or one on its way.
        for block, slot in zip(written, slots, strict=True):
            block.far = slot
            block.pending = transfer if transfer.state is State.PENDING else None
            layer.unwritten.pop(block, None)

    def _far_slot(self, far: BlockPool, layer: LayerStore, block: Block, required: bool) -> int | None:
        self._grow_run(far, layer.last_far)
        slot = far.allocate(layer.last_far, block)
        if slot is None and (self._grow(far) or (required and self._outgrow_handovers(far))):
            slot = far.allocate(layer.last_far, block)
        if slot is None and required and self._forget_copy(layer.layout):
            slot = far.allocate(layer.last_far, block)
        return slot

    def _outgrow_handovers(self, pool: BlockPool) -> bool:
        """Grow a pool of host memory at the cost of what queries of any device pass through."""
        return pool.memory.make_way(pool.layout.nbytes) and self._grow(pool) > 0

    def _forget_copy(self, layout: BlockLayout) -> bool:
        """Free one far slot whose block is on the device too. The block will be written anew if it must leave."""
        far = self.far_pool(layout)
        assert far is not None
        for layer in self.layers:
            if layer.layout != layout:
                continue
            for block in reversed(layer.resident):
                if block.far is not None and block.pending is None:
                    far.release(block.far)
                    block.far = None
                    layer.unwritten[block] = None
                    return True
        return False

    def _far_shortage(self, layer: LayerStore) -> BudgetError:
        assert self.far is not None
        budget = self.far.budget
        needed = budget.limit + layer.layout.nbytes
        return BudgetError(
            f"The host budget of {budget.limit} bytes is full and the device budget too. The next block needs {needed} "
            "bytes of host_budget. Give more of either, or drop tokens with `crop`.",
            tier=budget.tier,
            needed=needed,
            budget=budget.limit,
        )

    def reclaim(self, nbytes: int, keep: LayerStore | None) -> bool:
        """Give slabs back until `nbytes` of the near budget are free; see `compaction`."""
        return compaction.reclaim(self, nbytes, keep)

    # The end

    def free_block(self, block: Block) -> None:
        """Drop the slots of a block that no table holds any more. Transfers in flight keep theirs until they end."""
        layer = block.layer
        layer.resident.pop(block, None)
        layer.unwritten.pop(block, None)
        if block.near is not None:
            self.near_pool(layer.layout).release(block.near)
        if block.far is not None:
            far = self.far_pool(layer.layout)
            assert far is not None
            far.release(block.far)
        block.near = block.far = block.pending = None

    def far_bytes(self) -> int:
        """Bytes of far slots that this device's blocks hold."""
        return sum(b.far is not None and x.layout.nbytes for x in self.layers for b in x.distinct_blocks())

    def close(self) -> None:
        """Give all near memory back and end the engine. Far pools are the caller's."""
        self.engine.close()
        self.staging.staged.clear()
        for layer in self.layers:
            layer.forget_plan()
        self.workspace.release()
        self.handover.release()
        for pool in self.near_pools.values():
            pool.close()
        self.near_pools.clear()
        self._tidying.clear()
        self.layers.clear()
