"""`check_integrity` walks every count: each of them, made wrong on purpose, makes it raise."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier import TieredKVCache, TieredMemory
from kvtier.attention.partition import Partition
from kvtier.attention.reader import LayerReader
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.owner import Owner
from kvtier.memory.storage.buffers import Workspace
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier
from kvtier.planning.admission import Claim
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable
from kvtier.testing import held, with_doubles
from kvtier.transfer.copies import Copy


class World:
    """Two caches on one memory with blocks in every state, and names for what counts them."""

    def __init__(self) -> None:
        memory = with_doubles(TieredMemory(device_budget=40_000, host_budget=40_000), held(0, 0.0, late=True))
        self.memory = memory
        self.caches = [TieredKVCache(memory=memory, block_size=4) for _ in range(2)]
        for cache in self.caches:
            x = torch.randn(3, 2, 42, 4)
            cache.update(x, x, 0)
            cache.update(x, x, 1)
            cache.reorder_cache(torch.tensor([0, 1, 1]))
            for layer in range(2):
                cache.update(x[:, :, :1], x[:, :, :1], layer)
            cache._forward._finalizer.detach()  # what is wrong is not given back
        with memory.lock:
            self.device: ComputeDevice = memory.devices[0]
            self.host: HostTier = memory.host
            forward = self.caches[0]._forward
            self.reader: LayerReader = forward.readers[0]
            self.layer: LayerKV = self.reader.layer
            self.blocks: BlockSet = self.layer.blocks
            self.pools: Pools = self.blocks.pools
            self.owner: Owner = forward._held.owner
            self.device.evict_from(self.blocks, 8)
            self.device.engine.drain()
            self.device.poll()
            self.device.fetch([run for run in self.layer.runs() if run.state is State.HOST], 3, None, evict=False)
            self.device.write_back(self.blocks, 4)
            self.workspace: Workspace = self.reader.workspace
            self.workspace.take(640)
            self.reader.partition(self.layer.length)
            self.device_pool: BlockPool = self.device.device_pools[0]
            self.host_pool: BlockPool = self.pools.host
        states = {run.state for run in self.blocks.runs}
        assert states >= {State.FILLING, State.DEVICE, State.LEAVING, State.HOST, State.ARRIVING}
        self.check()

    def run(self, state: State) -> Run:
        """Some run in that state."""
        return next(run for run in self.blocks.runs if run.state is state)

    def copy_to_a_free_slot(self) -> Copy:
        """A copy that nobody may make."""
        start, _ = next(self.host_pool.ranges())
        return Copy(self.host_pool.span(self.run(State.HOST).host, 1), self.host_pool.span(start, 1))

    def check(self) -> None:
        """Of all that there is."""
        for cache in self.caches:
            cache.check_integrity()


@pytest.fixture
def world() -> World:
    """Nothing is wrong yet."""
    return World()


def more(name: str, by: int = 1) -> Callable[[Any], None]:
    """One more of it."""
    return lambda x: setattr(x, name, getattr(x, name) + by)


def locked(memory: TieredMemory, act: Callable[[], Any]) -> None:
    """Act under its lock."""
    with memory.lock:
        act()


#: By owner: what is wrong, where it is, and how it becomes wrong.
WRONG: dict[str, tuple[Callable[[World], Any], Callable[[Any], None]]] = {
    # pools
    "BlockPool.slots": (lambda w: w.device_pool, more("slots")),
    "BlockPool.free": (lambda w: w.host_pool, more("free")),
    "BlockPool.nbytes": (lambda w: w.device_pool, more("nbytes", 64)),
    "BlockPool._ranges, a free slot is forgotten": (lambda w: w.device_pool, lambda x: x.take(1)),
    "BlockPool._ranges, a slot in use is free": (lambda w: w.device_pool, lambda x: x._add(x.slabs[0].base, 1)),
    "BlockPool._starts": (lambda w: w.host_pool, lambda x: x._starts.reverse() or x._starts.append(x._starts[0])),
    "BlockPool._held, a slot in use is held": (
        lambda w: w,
        lambda w: w.device_pool._held.append((w.run(State.LEAVING).move, w.run(State.DEVICE).device, 1)),
    ),
    "BlockPool._slabs": (lambda w: w.device_pool, lambda x: x._set_slabs(list(reversed(x.slabs))[:-1])),
    "BlockPool._next_base": (lambda w: w.device_pool, more("_next_base", -2)),
    # bytes
    "Budget.used, device": (lambda w: w.device.slabs.budget, more("used")),
    "Budget.used, host": (lambda w: w.host.slabs.budget, more("used")),
    "Budget.rounded": (lambda w: w.host.slabs.budget, more("rounded")),
    "Budget.peak": (lambda w: w.host.slabs.budget, lambda x: setattr(x, "peak", x.used - 1)),
    "Budget.limit": (lambda w: w.device.slabs.budget, lambda x: setattr(x, "limit", x.used - 1)),
    "Workspace._data": (lambda w: w.workspace, lambda x: setattr(x, "_data", None)),
    # sets
    "BlockSet.counts": (lambda w: w.blocks.counts, lambda x: x.__setitem__(State.HOST, x[State.HOST] + 1)),
    "BlockSet.runs, one is missing": (lambda w: w, lambda w: w.blocks.runs.pop(w.run(State.DEVICE))),
    "BlockSet.resident, one is missing": (lambda w: w.blocks.resident, lambda x: x.pop()),
    "BlockSet.resident, one is there twice": (lambda w: w.blocks.resident, lambda x: x.append(x[0])),
    "BlockSet.resident, one is not": (lambda w: w, lambda w: w.blocks.resident.append(w.run(State.HOST))),
    "BlockSet.dirty, one is missing": (lambda w: w.blocks.dirty, lambda x: x.pop()),
    "BlockSet.dirty, one is there twice": (lambda w: w.blocks.dirty, lambda x: x.append(x[0])),
    "BlockSet.dirty, one is not": (lambda w: w, lambda w: w.blocks.dirty.append(w.run(State.LEAVING))),
    "BlockSet.transient": (lambda w: w.blocks, more("transient")),
    "BlockSet.owner": (lambda w: w.blocks, more("owner")),
    "Pools.spilled": (lambda w: w.pools, more("spilled")),
    # runs
    "Run.count": (lambda w: w.run(State.DEVICE), more("count")),
    "Run.refs, one too many": (lambda w: w.run(State.DEVICE), more("refs")),
    "Run.refs, one too few": (lambda w: next(r for r in w.blocks.runs if r.refs > 1), more("refs", -1)),
    "Run.state": (lambda w: w.run(State.DEVICE), lambda x: setattr(x, "state", State.BOTH)),
    "Run.device": (lambda w: w.run(State.HOST), lambda x: setattr(x, "device", 1)),
    "Run.device, another's": (
        lambda w: w,
        lambda w: setattr(w.run(State.DEVICE), "device", w.run(State.FILLING).device),
    ),
    "Run.host": (lambda w: w.run(State.HOST), lambda x: setattr(x, "host", None)),
    "Run.host, another's": (lambda w: w.run(State.HOST), lambda x: setattr(x, "host", x.host + 1)),
    "Run.move, none": (lambda w: w.run(State.ARRIVING), lambda x: setattr(x, "move", None)),
    "Run.move, one that has ended": (
        lambda w: w.run(State.LEAVING).move.transfer,
        lambda x: setattr(x, "_on_done", lambda: None) or x.settle(),
    ),
    "Run.sums": (lambda w: w.run(State.HOST), lambda x: setattr(x, "sums", array("Q", bytes(8 * x.count + 8)))),
    "Run.sums, another's": (lambda w: w.run(State.HOST), lambda x: setattr(x, "sums", array("Q", [7] * x.count))),
    "Run.parts": (lambda w: w.run(State.DEVICE), lambda x: setattr(x, "parts", (x, x))),
    "Run.blocks": (
        lambda w: w,
        lambda w: setattr(w.run(State.DEVICE), "blocks", w.caches[1]._forward.readers[0].layer.blocks),
    ),
    "Move.runs": (lambda w: w.run(State.ARRIVING).move.runs, lambda x: x.clear()),
    # tables
    "BlockTable.length": (lambda w: w.layer.tables[0], more("length")),
    "BlockTable.runs, one is missing": (lambda w: w.layer.tables[0].runs, lambda x: x.pop()),
    "BlockTable.runs, one is there twice": (lambda w: w.layer.tables[0].runs, lambda x: x.append(x[-1])),
    "LayerKV.length": (lambda w: w.layer, more("length")),
    "LayerKV.rows": (lambda w: w.layer.rows, lambda x: x.append(BlockTable())),
    "LayerKV.tables": (lambda w: w.layer.tables, lambda x: x.append(BlockTable())),
    "LayerKV._token_shapes": (lambda w: w.layer, lambda x: setattr(x, "_token_shapes", ((), ()))),
    # owners
    "ComputeDevice.sets": (lambda w: w.device.sets, lambda x: x.pop()),
    "HostTier.sets": (lambda w: w.host.sets, lambda x: x.pop()),
    "Owner.sets": (lambda w: w.owner.sets, lambda x: x.pop()),
    "Owner.number": (lambda w: w.owner, more("number", 100)),
    "Owner.number, of one that has no blocks": (lambda w: w.memory.join(), more("number", 100)),
    "Readers._active": (lambda w: w, lambda w: locked(w.memory, w.memory.readers.begin)),
    "Owner.claims": (lambda w: w.owner.claims, lambda x: x.__setitem__(object(), Claim())),
    "Owner.workspaces": (lambda w: w.owner.workspaces, lambda x: x.clear()),
    "Owner.io_buffers": (lambda w: w.owner.io_buffers, lambda x: x.clear()),
    "ComputeDevice.reclaimable": (lambda w: w.device.reclaimable, lambda x: x.pop()),
    "HostTier.reclaimable": (lambda w: w.host.reclaimable, lambda x: x.append(x[0])),
    "HostTier.pools": (lambda w: w.host.pools, lambda x: x.clear()),
    # transfers
    "Copy.target, a slot that is free": (
        lambda w: w,
        lambda w: w.run(State.LEAVING).move.transfer.copies.__setitem__(0, w.copy_to_a_free_slot()),
    ),
    # what is kept from call to call
    "LayerReader._partition": (
        lambda w: w.reader,
        lambda x: setattr(x, "_partition", Partition(x.layer.blocks.pools, x.layer.rows, [1] * x.layer.batch)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_count_that_is_wrong_is_noticed(name: str, world: World) -> None:
    where, falsify = WRONG[name]
    falsify(where(world))
    with pytest.raises(AssertionError):
        world.check()


#: What a class has that counts nothing, or that nothing else says.
NOT_COUNTED: dict[type, set[str]] = {
    BlockPool: {"layout", "allocator", "poison"},
    Budget: {"tier", "goal"},
    Workspace: {"_slabs", "_make_room", "version", "in_use", "views", "plans"},
    # The version is compared by whoever keeps something; the rest are hints for policies and for neighbours.
    BlockSet: {
        *("layer", "pools", "counters", "version", "last_used", "last_host", "last_read"),
        *("parked", "holders"),  # see test_parked.py
        "stale",  # see test_mutations.py
    },
    Pools: {"layout", "device", "host", "engine", "audit"},
    Run: {"corrupt"},
    BlockTable: {"_joined"},
    LayerKV: {
        *("index", "layout", "device", "counters", "blocks", "epoch", "shape_version", "carries_graph", "_prepared"),
        "_tails",  # see below
        *("parked", "_counted", "_counts"),  # see test_parked.py
    },
    Owner: {"counters", "uses_threads", "user", "release"},
}


@pytest.mark.parametrize("owner", NOT_COUNTED)
def test_every_count_of_a_class_is_made_wrong_above(owner: type, world: World) -> None:
    examples: dict[type, Any] = {
        BlockPool: world.device_pool,
        Budget: world.host.slabs.budget,
        Workspace: world.workspace,
        BlockSet: world.blocks,
        Pools: world.pools,
        Run: world.run(State.DEVICE),
        BlockTable: world.layer.tables[0],
        LayerKV: world.layer,
        Owner: world.owner,
    }
    found = examples[owner]
    attributes = set(getattr(owner, "__slots__", None) or vars(found))
    tried = {name.split(",")[0].split(".")[1] for name in WRONG if name.startswith(f"{owner.__name__}.")}
    assert attributes == tried | NOT_COUNTED[owner]


def test_a_writer_of_new_tokens_that_is_out_of_date_is_noticed() -> None:
    cache = TieredKVCache(block_size=4)
    for tokens in (5, 1):
        x = torch.randn(1, 1, tokens, 4)
        cache.update(x, x, 0)
    cache.check_integrity()
    tails = cache._forward.readers[0].layer._tails
    assert tails is not None
    tails._blocks[0] += 64
    with pytest.raises(AssertionError, match="new tokens go to where a block was"):
        cache.check_integrity()
