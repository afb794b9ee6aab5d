"""What the tiers of a memory hold, as its statistics show it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from kvtier.config import MemoryOptions
from kvtier.errors import ConfigError
from kvtier.memory import limits
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


def unused(options: MemoryOptions, last: Mapping[str, TierStats], *, closed: bool) -> dict[str, TierStats]:
    """The tiers of a memory that nobody uses: the budgets that they would have, and the peaks that they had.

    Args:
        options: of the memory.
        last: what the tiers held when they were given back; empty: they were never used.
        closed: nobody will use it any more.
    """
    last = last or {"device": NO_TIER, "host": NO_TIER}
    given = {"device": options.device_bytes(), "host": options.host_bytes()}
    budgets = {name: given[name] or tier.budget for name, tier in last.items()}
    if not (budgets["host"] or closed):  # "auto", or a share: what it would be if it were used now
        with contextlib.suppress(ConfigError):  # a full machine leaves nothing: an error for the first forward
            budgets["host"] = limits.of_host(options, 0)
    return {name: TierStats(budgets[name], 0, tier.peak_bytes, 0, 0, 0, 0, 0) for name, tier in last.items()}


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
