"""The walks find what they are for: without any one wait, fence, reference, lock or notice they fail, in a few seeds.

A test here that fails means that the walks went blind, or that the core does not need what is taken away: not that a
cache is wrong. What orders work on CUDA streams is taken away in `tests/transfer/test_order.py`.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import test_budget_changes
import test_later_layers
import test_parked
import test_reclaim
import test_residency
import torch
from scenes import PLACES, play, scenes
from stepped import Turns, check_lock
from transformers import Gemma3TextConfig, LlamaConfig
from walk import ENGINES, Walk

from kvtier.attention import dense, dispatch, split, streaming
from kvtier.attention.call import AttentionCall
from kvtier.attention.host_part import HostPart
from kvtier.attention.reader import LayerReader
from kvtier.forward import admission
from kvtier.forward.appending import AppendingForward
from kvtier.forward.forward import Forward
from kvtier.forward.planned import PlannedForward
from kvtier.forward.token import NextToken
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.kernels.params import AttentionParams
from kvtier.memory.access.readers import Readers, ReadFence
from kvtier.memory.admission import Admission
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet
from kvtier.memory.recovery import Recovery
from kvtier.memory.storage.buffers import IoBuffers, Workspace
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.fetching import Fetching
from kvtier.memory.tiers.host import HostTier
from kvtier.memory.tiers.room import Room
from kvtier.tables import sharing, writing
from kvtier.tables.layer import LayerKV
from kvtier.tables.parked.sequences import ParkedSequences
from kvtier.tables.table import BlockTable
from kvtier.transfer.engine import Transfer

slow = pytest.mark.slow

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
#: Seeds of each way to walk, and operations of each walk.
SEEDS, STEPS = 12, 80
#: Seconds after which a walk, which takes less than one, is one that never ends.
TIME_LIMIT = 30


def rewritten(owner: type | ModuleType, name: str, old: str, new: str, which: int = -1) -> Any:
    """The function `name` of `owner` with `old` replaced by `new` in its source, where it occurs for the `which`-th
    time; -1: everywhere. The source must contain it."""
    found = owner.__dict__[name]
    wrap = found.fget if isinstance(found, property) else found
    function = inspect.unwrap(wrap)
    source = textwrap.dedent(inspect.getsource(function))
    parts = source.split(old)
    assert len(parts) > max(which + 1, 1), f"{owner.__name__}.{name} no longer contains {old!r}: renew this mutation"
    at = range(len(parts) - 1) if which < 0 else (which,)
    source = parts[0] + "".join((new if i in at else old) + part for i, part in enumerate(parts[1:]))
    names: dict[str, Any] = {}
    exec(
        compile("from __future__ import annotations\n" + source, f"<mutated {name}>", "exec"),
        function.__globals__,
        names,
    )
    return names[name]


def edit(owner: type | ModuleType, name: str, old: str, new: str, which: int = -1) -> Mutation:
    """A mutation by rewriting one function, everywhere it was imported to."""

    def apply(patch: Patch) -> None:
        was, made = owner.__dict__[name], rewritten(owner, name, old, new, which)
        patch.setattr(owner, name, made)
        if isinstance(owner, ModuleType):
            for module in (dense, dispatch, split, streaming):
                if module.__dict__.get(name) is was:
                    patch.setattr(module, name, made)

    return apply


def gone(owner: type | ModuleType, name: str, answer: Any = None) -> Mutation:
    """A mutation: a function does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **options: answer)


def both(*mutations: Mutation) -> Mutation:
    """A mutation in several places: each is enough without the other."""

    def apply(patch: Patch) -> None:
        for mutation in mutations:
            mutation(patch)

    return apply


#: What walks of caches in one thread notice.
ALONE: dict[str, Mutation] = {
    # waits
    "nobody waits for a fetch before reading": edit(residency, "arrive", "move.transfer.wait()", "pass"),
    "wait does nothing": gone(Transfer, "wait"),
    "an eviction does not wait for the copy": edit(
        Eviction,
        "evict_run",
        "run.move.transfer.synchronize()",
        "residency._enter(run, residency.Operation.COMPLETE)",
    ),
    "a fetch does not follow the copy before": edit(residency, "fetch", "after.append(run.move.transfer)", "pass"),
    "an open block does not wait for its copy": edit(residency, "reopen", "run.move.settle()", "pass"),
    "an attention call does not say that it has ended": edit(
        LayerReader, "end", "self.memory.readers.end(reading, event)", "pass"
    ),
    # fences
    "slots under a copy are free at once": edit(residency, "free", "if under is not None:", "if False:"),
    "slots of a fetch that is given up are free at once": edit(
        residency, "evict", "fence = move if fence is None else Fences(move, fence)", "fence = None"
    ),
    "a host copy is dropped while a fetch reads it": edit(residency, "drop_copy", "if under is not None:", "if False:"),
    "held slots are handed out": edit(BlockPool, "give", "if fence is None:", "if True:"),
    # references
    "a fork counts no references": edit(BlockTable, "fork", "run.refs += 1", "pass"),
    "a shared head counts no references": edit(BlockTable, "head", "run.refs += 1", "pass"),
    "a crop forgets references": edit(BlockTable, "crop", "release(each, free)", "pass"),
    "a table that ends keeps its blocks": edit(BlockTable, "clear", "release(run, free)", "pass"),
    "a part of a run that is cut has one reference": edit(
        residency,
        "cut",
        "part.state, part.refs, part.move, part.corrupt = run.state, run.refs, run.move, run.corrupt",
        "part.state, part.refs, part.move, part.corrupt = run.state, 1, run.move, run.corrupt",
    ),
    "a table that was copied from keeps its reference": edit(writing, "writable", "release(run, device.free)", "pass"),
    # copy on write
    "a shared tail is written in place": edit(
        writing,
        "writable",
        "if run.refs > 1 or",
        "if (run.refs > 1 and (setattr(run, 'refs', 1) or False)) or",
    ),
    "an opened block keeps its host copy": edit(residency, "reopen", "drop_copy(run)", "run.state = State.DEVICE"),
    # notices: what is kept from call to call
    "a move of a run changes no version": edit(residency, "_enter", "blocks.changed()", "pass"),
    "a crop keeps the writer of the tails, and nobody asks whether they are open": both(
        edit(LayerKV, "_trim", "self._tails = None", "pass"),
        edit(
            writing.TailWriter,
            "of",
            "if any(run.state is not State.FILLING or run.refs > 1 for run in runs):",
            "if False:",
        ),
    ),
    "new rows keep the writer of the tails": edit(LayerKV, "_set_rows", "self._tails = None", "pass"),
    "new rows change no version": edit(LayerKV, "_set_rows", "self.shape_version += 1", "pass"),
    "a change is told to no policy": edit(BlockSet, "touch", "self.stale[self.layer] = None", "pass"),
    "fetched blocks are told to no policy": edit(BlockSet, "set_transient", "self.touch()", "pass"),
    "a crop changes no epoch": edit(LayerKV, "crop", "self.epoch += 1", "pass"),
    "a copy does not know what was cut": edit(residency, "cut", "[] if run.move is None else run.move.runs", "[]"),
    # failures
    "a failed copy keeps its slots": edit(residency, "_fail", "pools.host.give(run.host, run.count)", "pass"),
    "a failed fetch keeps its slots": edit(residency, "_fail", "pools.device.give(run.device, run.count)", "pass"),
    "nobody is told that a fetch failed": edit(Transfer, "settle", "error is None else self._on_failed", "True else 0"),
    "an append that failed leaves its blocks": edit(LayerKV, "append", "self._trim(self.length)", "pass"),
    # what is given back
    "a cache that is closed leaves its workspace": edit(TieredMemory, "leave", "each.release()", "pass"),
    "a cache that is closed leaves its claims": edit(
        TieredMemory, "leave", "if self._owners.pop(owner.number, None) is not None:", "if False:"
    ),
    "a cache that is dropped keeps what it has": gone(Recovery, "abandon"),
    "a workspace in use is given back": edit(
        Workspace, "release_idle", "0 if self.in_use else self.nbytes", "self.nbytes"
    ),
    # admission
    "nothing is admitted": edit(Admission, "_admit", "if demanded(limit) > limit:", "if False:"),
    "claims of others do not count": edit(Admission, "_demand", "if each in x.claims and x is not owner", "if False"),
    "a refusal leaves what came before": gone(TieredKVCache, "_roll_back"),
}

#: What walks of threads that take turns notice.
THREADS: dict[str, Mutation] = {
    "attention does not say that it reads": edit(
        LayerReader, "begin", "None if memory.private else memory.readers.begin()", "None"
    ),
    "an attention call ends before it reads": edit(
        split,
        "attend",
        "reading = reader.begin()",
        ("reading = reader.begin(); reader.memory.readers.end(reading); reading = None"),
    ),
    "slots are not held for readers": gone(Readers, "fence"),
    "a fence does not ask whether readers have ended": edit(
        ReadFence, "_over", "all(reading.over for reading in self._readings)", "True"
    ),
    "an eviction holds no slots": edit(residency, "evict", "run.count, fence)", "run.count)"),
    "a host copy that is dropped holds no slots": edit(
        HostTier, "_drop_copy", "residency.drop_copy(run, self._readers.fence())", "residency.drop_copy(run)"
    ),
    "a fetch that is given up holds no slots for readers": edit(
        residency, "evict", "move if fence is None else Fences(move, fence)", "move"
    ),
    "nobody waits for a fetch that another thread gives up": edit(split, "arrive", "move.transfer.wait()", "pass"),
    "blocks move under readers": edit(Room, "_reclaim", "elif not self._tier.readers.wait():", "else:"),
    "blocks move under readers on the host": edit(HostTier, "_reclaim", "elif not self._readers.wait():", "else:"),
    "who waits for readers is not told that they ended": edit(Readers, "end", "self._ended.notify_all()", "pass"),
    "addresses are looked up after the lock": edit(
        LayerReader,
        "portions",
        "yield places",
        "yield [Place(x.run.home, x.run.count, x.index, x.rows) for x in ready]",
    ),
    "a buffer is given back in the midst of a call": edit(
        IoBuffers, "release_idle", "0 if self.in_use else self.nbytes", "self.nbytes"
    ),
    "a workspace is given back in the midst of a call": ALONE["a workspace in use is given back"],
}

#: What no walk comes by within a few seeds, and the test that does.
DIRECTED: dict[str, tuple[Mutation, Callable[[], None]]] = {
    "slots that were taken for what has come meanwhile are lost": (
        edit(Fetching, "_slots_for", "pools.device.give(start, n, self._tier.fence())", "pass"),
        test_reclaim.test_slots_for_what_another_thread_has_fetched_meanwhile_are_given_back,
    ),
    "what makes room gives no fetch up where the host is full": (
        both(
            edit(Room, "_reclaim", "if not self._eviction.cancel() and", "if True and"),
            gone(HostTier, "_await_copies", False),
        ),
        test_reclaim.test_a_full_host_makes_a_device_give_its_fetches_up,
    ),
    "a full host waits for no copy": (
        gone(HostTier, "_await_copies", False),
        lambda: test_budget_changes.test_copies_that_are_under_way_refuse_no_budget(0.0),
    ),
    "free room of other layouts is not gathered": (
        gone(Room, "_gather", False),
        lambda: test_budget_changes.test_what_a_resize_names_suffices_where_room_is_scattered_over_layouts(10),
    ),
    "what is continued is claimed by nobody": (
        edit(ParkedSequences, "_used", "if counts:", "if False:"),
        test_parked.test_what_several_caches_continue_is_there_once_and_claimed_once,
    ),
    "what is parked is never given up": (
        gone(ParkedSequences, "give", False),
        test_parked.test_what_is_parked_goes_before_a_cache_is_refused,
    ),
    "a copied tail is counted for nobody": (
        edit(sharing, "blocks_needed", " or tail.blocks.parked", ""),
        lambda: test_parked.test_a_part_of_a_block_is_continued_in_a_copy_that_was_asked_for(1, True),
    ),
    "what a copy uses may move": (
        edit(residency, "can_move", " and _under(run) is None", ""),
        test_residency.test_a_fetch_that_the_compute_stream_waits_for_has_arrived_and_still_reads_the_host_slots,
    ),
    "a second layer is not compared with the first": (
        edit(AppendingForward, "_append", "self._differs(groups)", "self._admitted and self._differs(groups)"),
        test_later_layers.test_a_second_layer_whose_rows_share_less_is_admitted_anew,
    ),
    "rows of a layer that is empty count": (
        edit(admission, "claim", "layer.rows if layer.length else ()", "layer.rows"),
        test_later_layers.test_a_cache_that_was_cropped_to_nothing_claims_what_a_new_one_claims,
    ),
}

#: What walks notice of caches that park what they hold, and continue what is parked.
PARKED: dict[str, Mutation] = {
    "a parked block that one cache holds is written": edit(writing, "writable", " or run.blocks.parked", ""),
    "whoever continues parked blocks does not hear that they moved": edit(
        BlockSet, "changed", "blocks.version += 1", "pass"
    ),
    "whoever continues parked blocks tells no policy that they moved": edit(
        BlockSet, "changed", "blocks.touch()", "pass"
    ),
    "parked blocks that a cache has written to keep its reference": edit(
        writing, "writable", "release(run, device.free)", "pass"
    ),
    "a cache that ends keeps its parked blocks": edit(LayerKV, "forget", "release(run, self.device.free)", "pass"),
    "blocks that are parked are counted in two sets": edit(
        residency, "adopt", "before.counts[run.state] -= run.count", "pass"
    ),
}

#: Where the lock is taken, and under which names.
TAKERS: tuple[type | ModuleType, ...] = (
    *(TieredMemory, Forward, AppendingForward, PlannedForward, NextToken, LayerReader),
    *(split, AttentionCall, HostPart, dense),
)
NAMES = (
    *("lock", "memory.lock", "self.lock", "self.memory.lock", "reader.memory.lock", "self.reader.memory.lock"),
    *("self.lock, self.change", "self.memory.lock, self.memory.change", "self._of.reader.memory.lock"),
)


def locks() -> Iterator[tuple[str, Mutation]]:
    """Each place that takes the lock, without it."""
    for owner in TAKERS:
        for name, found in owner.__dict__.items():
            function = inspect.unwrap(found.fget if isinstance(found, property) else found)
            home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
            if not inspect.isfunction(function) or function.__module__ != home:
                continue
            if name in ("drain", "check_integrity"):  # those are called where nobody else is at work
                continue
            for text in (f" with {lock}:" for lock in NAMES):
                for i in range(inspect.getsource(function).count(text)):
                    yield f"{owner.__name__.split('.')[-1]}.{name}, {i}", edit(owner, name, text, " if True:", i)


LOCKS = dict(locks())


def alone(seed: int, engine: str) -> None:
    """A walk in one thread."""
    trip = Walk(900 + seed, ENGINES[engine](seed), members=3)
    for _ in range(STEPS):
        trip.step()
    trip.end()


def parking(seed: int, engine: str) -> None:
    """The same of caches that park, in one thread and in several."""
    for members, turns in ((4, None), (3, Turns(seed, chance=0.5))):
        trip = Walk(900 + seed, ENGINES[engine](seed), members=members, turns=turns, parking=True)
        if turns is not None:
            trip.run_in_turns(STEPS // 4)
            continue
        for _ in range(STEPS):
            trip.step()
        trip.end()


def in_turns(seed: int, engine: str) -> None:
    """A walk of threads, and what no walk comes by, with the lock looked after."""
    with Patch.context() as patch:
        turns = Turns(seed, chance=0.5)
        trip = Walk(900 + seed, ENGINES[engine](seed), members=3, turns=turns)
        check_lock(patch, turns)
        aside(trip.memory)
        trip.run_in_turns(STEPS // 4)


def in_scenes(seed: int, engine: str) -> None:
    """What one thread may do in the midst of another's reading; and then random walks."""
    if not seed and engine == "held":
        for read, act in scenes():
            for place in range(PLACES):
                if not play(read, act, place):
                    break
    in_turns(seed, engine)


def aside(memory: TieredMemory) -> None:
    """Layers that are made early, assigned to, looked at, and of other kinds."""
    x = torch.ones(1, 1, 3, 4)
    with TieredKVCache(LlamaConfig(num_hidden_layers=1), memory=memory) as cache:
        cache.layers[0].lazy_initialization(x, x)
        cache.update(x, x, 0)
        with memory.lock:
            parked = ParkedSequences(memory)
        sequence = cache._forward.park(parked, 0, 2)
        with TieredKVCache(LlamaConfig(num_hidden_layers=1), memory=memory) as other:
            assert other._forward.follow(parked, [sequence], 2) == 2
        with memory.lock:
            parked.drop(sequence)
        cache.layers[0].keys = 2 * x
        assert cache.stats.steps == 1
        assert cache.residency().layers[0].tokens == 3
        cache.check_integrity()
        cache.explain()
        cache.layers[0].reset()
    with memory.lock, memory.change:
        parked.close()
    with TieredKVCache(LlamaConfig(num_hidden_layers=1), memory=memory, block_size=1) as cache:
        cache.update(x, x, 0)
        reader = cache._forward.readers[0]
        with memory.lock, memory.change:
            assert reader.device.evict_from(reader.layer.blocks, 1) == 1
            parked = ParkedSequences(memory)
        split.attend(reader, 3, x[:, :, :1], AttentionParams(0.5), pause=lambda: None)
        head, tail = cache._forward.park(parked, 0, 2), cache._forward.park(parked, 0, 1, 2)
        with TieredKVCache(LlamaConfig(num_hidden_layers=1), memory=memory, block_size=1) as other:
            assert other._forward.follow(parked, [head], 2) == 2
            assert other._forward.follow_on(parked, tail, 1) == 1
        with memory.lock:
            parked.drop(head)
            parked.drop(tail)
    with memory.lock, memory.change:
        parked.close()
    memory.reset_if_unused()
    assert memory.totals().steps > 0
    unused = TieredMemory(host_budget="1MiB")
    unused.lock = unused.recovery.lock = memory.lock  # type: ignore[assignment]
    unused.reset_if_unused()
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=8)
    with TieredKVCache(config, memory=memory) as cache:
        for _ in range(2):
            for i in range(2):
                cache.update(x, x, i)


def noticed(walk: Callable[[int, str], None]) -> BaseException | None:
    """What the first walk that fails, or does not end, fails with."""
    for seed in range(SEEDS):
        for engine in ("held", "asynchronous", "failing", "late", "held, any order"):
            try:
                with ending():
                    walk(seed, engine)
            except Exception as error:
                return error
    return None


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Raise in this thread what does not end."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"nothing has ended for {TIME_LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(TIME_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def kept(monkeypatch: Patch) -> list[torch.Tensor]:
    """Memory that is given back too early is there still, so that who reads it finds NaN and does not crash."""
    found: list[torch.Tensor] = []
    release = SlabAllocator.release

    def released(slabs: SlabAllocator, slab: torch.Tensor) -> None:
        found.append(slab)
        release(slabs, slab)

    monkeypatch.setattr(SlabAllocator, "release", released)
    return found


@slow
@pytest.mark.parametrize("mutation", ALONE)
def test_a_broken_memory_makes_a_walk_fail(mutation: str, monkeypatch: Patch) -> None:
    ALONE[mutation](monkeypatch)
    assert noticed(alone) is not None


@slow
@pytest.mark.parametrize("mutation", THREADS)
def test_a_broken_memory_makes_a_walk_of_threads_fail(mutation: str, monkeypatch: Patch) -> None:
    THREADS[mutation](monkeypatch)
    assert noticed(in_scenes) is not None


@slow
@pytest.mark.parametrize("mutation", PARKED)
def test_a_broken_memory_makes_a_walk_of_parked_sequences_fail(mutation: str, monkeypatch: Patch) -> None:
    PARKED[mutation](monkeypatch)
    assert noticed(parking) is not None


@slow
@pytest.mark.parametrize("mutation", DIRECTED)
def test_a_broken_memory_makes_a_test_of_its_own_fail(mutation: str, monkeypatch: Patch) -> None:
    mutate, test = DIRECTED[mutation]
    test()
    mutate(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test()


@slow
@pytest.mark.parametrize("place", LOCKS)
def test_a_lock_that_is_not_taken_makes_a_walk_of_threads_fail(place: str, monkeypatch: Patch) -> None:
    LOCKS[place](monkeypatch)
    assert "without the memory's lock" in str(noticed(in_turns))


@slow
@pytest.mark.parametrize("walk", [alone, in_scenes, parking])
def test_nothing_broken_makes_no_walk_fail(walk: Callable[[int, str], None]) -> None:
    error = noticed(walk)
    if error is not None:
        raise error


def test_what_mutations_change_is_where_they_look_for_it() -> None:
    """The tests above are slow; a mutation that changes nothing any more would be found by them alone."""
    for name, mutate in {**ALONE, **THREADS, **PARKED, **{k: v for k, (v, _) in DIRECTED.items()}, **LOCKS}.items():
        with Patch.context() as patch:
            try:
                mutate(patch)
            except Exception as error:
                raise AssertionError(f"renew the mutation {name!r}") from error
