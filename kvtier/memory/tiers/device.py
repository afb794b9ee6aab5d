"""`ComputeDevice`: the blocks of the layers that one device attends to, in its own tier and in the host's."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.access.change import ask, asked
from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import reclaim, residency
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.storage import shortage
from kvtier.memory.storage.buffers import Reclaimable
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool, Fence
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.memory.tiers.host import HostTier
from kvtier.planning import sizing
from kvtier.planning.policy import Policy, checked_victims
from kvtier.planning.step import whole
from kvtier.stats import Counters
from kvtier.transfer.engine import Event, TransferEngine
from kvtier.transfer.engine import State as TransferState

#: Blocks that move at one fetch to bring together what is free, and fetches until that is looked at again.
PACKED_BLOCKS, PACK_INTERVAL = 8, 64
#: A device gives up this part of its slots together, at the most, so that free slots are neighbours.
EVICTION_SHARE, EVICTION_BATCH = 256, 16


class ComputeDevice:
    """Where attention runs: its device tier, if it has one, and the way between that and the host.

    The caller of every method holds the memory's lock.

    Args:
        device: where attention runs.
        limit: bytes of its device tier; None: there is none, and blocks begin and stay on the host.
        host: the tier below.
        engine: moves blocks between them.
        policy: decides what leaves and what is written back.
        readers: attention calls under way.
        audit: compares blocks in host memory with what was written; None: nobody does.
        poison: fill free slots with NaN (tests).
    """

    def __init__(
        self,
        device: torch.device,
        limit: int | None,
        host: HostTier,
        engine: TransferEngine,
        policy: Policy,
        readers: Readers,
        *,
        audit: Audit | None = None,
        poison: bool = False,
    ) -> None:
        self.device = device
        self.kind, self.name = device.type, str(device)
        self.host = host
        self.engine = engine
        self.policy = policy
        self.audit = audit
        self.slabs = (
            None if limit is None else SlabAllocator(device, Budget("device", limit), elastic=True, poison=poison)
        )
        self.sets: list[BlockSet] = []
        self.reclaimable: list[Reclaimable] = []
        self._readers = readers
        self._poison = poison
        self._pools: dict[BlockLayout, Pools] = {}
        self._withheld = 0  # blocks that could have left in the last `evict`, and the policy did not name
        self._scattered = False
        self._until_pack = 0
        # The end of the compute stream's last work in slots that is no attention, so that no fence waits for it.
        self._written: Event | None = None
        self._reclaiming = 0  # threads: one may wait for readers meanwhile

    # What there is

    @property
    def home(self) -> SlabAllocator:
        """Where blocks begin, and the memory that attention works in is taken."""
        return self.host.slabs if self.slabs is None else self.slabs

    @property
    def all_pools(self) -> list[Pools]:
        """The pools of every layout."""
        return list(self._pools.values())

    @property
    def device_pools(self) -> list[BlockPool]:
        """The pools of the device tier."""
        return [pools.device for pools in self._pools.values() if pools.device is not None]

    @property
    def free_bytes(self) -> int:
        """Bytes of the device tier that are free, or would be if free slots were whole slabs."""
        assert self.slabs is not None
        pools = self.device_pools
        return reclaim.free_bytes(pools) if pools else self.slabs.budget.free

    @property
    def spilled(self) -> int:
        """Blocks that are on the host only, where there is a device tier."""
        return sum([pools.spilled for pools in self._pools.values()])

    @property
    def copying(self) -> bool:
        """Whether a copy is under way."""
        self.engine.poll()
        return bool(self.engine.in_flight())

    def pools(self, layout: BlockLayout) -> Pools:
        """Where blocks of a layout are, made on first use."""
        found = self._pools.get(layout)
        if found is None:
            own = None if self.slabs is None else BlockPool(layout, self.slabs, poison=self._poison)
            found = self._pools[layout] = Pools(layout, own, self.host.pool(layout), self.engine, audit=self.audit)
        return found

    def block_set(self, layout: BlockLayout, layer: int, owner: int, counters: Counters) -> BlockSet:
        """A new set of blocks, counted for an owner until `drop_set`."""
        blocks = BlockSet(layer, owner, self.pools(layout), counters)
        self.sets.append(blocks)
        self.host.sets.append(blocks)
        return blocks

    def drop_set(self, blocks: BlockSet) -> None:
        """Forget a set that holds no blocks any more."""
        assert not blocks.runs, "a set in use"
        self.sets.remove(blocks)
        self.host.sets.remove(blocks)

    def fence(self, blocks: BlockSet | None = None) -> Fence | None:
        """What holds slots that become free now: the last attention over `blocks`, or whatever ran last."""
        event: Event | None = None
        if self.engine.asynchronous:
            event = (None if blocks is None else blocks.last_read) or self.engine.mark()
        return self._readers.fence(event)

    def obtainable(self, pools: Pools, *, ordered: bool = False) -> int:
        """Slots where blocks begin, to be had without evicting anything; `ordered`: see `BlockPool.take`."""
        return pools.home.obtainable(ordered=ordered) + self.home.budget.free // pools.layout.nbytes

    # New blocks

    def allocate(self, blocks: BlockSet, count: int, after: Run | None = None) -> Run:
        """A run of at least one and at most `count` new blocks, to be filled.

        Args:
            after: the run that they continue, for slots next to its own.

        Raises:
            BudgetError: everything is in use and nothing may leave. TransferError: what had to leave could not.
        """
        pools = blocks.pools
        behind = None if after is None or after.state is State.FREE else _last_slot(after, pools)
        start, found = self._take(pools, count, behind, keep=None)
        return residency.allocate(blocks, start, found)

    def copy_of(self, run: Run, blocks: BlockSet) -> Run:
        """A run of a set like this one that is on the device, or the host where that is all there is, in slots of its
        own.

        Raises:
            BudgetError, TransferError: as `allocate`.
        """
        pools = blocks.pools
        twin = self.allocate(blocks, run.count)
        try:
            assert twin.count == run.count == 1, "tails are copied"
            if self.audit is not None:
                self.audit.moved([run])
            if pools.device is not None:
                self.bring(run)
            source = run.host if pools.device is None else run.device
            assert source is not None
            pools.home.bytes(twin.home, 1).copy_(pools.home.bytes(source, 1))
            if self.engine.asynchronous and run.blocks is blocks:
                blocks.last_read = self.engine.mark()
        except BaseException:
            residency.free(twin, self.fence())
            raise
        return twin

    def bring(self, run: Run) -> None:
        """Fetch one block that is on the host only, unless it is on its way, and wait for it.

        Raises:
            BudgetError, TransferError: as `fetch`.
        """
        assert run.count == 1, "blocks that are read are fetched in portions"
        if run.state is State.HOST:
            self.fetch([run], 1, None, evict=True)
        residency.arrive(run)

    def seal(self, run: Run) -> None:
        """All tokens of a run are written. Copies to the host what is due.

        Raises:
            Exception: of the policy; nothing was changed.
        """
        due = 0
        if self.slabs is not None:
            used = sum([pool.used * pool.layout.nbytes for pool in self.device_pools])
            answer = ask(self.policy.write_back, used, self.slabs.budget.limit, run.count)
            due = whole(answer, "answer to write_back")
        residency.seal(run)
        if due > 0:
            # Ahead of need: what cannot be copied now is copied when it has to leave.
            with contextlib.suppress(BudgetError, TransferError):
                self.write_back(run.blocks, due)

    def free(self, run: Run) -> None:
        """No table holds it any more."""
        residency.free(run, self.fence())

    # Down

    def keep_free(self, pools: Pools, nbytes: int) -> None:
        """Have slots for `nbytes` free, if blocks may leave for it: so that fetching evicts nobody later."""
        # What leaves may bring blocks back from a full host: more than there is would be asked for without end.
        nbytes = min(nbytes, self.home.budget.limit)
        missing = nbytes // pools.layout.nbytes - self.obtainable(pools, ordered=True)
        if missing > 0:
            with contextlib.suppress(BudgetError, TransferError):  # no room below: fetches make do with less
                self.evict(pools, missing)

    def write_back(self, blocks: BlockSet, count: int) -> None:
        """Copy up to `count` of the blocks that are on the device only to the host, in the background: the oldest, as
        far as the host has room for them.

        Raises:
            BudgetError: the machine does not have what the host budget allows. TransferError: a copy could not begin.
        """
        chosen: list[tuple[Run, int]] = []
        try:
            while count and len(chosen) < len(blocks.dirty):
                run = blocks.dirty[len(chosen)]
                found = self.host.take(blocks.pools.host, min(run.count, count), blocks.last_host, required=False)
                if found is None:
                    break
                start, n = found
                blocks.last_host = start + n - 1
                if n < run.count:
                    run = residency.cut(run, n)[0]
                chosen.append((run, start))
                count -= n
        except BaseException:
            for run, start in chosen:
                blocks.pools.host.give(start, run.count)
            raise
        if chosen:
            residency.write_back(chosen)

    def evict(self, pools: Pools, count: int, keep: BlockSet | None = None) -> int:
        """Let blocks of one layout leave the device, as the policy says. Returns how many left.

        Args:
            count: slots needed.
            keep: blocks that stay, for they are being read.

        Raises:
            BudgetError: the host is full. TransferError: a copy failed.
        """
        left, self._withheld = 0, 0
        for parked in self.host.parked:
            left += parked.evict(pools, count - left)
        if left >= count:
            return left
        candidates = [each for each in self.sets if each.pools is pools and each is not keep and each.evictable]
        if candidates:
            unnamed = {id(each): each.evictable for each in candidates}
            for candidate, blocks, latest_first in asked(checked_victims(ask(self.policy.victims, candidates, count))):
                if not any(candidate is each for each in candidates):
                    continue  # it was not asked about that: it may be being read
                assert isinstance(candidate, BlockSet)
                unnamed[id(candidate)] = max(unnamed[id(candidate)] - blocks, 0)
                left += self.evict_from(candidate, min(blocks, count - left), latest_first=latest_first)
                if left >= count:
                    break
            else:
                self._withheld = sum(unnamed.values())
        return left

    def evict_end(self, run: Run, most: int) -> int:
        """Let up to `most` of the last blocks of a run leave the device. Returns how many. Raises as `evict`."""
        part = residency.cut(run, run.count - most)[1] if run.count > most else run
        self.evict_run(part)
        return part.count

    def evict_from(self, blocks: BlockSet, count: int, *, latest_first: bool = False) -> int:
        """Let up to `count` blocks of a set leave the device. Returns how many left. Raises as `evict`."""
        left = 0
        while left < count and blocks.resident:
            run = blocks.resident[-1 if latest_first else 0]
            if run.count > count - left:
                parts = residency.cut(run, run.count - count + left if latest_first else count - left)
                run = parts[1] if latest_first else parts[0]
            left += run.count
            self.evict_run(run)
        return left

    def leave(self, runs: Collection[Run], most: int) -> int:
        """Let up to `most` blocks of runs leave the device, without waiting for anything. Returns how many left.

        Those without a host copy get one, as far as the host has room, and can leave later.
        """
        left = 0
        if runs:
            self.poll()  # copies that have ended
        for run in runs:
            for part in list(run.leaves()):  # making room on the host may have cut it
                if most <= 0:
                    return left
                if part.state not in (State.DEVICE, State.BOTH):
                    continue
                first = residency.cut(part, most)[0] if part.count > most else part
                most -= first.count
                if first.state is State.DEVICE:
                    with contextlib.suppress(BudgetError, TransferError):
                        self._write_back_run(first)
                for copied in list(first.leaves()):
                    if copied.state is State.BOTH:
                        residency.evict(copied, self.fence(copied.blocks))
                        left += copied.count
        return left

    def evict_run(self, run: Run) -> None:
        """Let a run on the device leave it. Moves no bytes if its host copy exists; else makes the copy first."""
        while run.state is not State.BOTH:
            if run.parts is not None:
                for part in run.leaves():
                    self.evict_run(part)
                return
            if run.state is State.DEVICE:
                self._write_back_run(run)
            elif run.state is State.LEAVING:
                assert run.move is not None
                assert run.move.transfer is not None
                run.move.transfer.synchronize()
            else:
                return
        residency.evict(run, self.fence(run.blocks))

    def _write_back_run(self, run: Run) -> None:
        """Begin to copy this very run, or a part of it, to the host."""
        blocks = run.blocks
        found = self.host.take(blocks.pools.host, run.count, blocks.last_host, required=True)
        if found is None:
            raise shortage.both_full(self.host.slabs.budget, blocks.pools.layout.nbytes)
        start, n = found
        if run.state is not State.DEVICE or run.parts is not None:  # making room has changed it
            blocks.pools.host.give(start, n)
            return
        blocks.last_host = start + n - 1
        part = residency.cut(run, n)[0] if n < run.count else run
        transfer = residency.write_back([(part, start)])
        if transfer.state is TransferState.FAILED:
            transfer.wait()  # raises

    # Up

    def fetch(
        self, runs: Sequence[Run], most: int, keep: BlockSet | None, *, evict: bool, counters: Counters | None = None
    ) -> list[Run]:
        """Begin to fetch runs of one set that are on the host only, as many of the first blocks as there is room for.

        Args:
            runs: in the order of use.
            most: blocks, at the most.
            keep: blocks that are not evicted for it.
            evict: make room for one block if there is none; else only what is free or may be allocated.
            counters: of who asks; None: of who owns the set.

        Returns:
            What is on its way, possibly nothing.

        Raises:
            BudgetError, TransferError: `evict`, and there is no room for one block, or the copy failed at once.
        """
        if not runs:
            return []
        pools = runs[0].blocks.pools
        self.poll()
        self._pack(pools, keep)
        behind: list[Event] = []
        chosen = self._slots_for(pools, runs, most, keep, behind, evict=evict)
        if not chosen:
            return []
        if self._poison:
            self.note_writes()  # free slots were filled
        if self._written is not None:
            if self._written.passed():
                self._written = None
            else:
                behind.append(self._written)
        # Slots in rising order: neighbours at both ends are one copy.
        self._scattered = sizing.scattered(len(chosen), sum(run.count for run, _ in chosen))
        transfer = residency.fetch(chosen, behind if self.engine.asynchronous else None, counters)
        if transfer.state is TransferState.FAILED:
            if evict:
                transfer.wait()  # raises
            return []
        return [run for run, _ in chosen]

    def _slots_for(
        self, pools: Pools, runs: Sequence[Run], most: int, keep: BlockSet | None, behind: list[Event], *, evict: bool
    ) -> list[tuple[Run, int]]:
        """Take device slots for the first `most` blocks of runs, or for as many as there is room for.

        Args:
            behind: gets what a copy into these slots waits for.
            pools, runs, most, keep, evict: see `fetch`.

        Returns:
            Parts of the runs, and where the slots of each begin.
        """
        assert pools.device is not None
        chosen: list[tuple[Run, int]] = []
        try:
            last: int | None = None
            for run in runs:
                rest: Run | None = run
                while rest is not None and most > 0:
                    wanted = min(rest.count, most)
                    if evict and not chosen:
                        start, n = self._take(pools, wanted, last, keep=keep, behind=behind)
                    else:
                        found = self._take_free(pools.device, wanted, last, behind)
                        if found is None:
                            most = 0
                            break
                        start, n = found
                    if rest.parts is not None or rest.state is not State.HOST:  # making room has brought it
                        pools.device.give(start, n, self.fence())
                        break
                    part, rest = residency.cut(rest, n) if n < rest.count else (rest, None)
                    chosen.append((part, start))
                    last = start + n - 1
                    most -= n
            if self.audit is not None:
                self.audit.moved([run for run, _ in chosen])
        except BaseException:
            for run, start in chosen:
                pools.device.give(start, run.count, self.fence())
            raise
        return chosen

    # Room

    def poll(self) -> None:
        """Settle what has ended, and free the slots that waited for it."""
        self.engine.poll()
        for pools in self._pools.values():
            pools.host.poll()
            if pools.device is not None:
                pools.device.poll()

    def make_room(self, nbytes: int) -> None:
        """Free so many bytes where attention works.

        Raises:
            BudgetError: what cannot move leaves no room for them.
        """
        if self.slabs is None:
            if not self.host.make_room(nbytes):
                raise self.shortage(nbytes)
            return
        budget = self.slabs.budget
        while budget.free < nbytes:
            if self._release_idle() and budget.free >= nbytes:
                return
            if not (self._reclaim(nbytes, None) or self._readers.wait() or self.slabs.allow(budget.used + nbytes)):
                raise self.shortage(nbytes)

    def shortage(self, missing: int) -> BudgetError:
        """The error where `missing` bytes are not to be had, although the step was admitted."""
        budget = self.home.budget
        if self.home.shrunk:
            return shortage.no_device_memory(budget, missing, self.name)
        return shortage.full(budget, missing, type(self.policy).__name__, self._withheld)

    def _take(
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
        found = self._take_free(pool, count, after, order)
        while found is None:
            # A fetch evicts for one slot only: what it brings is read and gives its slots back.
            if not self._make_slots(pools, count if behind is None else 1, keep):
                raise self.shortage(pool.layout.nbytes)
            found = pool.take(count, after, behind=order)
        return found

    def _take_free(self, pool: BlockPool, count: int, after: int | None, behind: list[Event]) -> tuple[int, int] | None:
        """Take slots that are free or that the budget and the machine have room for; None if there are none."""
        pool.poll()
        if pool.free < count and self.home.budget.free >= pool.layout.nbytes:
            self._grow(pool, count - pool.free)
        return pool.take(count, after, behind=behind)

    def _grow(self, pool: BlockPool, needed: int = 1) -> bool:
        """Allocate a slab for at least some of `needed` slots, if the budget allows it. Whether it did."""
        budget, nbytes = self.home.budget, pool.layout.nbytes
        slots = sizing.slab_slots(budget.limit, nbytes, pool.nbytes, needed)
        if self.slabs is not None and self.slabs.in_segments:
            slots = sizing.in_whole_segments(slots, nbytes, pool.nbytes, budget.free)
        if not pool.grow(slots):
            return False
        self.note_writes()
        return True

    def note_writes(self) -> None:
        """What is fetched from now on begins behind the compute stream's work so far.

        New memory may be what kernels in flight still use: torch's allocator hands it on in the order of that stream.
        Blocks that move are written by it.
        """
        if self.engine.asynchronous:
            self._written = self.engine.mark()

    def _make_slots(self, pools: Pools, count: int, keep: BlockSet | None) -> bool:
        """Free at least one slot where blocks begin, the cheapest way first. False if there is none left."""
        self.poll()
        pool = pools.home
        if pool.obtainable(ordered=True) or self._grow(pool) or (self._release_idle() and self._grow(pool)):
            return True
        if pools.device is None:
            return self.host.give_slot(pool) or (self.host.make_room(pool.layout.nbytes) and self._grow(pool))
        free = self.free_bytes
        try:
            if self.evict(pools, self._batch(pool, count), keep) and pool.obtainable(ordered=True):
                return True
            if self._slab_of_others(pool, keep):
                return True
        except BudgetError:
            if not self._free_although_host_is_full(pool, free, keep):
                raise
            return True
        # Looked at again: while others were asked, a device may have come by what held a slot.
        if self._cancel() or self._readers.wait() or pool.obtainable(ordered=True):
            return True
        assert self.slabs is not None
        if not self.slabs.allow(self.slabs.budget.used + pool.layout.nbytes) or not pool.grow(1):
            return False
        self.note_writes()
        return True

    def _slab_of_others(self, pool: BlockPool, keep: BlockSet | None) -> bool:
        """Give a pool a slab for one block at least, of memory that other layouts give back. Whether it got one."""
        return self._reclaim(pool.layout.nbytes, keep) and self._grow(pool)

    def _free_although_host_is_full(self, pool: BlockPool, before: int, keep: BlockSet | None) -> bool:
        """Nothing can leave for the host: what was fetched ahead goes before anything is refused, and what other
        layouts leave free. Whether a slot may be free now.

        Args:
            before: bytes of free slots when nothing had been tried yet. The host may have waited for readers since, and
                let other threads free some.
        """
        free = self.free_bytes
        return self._cancel() or free > before or (free >= pool.layout.nbytes and self._slab_of_others(pool, keep))

    def _batch(self, pool: BlockPool, count: int) -> int:
        """Slots to free together where `count` are wanted: where there are many, so that they are neighbours."""
        assert self.slabs is not None
        capacity = self.slabs.budget.limit // pool.layout.nbytes
        return max(1, min(count, capacity // sizing.RUN_SHARE), min(EVICTION_BATCH, capacity // EVICTION_SHARE))

    def _release_idle(self) -> bool:
        """Take back workspaces that nobody reads now. Whether there was one."""
        return sum([each.release_idle() for each in self.reclaimable]) > 0

    def _reclaim(self, nbytes: int, keep: BlockSet | None) -> bool:
        """Give slabs of the device back until `nbytes` of its budget are free; False if that many cannot be had."""
        goal = nbytes
        self._reclaiming += 1
        try:
            while True:
                missing = goal - self.free_bytes
                if missing > 0:
                    try:
                        left = any(self.evict(x, -(-missing // x.layout.nbytes), keep) for x in self._pools.values())
                    except BudgetError:
                        # As in `_make_slots`.
                        if not self._cancel() and goal - self.free_bytes >= missing:
                            raise
                        left = True
                    if not left and not self._cancel() and goal - self.free_bytes >= missing:
                        return False  # nor has a device come by what held some
                    self._settle()
                elif not self._readers.wait():  # while it waits, others may take what was free
                    # What a copy uses cannot move.
                    self.engine.drain()
                    self._settle()
                    enough = reclaim.reclaim(self.device_pools, self._placed, nbytes)
                    self.note_writes()
                    if enough:
                        return True
                    # Slabs that cannot be cut may go when they hold fewer blocks.
                    goal = self.free_bytes + 1
        finally:
            self._reclaiming = max(self._reclaiming - 1, 0)

    def _settle(self) -> None:
        """Wait for the copies and the readers on the device that hold slots."""
        for pools in self._pools.values():
            for pool in (pools.host, pools.device):
                if pool is not None and pool.held:
                    for fence in pool.fences():
                        fence.settle()
                    pool.poll()

    def _cancel(self) -> bool:
        """Give up every fetch that is under way, and wait until no copy is. Whether there was any of either, or slots
        that had become free meanwhile."""
        arriving = [run for each in self.sets for run in each.runs if run.state is State.ARRIVING]
        in_flight, held = bool(self.engine.in_flight()), self._held
        for run in arriving:
            residency.evict(run, self._readers.fence())
        self.engine.drain()
        self._settle()
        self.poll()
        return bool(arriving) or in_flight or self._held < held

    @property
    def _held(self) -> int:
        """Slots of the device tier that wait for a fence."""
        return sum([pool.held for pool in self.device_pools])

    def _pack(self, pools: Pools, keep: BlockSet | None) -> None:
        """Before a fetch: where the last ones found free slots scattered, move a few blocks to bring them together."""
        self._until_pack -= 1
        if not self._scattered or self._until_pack > 0 or pools.device is None:
            return
        self._until_pack = PACK_INTERVAL
        if not self._readers.others():
            movable = [
                x
                for x in self._placed(pools.device)
                if x.run.blocks is not keep and residency.can_move(x.run) and x.run.sealed
            ]
            reclaim.pack(pools.device, movable, PACKED_BLOCKS, self.fence)
            self.note_writes()

    def _placed(self, pool: BlockPool) -> Iterator[reclaim.Placed]:
        for each in self.sets:
            if each.pools.device is pool:
                for run in each.runs:
                    if run.device is not None:
                        yield reclaim.Placed(run.device, run)

    def promote(self, layout: BlockLayout | None) -> bool:
        """Bring a block from the host to a free slot and give up its host slot. Whether there was one."""
        if self._reclaiming:
            return False  # free slots are what is wanted: blocks would go up and down for ever
        for each in self.sets:
            pools = each.pools
            if pools.device is None or not each.counts[State.HOST] or layout not in (None, pools.layout):
                continue
            if (
                pools.device.free
                or self._grow(pools.device)
                or (self._release_idle() and self._grow(pools.device))
                or self._gather(pools.device)
            ):
                run = next(run for run in each.runs if run.state is State.HOST)
                with contextlib.suppress(TransferError):
                    for part in self.fetch([run], 1, None, evict=False):
                        residency.arrive(part)
                        residency.drop_copy(part, self._readers.fence())
                        self.host.poll()
                        return True
        return False

    def _gather(self, pool: BlockPool) -> bool:
        """Give a pool a slab of what slabs of other layouts have free; nothing is evicted. Whether it got one."""
        if self.free_bytes < pool.layout.nbytes or self._readers.others():
            return False
        self.engine.drain()  # what a copy uses cannot move
        self._settle()
        enough = reclaim.reclaim(self.device_pools, self._placed, pool.layout.nbytes)
        self.note_writes()
        return enough and self._grow(pool)

    def recount(self) -> None:
        """After a change was cut short, and all sets were repaired: count again what is counted over sets."""
        for pools in self._pools.values():
            pools.spilled = sum([each.spilled for each in self.sets if each.pools is pools])
        self._reclaiming = 0
        self.note_writes()  # fences went with the slots that they held

    def close(self) -> None:
        """Give all memory of the device tier back and end the engine. Host pools are the host tier's."""
        self.engine.close()
        for pool in self.device_pools:
            pool.close()
        self._pools.clear()
        self.sets.clear()


def _last_slot(run: Run, pools: Pools) -> int | None:
    """The last slot of a run where blocks begin; None if it has none there."""
    start = run.host if pools.device is None else run.device
    return None if start is None else start + run.count - 1
