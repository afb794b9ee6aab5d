"""A race detector for CUDA streams, on a CPU: the real `CudaTransfers` runs over a model of streams and events.

Copies run at once, so numbers are always right; what is checked is *order*. Every actor (the compute stream, the
engine's four, the CPU thread and jobs on host threads) has a vector clock. What is enqueued on a stream comes after all
that the stream did before and all that the CPU did or learned before; events, waits and synchronisation join clocks.
Two accesses to the same bytes, at least one a write, of which neither comes before the other, are a race.

    model = StreamModel(seed, monkeypatch)
    with model:
        cache = with_doubles(TieredKVCache(device_budget=...), model.engine)
        ...

Who accesses what is seen in three ways: a dispatch mode reads from the schema of every aten operation what it reads and
writes; the native kernel and launches that copy blocks are patched to tell; giving memory back counts as a write to all
of it. Operations belong to the current stream, those on host memory outside a stream to the CPU. All memory that is not
a host slab, an I/O buffer or addresses of a launch is the device's, temporaries included: the allocator hands them out
again like CUDA's caching allocator, in the order of the compute stream.

A thread may set another compute stream: `with model.using(model.stream("other")):`. Then a model that is made with
`streams=True` hands no memory of temporaries out again, as CUDA's allocator hands it to none but the stream it was on.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from accesses import Observer, Span, block_spans, call_site, spans_of

from kvtier.cpu import fallback, native
from kvtier.kernels import copies, launch
from kvtier.memory.storage.buffers import IoBuffer
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.launches import Launches

COMPUTE, HOST, THREADS = "compute", "host", "host threads"
_PAGE = 4096

Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses to the same bytes, at least one a write, that nothing orders."""

    def __init__(self, earlier: Access, later: Access, span: Span, memory: str) -> None:
        super().__init__(
            f"{later} does not come after {earlier}: {span[1] - span[0]} bytes in common, in {memory} at {span[0]:#x}"
        )
        self.pair = (earlier.kind, later.kind)
        self.memory = memory


class Access:
    """One access: who, at which tick of whose clock, and what for messages."""

    __slots__ = ("actor", "site", "tick", "what", "who", "write")

    def __init__(self, actor: str, tick: int, write: bool, what: str) -> None:
        self.actor = self.who = actor
        self.tick = tick
        self.write = write
        self.what = what
        self.site = call_site()

    @property
    def kind(self) -> str:
        """`"fetch writes"`, `"host threads read"`, ..."""
        return f"{self.who} {'writes' if self.write else 'reads'}"

    def __str__(self) -> str:
        return f"[{self.kind}: {self.what} at {self.site}]"


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, model: StreamModel, name: str) -> None:
        self._model = model
        self.name = name
        self.clock: Clock = {}

    def enqueue(self) -> Clock:
        """What the next action on this stream comes after."""
        _join(self.clock, self._model.host)
        return self.clock

    def wait_event(self, event: Event) -> None:
        """Later actions come after the event, as it is recorded now."""
        _join(self.enqueue(), event.clock)

    def synchronize(self) -> None:
        """The CPU learns that all is done."""
        _join(self._model.host, self.clock)


class Event:
    """Stands for `torch.cuda.Event`. Recorded anew, it does not change what waits for it already."""

    def __init__(self, model: StreamModel) -> None:
        self._model = model
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        """Stand for the end of all that `stream` did so far."""
        self.clock = dict(stream.enqueue())

    def synchronize(self) -> None:
        """The CPU learns of the end."""
        _join(self._model.host, self.clock)

    def query(self) -> bool:
        """Any answer that a device could give; a True is news to the CPU."""
        known = all(self._model.host.get(name, 0) >= tick for name, tick in self.clock.items())
        if known or self._model.random.random() < self._model.eagerness:
            self.synchronize()
            return True
        return False

    def elapsed_time(self, other: Event) -> float:
        """Of both, the device must have come by."""
        for event in (self, other):
            known = all(self._model.host.get(name, 0) >= tick for name, tick in event.clock.items())
            assert known, "an event is read that may not have ended"
        return 0.0


class StreamModel(contextlib.AbstractContextManager["StreamModel"]):
    """Clocks, memory and the history of accesses to it.

    Args:
        seed: of what events answer.
        patch: puts the model in the place of CUDA.
        eagerness: probability that an event that may have ended has.
        strict: raise at the first race; else collect them.
        streams: whether there are several compute streams.

    Attributes:
        races: all of them.
        accesses: how many were seen, by kind.
        launches: of `copy_blocks`, how many were seen.
    """

    def __init__(
        self,
        seed: int,
        patch: pytest.MonkeyPatch,
        *,
        eagerness: float = 0.3,
        strict: bool = True,
        streams: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.eagerness = eagerness
        self.strict = strict
        self.races: list[Race] = []
        self.accesses: dict[str, int] = {}
        self.launches = 0
        self.host: Clock = {HOST: 1}
        self.compute = Stream(self, COMPUTE)
        self._current: Stream | None = None  # the default: compute, or the CPU where the memory is the host's
        self._hosted = 0
        self._launching = False  # what a launch does is told by its addresses, however it is emulated
        self._streams = 0
        self._pages: dict[int, list[tuple[int, int, Access]]] = {}
        self._regions: list[tuple[int, int, str]] = []  # what is named, by address
        self._kept: list[torch.Tensor] = []  # no named memory is used again under another name
        self._several: dict[int, torch.Tensor] | None = {} if streams else None
        self._taken: dict[int, Stream] = {}  # by address, on which stream a slab of a device was taken
        self._recorded: dict[int, Stream] = {}  # and on which it is used, as torch was told
        self._mode = Observer(self.saw)
        self._within = contextlib.ExitStack()
        self._patch(patch)

    def __enter__(self) -> StreamModel:
        if torch.get_default_device().type != "cpu":
            self._within.enter_context(torch.device("cpu"))
        self._within.enter_context(self._mode)
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()

    def engine(self, device: torch.device) -> CudaTransfers:
        """The real engine, on the model's streams: an `EngineFactory`."""
        made = CudaTransfers(device)
        for direction, stream in made._streams.items():
            stream.name = direction.value  # type: ignore[attr-defined]
        return made

    def stream(self, name: str) -> Stream:
        """Another compute stream."""
        return Stream(self, name)

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`, of whoever uses a cache."""
        before, self.compute = self.compute, stream
        try:
            yield
        finally:
            self.compute = before

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """The kinds of accesses that raced."""
        return {race.pair for race in self.races}

    # Accesses

    def access(
        self, actor: str, clock: Clock, write: bool, spans: Sequence[Span], what: str, tick: int | None = None
    ) -> Access:
        """An access to some bytes at `tick`, now unless given, by an actor who comes after `clock`.

        Raises:
            Race: if the model is strict.
        """
        new = Access(actor, clock[actor] if tick is None else tick, write, what)
        self.accesses[new.kind] = self.accesses.get(new.kind, 0) + 1
        for start, stop in spans:
            for page in range(start // _PAGE, (stop - 1) // _PAGE + 1):
                low, high = max(start, page * _PAGE), min(stop, (page + 1) * _PAGE)
                self._access_page(page, low, high, new, clock)
        return new

    def _access_page(self, page: int, low: int, high: int, new: Access, clock: Clock) -> None:
        kept = []
        for entry in self._pages.get(page, ()):
            start, stop, old = entry
            ordered = clock.get(old.actor, 0) >= old.tick
            if not ordered and (new.write or old.write) and max(start, low) < min(stop, high):
                self._report(Race(old, new, (max(start, low), min(stop, high)), self._name(low)))
            # Whoever comes after this access comes after what it covers.
            if not (low <= start and stop <= high and ((ordered and not old.write) or new.write)):
                kept.append(entry)
        kept.append((low, high, new))
        self._pages[page] = kept

    def _report(self, race: Race) -> None:
        self.races.append(race)
        if self.strict:
            raise race

    def on_stream(self, stream: Stream, write: bool, spans: Sequence[Span], what: str) -> None:
        """An access by an action enqueued on `stream`."""
        if spans:
            clock = stream.enqueue()
            clock[stream.name] = clock.get(stream.name, 0) + 1
            self.access(stream.name, clock, write, spans, what)

    def on_host(self, write: bool, spans: Sequence[Span], what: str) -> None:
        """An access by the CPU, now."""
        if spans:
            self.host[HOST] += 1
            self.access(HOST, self.host, write, spans, what)

    def saw(self, writes: Sequence[torch.Tensor], reads: Sequence[torch.Tensor], what: str) -> None:
        """An operation: whose it is follows from where it runs and what it touches."""
        if self._launching:
            return
        if self._several is not None:
            self._several |= {x.untyped_storage().data_ptr(): x for x in (*writes, *reads)}
        done = [(True, x, spans_of(x)) for x in writes] + [(False, x, spans_of(x)) for x in reads]
        if self._current is None:
            named = {self._is_host(s[0][0]) for _, _, s in done if s and self._name(s[0][0]) != "device memory"}
            assert len(named) < 2, f"{what} moves bytes between tiers, but not through the engine"
            if self._hosted or True in named:
                for write, _, spans in done:
                    # What the CPU makes for itself is nobody else's.
                    self.on_host(write, [x for x in spans if self._name(x[0]) != "device memory"], what)
                return
        for write, _, spans in done:
            self.on_stream(self._current or self.compute, write, spans, what)

    # Memory

    def watch(self, tensor: torch.Tensor, name: str) -> None:
        """Give memory a name; one that begins with "host" is the host's."""
        start = tensor.untyped_storage().data_ptr()
        span = (start, start + tensor.untyped_storage().nbytes())
        self._kept.append(tensor)
        self._forget(span)
        bisect.insort(self._regions, (*span, name))

    def gave_back(self, tensor: torch.Tensor) -> None:
        """Memory is given back: nobody may be using it. Host memory is gone at once, that of a device by the stream it
        was taken on, once those have come by that torch was told of."""
        spans, address = spans_of(tensor), tensor.data_ptr()
        if self._is_host(spans[0][0]):
            self.on_host(True, spans, "the memory is given back")
            return
        stream = self._taken.pop(address, self.compute)
        clock = dict(stream.enqueue())
        if (recorded := self._recorded.pop(address, None)) is not None:
            _join(clock, recorded.enqueue())
        clock[stream.name] = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.access(stream.name, clock, True, spans, "the memory is given back")

    def _forget(self, span: Span) -> None:
        for page in range(span[0] // _PAGE, (span[1] - 1) // _PAGE + 1):
            old = self._pages.get(page, ())
            self._pages[page] = [x for x in old if x[1] <= span[0] or span[1] <= x[0]]

    def _name(self, address: int) -> str:
        i = bisect.bisect_right(self._regions, (address, sys.maxsize, "")) - 1
        if i >= 0 and address < self._regions[i][1]:
            return self._regions[i][2]
        return "device memory"

    def _is_host(self, address: int) -> bool:
        return self._name(address).startswith("host")

    # In the place of CUDA, and beside what the dispatcher does not see

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        def stream(device: torch.device, priority: int = 0) -> Stream:
            self._streams += 1
            return Stream(self, f"stream {self._streams}")

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            previous, self._current = self._current, stream
            try:
                yield
            finally:
                self._current = previous

        patch.setattr(torch.cuda, "Stream", stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self._current or self.compute)
        patch.setattr(launch, "stream_number", lambda device: id(self._current or self.compute))
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        self._patch_memory(patch)
        self._patch_native(patch)
        self._patch_launches(patch)

    def _patch_memory(self, patch: pytest.MonkeyPatch) -> None:
        allocate, release, buffer = SlabAllocator.allocate, SlabAllocator.release, IoBuffer.__init__
        give_back = CudaTransfers.give_back

        def allocated(slabs: SlabAllocator, nbytes: int, **options: bool) -> torch.Tensor | None:
            slab = allocate(slabs, nbytes, **options)
            if slab is not None:
                self.watch(slab, f"{slabs.budget.tier} slab")
                if slabs.budget.tier == "device":
                    # It may be what kernels in flight still use: safe for this stream, and for who waits for it.
                    self._taken[slab.data_ptr()] = self.compute
                    self.on_stream(self.compute, True, spans_of(slab), "the memory is handed out")
            return slab

        def released(slabs: SlabAllocator, slab: torch.Tensor) -> None:
            release(slabs, slab)
            self.gave_back(slab)

        def made(io: IoBuffer, data: torch.Tensor, *args: Any, **options: Any) -> None:
            buffer(io, data, *args, **options)
            self.watch(data, "host I/O buffer")

        def given(engine: CudaTransfers, memory: torch.Tensor) -> None:
            give_back(engine, memory)
            self._recorded[memory.data_ptr()] = engine.stream  # type: ignore[assignment]

        patch.setattr(CudaTransfers, "give_back", given)
        patch.setattr(SlabAllocator, "allocate", allocated)
        patch.setattr(SlabAllocator, "release", released)
        patch.setattr(SlabAllocator, "is_mapped", lambda slabs, slab: True)  # page-locked
        patch.setattr(IoBuffer, "__init__", made)

    def _patch_native(self, patch: pytest.MonkeyPatch) -> None:
        attend, submit, wait, in_torch = native.attend, native.Call.submit, native.Future.wait, fallback.attend
        merge, append = native.merge, native.TokenWriter.write
        jobs: dict[int, list[Access]] = {}

        def merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor, *lse: Any) -> torch.Tensor:
            self.on_stream(
                self.compute, False, [s for part in parts for x in part for s in spans_of(x)], "native.merge"
            )
            self.on_stream(self.compute, True, spans_of(out), "native.merge")
            return merge(parts, out, *lse)

        def appended(
            writer: native.TokenWriter, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[int], offset: int
        ) -> bool:
            if not append(writer, keys, values, blocks, offset):
                return False
            appender = writer.appender
            shape, size = appender.shape, appender.shape.dtype.itemsize
            written = []
            for heads, dim, start in (
                (shape.kv_heads, shape.k_dim, 0),
                (appender.v_heads, shape.v_dim, appender.values_offset),
            ):
                for block in blocks:
                    for head in range(heads):
                        first = block + start + (head * shape.block_size + offset) * dim * size
                        written.append((first, first + dim * size))
            self.on_stream(self.compute, False, [*spans_of(keys), *spans_of(values)], "TokenWriter.write")
            self.on_stream(self.compute, True, written, "TokenWriter.write")
            return True

        def attended(
            shape: native.Shape, query: torch.Tensor, blocks: native.Sequences, *args: Any, **options: Any
        ) -> torch.Tensor:
            # The device's part, where the device is emulated: a kernel on the compute stream.
            nbytes = shape.kv_heads * shape.block_size * (shape.k_dim + shape.v_dim) * shape.dtype.itemsize
            self.on_stream(self.compute, False, [*spans_of(query), *block_spans(blocks, nbytes)], "native.attend")
            out = attend(shape, query, blocks, *args, **options)
            for x in (out, options.get("lse")):
                self.on_stream(self.compute, True, [] if x is None else spans_of(x), "native.attend")
            return out

        def submitted(call: native.Call, threads: int) -> native.Future:
            shape = call.shape
            nbytes = shape.kv_heads * shape.block_size * (shape.k_dim + shape.v_dim) * shape.dtype.itemsize
            spans = [*spans_of(call.query), *block_spans(call.sequences, nbytes)]
            written = [s for x in (call.out, call.lse) if x is not None for s in spans_of(x)]
            # A job comes after what the CPU knows when it submits; until `wait`, nobody comes after the job.
            done = [
                self.access(THREADS, self.host, write, what, "Call.submit", tick=sys.maxsize)
                for write, what in ((False, spans), (True, written))
            ]
            future = submit(call, threads)
            jobs[id(future)] = done
            return future

        def waited(future: native.Future) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = wait(future)
            self.host[HOST] += 1
            for access in jobs.pop(id(future), ()):
                # From now on, what the job did is something that the CPU did.
                access.actor, access.tick = HOST, self.host[HOST]
            return result

        def on_host(*args: Any, **options: Any) -> Any:
            self._hosted += 1
            try:
                return in_torch(*args, **options)
            finally:
                self._hosted -= 1

        patch.setattr(native, "attend", attended)
        patch.setattr(native, "merge", merged)
        patch.setattr(native.TokenWriter, "write", appended)
        patch.setattr(native.Call, "submit", submitted)
        patch.setattr(native.Future, "wait", waited)
        patch.setattr(fallback, "attend", on_host)

    def _patch_launches(self, patch: pytest.MonkeyPatch) -> None:
        copy_blocks, make = copies.copy_blocks, Launches._make

        def copied(sources: torch.Tensor, targets: torch.Tensor, nbytes: int, **options: Any) -> None:
            stream = self._current or self.compute
            read, written = ([(a, a + nbytes) for a in x.tolist()] for x in (sources, targets))
            # The addresses too are read at any time until the launch has ended.
            self.on_stream(stream, False, [*spans_of(sources), *spans_of(targets), *read], "copy_blocks")
            self.on_stream(stream, True, written, "copy_blocks")
            self.launches += 1
            self._launching = True
            try:
                copy_blocks(sources, targets, nbytes, **options)
            finally:
                self._launching = False

        def made(launches: Launches, count: int) -> torch.Tensor:
            addresses = make(launches, count)
            self.watch(addresses, "host addresses")
            return addresses

        patch.setattr(copies, "copy_blocks", copied)
        patch.setattr(Launches, "_make", made)


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        if tick > clock.get(name, 0):
            clock[name] = tick
