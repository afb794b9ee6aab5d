"""Whether everything that is counted twice agrees. For tests and debugging: it walks every block."""

from __future__ import annotations

from collections.abc import Collection

from kvtier.storage.block import Block
from kvtier.storage.memory import Memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers


def check(devices: Collection[Tiers], host_pools: Collection[BlockPool], host: Memory | None) -> None:
    """Raise AssertionError unless rows, tables, blocks, slots, references and bytes agree with each other."""
    for tiers in devices:
        check_tiers(tiers)
    if host is None:
        return
    taken = sum(pool.nbytes for pool in host_pools)
    taken += sum(p.nbytes for t in devices if t.far is None for p in t.near_pools.values())
    taken += sum(t.workspace.nbytes for t in devices if t.far is None)
    taken += sum(t.handover.nbytes for t in devices)
    assert host.budget.used == taken, "host bytes are counted wrong"
    assert taken <= host.budget.limit, "the host budget is exceeded"
    for pool in host_pools:
        pool.check_integrity()
    held = sum(b.far is not None for t in devices for x in t.layers for b in x.distinct_blocks())
    in_flight = sum(t.engine.pending_slots(p) for t in devices for p in host_pools)
    assert held <= sum(pool.used for pool in host_pools) <= held + in_flight, "host slots leaked"


def check_tiers(tiers: Tiers) -> None:
    """Near pools, staging and workspace of one device, and its layers."""
    taken = tiers.workspace.nbytes
    waiting = tiers.staging.staged
    for layout, pool in tiers.near_pools.items():
        pool.check_integrity()
        taken += pool.nbytes
        layers = [x for x in tiers.layers if x.layout == layout]
        held = [b.near for x in layers for b in x.distinct_blocks() if b.near is not None]
        staged = [slot for x in layers if x in waiting for slot in waiting[x].slots]
        assert len(set(held)) == len(held), "two blocks in one slot"
        assert not set(held) & set(staged), "a staged slot has an owner"
        assert all(pool.references(slot) >= 1 for slot in held + staged), "a slot in use is free"
        in_flight = tiers.engine.pending_slots(pool)
        assert len(held) + len(staged) <= pool.used <= len(held) + len(staged) + in_flight, "near slots leaked"
    if tiers.far is not None:
        assert tiers.near.budget.used == taken, "near bytes are counted wrong"
    assert taken <= tiers.near.budget.limit, "the near budget is exceeded"
    for layer in tiers.layers:
        check_layer(layer)


def check_layer(layer: LayerStore) -> None:
    """Rows, tables and blocks of one layer."""
    assert set(layer.rows) == set(layer.tables()), "a row points at no table, or a table has no row"
    size = layer.layout.block_size
    refs: dict[Block, int] = {}
    for table in layer.tables():
        assert len(table.blocks) == -(-layer.length // size), "a table does not match the length"
        for i, block in enumerate(table.blocks):
            refs[block] = refs.get(block, 0) + 1
            assert block.layer is layer, "a block of another layer"
            assert block.sealed or (i + 1) * size > layer.length, "a full block is not sealed"
            assert block.near is not None or (block.sealed and block.far is not None), "a block has no bytes"
            resident = block.sealed and block.near is not None
            assert (block in layer.resident) == resident, "residents are listed wrong"
            unwritten = resident and block.far is None and layer.tiers.far is not None
            assert (block in layer.unwritten) == unwritten, "the backlog is listed wrong"
    assert len(refs) == layer.count, "blocks are counted wrong"
    assert all(block.refs == n for block, n in refs.items()), "a block miscounts its tables"
    assert layer.resident.keys() <= refs.keys(), "a block that no table holds is resident"
