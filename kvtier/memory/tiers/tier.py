"""`DeviceTier`: what there is where one device attends: pools, sets of blocks, and what their slots wait for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import reclaim
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import BlockSet, Pools
from kvtier.memory.storage.buffers import Reclaimable
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool, Fence
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.memory.tiers.host import HostTier
from kvtier.stats import Counters
from kvtier.transfer.engine import Event, TransferEngine


class DeviceTier:
    """The blocks of the layers that one device attends to, in slots of its own, if it has any, and of the host's.

    It moves no block. The caller of every method holds the memory's lock.

    Args:
        device: where attention runs.
        limit: bytes of its device tier; None: there is none, and blocks begin and stay on the host.
        host: the tier below.
        engine: moves blocks between them.
        readers: attention calls under way.
        audit: compares blocks in host memory with what was written; None: nobody does.
        poison: fill free slots with NaN (tests).

    Attributes:
        slabs: where memory of the device tier comes from; None: there is none.
        sets: the blocks.
        reclaimable: who holds memory of the device's budget that can be given back.
    """

    def __init__(
        self,
        device: torch.device,
        limit: int | None,
        host: HostTier,
        engine: TransferEngine,
        readers: Readers,
        *,
        audit: Audit | None = None,
        poison: bool = False,
    ) -> None:
        self.device = device
        self.kind, self.name = device.type, str(device)
        self.host = host
        self.engine = engine
        self.readers = readers
        self.audit = audit
        self.poison = poison
        self.slabs: SlabAllocator | None = None
        if limit is not None:
            budget = Budget("device", limit)
            self.slabs = SlabAllocator(device, budget, elastic=True, poison=poison, gives_back=engine.give_back)
        self.sets: list[BlockSet] = []
        self.reclaimable: list[Reclaimable] = []
        self._pools: dict[BlockLayout, Pools] = {}
        # The end of the compute stream's last work in slots that is no attention, so that no fence waits for it.
        self._written: Event | None = None

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

    @property
    def held(self) -> int:
        """Slots of the device tier that wait for a fence."""
        return sum([pool.held for pool in self.device_pools])

    def pools(self, layout: BlockLayout) -> Pools:
        """Where blocks of a layout are, made on first use."""
        found = self._pools.get(layout)
        if found is None:
            own = None if self.slabs is None else BlockPool(layout, self.slabs, poison=self.poison)
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

    def placed(self, pool: BlockPool) -> Iterator[reclaim.Placed]:
        """The runs with slots in a pool of the device tier."""
        for each in self.sets:
            if each.pools.device is pool:
                for run in each.runs:
                    if run.device is not None:
                        yield reclaim.Placed(run.device, run)

    def obtainable(self, pools: Pools, *, ordered: bool = False) -> int:
        """Slots where blocks begin, to be had without evicting anything; `ordered`: see `BlockPool.take`."""
        return pools.home.obtainable(ordered=ordered) + self.home.budget.free // pools.layout.nbytes

    # What slots wait for

    def fence(self, blocks: BlockSet | None = None) -> Fence | None:
        """What holds slots that become free now: the last attention over `blocks`, or whatever ran last."""
        event: Event | None = None
        if self.engine.asynchronous:
            event = (None if blocks is None else blocks.last_read) or self.engine.mark()
        return self.readers.fence(event)

    def note_writes(self) -> None:
        """What is fetched from now on begins behind the compute stream's work so far.

        New memory may be what kernels in flight still use: torch's allocator hands it on in the order of that stream.
        Blocks that move are written by it.
        """
        if self.engine.asynchronous:
            self._written = self.engine.mark()

    @property
    def written(self) -> Event | None:
        """What a fetch begins behind, besides what held its slots; None: nothing any more."""
        if self._written is not None and self._written.passed():
            self._written = None
        return self._written

    def poll(self) -> None:
        """Settle what has ended, and free the slots that waited for it."""
        self.engine.poll()
        for pools in self._pools.values():
            pools.host.poll()
            if pools.device is not None:
                pools.device.poll()

    def settle(self) -> None:
        """Wait for the copies and the readers on the device that hold slots."""
        for pools in self._pools.values():
            for pool in (pools.host, pools.device):
                if pool is not None and pool.held:
                    for fence in pool.fences():
                        fence.settle()
                    pool.poll()

    # The end

    def recount(self) -> None:
        """After a change was cut short, and all sets were repaired: count again what is counted over sets."""
        for pools in self._pools.values():
            pools.spilled = sum([each.spilled for each in self.sets if each.pools is pools])
        self.note_writes()  # fences went with the slots that they held

    def close(self) -> None:
        """Give all memory of the device tier back and end the engine. Host pools are the host tier's."""
        self.engine.close()
        for pool in self.device_pools:
            pool.close()
        self._pools.clear()
        self.sets.clear()
