"""Sizes: of slabs, and of the portions in which a layer is read. Pure functions of numbers."""

from __future__ import annotations

#: No slab is larger than this; host slabs of this size are whole huge pages.
MAX_SLAB_BYTES = 64 * 2**20
#: A budget is cut into at least so many slabs, so that giving one back gives back little.
SLABS_PER_BUDGET = 16
#: A slab adds this part of what is held already: so little is allocated in vain.
GROWTH_SHARE = 16
#: A slab asked for by a long run of blocks takes at most this share of the budget.
RUN_SHARE = 8
#: A layer that takes at most this share of the device passes through the workspace as a whole.
STREAM_SHARE = 8
#: So many bytes of a layer pass through the workspace of a host at a time: enough for torch's kernel, little to hold.
STREAM_BYTES = 32 * 2**20
#: torch's allocator takes memory from a CUDA device in multiples of so many bytes,
SEGMENT = 2 * 2**20
#: for tensors of so many bytes or more one by one; smaller ones share segments with other tensors.
OWN_SEGMENT = 10 * 2**20
#: A slab is made as large as that where it adds at most this part of what is held already.
ROUNDING_SHARE = 7
#: A fetch in more runs than this, of fewer blocks each on average, finds what is free scattered.
SCATTERED_RUNS, SHORT_RUN = 8, 16

#: A device gives up this part of its slots together, at the most, so that free slots are neighbours.
EVICTION_SHARE, EVICTION_BATCH = 256, 16


def slab_slots(budget: int, slot_bytes: int, held: int, needed: int = 1) -> int:
    """Slots of the next slab: few against what is held already, but enough for `needed`.

    Args:
        budget: bytes of the memory.
        slot_bytes: bytes of a slot.
        held: bytes that the pool has already.
        needed: slots needed next to each other.
    """
    size = min(held // GROWTH_SHARE, budget // SLABS_PER_BUDGET, MAX_SLAB_BYTES)
    needed = min(needed, budget // (RUN_SHARE * slot_bytes), MAX_SLAB_BYTES // slot_bytes)
    return max(size // slot_bytes, needed, 1)


def segment_bytes(nbytes: int) -> int:
    """Bytes that torch's allocator takes from a CUDA device for a slab of `nbytes`, as far as they are this slab's."""
    return -(-nbytes // SEGMENT) * SEGMENT if nbytes >= OWN_SEGMENT else nbytes


def in_whole_segments(slots: int, slot_bytes: int, held: int, free: int) -> int:
    """Slots of a slab on a CUDA device, so that it leaves little of its segments unused.

    Args:
        slots: from `slab_slots`.
        slot_bytes: bytes of a slot.
        held: bytes that the pool has already.
        free: bytes of the budget.

    Returns:
        `slots` where the slab shares segments with other tensors; else as many as fill the segments, where the budget
        holds them: as it ends, exactly what is left.
    """
    nbytes = slots * slot_bytes
    if nbytes < OWN_SEGMENT and held >= ROUNDING_SHARE * OWN_SEGMENT:
        nbytes = OWN_SEGMENT
    if nbytes < OWN_SEGMENT or segment_bytes(nbytes) > free:
        return slots
    return max(segment_bytes(nbytes) // slot_bytes, slots)


def scattered(runs: int, blocks: int) -> bool:
    """Whether blocks fetched in so many runs are worth to be brought into order: a copy costs some microseconds."""
    return runs > SCATTERED_RUNS and blocks < SHORT_RUN * runs


def eviction_batch(slots: int) -> int:
    """Slots that a device of so many frees together, where fewer are wanted."""
    return max(min(EVICTION_BATCH, slots // EVICTION_SHARE), 1)


def stream_blocks(budget: int, block_bytes: int, batch: int, *, device: bool) -> int:
    """Blocks of each row that pass through the workspace at a time when a layer is read by many queries.

    Args:
        budget: bytes of the memory that the workspace is in.
        block_bytes: bytes of a block.
        batch: rows.
        device: whether that memory is a device's.
    """
    bound = budget // STREAM_SHARE
    if not device:
        bound = min(bound, STREAM_BYTES)
    return max(bound // (block_bytes * max(batch, 1)), 1)
