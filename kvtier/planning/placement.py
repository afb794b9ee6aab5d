"""The first placement: as much as fits stays on the device; what does not spills evenly, oldest first.

Pure functions of numbers. A planner that weighs fetching, host attention and recomputation replaces them one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

#: No slab is larger than this; host slabs of this size are whole huge pages.
MAX_SLAB_BYTES = 64 * 2**20
#: Slabs begin at this size.
MIN_SLAB_BYTES = 2 * 2**20
#: A budget is cut into at least so many slabs, so that giving one back gives back little.
SLABS_PER_BUDGET = 16
#: A slab asked for by a long run of blocks takes at most this share of the budget.
WANTED_SHARE = 8
#: Staging may take this share of the device slots.
STAGING_SHARE = 8
#: A layer that takes at most this share of the device passes through the workspace as a whole.
STREAM_SHARE = 8
#: So many bytes of a layer pass through the workspace of a host at a time: enough for torch's kernel, little to hold.
STREAM_BYTES = 32 * 2**20
#: A fetch in more runs than this, of fewer blocks each on average, finds what is free scattered.
MOST_RUNS, SHORT_RUN = 8, 16


def slab_slots(budget: int, slot_bytes: int, held: int, wanted: int = 1) -> int:
    """Slots of the next slab: small against the budget and against what is held already, but enough for `wanted`.

    Args:
        budget: bytes of the memory.
        slot_bytes: bytes of a slot.
        held: bytes that the pool has already; a slab adds a sixteenth of that, so little is allocated in vain.
        wanted: slots needed next to each other.
    """
    ceiling = min(budget // SLABS_PER_BUDGET, MAX_SLAB_BYTES)
    size = min(max(held // 16, MIN_SLAB_BYTES), ceiling)
    wanted = min(wanted, budget // (WANTED_SHARE * slot_bytes), MAX_SLAB_BYTES // slot_bytes)
    return max(size // slot_bytes, wanted, 1)


def may_begin_extent(budget: int, extent_bytes: int) -> bool:
    """Whether a new extent may be allocated while single slots are free: where it is little against the budget."""
    return extent_bytes * SLABS_PER_BUDGET <= budget


def victim_layer(resident: Iterable[tuple[int, int]]) -> int | None:
    """The layer that gives up its oldest block: the one with most on the device, so that layers stay even.

    Args:
        resident: (layer, evictable blocks on the device) pairs.

    Returns:
        A layer, the first of several equals; None if no layer has one.
    """
    best, most = None, 0
    for layer, count in resident:
        if count > most:
            best, most = layer, count
    return best


def write_through_count(used_bytes: int, budget: int, share: float, sealed: int) -> int:
    """How many blocks to copy to the host after `sealed` blocks were sealed.

    None below the watermark. Above it two for each sealed one: between half the budget and all of it, the backlog and
    the newly sealed then get their copies just in time for the first eviction.
    """
    return 2 * sealed if used_bytes >= share * budget else 0


def staging_slots(capacity: int, missing: int) -> int:
    """Slots worth evicting residents for, to stage `missing` blocks of one layer on a device of `capacity` slots."""
    return max(min(missing, capacity // STAGING_SHARE), 1)


def keep_fetched(free: int, reserve: int, tails: int, missing: int, others: int) -> bool:
    """Whether a fetched block stays on the device.

    Only into room that neither staging nor the next tails will ask back, and only in a layer that misses as much as
    any other.

    Args:
        free: slots to be had without evicting.
        reserve: slots that staging wants free.
        tails: sequences of all layers, each of which will open a block.
        missing: blocks that this layer misses.
        others: the most that another layer misses.
    """
    return free > 2 * reserve + tails and missing >= others


def scattered(runs: int, blocks: int) -> bool:
    """Whether blocks fetched in so many runs are worth to be brought into order: a copy costs some microseconds."""
    return runs > MOST_RUNS and blocks < SHORT_RUN * runs


def stream_blocks(budget: int, block_bytes: int, batch: int, *, device: bool) -> int:
    """Blocks of each row that pass through the workspace at a time when a layer is read by many queries.

    Args:
        budget: bytes of the memory that the workspace lies in.
        block_bytes: bytes of a block.
        batch: rows.
        device: whether that memory is a device's.
    """
    bound = budget // STREAM_SHARE
    if not device:
        bound = min(bound, STREAM_BYTES)
    return max(bound // (block_bytes * max(batch, 1)), 1)
