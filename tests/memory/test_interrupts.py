"""An interrupt at any line, in the middle of anything: what others hold is as it was, no byte is lost, and every count
is right again by the next use."""

from __future__ import annotations

import copy
import dis
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kvtier
from kvtier import InterruptedStepError, MemoryInUseError, TieredKVCache, TieredMemory
from kvtier.memory.storage.buffers import IoBuffer, IoBuffers, Workspace
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool, Slab
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.testing import held, throttled, with_doubles
from kvtier.transfer.copies import Copy, Span
from kvtier.transfer.engine import Direction, InlineTransfers

PACKAGE = str(Path(kvtier.__file__).parent)
HEADS, DIM, BLOCK, TOKENS = 1, 4, 4, 26
SLOT = 2 * HEADS * DIM * BLOCK * 4


LETTING_GO = ("release", "_release_save", "_acquire_restore")


@functools.cache
def leaving(code: Any) -> frozenset[int]:
    """Where no signal comes in this code: where a `with` statement leaves its block, before it has; and before a lock
    is let go of or taken again, if that is the first call behind the one after which a signal was looked for last."""
    found, instructions = set(), list(dis.get_instructions(code))
    for i, first in enumerate(instructions):
        called = itertools.takewhile(lambda x: x.opname.startswith("LOAD") or x.opname == "NOP", instructions[i:])
        if first.starts_line and any(x.argval in LETTING_GO for x in called):
            found.add(first.offset)
        if first.opname == "NOP":  # of `try:`, which cannot raise
            found.add(first.offset)
        three = instructions[i : i + 3]
        if len(three) == 3 and all(x.opname == "LOAD_CONST" and x.argval is None for x in three):
            found.add(first.offset)
            if i and instructions[i - 1].opname == "SWAP":  # it returns a value
                found.add(instructions[i - 1].offset)
    return frozenset(found)


class Line:
    """Raises an interrupt in the place of the `at`-th line of the package that runs while this is the tracer.

    Attributes:
        kind: what it raises.
        where: that line; None as long as it was not reached.
    """

    def __init__(self, at: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.left = at
        self.kind = kind
        self.where: str | None = None

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """Trace one event."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and self.where is None and frame.f_lasti not in leaving(frame.f_code):
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise self.kind
        return self

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Here it may come; and it gets out."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        except BaseException as error:  # its kind may be one that the package says in words of its own
            if self.where is None or (not isinstance(error, self.kind) and not isinstance(error.__cause__, self.kind)):
                raise
        finally:
            sys.settrace(before)


class World:
    """A memory that is too small for all that two caches hold, and what they hold."""

    def __init__(self, engine: str, *, host_attention: bool = True) -> None:
        self.memory = TieredMemory(device_budget=(16 if host_attention else 24) * SLOT, host_budget=60 * SLOT)
        if engine == "held":
            with_doubles(self.memory, held(0, 0.5))
        elif engine == "throttled":
            with_doubles(self.memory, throttled(up=50e6))
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randn(2, 1, HEADS, TOKENS + 12, DIM, generator=generator)
        self.caches = [
            TieredKVCache(memory=self.memory, block_size=BLOCK, host_attention=host_attention) for _ in range(2)
        ]
        for n in (TOKENS, 1):
            for number in range(2):
                self.step(number, n)
        self.mine, self.other = self.caches
        memory = self.memory
        self.slabs: list[SlabAllocator] = [memory.host.slabs, *(d.slabs for d in memory.devices if d.slabs is not None)]

    def step(self, number: int, n: int) -> None:
        """A forward of one of the caches, with the next tokens."""
        cache = self.caches[number]
        length = cache.get_seq_length()
        x = self.tokens[number, :, :, length : length + n]
        for layer in range(2):
            views = cache.update(x, -x, layer)
            F.scaled_dot_product_attention(x, *views)

    def check(self, number: int) -> None:
        """A cache holds what it was given."""
        cache = self.caches[number]
        x = self.tokens[number, :, :, : cache.get_seq_length()]
        for layer in cache.layers:
            if layer.keys is not None:
                assert torch.equal(layer.keys.dense(), x)
                assert torch.equal(layer.values.dense(), -x)

    def end(self) -> None:
        """All counts are right, the other cache holds what it held, this one is of use again, and nothing is left."""
        assert not self.memory.lock._is_owned(), "the lock is held for ever"
        self.memory.check_integrity()
        assert self.other.get_seq_length() == TOKENS + 1
        self.check(1)
        for cache in list(self.caches):
            if not cache._forward.closed:
                try:
                    cache.check_integrity()
                    self.check(self.caches.index(cache))
                    self.step(self.caches.index(cache), 1)
                except (InterruptedStepError, AssertionError):
                    if cache is self.other:
                        raise
                    cache.reset()
                    self.memory.check_integrity()
                    assert cache.get_seq_length() == 0
                    self.step(0, TOKENS)
                    cache.check_integrity()
        self.check(1)
        for cache in self.caches:
            cache.close()
        with self.memory.lock:
            self.memory._drain()  # what copies under way still use
            self.memory.trim(all_free=True)
        stats = self.memory.stats
        assert (stats.device.bytes, stats.host.bytes) == (0, 0)
        assert (stats.device.used_blocks, stats.host.used_blocks) == (0, 0)
        self.memory.close()
        for slabs in self.slabs:
            assert not slabs._live
            assert slabs.budget.used == 0


def attend(world: World, queries: int) -> None:
    """Read a layer."""
    layer = world.mine.layers[0]
    query = torch.randn(1, HEADS, queries, DIM)
    F.scaled_dot_product_attention(query, layer.keys, layer.values)


def assign(world: World) -> None:
    """A layer holds something else."""
    x = world.tokens[0, :, :, : TOKENS + 1].clone()
    world.mine.layers[0].keys = x


def early(world: World) -> None:
    """Layers are made without tokens."""
    world.mine.reset()
    for layer in world.mine.layers:
        layer.lazy_initialization(world.tokens[0], world.tokens[0])


def pack(world: World) -> None:
    """Somebody needs what is free."""
    with world.memory.lock, world.memory.change:
        world.memory.recovery.collect()
        device = world.memory.devices[0]
        device.make_room(10 * SLOT)
        world.memory.host.make_room(world.memory.host.slabs.budget.free + 2 * SLOT)


def drop(world: World) -> None:
    """As the garbage collector does it."""
    forward = world.mine._forward
    forward._finalizer.detach()
    forward.closed = True
    world.memory.recovery._abandoned.append(forward._held.release)
    world.memory.recovery.abandon(lambda: None)


ACTS: dict[str, Callable[[World], None]] = {
    "a prompt": lambda world: world.step(0, 9),
    "a token": lambda world: [world.step(0, 1) for _ in range(2)],
    "reading in place": lambda world: attend(world, 1),
    "reading many": lambda world: attend(world, 20),
    "copying": lambda world: world.mine.layers[0].keys.dense(),
    "crop": lambda world: world.mine.crop(-7),
    "rows": lambda world: (world.mine.batch_repeat_interleave(2), world.mine.reorder_cache(torch.tensor([1]))),
    "assigning": assign,
    "making a layer early": early,
    "deepcopy": lambda world: copy.deepcopy(world.mine).close(),
    "packing": pack,
    "resizing": lambda world: world.memory.resize(device_budget=12 * SLOT, host_budget=50 * SLOT),
    "reset": lambda world: world.mine.reset(),
    "close": lambda world: world.mine.close(),
    "the end of a cache that was dropped": drop,
}


def cut_short(name: str, engine: str, at: int, kind: type[BaseException] = KeyboardInterrupt) -> int:
    """Cut an act short at a line. Returns how many lines were left when it ended: below 0 if there is such a line."""
    world = World(engine, host_attention=name != "reading many")
    line = Line(at, kind)
    with line.traced():
        ACTS[name](world)
    try:
        world.end()
    except BaseException as error:
        error.add_note(f"cut short at line {at}, {line.where}")
        raise
    return line.left


def lines(name: str, engine: str, number: int) -> list[int]:
    """Some lines of an act, evenly."""
    last = 10**6 - cut_short(name, engine, 10**6)
    return sorted({i * last // number for i in range(number)})


@pytest.mark.parametrize("engine", ["inline", "held", "throttled"])
@pytest.mark.parametrize("name", ACTS)
def test_what_is_cut_short_loses_nothing(name: str, engine: str) -> None:
    for at in lines(name, engine, 4):
        cut_short(name, engine, at)


@pytest.mark.parametrize("name", ["close", "reset"])
def test_what_is_cut_short_at_one_of_its_last_lines_loses_nothing(name: str) -> None:
    last = 10**6 - cut_short(name, "held", 10**6)
    for at in range(last - 30, last + 1):
        cut_short(name, "held", at)


@pytest.mark.parametrize("name", ACTS)
def test_what_a_signal_handler_cuts_short_by_an_error_loses_nothing(name: str) -> None:
    """As a time limit by `signal.alarm` does: it is no error of the change, which has not undone itself."""
    places = lines(name, "held", 9)
    for at, kind in zip(places, itertools.cycle((TimeoutError, RuntimeError, RecursionError))):
        cut_short(name, "held", at, kind)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "held", "throttled"])
@pytest.mark.parametrize("name", ACTS)
def test_what_is_cut_short_at_any_line_loses_nothing(name: str, engine: str) -> None:
    for at in lines(name, engine, 400):
        cut_short(name, engine, at)


@pytest.mark.parametrize("name", ["close", "reset", "the end of a cache that was dropped"])
def test_giving_back_that_is_cut_short_twice_loses_nothing(name: str) -> None:
    places = lines(name, "held", 9)
    for first, second in zip(places, places[4:] + places[:4], strict=True):
        world = World("held")
        where = []
        for at in (first, second):
            line = Line(at)
            with line.traced():
                ACTS[name](world)
            where.append(line.where)
        try:
            world.end()
        except BaseException as error:
            error.add_note(f"cut short at {where}")
            raise


def read_behind(engine: str, at: int, *, host_attention: bool, queries: int, crops: bool) -> Line:
    """A cache has appended and not read yet when another one of its memory is cut short at a line; then it reads."""
    memory = TieredMemory(device_budget=24 * SLOT, host_budget=200 * SLOT, audit="off")
    if engine == "held":
        with_doubles(memory, held(0, 0.3))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, HEADS, 60, DIM, generator=generator)
    mine = TieredKVCache(memory=memory, block_size=BLOCK)
    other = TieredKVCache(memory=memory, block_size=BLOCK, host_attention=host_attention)
    other.update(x[:, :, :40], -x[:, :, :40], 0)
    mine.update(x[:, :, :20], -x[:, :, :20], 0)
    query = x[:, :, 40 : 40 + queries]
    keys, values = other.update(query, -query, 0)
    line = Line(at)
    with line.traced():
        mine.update(x[:, :, 20:], -x[:, :, 20:], 0)
    try:
        if crops:
            other.crop(-30)
            memory.check_integrity()
        length = 10 + queries if crops else 40 + queries
        keys, values = (other.layers[0].keys, other.layers[0].values) if crops else (keys, values)
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        seen = x[:, :, :length]
        right = F.scaled_dot_product_attention(query, seen, -seen, attn_mask=mask)
        torch.testing.assert_close(found, right)
        mine.close()
        other.close()
        memory.close()
    except BaseException as error:
        error.add_note(f"cut short at line {at}, {line.where}")
        raise
    return line


READS = [(False, 1, False), (False, 12, False), (True, 1, False), (True, 20, False), (True, 1, True)]


@pytest.mark.parametrize("engine", ["inline", "held"])
@pytest.mark.parametrize(("host_attention", "queries", "crops"), READS)
def test_who_reads_behind_an_interrupt_of_another_cache_reads_what_it_wrote(
    engine: str, host_attention: bool, queries: int, crops: bool
) -> None:
    how: dict[str, Any] = {"host_attention": host_attention, "queries": queries, "crops": crops}
    last = 10**6 - read_behind(engine, 10**6, **how).left
    for i in range(40):
        read_behind(engine, i * last // 40, **how)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inline", "held"])
@pytest.mark.parametrize(("host_attention", "queries", "crops"), READS)
def test_who_reads_behind_an_interrupt_at_any_line_reads_what_it_wrote(
    engine: str, host_attention: bool, queries: int, crops: bool
) -> None:
    at = 0
    while read_behind(engine, at, host_attention=host_attention, queries=queries, crops=crops).where is not None:
        at += 1
    assert at > 400


@pytest.mark.parametrize("again", [False, True], ids=["making", "reset"])
def test_a_cache_that_is_cut_short_as_it_joins_leaves_no_owner_that_nobody_has(again: bool) -> None:
    at = 0
    while True:
        memory = TieredMemory(device_budget=16 * SLOT, host_budget=60 * SLOT)
        made = [TieredKVCache(memory=memory)] if again else []
        line = Line(at)
        with line.traced():
            made[0].reset() if again else made.append(TieredKVCache(memory=memory))
        for cache in made:
            cache.close()
        try:
            memory.close()
        except MemoryInUseError as error:
            error.add_note(f"cut short at {line.where}")
            raise
        if line.where is None:
            break
        at += 1
    assert at > 30


def test_a_copy_that_is_cut_short_keeps_nothing_of_who_asked_for_it() -> None:
    """Without waiting for the garbage collector: the interrupt refers to frames, and these to the transfer."""

    class Big:
        pass

    def ask(at: int) -> weakref.ref[Big]:
        big, slab = Big(), torch.zeros(64, dtype=torch.uint8)
        copied = Copy(Span(slab, 0, 32, 32, False), Span(slab, 32, 32, 32, False))
        with Line(at).traced():
            transfer = InlineTransfers(torch.device("cpu")).submit([copied], Direction.FETCH, Counters())
            assert transfer.error is None
        return weakref.ref(big)

    gc.disable()
    try:
        for at in range(40):
            assert ask(at)() is None
    finally:
        gc.enable()


def takes(slabs: SlabAllocator) -> dict[str, tuple[Callable[[], object], Callable[[], list[torch.Tensor]]]]:
    """Who takes memory: how, and what they have."""
    pool = BlockPool(BlockLayout(1, 1, 4, 4, 4, torch.float32), slabs, poison=True)
    space, buffers = Workspace(slabs, lambda nbytes: None), IoBuffers(slabs)
    return {
        "pool": (lambda: pool.grow(3), lambda: [slab.data for slab in pool.slabs]),
        "workspace": (lambda: space.take(640), lambda: space.slabs),
        "buffers": (lambda: buffers.take((1, 2, 1, 8), 8, torch.float32), lambda: buffers.slabs),
    }


@pytest.mark.parametrize("who", ["pool", "workspace", "buffers"])
def test_what_is_cut_short_between_taking_memory_and_noting_it_leaks_none(who: str, page_locking: Any) -> None:
    """Neither bytes nor page-locks: an interrupt until the next use, when what nobody owns is given back."""
    at = 0
    while True:
        slabs = SlabAllocator(torch.device("cpu"), Budget("host", 10**5), lock_for=torch.device("cuda", 0))
        take, has = takes(slabs)[who]
        line = Line(at)
        with line.traced():
            take()
        slabs.keep(has())
        assert slabs.budget.used == sum(x.numel() for x in has()) == sum(page_locking.locked.values()), line.where
        assert slabs.page_locked == slabs.budget.used
        assert set(page_locking.locked) == {x.data_ptr() for x in has()}
        for slab in has():
            slabs.release(slab)
        page_locking.locked.clear()
        if line.where is None:
            break
        at += 1
    assert at > 10


@pytest.mark.parametrize(("who", "owner"), [("pool", Slab), ("buffers", IoBuffer)])
def test_what_fails_between_taking_memory_and_noting_it_leaks_none(
    who: str, owner: type, monkeypatch: pytest.MonkeyPatch, page_locking: Any
) -> None:
    def fails(*args: object) -> None:
        raise MemoryError

    slabs = SlabAllocator(torch.device("cpu"), Budget("host", 10**5), lock_for=torch.device("cuda", 0))
    take, has = takes(slabs)[who]
    with monkeypatch.context() as patch:
        patch.setattr(owner, "__init__", fails)
        with pytest.raises(MemoryError):
            take()
    assert (slabs.budget.used, page_locking.locked, has()) == (0, {}, [])
    take()
    assert slabs.budget.used == sum(x.numel() for x in has()) > 0
