"""What a user can see: counters, kept by the parts, and the typed snapshot `cache.stats`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Running totals since the cache was made or reset. Written by the runtime, read through `CacheStats`."""

    steps: int = 0
    views_attended: int = 0
    host_attended: int = 0
    host_blocks: int = 0
    attention_bytes: int = 0
    handover_misses: int = 0
    dense_fallbacks: int = 0
    dense_fallback_bytes: int = 0
    dense_fallback_ops: dict[str, int] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    copies_down: int = 0
    copies_up: int = 0
    block_hits: int = 0
    block_fetches: int = 0
    prefetched: int = 0
    evictions: int = 0
    promotions: int = 0
    moved_blocks: int = 0
    failed_transfers: int = 0
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, all devices together.

    Attributes:
        budget: bytes it may use (0: there is no such tier); less than were given, and perhaps than the peak, once the
            device was full.
        bytes: bytes it has allocated now: slabs of blocks; where attention runs, the workspace; and in the host tier
            what queries and results pass through.
        peak_bytes: the most it has had allocated.
        workspace_bytes: the part of `bytes` in which one layer's KV is laid out for torch's attention.
        handover_bytes: the part of `bytes` through which queries, masks and results of attention on the host pass.
        page_locked_bytes: the part of `bytes` that is page-locked, so that an accelerator copies it in the background.
        used_blocks: slots in use; staging included.
        free_blocks: slots allocated and free.
    """

    budget: int
    bytes: int
    peak_bytes: int
    workspace_bytes: int
    handover_bytes: int
    page_locked_bytes: int
    used_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of a cache, `cache.stats`.

    Attributes:
        device: the device tier.
        host: the host tier.
        resident_bytes: bytes in layers that stay resident in Transformers' own layer classes (sliding windows,
            linear attention, indexers); outside the budgets.
        steps: forwards seen.
        views_attended: attention calls taken over without making the cache's tensor dense for the model.
        host_attended: of those, calls that host threads served, wholly or together with the device.
        host_blocks: blocks that host threads read where they lie, in total.
        attention_bytes: bytes of queries and results copied between device and host for it.
        handover_misses: calls for which `host_budget` had no room left to keep memory that these pass through, so that
            they took their own, not page-locked: slower, and as an activation.
        dense_fallbacks: views that another operation forced into a dense tensor of the model's own.
        dense_fallback_bytes: bytes of those tensors, in total.
        dense_fallback_ops: which operations, how often.
        bytes_down: bytes copied device -> host.
        bytes_up: bytes copied host -> device.
        copies_down: copies device -> host after neighbouring blocks were joined.
        copies_up: copies host -> device after neighbouring blocks were joined.
        block_hits: blocks read where attention runs, without a transfer.
        block_fetches: blocks that had to be fetched.
        prefetched: of those, blocks whose fetch was submitted ahead of need.
        evictions: device slots given up because a host copy exists.
        promotions: fetched blocks that stayed on the device.
        moved_blocks: blocks moved within a tier, to give a slab back or to bring together what is free.
        failed_transfers: transfers that failed.
        stall_seconds: seconds in which the CPU waited for a transfer.
    """

    device: TierStats
    host: TierStats
    resident_bytes: int
    steps: int
    views_attended: int
    host_attended: int
    host_blocks: int
    attention_bytes: int
    handover_misses: int
    dense_fallbacks: int
    dense_fallback_bytes: int
    dense_fallback_ops: dict[str, int]
    bytes_down: int
    bytes_up: int
    copies_down: int
    copies_up: int
    block_hits: int
    block_fetches: int
    prefetched: int
    evictions: int
    promotions: int
    moved_blocks: int
    failed_transfers: int
    stall_seconds: float
