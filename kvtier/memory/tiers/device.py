"""`ComputeDevice`: the blocks of the layers that one device attends to, in its own tier and in the host's."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.access.change import ask
from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool, Fence
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.fetching import Fetching
from kvtier.memory.tiers.host import HostTier
from kvtier.memory.tiers.room import Room
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.planning.policy import Policy
from kvtier.planning.step import whole
from kvtier.stats import Counters
from kvtier.transfer.engine import TransferEngine


class ComputeDevice:
    """Where attention runs: its device tier, if it has one, and the way between that and the host.

    It makes, seals and frees blocks. Its parts do the rest, and each knows only those before it: what there
    is (`DeviceTier`), the way down (`Eviction`), how room is found (`Room`), the way up (`Fetching`). The caller of
    every method holds the memory's lock.

    Args:
        device, limit, host, engine, readers, audit, poison: as of `DeviceTier`.
        policy: decides what leaves and what is written back.

    Attributes:
        slabs, sets, reclaimable: as of `DeviceTier`.
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
        self.tier = tier = DeviceTier(device, limit, host, engine, readers, audit=audit, poison=poison)
        self.eviction = Eviction(tier, policy)
        self.room = Room(tier, self.eviction)
        self.fetching = Fetching(tier, self.room)
        self.device, self.kind, self.name = tier.device, tier.kind, tier.name
        self.host, self.engine, self.policy, self.audit = host, engine, policy, audit
        self.slabs, self.sets, self.reclaimable = tier.slabs, tier.sets, tier.reclaimable

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
        start, found = self.room.take(pools, count, behind, keep=None)
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

    # What there is: see `DeviceTier`

    @property
    def home(self) -> SlabAllocator:
        """Where blocks begin, and the memory that attention works in is taken."""
        return self.tier.home

    @property
    def all_pools(self) -> list[Pools]:
        """The pools of every layout."""
        return self.tier.all_pools

    @property
    def device_pools(self) -> list[BlockPool]:
        """The pools of the device tier."""
        return self.tier.device_pools

    @property
    def free_bytes(self) -> int:
        """Bytes of the device tier that are free, or would be if free slots were whole slabs."""
        return self.tier.free_bytes

    @property
    def spilled(self) -> int:
        """Blocks that are on the host only, where there is a device tier."""
        return self.tier.spilled

    @property
    def copying(self) -> bool:
        """Whether a copy is under way."""
        return self.tier.copying

    def pools(self, layout: BlockLayout) -> Pools:
        """Where blocks of a layout are, made on first use."""
        return self.tier.pools(layout)

    def block_set(self, layout: BlockLayout, layer: int, owner: int, counters: Counters) -> BlockSet:
        """A new set of blocks, counted for an owner until `drop_set`."""
        return self.tier.block_set(layout, layer, owner, counters)

    def drop_set(self, blocks: BlockSet) -> None:
        """Forget a set that holds no blocks any more."""
        self.tier.drop_set(blocks)

    def obtainable(self, pools: Pools, *, ordered: bool = False) -> int:
        """Slots where blocks begin, to be had without evicting anything."""
        return self.tier.obtainable(pools, ordered=ordered)

    def fence(self, blocks: BlockSet | None = None) -> Fence | None:
        """What holds slots that become free now: the last attention over `blocks`, or whatever ran last."""
        return self.tier.fence(blocks)

    def poll(self) -> None:
        """Settle what has ended, and free the slots that waited for it."""
        self.tier.poll()

    # Down, up, and room for both: see `Eviction`, `Fetching` and `Room`

    def keep_free(self, pools: Pools, nbytes: int) -> None:
        """Have slots for `nbytes` free, if blocks may leave for it."""
        self.room.keep_free(pools, nbytes)

    def make_room(self, nbytes: int) -> None:
        """Free so many bytes where attention works, or raise `BudgetError`."""
        self.room.make_room(nbytes)

    def write_back(self, blocks: BlockSet, count: int) -> None:
        """Copy up to `count` blocks of a set to the host, in the background."""
        self.eviction.write_back(blocks, count)

    def evict_end(self, run: Run, most: int) -> int:
        """Let up to `most` of the last blocks of a run leave the device. Returns how many."""
        return self.eviction.evict_end(run, most)

    def evict_from(self, blocks: BlockSet, count: int, *, latest_first: bool = False) -> int:
        """Let up to `count` blocks of a set leave the device. Returns how many left."""
        return self.eviction.evict_from(blocks, count, latest_first=latest_first)

    def evict_run(self, run: Run) -> None:
        """Let a run on the device leave it."""
        self.eviction.evict_run(run)

    def leave(self, runs: Collection[Run], most: int) -> int:
        """Let up to `most` blocks of runs leave the device, without waiting. Returns how many left."""
        return self.eviction.leave(runs, most)

    def fetch(
        self, runs: Sequence[Run], most: int, keep: BlockSet | None, *, evict: bool, counters: Counters | None = None
    ) -> list[Run]:
        """Begin to fetch the first blocks of runs of one set. Returns what is on its way."""
        return self.fetching.fetch(runs, most, keep, evict=evict, counters=counters)

    def promote(self, layout: BlockLayout | None) -> bool:
        """Bring a block from the host to a free slot and give up its host slot. Whether there was one."""
        return self.fetching.promote(layout)

    # The end

    def recount(self) -> None:
        """After a change was cut short, and all sets were repaired: count again what is counted over sets."""
        self.tier.recount()
        self.room.recount()

    def close(self) -> None:
        """Give all memory of the device tier back and end the engine."""
        self.tier.close()


def _last_slot(run: Run, pools: Pools) -> int | None:
    """The last slot of a run where blocks begin; None if it has none there."""
    start = run.host if pools.device is None else run.device
    return None if start is None else start + run.count - 1
