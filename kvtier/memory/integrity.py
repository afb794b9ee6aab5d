"""Whether everything that is counted twice agrees. For tests and debugging: it walks every run and every slot."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence

from kvtier.memory.access.readers import Readers
from kvtier.memory.blocks import audit
from kvtier.memory.blocks.block import RESIDENT, BlockSet, Run, State
from kvtier.memory.owner import Owner
from kvtier.memory.storage.buffers import Reclaimable
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier
from kvtier.transfer.copies import Copy
from kvtier.transfer.engine import Direction

_ON_DEVICE = frozenset((State.DEVICE, State.LEAVING, State.BOTH, State.ARRIVING))
_ON_HOST = frozenset((State.LEAVING, State.BOTH, State.ARRIVING, State.HOST))


def check(
    host: HostTier | None, devices: Sequence[ComputeDevice], numbered: Mapping[int, Owner], readers: Readers
) -> None:
    """Raise AssertionError unless blocks, slots, sets, claims and bytes agree with each other.

    This thread must not be in the midst of an attention call.
    """
    me = threading.get_ident()
    assert all(reading.thread != me for reading in readers._active), "an attention call that has ended still reads"
    assert all(number == owner.number for number, owner in numbered.items()), "an owner has another's number"
    owners = list(numbered.values())
    if host is None:
        assert not devices
        return
    _check_owners(host, devices, owners)
    slots: dict[BlockPool, list[tuple[int, int]]] = {}
    for device in devices:
        for blocks in device.sets:
            check_set(blocks)
            for run in blocks.runs:
                for pool, slot in ((blocks.pools.device, run.device), (blocks.pools.host, run.host)):
                    if slot is not None:
                        assert pool is not None
                        slots.setdefault(pool, []).append((slot, run.count))
        for pools in device.all_pools:
            spilled = sum(blocks.spilled for blocks in device.sets if blocks.pools is pools)
            assert pools.spilled == spilled, "spilled blocks are counted wrong"
            assert pools.host is host.pools.get(pools.layout), "a layout has two pools on the host"
    buffers = sum(b.nbytes for owner in owners for b in owner.io_buffers.values())
    spaces = [x for owner in owners for x in owner.workspaces.items()]
    on_host = buffers + sum(w.nbytes for d, w in spaces if d.slabs is None)
    _check_tier(host.slabs, list(host.pools.values()), slots, on_host)
    for device in devices:
        _check_transfers(device, [*host.pools.values(), *device.device_pools])
        if device.slabs is not None:
            _check_tier(device.slabs, device.device_pools, slots, sum(w.nbytes for d, w in spaces if d is device))


def _check_owners(host: HostTier, devices: Sequence[ComputeDevice], owners: Sequence[Owner]) -> None:
    """Sets, workspaces and buffers are listed where they are looked for, once."""
    listed = sorted(id(x) for o in owners for x in o.sets)
    assert sorted(map(id, host.sets)) == sorted(id(x) for d in devices for x in d.sets), "sets are listed wrong"
    assert sorted(map(id, host.sets)) == listed, "sets without an owner"
    for owner in owners:
        assert all(blocks.owner == owner.number for blocks in owner.sets), "a set of another owner"
        assert owner.claims.keys() <= set(devices), "a claim on a device that is gone"
    mine: dict[int, list[Reclaimable]] = {id(host): [], **{id(device): [] for device in devices}}
    for owner in owners:
        mine[id(host)] += owner.io_buffers.values()
        for device, space in owner.workspaces.items():
            mine[id(host) if device.slabs is None else id(device)].append(space)
    for tier, listed_there in [(id(host), host.reclaimable), *((id(x), x.reclaimable) for x in devices)]:
        assert sorted(map(id, listed_there)) == sorted(map(id, mine[tier])), "what may be given back is listed wrong"


def _check_tier(
    slabs: SlabAllocator, pools: Sequence[BlockPool], slots: dict[BlockPool, list[tuple[int, int]]], other: int
) -> None:
    """Slots of the pools of one budget, and its bytes: those of the pools, and `other`."""
    assert slabs.in_segments or not slabs.budget.rounded, "segments are counted where there are none"
    for pool in pools:
        pool.check_integrity()
        assert pool.allocator is slabs, "a pool of another budget"
        ranges = slots.get(pool, [])
        assert pool.used == sum(count for _, count in ranges), "slots leaked"
        given = sorted([*ranges, *pool.ranges(), *pool.held_ranges()])
        for (start, count), (following, _) in itertools.pairwise(given):
            assert start + count <= following, "one slot has two runs, or is in use and free"
        for start, count in ranges:
            slab = pool.slab(start)
            assert slab.base <= start < start + count <= slab.base + slab.slots, "a run leaves its slab"
    budget = slabs.budget
    tier = budget.tier
    assert budget.used == other + sum(pool.nbytes for pool in pools), f"{tier} bytes are counted wrong"
    assert budget.used <= budget.limit, f"the {tier} budget is exceeded"
    assert budget.used <= budget.peak, f"the peak of the {tier} bytes is wrong"


def _check_transfers(device: ComputeDevice, pools: Sequence[BlockPool]) -> None:
    """What a copy may still read or write is used, or held for it."""
    there = {id(slab.data): (pool, slab) for pool in pools for slab in pool.slabs}
    for transfer in device.engine.in_flight():
        if transfer.over:  # one that followed it was seen to end, and has given up its slots
            continue
        for copy in transfer.copies:
            if not isinstance(copy, Copy):
                continue
            # Where a fetch writes may be free again, behind the compute stream, which waits for it.
            for span in (copy.source,) if transfer.direction is Direction.FETCH else (copy.source, copy.target):
                assert id(span.slab) in there, "a slab was given back under a copy"
                pool, slab = there[id(span.slab)]
                first = slab.base + span.offset // span.block
                last = first + span.nbytes // span.block
                free = any(start < last and first < start + count for start, count in pool.ranges())
                assert not free, "a slot is free under a copy"


def check_set(blocks: BlockSet) -> None:
    """Runs, counts and lists of one set."""
    counts = [0] * len(State)
    resident, dirty = set(blocks.resident), set(blocks.dirty)
    assert len(resident) == len(blocks.resident), "a resident is listed twice"
    assert len(dirty) == len(blocks.dirty), "the backlog lists a run twice"
    for run in blocks.runs:
        counts[run.state] += run.count
        _check_run(blocks, run)
        assert (run.state in RESIDENT) == (run in resident), "residents are listed wrong"
        assert (run.state is State.DEVICE) == (run in dirty), "the backlog is listed wrong"
    assert counts == blocks.counts, "blocks are counted wrong"
    two_tiers = blocks.pools.device is not None
    assert resident <= (blocks.runs.keys() if two_tiers else set()), "residents are listed wrong"
    assert dirty <= resident, "the backlog is listed wrong"
    assert blocks.transient >= 0, "blocks that leave again are counted wrong"


def _check_run(blocks: BlockSet, run: Run) -> None:
    state, two_tiers = run.state, blocks.pools.device is not None
    assert run.blocks is blocks, "a run of another set"
    assert run.parts is None, "a run that was cut is listed"
    assert run.count > 0, "an empty run is listed"
    assert run.refs > 0, "a run that no table holds is listed"
    on_device, on_host = state in _ON_DEVICE, state in _ON_HOST
    if state is State.FILLING:
        on_device, on_host = two_tiers, not two_tiers
    assert (run.device is not None) == on_device, f"{run} has the wrong slots"
    assert (run.host is not None) == on_host, f"{run} has the wrong slots"
    if state in (State.LEAVING, State.ARRIVING):
        assert run.move is not None, "no copy is under way"
        assert run.move.transfer is None or run.move.transfer.pending, "a copy has ended and its run does not know"
    if run.move is not None:
        assert run in run.move.runs, "a copy does not know what it moves"
    if blocks.pools.audit is not None:
        audit.check_integrity(run)
