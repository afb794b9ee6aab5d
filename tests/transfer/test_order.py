"""Who touches the same bytes is ordered: real caches over the real CUDA engine and a model of streams.

No race is found wherever blocks are and whatever moves them; without any one edge the pair of accesses races that it
orders. A test of a lost edge that fails means that the model went blind or that an edge moved, not that there is a
race.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conversations import (
    BLOCK,
    DIM,
    HEADS,
    SLOT,
    STEPS,
    Conversation,
    Patch,
    always_packing,
    begins_at_once,
    by_both,
    by_launch,
    edit,
    in_torch,
    through_tables,
)
from stream_model import COMPUTE, Race, StreamModel
from torch.nn import functional as F

from kvtier import TieredKVCache
from kvtier.attention.host_part import HostPart
from kvtier.attention.reader import LayerReader
from kvtier.cpu import native
from kvtier.memory.blocks import residency
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.fetching import Fetching
from kvtier.memory.tiers.room import Room
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.planning.policy import Policy
from kvtier.stats import Counters
from kvtier.tables.layer import LayerKV
from kvtier.testing import held, with_doubles
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction
from kvtier.transfer.launches import Launches

FETCH, WRITE_BACK, QUERY, RESULT = Direction
CPU = torch.device("cpu")

# Nothing races

#: Where the CPU waits for a query: without the lock, so that others go on, then with it.
QUERY_WAIT = "self._down.block()\n    with self._of.reader.memory.lock:\n        self._down.synchronize()"

#: Who attends, and what of `cache.stats` shows that the conversation came by.
WAYS: dict[str, tuple[bool, Callable[[Patch], None] | None, tuple[str, ...]]] = {
    "fetched": (False, None, ("promotions", "prefetched", "moved_blocks")),
    "fetched and packed": (False, always_packing, ("promotions", "prefetched", "moved_blocks")),
    "host threads": (True, None, ("host_attended", "block_fetches")),
    "host in torch": (True, in_torch, ("host_attended", "block_fetches")),
    "device kernels": (True, through_tables, ("host_attended", "block_fetches", "prefetched")),
    "fetched by launches": (False, by_launch, ("promotions", "prefetched", "moved_blocks")),
    "fetched both ways": (False, by_both, ("promotions", "prefetched", "moved_blocks")),
    "host threads, launches": (True, by_launch, ("host_attended", "block_fetches")),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_whoever_attends_nothing_races(way: str) -> None:
    host, change, counted = WAYS[way]
    seen = dict.fromkeys(("evictions", "bytes_down", *counted), 0)
    actors: set[str] = set()
    launches = 0
    for seed in range(3):
        with Patch.context() as patch:
            if change is not None:
                change(patch)
            with StreamModel(seed, patch, eagerness=(0.3, 0.0, 0.9)[seed]) as model:
                talk = Conversation(model, seed, host_attention=host, poison=seed == 0)
                for _ in range(STEPS):
                    talk.step()
                talk.cache.check_integrity()
                stats = talk.cache.stats
                talk.cache.close()
                assert not model.races  # one found within a transfer is a failed transfer to whoever submitted it
        seen = {name: count + getattr(stats, name) for name, count in seen.items()}
        actors |= {kind.rsplit(" ", 1)[0] for kind in model.accesses}
        launches += model.launches
    assert actors >= {"compute", "host", "fetch", "write_back"} | ({"query", "result"} if host else set())
    assert (launches > 0) == (change in (by_launch, by_both))
    assert all(seen.values()), f"these conversations no longer reach everything: {seen}"


# Without an edge something does


@dataclass(frozen=True)
class Lost:
    """An edge that is taken away.

    Attributes:
        changes: of the code.
        pair: who races then, the earlier first.
        host: whether host threads attend.
    """

    changes: tuple[Callable[[Patch], None], ...]
    pair: tuple[str, str]
    host: bool = False


BEHIND = "(self.mark(),) if behind is None else behind"
OVERWRITTEN = ("compute reads", "fetch writes")
EDGES: dict[str, Lost] = {
    # A fetch into a slot begins behind the last attention that read the slot.
    "fetch: behind its events": Lost((begins_at_once(FETCH),), OVERWRITTEN),
    "fetch: the fence of a fetched block that was read": Lost(
        (edit(LayerReader, "retire", "self.device.fence(part.blocks)", "None"),), OVERWRITTEN
    ),
    "fetch: the fence of an evicted block": Lost(
        (edit(Eviction, "evict_run", "self._tier.fence(run.blocks)", "None"),), OVERWRITTEN
    ),
    "fetch: the event of every attention": Lost(
        (
            edit(
                LayerReader,
                "end",
                "blocks.last_read = engine.mark()",
                "blocks.last_read = blocks.last_read or engine.mark()",
            ),
        ),
        OVERWRITTEN,
    ),
    "fetch: the event that a held slot was taken behind": Lost(
        (edit(BlockPool, "_take_held", "behind.append(event)", "pass"),), OVERWRITTEN
    ),
    "fetch: what was done in new memory": Lost(
        (edit(Room, "grow", "self._tier.note_writes()", "pass"),), ("compute writes", "fetch writes")
    ),
    # A read happens behind its fetch.
    "read: the wait for what arrives": Lost(
        (edit(residency, "arrive", "move.transfer.wait()", "pass"),), ("fetch writes", "compute reads")
    ),
    "read: the wait of the stream": Lost(
        (edit(CudaTransfers, "_wait", "stream.wait_event(ended)", "pass"),), ("fetch writes", "compute reads")
    ),
    # A write-back reads what was written, and what it reads stays until it has ended.
    "write-back: behind its writer": Lost((begins_at_once(WRITE_BACK),), ("compute writes", "write_back reads")),
    "write-back: the fence of its blocks when they are freed": Lost(
        (edit(residency, "free", "_under(run)", "None"),), ("write_back reads", "compute writes")
    ),
    "write-back: its end before a block is opened again": Lost(
        (edit(residency, "reopen", "run.move.settle()", "run.move.transfer.settle()"),),
        ("write_back reads", "compute writes"),
    ),
    # Who reads the host's copy knows that it is there.
    "host: the end of the write-back": Lost(
        (edit(Eviction, "evict_run", "run.move.transfer.synchronize()", "run.move.transfer.settle()"),),
        ("write_back writes", "host threads reads"),
        host=True,
    ),
    "host: the end of the write-back, for a fetch": Lost(
        (edit(Eviction, "evict_run", "run.move.transfer.synchronize()", "run.move.transfer.settle()"),),
        ("write_back writes", "fetch reads"),
    ),
    "poll: what has ended": Lost(
        (
            edit(CudaTransfers, "poll", "ticket.ended.query()", "True"),
            edit(CudaTransfers, "_count", "seconds = ticket.began.elapsed_time(ticket.ended) / 1e3", "seconds = 0.0"),
        ),
        ("write_back reads", "fetch writes"),
    ),
    # Queries down, results up.
    "query: behind its writer": Lost((begins_at_once(QUERY),), ("compute writes", "query reads"), True),
    "query: its end before threads read it": Lost(
        (
            edit(
                HostPart,
                "_receive",
                QUERY_WAIT,
                QUERY_WAIT.replace("self._down.block()", "self._down.wait()").replace(
                    "self._down.synchronize()", "pass"
                ),
            ),
        ),
        ("query writes", "host threads reads"),
        True,
    ),
    "query: the job's end before the next one": Lost(
        (
            edit(HostPart, "wait", "self._future.wait()", "self._future.done()"),
            edit(HostPart, "end", "self._future.wait()", "self._future.done()"),
        ),
        ("host threads reads", "query writes"),
        True,
    ),
    "result: the job's end": Lost(
        (
            edit(HostPart, "wait", "self._future.wait()", "self._future.done()"),
            edit(HostPart, "end", "self._future.wait()", "self._future.done()"),
        ),
        ("host threads writes", "result reads"),
        True,
    ),
    "result: its end before it is read": Lost(
        (edit(HostPart, "result", "back.wait()", "pass"),), ("result writes", "compute reads"), True
    ),
    "result: its end before the next one is written": Lost(
        (edit(HostPart, "_receive", QUERY_WAIT, "pass"),),
        ("result reads", "host threads writes"),
        True,
    ),
}
#: How the addresses of a launch may be written over while it may still read them.
ADDRESSES = {
    "are used again at once": edit(
        CudaTransfers,
        "_start",
        "ticket.ended.record(stream)\n        ticket.whole",
        "self._launches.release(ticket.batches)\n        ticket.ended.record(stream)\n        ticket.whole",
    ),
    "belong to whoever comes next": edit(Launches, "_take", "self._spare.pop(i)", "addresses"),
}


def races(lost: Lost, seeds: int = 40) -> set[tuple[str, str]]:
    """The pairs that race in some conversations, until the one that is looked for does."""
    found: set[tuple[str, str]] = set()
    for seed in range(seeds):
        with Patch.context() as patch:
            for change in lost.changes:
                change(patch)
            # Events as late as can be: what the CPU learns by luck orders much.
            with StreamModel(seed, patch, eagerness=0.05, strict=False) as model:
                talk = Conversation(model, seed, host_attention=lost.host)
                for _ in range(STEPS):
                    talk.step()
                    if lost.pair in model.pairs:
                        break
                talk.cache.close()
        found |= model.pairs
        if lost.pair in found:
            break
    return found


@pytest.mark.parametrize("name", EDGES)
@torch.no_grad()
def test_without_an_edge_the_pair_that_it_orders_races(name: str) -> None:
    lost = EDGES[name]
    if lost.host and not native.available():
        pytest.skip("the native library is not compiled")
    assert lost.pair in races(lost)


@pytest.mark.parametrize(
    "name", ["fetch: behind its events", "read: the wait of the stream", "write-back: behind its writer"]
)
@torch.no_grad()
def test_without_an_edge_launches_race_as_copies_do(name: str, monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    assert EDGES[name].pair in races(EDGES[name])


@pytest.mark.parametrize("lost", [None, *ADDRESSES])
@torch.no_grad()
def test_addresses_are_not_written_over_while_a_launch_may_read_them(lost: str | None, monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    changes = () if lost is None else (ADDRESSES[lost],)
    pair = ("fetch reads", "host writes")
    assert (pair in races(Lost(changes, pair), seeds=8 if lost else 1)) == (lost is not None)


# The engine alone


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("lost", [False, True])
def test_no_copy_overtakes_the_compute_stream(direction: Direction, lost: bool, monkeypatch: Patch) -> None:
    up = direction in (FETCH, RESULT)
    pair = ("compute reads", f"{direction} writes") if up else ("compute writes", f"{direction} reads")
    if lost:
        begins_at_once(direction)(monkeypatch)
    with StreamModel(0, monkeypatch, strict=False) as model:
        host, device = torch.empty(8), torch.empty(8)
        model.watch(host, "host buffer")
        engine = model.engine(CPU)
        if up:
            device.sum()
        else:
            device.fill_(1)
        copy = TensorCopy(host, device) if up else TensorCopy(device, host)
        engine.submit([copy], direction, Counters())
        engine.close()
    assert model.pairs == ({pair} if lost else set())


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_begins_behind_the_events_that_it_is_given_and_nothing_later(lost: bool, monkeypatch: Patch) -> None:
    """Two halves of a buffer are read one after the other: the copy into the first waits for its reader alone."""
    if lost:
        begins_at_once(FETCH)(monkeypatch)
    with StreamModel(0, monkeypatch, strict=False) as model:
        device, host = torch.zeros(8), torch.ones(8)
        model.watch(host, "host buffer")
        engine = model.engine(CPU)
        device[:4].sum()
        read = engine.mark()
        device[4:].sum()
        now = model.compute.clock[COMPUTE]
        engine.submit([TensorCopy(host[:4], device[:4])], FETCH, Counters(), behind=[read])
        stream = engine._streams[FETCH]
        assert stream.clock.get(COMPUTE, 0) == (0 if lost else read.recorded.clock[COMPUTE]) < now
        assert (OVERWRITTEN in model.pairs) == lost
        engine.submit([TensorCopy(host[4:], device[4:])], FETCH, Counters(), behind=[read])
        assert OVERWRITTEN in model.pairs, "that one has no event of its reader"
        engine.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_begins_behind_the_transfers_that_it_comes_after(lost: bool, monkeypatch: Patch) -> None:
    if lost:
        edit(CudaTransfers, "_start", "stream.wait_event(earlier.ticket.ended)", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        one, middle, other = torch.ones(8), torch.zeros(8), torch.empty(8)
        model.watch(middle, "host buffer")
        engine = model.engine(CPU)
        down = engine.submit([TensorCopy(one, middle)], WRITE_BACK, Counters())
        up = engine.submit([TensorCopy(middle, other)], FETCH, Counters(), after=[down], behind=[])
        up.wait()
        other.sum()
        engine.close()
    assert model.pairs == ({("write_back writes", "fetch reads")} if lost else set())


def test_a_mark_that_nobody_holds_is_recorded_again_and_one_that_is_held_stays(monkeypatch: Patch) -> None:
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        engine = model.engine(CPU)
        held = engine.mark()
        event, before = held.recorded, dict(held.recorded.clock)
        for _ in range(3):
            torch.zeros(2).sum()
            assert engine.mark().recorded is not event
        assert event.clock == before
        assert len(engine._spare_marks) == 1, "the others took turns with one event"
        del held
        assert len(engine._spare_marks) == 2
        engine.close()


def test_a_transfer_that_fails_has_waited_for_what_it_would_have_begun_behind(monkeypatch: Patch) -> None:
    """Its slots are given back at once: their last reader must have ended."""
    by_launch(monkeypatch)
    monkeypatch.setattr(Launches, "divide", lambda self, copies, direction: 1 / 0)
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        device, host = torch.zeros(8), torch.ones(8)
        model.watch(host, "host buffer")
        engine = model.engine(CPU)
        device.sum()
        read = engine.mark()
        transfer = engine.submit([TensorCopy(host, device)], FETCH, Counters(), behind=[read])
        assert not transfer.pending
        known = model.host[COMPUTE]
        assert known >= read.recorded.clock[COMPUTE]
        engine.close()


# How far ahead


class Ahead:
    """For each fetch, how much of the compute stream's work it does not wait for."""

    def __init__(self, model: StreamModel, patch: Patch) -> None:
        self.left: list[int] = []
        submit = CudaTransfers._start

        def started(engine: CudaTransfers, transfer: object, behind: object) -> None:
            submit(engine, transfer, behind)  # type: ignore[arg-type]
            if transfer.direction is FETCH:  # type: ignore[attr-defined]
                began = transfer.ticket.began.clock.get(COMPUTE, 0)  # type: ignore[attr-defined]
                self.left.append(model.compute.clock[COMPUTE] - began)

        patch.setattr(CudaTransfers, "_start", started)


@pytest.mark.parametrize("precise", [True, False])
@torch.no_grad()
def test_a_fetch_does_not_wait_for_what_was_submitted_since_its_slots_were_read(
    precise: bool, monkeypatch: Patch
) -> None:
    if not precise:
        edit(CudaTransfers, "_start", BEHIND, "(self.mark(),)")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        ahead = Ahead(model, monkeypatch)
        talk = Conversation(model, 1, host_attention=False)
        talk.forward(60)
        for _ in range(12):
            talk.forward(1)
        talk.cache.close()
    assert len(ahead.left) > 12
    assert (max(ahead.left) > 0) == precise


# One slot after the other


class NothingAhead(Policy):
    """Writes nothing back before it is evicted."""

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        return 0


class Slots:
    """A memory over the model, with room on the device for six blocks.

    Attributes:
        memory: with the compute device `device`.
    """

    def __init__(self, model: StreamModel) -> None:
        self.memory = TieredMemory(device_budget=6 * SLOT, host_budget=20 * SLOT, policy=NothingAhead())
        self.memory.set_up(model.engine)
        self.owner = self.memory.join()
        self.layers: list[LayerKV] = []
        with self.memory.lock:
            self.device = self.memory.on(CPU)

    def layer(self, blocks: int) -> LayerKV:
        """One more layer, of so many full blocks."""
        layout = BlockLayout(HEADS, HEADS, DIM, DIM, BLOCK, torch.float32)
        owned = self.memory.block_set(self.owner, self.device, layout, len(self.layers))
        self.layers.append(LayerKV(len(self.layers), layout, self.device, owned, self.owner.counters))
        x = torch.randn(1, HEADS, blocks * BLOCK, DIM)
        self.layers[-1].append(x, x, self.layers[-1].group(x, x)[0])
        return self.layers[-1]

    def attend(self, layer: LayerKV) -> None:
        """Something on the compute stream reads what is on the device; behind it is a mark, as behind attention."""
        for run in layer.runs():
            if run.device is not None:
                residency.arrive(run)
                pool = layer.blocks.pools.device
                assert pool is not None
                pool.keys(run.device, run.count).sum()
        layer.blocks.last_read = self.device.engine.mark()

    def evict(self, layer: LayerKV, blocks: int) -> None:
        """The first blocks leave the device; the CPU does not learn of what else is done."""
        self.device.evict_from(layer.blocks, blocks)

    def fetch(self, layer: LayerKV) -> int:
        """All that there is room for. Returns how many blocks."""
        return sum(run.count for run in self.device.fetch(list(layer.runs()), 6, layer.blocks, evict=False))


def freed(model: StreamModel) -> None:
    """Blocks are dropped while they may be read, and others are fetched into their slots."""
    slots = Slots(model)
    with slots.memory.lock:
        spilled = slots.layer(3)
        slots.evict(spilled, 3)
        other = slots.layer(6)
        slots.attend(other)
        other.crop(3 * BLOCK)
        assert slots.fetch(spilled) == 3


def interrupted(model: StreamModel) -> None:
    """Blocks have left while they may be read; after an interrupt their slots are free."""
    slots = Slots(model)
    with slots.memory.lock:
        first = slots.layer(6)
        slots.device.write_back(first.blocks, 6)
        slots.device.engine.drain()
        slots.attend(first)
        slots.evict(first, 3)
        pool = first.blocks.pools.device
        assert pool is not None
        assert pool.held == 3
        slots.memory.recovery.interrupted = True
        slots.memory.recovery.collect()
        assert pool.held == 0
        assert slots.fetch(first) == 3


def packed(model: StreamModel) -> None:
    """Blocks move to gaps, then leave: the next fetch goes where they were, or to where they moved."""
    slots = Slots(model)
    with slots.memory.lock:
        first, other = slots.layer(3), slots.layer(3)
        for layer in (first, other):
            slots.device.write_back(layer.blocks, 3)
        slots.device.engine.drain()
        slots.attend(other)
        slots.evict(first, 3)
        slots.device.engine.drain()
        model.compute.synchronize()
        slots.device.poll()
        slots.device.fetching._scattered = True
        slots.device.fetching._until_pack = 0
        slots.device.fetching._pack(first.blocks.pools, None)
        assert slots.owner.counters.moved_blocks == 3
        slots.evict(other, 3)
        assert slots.fetch(first) == 3
        assert slots.fetch(other) == 3


def renewed(model: StreamModel) -> None:
    """Memory that kernels in flight still use is handed out again, and fetched into."""
    slots = Slots(model)
    with slots.memory.lock:
        first = slots.layer(6)
        slots.evict(first, 6)
        model.compute.synchronize()
        slots.device.poll()
        pool = first.blocks.pools.device
        assert pool is not None
        pool.retire_free()
        torch.randn(100).sum()
        assert slots.fetch(first) > 0


SCENES: dict[str, tuple[Callable[[StreamModel], None], Callable[[Patch], None], set[tuple[str, str]]]] = {
    "the fence of freed slots": (freed, edit(ComputeDevice, "free", "self.fence()", "None"), {OVERWRITTEN}),
    "the order behind an interrupt": (
        interrupted,
        edit(DeviceTier, "recount", "self.note_writes()", "pass"),
        {OVERWRITTEN},
    ),
    "the order behind moves": (
        packed,
        edit(Fetching, "_pack", "self._tier.note_writes()", "pass"),
        {("compute writes", "fetch writes")},
    ),
    "the order behind new memory": (
        renewed,
        edit(Room, "grow", "self._tier.note_writes()", "pass"),
        {("compute writes", "fetch writes")},
    ),
}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_a_fetch_overtakes_nothing_in_its_slots(scene: str, lost: bool, monkeypatch: Patch) -> None:
    play, change, pairs = SCENES[scene]
    if lost:
        change(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        play(model)
        gc.collect()  # under the model: what a memory gives back asks its engine
    assert model.pairs >= pairs if lost else not model.pairs


@pytest.mark.parametrize("late", [False, True], ids=["inline", "late"])
def test_slots_of_a_fetch_that_nobody_wants_any_more_are_no_reason_to_refuse(late: bool) -> None:
    """What fits must not depend on when copies end."""
    cache = TieredKVCache(device_budget=6 * SLOT, host_budget=2 * SLOT, block_size=BLOCK, policy=NothingAhead())
    if late:
        with_doubles(cache, held(0, eagerness=0.0, late=True))
    tokens = torch.randn(1, HEADS, 4 * BLOCK, DIM)
    cache.update(tokens, tokens, 0)
    forward = cache._forward
    layer, (device,) = forward.readers[0].layer, forward.memory.devices
    with forward.memory.lock:
        device.evict_from(layer.blocks, 2)
        assert len(device.fetch(list(layer.runs())[:1], 2, layer.blocks, evict=False)) == 1
    cache.crop(1 - 4 * BLOCK)
    assert bool(device.engine.in_flight()) == late
    for count in (BLOCK - 1, *[BLOCK] * 6):
        cache.update(tokens[:, :, :count], tokens[:, :, :count], 0)
    assert cache.get_seq_length() == 7 * BLOCK
    cache.check_integrity()
    cache.close()


# The end


@pytest.mark.parametrize("launches", [False, True], ids=["copies", "launches"])
@torch.no_grad()
def test_memory_is_not_given_back_under_a_copy(launches: bool, monkeypatch: Patch) -> None:
    if launches:
        by_launch(monkeypatch)
    edit(DeviceTier, "close", "self.engine.close()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        talk = Conversation(model, 0, host_attention=False)
        talk.forward(40)
        talk.forward(1)
        with pytest.raises(Race, match="given back"):
            talk.cache.close()


@pytest.mark.parametrize("polls", [True, False])
@torch.no_grad()
def test_results_that_were_read_do_not_pile_up(polls: bool, monkeypatch: Patch) -> None:
    """A transfer that has ended holds on to its tensors until somebody asks; a block may take long to fill."""
    if not polls:
        edit(HostPart, "begin", "reader.device.engine.poll()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=1.0) as model:
        cache = TieredKVCache(device_budget=40_000, host_budget=10**6, block_size=64, host_attention=True)
        with_doubles(cache, model.engine)
        tokens = torch.randn(1, HEADS, 640, DIM)
        cache.update(tokens, tokens, 0)
        one = torch.randn(1, HEADS, 1, DIM)
        for _ in range(20):
            F.scaled_dot_product_attention(one, *cache.update(one, one, 0))
        (device,) = cache._forward.memory.devices
        in_flight = len(device.engine.in_flight())
        assert cache.stats.host_attended == 20
        assert in_flight <= 1 if polls else in_flight >= 19
        cache.close()
