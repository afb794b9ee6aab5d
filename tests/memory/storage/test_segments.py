"""Slabs fill the segments that torch's allocator takes from a CUDA device, and what it takes beside them is shown."""

from __future__ import annotations

import pytest
import torch

from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.planning.sizing import OWN_SEGMENT, SEGMENT, in_whole_segments, segment_bytes, slab_slots

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (1, 1),
        (MIB, MIB),
        (10 * MIB - 1, 10 * MIB - 1),  # a part of a segment that it shares
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (63 * MIB, 64 * MIB),
    ],
)
def test_a_slab_takes_what_torch_documents(nbytes: int, taken: int) -> None:
    assert segment_bytes(nbytes) == taken


@pytest.mark.parametrize("slot", [64, 4096, 122_880, 2**18, 3 * MIB, 13 * MIB])
@pytest.mark.parametrize("limit", [MIB, 100 * MIB, 8 * GIB])
def test_slabs_fill_their_segments_and_a_small_cache_stays_small(slot: int, limit: int) -> None:
    held, unused, counts = 0, 0, 0
    while limit - held >= slot and counts < 3000:
        free = limit - held
        asked = slab_slots(limit, slot, held)
        slots = min(in_whole_segments(asked, slot, held, free), free // slot)
        nbytes = slots * slot
        assert nbytes > 0
        assert nbytes <= max(asked * slot + SEGMENT, OWN_SEGMENT + slot)
        if asked * slot < OWN_SEGMENT:
            assert nbytes == min(asked * slot, free // slot * slot) or nbytes <= 0.15 * held + slot
        last = free - nbytes < SEGMENT or asked * slot > free
        if nbytes >= OWN_SEGMENT and not last:
            assert segment_bytes(nbytes) - nbytes < min(slot, SEGMENT)
        unused += segment_bytes(nbytes) - nbytes
        held, counts = held + nbytes, counts + 1
    assert held <= limit
    if slot <= 2**18:
        assert unused <= 0.02 * held + SEGMENT


def test_what_the_allocator_rounds_up_is_shown_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget("device", 40 * MIB)
    slabs = SlabAllocator(torch.device("cuda", 0), budget)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype, device="cpu"))
    large, small = slabs.allocate(11 * MIB), slabs.allocate(3 * MIB)
    assert large is not None
    assert small is not None
    assert (budget.used, budget.rounded) == (14 * MIB, MIB)
    slabs.release(small)
    slabs.release(large)
    assert (budget.used, budget.rounded) == (0, 0)
    host = SlabAllocator(torch.device("cpu"), budget)
    assert host.allocate(11 * MIB) is not None
    assert budget.rounded == 0
