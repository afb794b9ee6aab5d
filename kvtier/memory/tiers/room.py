"""`Room`: how a device comes by a slot, or by bytes for what is not blocks: the cheapest way first."""

from __future__ import annotations

import contextlib

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.blocks import reclaim
from kvtier.memory.blocks.block import BlockSet, Pools
from kvtier.memory.storage import shortage
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.planning import sizing
from kvtier.transfer.engine import Event


class Room:
    """What is free, may be allocated, can leave, or can be brought together. The caller of every method holds the
    memory's lock.

    Args:
        tier: where room is made.
        eviction: lets blocks leave it.
    """

    def __init__(self, tier: DeviceTier, eviction: Eviction) -> None:
        self._tier = tier
        self._eviction = eviction
        self._reclaiming = 0  # threads: one may wait for readers meanwhile

    @property
    def reclaiming(self) -> bool:
        """Whether slabs are being given back: free slots are what is wanted."""
        return self._reclaiming > 0

    def recount(self) -> None:
        """After a change was cut short: no thread is in the midst of one."""
        self._reclaiming = 0

    def make_room(self, nbytes: int) -> None:
        """Free so many bytes where attention works.

        Raises:
            BudgetError: what cannot move leaves no room for them.
        """
        if self._tier.slabs is None:
            if not self._tier.host.make_room(nbytes):
                raise self.shortage(nbytes)
            return
        budget = self._tier.slabs.budget
        while budget.free < nbytes:
            if self.release_idle() and budget.free >= nbytes:
                return
            if not (
                self._reclaim(nbytes, None) or self._tier.readers.wait() or self._tier.slabs.allow(budget.used + nbytes)
            ):
                raise self.shortage(nbytes)

    def keep_free(self, pools: Pools, nbytes: int) -> None:
        """Have slots for `nbytes` free, if blocks may leave for it: so that fetching evicts nobody later."""
        # What leaves may bring blocks back from a full host: more than there is would be asked for without end.
        nbytes = min(nbytes, self._tier.home.budget.limit)
        missing = nbytes // pools.layout.nbytes - self._tier.obtainable(pools, ordered=True)
        if missing > 0:
            with contextlib.suppress(BudgetError, TransferError):  # no room below: fetches make do with less
                self._eviction.evict(pools, missing)

    def shortage(self, missing: int) -> BudgetError:
        """The error where `missing` bytes are not to be had, although the step was admitted."""
        budget = self._tier.home.budget
        if self._tier.home.shrunk:
            return shortage.no_device_memory(budget, missing, self._tier.name)
        return shortage.full(budget, missing, type(self._eviction.policy).__name__, self._eviction.withheld)

    def take(
        self,
        pools: Pools,
        count: int,
        after: int | None,
        *,
        keep: BlockSet | None,
        behind: list[Event] | None = None,
    ) -> tuple[int, int]:
        """Take slots where blocks begin: at least one and at most `count` neighbours, making room if need be.

        Raises:
            BudgetError: everything is in use and nothing may leave. TransferError: what had to leave could not.
        """
        pool = pools.home
        # The compute stream writes behind its own readers: who fills a block waits for none of them.
        order = [] if behind is None else behind
        found = self.take_free(pool, count, after, order)
        while found is None:
            # A fetch evicts for one slot only: what it brings is read and gives its slots back.
            if not self._make_slots(pools, count if behind is None else 1, keep):
                raise self.shortage(pool.layout.nbytes)
            found = pool.take(count, after, behind=order)
        return found

    def take_free(self, pool: BlockPool, count: int, after: int | None, behind: list[Event]) -> tuple[int, int] | None:
        """Take slots that are free or that the budget and the machine have room for; None if there are none."""
        pool.poll()
        if pool.free < count and self._tier.home.budget.free >= pool.layout.nbytes:
            self.grow(pool, count - pool.free)
        return pool.take(count, after, behind=behind)

    def slot_without_eviction(self, pool: BlockPool) -> bool:
        """Have a free slot of a pool of the device tier, if that takes no block off it. Whether there is one."""
        return pool.free > 0 or self.grow(pool) or (self.release_idle() and self.grow(pool)) or self._gather(pool)

    def release_idle(self) -> bool:
        """Take back workspaces that nobody reads now. Whether there was one."""
        return sum([each.release_idle() for each in self._tier.reclaimable]) > 0

    def grow(self, pool: BlockPool, needed: int = 1) -> bool:
        """Allocate a slab for at least some of `needed` slots, if the budget allows it. Whether it did."""
        budget, nbytes = self._tier.home.budget, pool.layout.nbytes
        slots = sizing.slab_slots(budget.limit, nbytes, pool.nbytes, needed)
        if self._tier.slabs is not None and self._tier.slabs.in_segments:
            slots = sizing.in_whole_segments(slots, nbytes, pool.nbytes, budget.free)
        if not pool.grow(slots):
            return False
        self._tier.note_writes()
        return True

    def _make_slots(self, pools: Pools, count: int, keep: BlockSet | None) -> bool:
        """Free at least one slot where blocks begin, the cheapest way first. False if there is none left."""
        self._tier.poll()
        pool = pools.home
        if pool.obtainable(ordered=True) or self.grow(pool) or (self.release_idle() and self.grow(pool)):
            return True
        if pools.device is None:
            return self._tier.host.give_slot(pool) or (
                self._tier.host.make_room(pool.layout.nbytes) and self.grow(pool)
            )
        free = self._tier.free_bytes
        try:
            if self._eviction.evict(pools, self._batch(pool, count), keep) and pool.obtainable(ordered=True):
                return True
            if self._slab_of_others(pool, keep):
                return True
        except BudgetError:
            if not self._free_although_host_is_full(pool, free, keep):
                raise
            return True
        # Looked at again: while others were asked, a device may have come by what held a slot.
        if self._eviction.cancel() or self._tier.readers.wait() or pool.obtainable(ordered=True):
            return True
        assert self._tier.slabs is not None
        if not self._tier.slabs.allow(self._tier.slabs.budget.used + pool.layout.nbytes) or not pool.grow(1):
            return False
        self._tier.note_writes()
        return True

    def _slab_of_others(self, pool: BlockPool, keep: BlockSet | None) -> bool:
        """Give a pool a slab for one block at least, of memory that other layouts give back. Whether it got one."""
        return self._reclaim(pool.layout.nbytes, keep) and self.grow(pool)

    def _free_although_host_is_full(self, pool: BlockPool, before: int, keep: BlockSet | None) -> bool:
        """Nothing can leave for the host: what was fetched ahead goes before anything is refused, and what other
        layouts leave free. Whether a slot may be free now.

        Args:
            before: bytes of free slots when nothing had been tried yet. The host may have waited for readers since, and
                let other threads free some.
        """
        free = self._tier.free_bytes
        return (
            self._eviction.cancel()
            or free > before
            or (free >= pool.layout.nbytes and self._slab_of_others(pool, keep))
        )

    def _batch(self, pool: BlockPool, count: int) -> int:
        """Slots to free together where `count` are wanted: where there are many, so that they are neighbours."""
        assert self._tier.slabs is not None
        capacity = self._tier.slabs.budget.limit // pool.layout.nbytes
        return max(min(count, capacity // sizing.RUN_SHARE), sizing.eviction_batch(capacity))

    def _reclaim(self, nbytes: int, keep: BlockSet | None) -> bool:
        """Give slabs of the device back until `nbytes` of its budget are free; False if that many cannot be had."""
        goal = nbytes
        self._reclaiming += 1
        try:
            while True:
                missing = goal - self._tier.free_bytes
                if missing > 0:
                    try:
                        left = any(
                            self._eviction.evict(x, -(-missing // x.layout.nbytes), keep) for x in self._tier.all_pools
                        )
                    except BudgetError:
                        # As in `_make_slots`.
                        if not self._eviction.cancel() and goal - self._tier.free_bytes >= missing:
                            raise
                        left = True
                    if not left and not self._eviction.cancel() and goal - self._tier.free_bytes >= missing:
                        return False  # nor has a device come by what held some
                    self._tier.settle()
                elif not self._tier.readers.wait():  # while it waits, others may take what was free
                    # What a copy uses cannot move.
                    self._tier.engine.drain()
                    self._tier.settle()
                    enough = reclaim.reclaim(self._tier.device_pools, self._tier.placed, nbytes)
                    self._tier.note_writes()
                    if enough:
                        return True
                    # Slabs that cannot be cut may go when they hold fewer blocks.
                    goal = self._tier.free_bytes + 1
        finally:
            self._reclaiming = max(self._reclaiming - 1, 0)

    def _gather(self, pool: BlockPool) -> bool:
        """Give a pool a slab of what slabs of other layouts have free; nothing is evicted. Whether it got one."""
        if self._tier.free_bytes < pool.layout.nbytes or self._tier.readers.others():
            return False
        self._tier.engine.drain()  # what a copy uses cannot move
        self._tier.settle()
        enough = reclaim.reclaim(self._tier.device_pools, self._tier.placed, pool.layout.nbytes)
        self._tier.note_writes()
        return enough and self.grow(pool)
