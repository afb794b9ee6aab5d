"""What the tiers of a memory hold, as its statistics show it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.memory.owner import Owner
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier
from kvtier.stats import NO_TIER, TierStats


def tiers(host: HostTier, devices: Sequence[ComputeDevice], owners: Sequence[Owner]) -> tuple[TierStats, TierStats]:
    """The device tiers together, `NO_TIER` where there is none, and the host's."""
    spaces = [x for owner in owners for x in owner.workspaces.items()]
    on_device = sum(space.nbytes for device, space in spaces if device.slabs is not None)
    on_host = sum(space.nbytes for device, space in spaces if device.slabs is None)
    buffers = sum(each.nbytes for owner in owners for each in owner.io_buffers.values())
    slabs = [device.slabs for device in devices if device.slabs is not None]
    pools = [pool for device in devices for pool in device.device_pools]
    return (
        _tier(slabs, pools, on_device) if slabs else NO_TIER,
        _tier([host.slabs], host.pools.values(), on_host, buffers),
    )


def _tier(
    slabs: Sequence[SlabAllocator], pools: Collection[BlockPool], workspace: int, io_buffers: int = 0
) -> TierStats:
    return TierStats(
        budget=sum(x.budget.limit for x in slabs),
        bytes=sum(x.budget.used + x.budget.rounded for x in slabs),
        peak_bytes=sum(x.budget.peak for x in slabs),
        workspace_bytes=workspace,
        io_buffer_bytes=io_buffers,
        page_locked_bytes=sum(x.page_locked for x in slabs),
        used_blocks=sum(p.used for p in pools),
        free_blocks=sum(p.free for p in pools),
    )
