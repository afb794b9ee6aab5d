"""`Recovery`: what caches leave that end without a word, and what a change leaves that is cut short."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from kvtier.memory.access.change import undone
from kvtier.memory.access.lock import Lock
from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import residency
from kvtier.memory.owner import Owner
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier, Parked


class Recovery:
    """Gives up what dropped caches held, and repairs a memory in which a change was cut short.

    The caller holds the memory's lock, but for `abandon` and `cut_short`.

    Args:
        lock: of the memory.
        readers: who reads outside of it.
        host: gives the host tier; None before its first use.
        devices: compute devices in use.
        owners: all that were let in.
        parked: blocks that nobody is promised.

    Attributes:
        interrupted: a change was cut short, and nobody has repaired it yet. Whoever cuts a change short sets it.
    """

    def __init__(
        self,
        lock: Lock,
        readers: Readers,
        host: Callable[[], HostTier | None],
        devices: Mapping[torch.device, ComputeDevice],
        owners: Mapping[int, Owner],
        parked: Sequence[Parked],
    ) -> None:
        self.lock = lock
        self.interrupted = False
        self._readers = readers
        self._host = host
        self._devices = devices
        self._owners = owners
        self._parked = parked
        self._abandoned: deque[Callable[[], object]] = deque()

    def abandon(self, release: Callable[[], object]) -> None:
        """Let `release`, which gives up what a dropped cache held, run under the lock: now, or when it is free, and
        again where it returns False, once others were released.

        Garbage is collected at any moment, perhaps by a thread that holds the lock.
        """
        self._abandoned.append(release)
        if self.lock._is_owned() or self._readers.mine():
            return  # in the midst of a change, or of an attention call that reads what nobody owns any more
        try:
            if self.lock.acquire(blocking=False):
                self.collect()
        except BaseException as error:
            self.interrupted = self.interrupted or not undone(error)
            raise
        finally:
            try:  # noqa: SIM105 - the first call: see `kvtier.memory.access.lock`
                self.lock.release()
            except RuntimeError:
                pass  # another thread's

    def cut_short(self) -> None:
        """A change of a cache was cut short by what is not an `Exception`, in this thread."""
        self.interrupted = True
        self._readers.cut_short()

    @property
    def has_garbage(self) -> bool:
        """Whether `collect` has anything to do."""
        return bool(self._abandoned) or self.interrupted

    def collect(self) -> None:
        """Give up what dropped caches held, and after an interrupt what nobody owns.

        May be cut short itself, if the caller then sets `interrupted`: the next call does it again.
        """
        if self.interrupted:
            self.find_abandoned()
            self._repair()
        waiting = 0
        while waiting < len(self._abandoned):
            if self._abandoned[0]() is False:
                self._abandoned.rotate(-1)
                waiting += 1
            else:
                self._abandoned.popleft()
                waiting = 0

    def find_abandoned(self) -> None:
        """Whose user is gone and who was not heard of: an interrupt came in the midst of that. `collect` follows."""
        for owner in self._owners.values():
            gone = owner.user is not None and owner.user() is None
            if gone and owner.release is not None and owner.release not in self._abandoned:
                self._abandoned.append(owner.release)

    def _repair(self) -> None:
        """After a change was cut short: settle every copy, and free all that nobody has."""
        while self._readers.wait():
            pass  # other threads read slots that nobody owns any more
        devices = list(self._devices.values())
        for device in devices:
            device.engine.drain()
        recover(self._host(), devices, list(self._owners.values()), self._parked)
        self.interrupted = False


def recover(
    host: HostTier | None, devices: Sequence[ComputeDevice], owners: Sequence[Owner], parked: Sequence[Parked]
) -> None:
    """After a change was cut short make everything again from the runs: list what owners have, free all slots that no
    run has and all slabs that nobody has, and count again.

    The caller holds the memory's lock; no copy is under way and nobody reads.
    """
    for each in parked:
        each.unlist()
    _list_again(host, devices, owners)
    used: dict[BlockPool, list[tuple[int, int]]] = {}
    for device in devices:
        for blocks in device.sets:
            if blocks.parked:
                blocks.recount()
            residency.repair(blocks)
            for run in blocks.runs:
                for pool, slot in ((blocks.pools.device, run.device), (blocks.pools.host, run.host)):
                    if pool is not None and slot is not None:
                        used.setdefault(pool, []).append((slot, run.count))
    pools = [pool for device in devices for pool in device.device_pools]
    slabs: dict[SlabAllocator, list[torch.Tensor]] = {device.home: [] for device in devices}
    if host is not None:
        pools += host.pools.values()
        slabs[host.slabs] = [
            slab for owner in owners for buffers in owner.io_buffers.values() for slab in buffers.slabs
        ]
    for owner in owners:
        for device, space in owner.workspaces.items():
            slabs[device.home] += space.slabs
    for pool in pools:
        slabs[pool.allocator] += [slab.data for slab in pool.slabs]
    for allocator, owned in slabs.items():
        allocator.keep(owned)
    for pool in pools:
        pool.reset(used.get(pool, []))
    for device in devices:
        device.recount()
    for each in parked:
        each.recover()


def _list_again(host: HostTier | None, devices: Sequence[ComputeDevice], owners: Sequence[Owner]) -> None:
    """Sets, workspaces and buffers are listed where they are looked for, as their owners have them."""
    mine = [blocks for owner in owners for blocks in owner.sets]
    spaces = [x for owner in owners for x in owner.workspaces.items()]
    device_of = {pools: device for device in devices for pools in device.all_pools}
    for device in devices:
        device.sets[:] = [blocks for blocks in mine if device_of[blocks.pools] is device]
        device.reclaimable[:] = [space for where, space in spaces if where is device and device.slabs is not None]
    if host is not None:
        host.sets[:] = mine
        host.reclaimable[:] = [space for where, space in spaces if where.slabs is None]
        host.reclaimable += [buffers for owner in owners for buffers in owner.io_buffers.values()]
