"""`HostTier`: slots in host memory, shared by the layers of all compute devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import reclaim, residency
from kvtier.memory.blocks.block import BlockSet, Pools, State
from kvtier.memory.storage.buffers import Reclaimable
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.planning import sizing


class Parked(Protocol):
    """Blocks that are kept as long as nobody needs their room. The caller holds the memory's lock."""

    def evict(self, pools: Pools, count: int) -> int:
        """Let up to `count` blocks of one layout leave their device for the host. Returns how many did."""

    def give(self, nbytes: int) -> bool:
        """Drop blocks of so many bytes. Whether any went."""

    def relax(self, without: int | None = None) -> None:
        """Claim no more than must stay now; or than had to, if the owner of that number were not there."""

    def unlist(self) -> None:
        """A change was cut short: list no blocks of what was being given up, or was not all there yet."""

    def recover(self) -> None:
        """A change was cut short, and all blocks that are listed are counted right: make everything else agree."""


class HostTier:
    """Host memory under one budget.

    Args:
        limit: bytes.
        readers: attention calls under way.
        poison: fill free slots with NaN (tests).

    Attributes:
        slabs: where memory comes from.
        pools: slots by layout.
        sets: all blocks of the memory, for those that may leave the host.
        reclaimable: who holds memory of this budget that can be given back.
        promote: brings blocks of a layout from the host to where a device has room; whether any.
        drain: waits for every copy from and to the host.
        parked: blocks that go where nothing else can.
    """

    def __init__(self, limit: int, readers: Readers, *, poison: bool = False) -> None:
        self.slabs = SlabAllocator(torch.device("cpu"), Budget("host", limit), poison=poison)
        self.pools: dict[BlockLayout, BlockPool] = {}
        self.sets: list[BlockSet] = []
        self.reclaimable: list[Reclaimable] = []
        self.promote: Callable[[BlockLayout | None], bool] = lambda layout: False
        self.drain: Callable[[], None] = lambda: None
        self.parked: list[Parked] = []
        self._readers = readers
        self._poison = poison

    def pool(self, layout: BlockLayout) -> BlockPool:
        """The slots of a layout, made on first use."""
        found = self.pools.get(layout)
        if found is None:
            found = self.pools[layout] = BlockPool(layout, self.slabs, poison=self._poison)
        return found

    def take(self, pool: BlockPool, count: int, after: int | None, *, required: bool) -> tuple[int, int] | None:
        """Take host slots: at least one and at most `count` neighbours; None if there are none.

        Args:
            pool: of which layout.
            count: slots needed.
            after: prefer those behind this slot.
            required: for one slot, give up what can be had elsewhere: idle buffers, copies of blocks that are on a
                device too, slabs of other layouts. Otherwise only what is free or may be allocated.
        """
        pool.poll()
        if pool.free < count:
            self.grow(pool, count - pool.free)
        found = pool.take(count, after)
        while found is None and required and self._make_room(pool):
            found = pool.take(count, after)
        return found

    def grow(self, pool: BlockPool, needed: int = 1) -> bool:
        """Allocate a slab for at least some of `needed` slots, if the budget allows it. Whether it did."""
        return pool.grow(sizing.slab_slots(self.slabs.budget.limit, pool.layout.nbytes, pool.nbytes, needed)) > 0

    def make_room(self, nbytes: int) -> bool:
        """Free so many bytes of the budget, for what is not blocks. Whether they are free."""
        budget = self.slabs.budget
        while budget.free < nbytes:
            if not (self.release_idle() or self._reclaim(nbytes) or self._readers.wait()):
                return False
        return True

    def release_idle(self) -> int:
        """Take back buffers and workspaces that nobody uses now. Returns the bytes."""
        return sum([each.release_idle() for each in self.reclaimable])

    def poll(self) -> None:
        """Free the slots whose fence has passed."""
        for pool in self.pools.values():
            pool.poll()

    def _make_room(self, pool: BlockPool) -> bool:
        """Free at least one slot of a pool, the cheapest way first. False if there is none left."""
        return (
            pool.free > 0
            or (self.release_idle() > 0 and self.grow(pool))
            or (self._drop_copy(pool.layout) and pool.free > 0)
            or self.give_slot(pool)
            or (self._reclaim(pool.layout.nbytes) and self.grow(pool))
            or self._readers.wait()
        )

    def _reclaim(self, nbytes: int) -> bool:
        """Give slabs back until `nbytes` of the budget are free; False if that many cannot be had.

        First copies of blocks that are on a device too go for it, then blocks that a device has room for.
        """
        pools = self.pools.values()
        while True:
            missing = nbytes - reclaim.free_bytes(pools)
            if missing > 0:
                if not (
                    self._drop_copy(None)
                    or self._settle()
                    or self._await_copies()
                    or self.promote(None)
                    or self._give(missing)
                ):
                    return False
            elif not self._readers.wait():  # while it waits, others may take what was free
                break
        self.drain()  # what a copy uses cannot move
        self._settle()
        return reclaim.reclaim(pools, self._placed, nbytes)

    def give_slot(self, pool: BlockPool) -> bool:
        """Let parked blocks go until a slot of a pool is free. Whether one is."""
        while self._give(pool.layout.nbytes):
            if pool.free > 0 or self.grow(pool):
                return True
        return False

    def _give(self, nbytes: int) -> bool:
        """Let parked blocks of so many bytes go. Whether any did; their slots are free then, but for readers' sake."""
        gave = any(each.give(nbytes) for each in self.parked)
        if gave:
            self._settle()
        return gave

    def _drop_copy(self, layout: BlockLayout | None) -> bool:
        """Give up the host copy of a block, of this layout or of any, that is on a device too. Whether there was one.

        Of the fullest layer, the latest: the oldest leave the device next, and would have to be written again.
        """
        fullest: BlockSet | None = None
        for each in self.sets:
            asked = layout in (None, each.pools.layout)
            if asked and each.counts[State.BOTH] > (0 if fullest is None else fullest.counts[State.BOTH]):
                fullest = each
        if fullest is None:
            return False
        run = next(run for run in reversed(fullest.resident) if run.state is State.BOTH)
        if run.count > 1:
            run = residency.cut(run, run.count - 1)[1]
        residency.drop_copy(run, self._readers.fence())
        self._settle()
        return True

    def _settle(self) -> bool:
        """Wait for copies that hold host slots. Whether any slot became free."""
        before = sum([pool.held for pool in self.pools.values()])
        if before:
            for pool in self.pools.values():
                for fence in pool.fences():
                    fence.settle()
            self.poll()
        return sum([pool.held for pool in self.pools.values()]) < before

    def _await_copies(self) -> bool:
        """Wait until no copy is under way: what is on both tiers then can be given up. Whether any was."""
        before = self._under_way
        if before:
            self.drain()
            self.poll()
        return self._under_way < before

    @property
    def _under_way(self) -> int:
        """Blocks that leave a device or arrive there."""
        return sum([each.counts[State.LEAVING] + each.counts[State.ARRIVING] for each in self.sets])

    def _placed(self, pool: BlockPool) -> Iterator[reclaim.Placed]:
        for each in self.sets:
            if each.pools.host is pool:
                for run in each.runs:
                    if run.host is not None:
                        yield reclaim.Placed(run.host, run)
