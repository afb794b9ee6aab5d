"""After a change was cut short, by Ctrl-C or an unexpected error: everything is made again from the runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.memory.blocks import residency
from kvtier.memory.owner import Owner
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier, Parked


def recover(
    host: HostTier | None, devices: Sequence[ComputeDevice], owners: Sequence[Owner], parked: Sequence[Parked]
) -> None:
    """List what owners have, free all slots that no run has and all slabs that nobody has, and count again.

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
