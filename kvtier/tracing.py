"""`kvtier.trace`: what really happens, written as a Chrome trace while it happens.

Whoever moves or computes something tells the trace that is active, if one is: `active` is looked at in few places, and
in none that a repeated decode call passes. Where a device works behind the CPU's back, times are those of the device:
points of its streams (`Stamp`), read when it has come by, never waited for before the trace ends.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from kvtier.config import parse_count
from kvtier.errors import ConfigError
from kvtier.forks import heed, inherited
from kvtier.planning.reports.trace import LIMIT, Event, TraceWriter
from kvtier.stats import Counters

#: Spans of a cache that wait for its device, at the most; the oldest are dropped, and counted.
WAITING = 100_000
#: What a step shows of what was counted in it.
_COUNTED = (
    *("bytes_up", "bytes_down", "block_fetches", "evictions", "host_blocks", "host_bytes"),
    *("host_seconds", "stall_seconds"),
)


class Stamp(Protocol):
    """A point of a device's work."""

    def seconds(self) -> float | None:
        """When the device came by, on the clock of `time.perf_counter`; None: it has not yet."""

    def settle(self) -> None:
        """Block the CPU until it has."""


class Drainable(Protocol):
    """Whose copies end before a trace does."""

    def drain(self) -> None:
        """Block until no copy is under way."""


#: A time of the CPU, or a point of a device's work.
Time = float | Stamp


def trace(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Trace:
    """Record what all caches of this process do, as a file that https://ui.perfetto.dev and chrome://tracing open.

        with kvtier.trace("trace.json"):
            model.generate(**inputs, past_key_values=cache)

    Each cache is a process in it, with threads for its steps and plans (decisions, predicted seconds), compute,
    fetches, write-backs, attention on the host, waits for that, and stalls; `kvtier.planning.reports.trace` has the
    format and reads it back. A step ends where the next one begins, the last one with its last attention. While a trace
    is recorded, attention calls that would be repeated take the general way; without one, nothing is slower.

    The file appears when the block is left, also by an exception, and replaces an older one then. A process that is
    forked inside records nothing.

    Args:
        path: of the file.
        limit: events, some 150 bytes each, that are written at the most. What comes later is counted in the file's
            `otherData`.

    Raises:
        ConfigError: `path` is no path, or `limit` no whole number. When the block is entered: another trace is active,
            this one was used before, or there can be no such file. When it is left: the file could not be written.
    """
    return Trace(path, limit)


@dataclass(slots=True)
class _Span:
    """What a cache's device does between two points, or a step's begin or plan at one. In the order of the telling."""

    kind: str
    name: str
    began: Time
    ended: Time
    device: str
    args: dict[str, Any]
    cuts: bool = False
    totals: tuple[float, ...] = ()


@dataclass(slots=True)
class _Cache:
    """What is known of one cache.

    Attributes:
        name: that is shown.
        counters: of the cache.
        told: the number of the step that began last, from 0; -1 before the first.
        spans: that wait for the device.
        step: the step that `spans` begins in; None before the first.
        device: of its last attention.
        attended: whether it had any.
        computed: until when the device's work is known.
        stalls: of the device since `computed`, waits for the host included.
        ends: of the last events, by device and lane, in lanes where one thing follows another.
    """

    name: str
    counters: Counters
    computed: float
    told: int = -1
    spans: deque[_Span] = field(default_factory=deque)
    step: _Span | None = None
    device: str = ""
    attended: bool = False
    stalls: list[tuple[float, float]] = field(default_factory=list)
    ends: dict[tuple[str, str], float] = field(default_factory=dict)


class Trace:
    """A trace, active inside its `with` block; see `trace`. Any thread may tell it things.

    Attributes:
        path: of the file.
        began: the time that is 0 in it.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int = LIMIT) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"trace({path!r}): give the path of a file, such as 'trace.json'.")
        self.path = os.fspath(path)
        self.began = 0.0
        self._forked = False
        self._limit = parse_count("limit", limit, 0, "events")
        self._writer: TraceWriter | None = None
        self._lost = 0
        # Garbage may be collected, and a cache closed by that, inside: the same thread comes again.
        self._lock = threading.RLock()
        self._caches: dict[int, _Cache] = {}
        self._memories: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def events(self) -> int:
        """Written so far."""
        return 0 if self._writer is None else self._writer.written

    @property
    def dropped(self) -> int:
        """Events that are not in the file, for it is full or the device was too late."""
        return self._lost + (0 if self._writer is None else self._writer.dropped)

    def __enter__(self) -> Trace:
        global active
        with _switching:
            if active is not None:
                raise ConfigError(f"A trace is being written to {active.path}: one at a time, for a whole process.")
            if self._writer is not None:
                raise ConfigError(f"This trace was written to {self.path}. Make a new one with kvtier.trace().")
            self.began = time.perf_counter()
            heed(self)
            try:
                self._writer = TraceWriter(self.path, origin=self.began, limit=self._limit)
            except (OSError, ValueError) as error:  # a path with a null byte is no OSError
                raise ConfigError(f"There can be no trace at {self.path}: {error}.") from error
            active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global active
        assert self._writer is not None
        if self._forked:
            return  # the file is the parent's
        try:
            try:
                self._finish()
            finally:
                active = None
                with self._lock:
                    self._writer.close({"lost": self._lost, "interrupted_by": None if kind is None else kind.__name__})
        except OSError as failure:
            if error is None:
                raise ConfigError(f"The trace could not be written to {self.path}: {failure}.") from failure

    def forked(self) -> None:
        """See `kvtier.forks`: the parent goes on with the trace, and this process may begin one of its own."""
        global active, _switching
        self._forked = True
        if active is self:
            active, _switching = None, inherited(_switching, threading.Lock)

    def _finish(self) -> None:
        """What is under way ends, and what waits for a device is read."""
        for memory in list(self._memories):
            memory.drain()  # without the lock: it tells what has ended
        with self._lock:
            for cache in self._caches.values():
                for span in cache.spans:
                    for point in (span.began, span.ended):
                        if not isinstance(point, float):
                            point.settle()
                self._advance(cache)
                self._lost += len(cache.spans)
                self._end_step(cache, None, "", _totals(cache.counters))

    # What is told

    def step(self, counters: Counters, tokens: int, now: float, device: str, memory: Drainable) -> None:
        """A forward of a cache begins, so its last one is over; `device`: where its layers are, as far as is known."""
        with self._lock:
            cache = self._cache(counters)
            self._memories.add(memory)
            cache.told += 1
            args = {"step": cache.told, "tokens": tokens}
            self._tell(cache, _Span("step", f"step {cache.told}", now, now, device, args, totals=_totals(counters)))

    def plan(self, counters: Counters, args: Mapping[str, Any]) -> None:
        """A step was planned."""
        with self._lock:
            cache, now = self._cache(counters), time.perf_counter()
            self._tell(cache, _Span("plan", "plan", now, now, "", {"step": cache.told, **args}))

    def attention(self, counters: Counters, layer: int, device: str, began: Time, ended: Time, queries: int) -> None:
        """A layer was attended to; before that the device computed what leads to it."""
        with self._lock:
            cache = self._cache(counters)
            args = {"step": cache.told, "layer": layer, "queries": queries}
            self._tell(cache, _Span("attention", f"{layer}", began, ended, device, args))

    def stall(
        self, counters: Counters, device: str, began: Time, ended: Time, args: Mapping[str, Any], *, cuts: bool
    ) -> None:
        """Something waited for a copy of blocks; `cuts`: the device did not compute meanwhile."""
        with self._lock:
            cache = self._cache(counters)
            name = f"layer {args['layer']}" if "layer" in args else "copy"
            self._tell(cache, _Span("stall", name, began, ended, device, {"step": cache.told, **args}, cuts))

    def host(self, counters: Counters, layer: int, began: float, seconds: float, blocks: int, nbytes: int) -> None:
        """Host threads attended to blocks."""
        with self._lock:
            cache = self._cache(counters)
            args = {"step": cache.told, "layer": layer, "blocks": blocks, "bytes": nbytes}
            self._add(cache, Event("host", f"layer {layer}", began, seconds, args, cache.name))

    def waited(self, counters: Counters, layer: int, device: str, began: Time, ended: Time) -> None:
        """The device had done its part of a layer's attention, and waited for the host's."""
        with self._lock:
            cache = self._cache(counters)
            args = {"step": cache.told, "layer": layer}
            self._tell(cache, _Span("wait", f"layer {layer}", began, ended, device, args, cuts=True))

    def step_of(self, counters: Counters) -> int:
        """The number of the step that a cache is in; -1 before the first."""
        return self._cache(counters).told

    def copied(
        self, counters: Counters, lane: str, device: str, began: float, ended: float, args: Mapping[str, Any]
    ) -> None:
        """A fetch (lane "up") or write-back ("down") has ended; `args` has the step in which it was submitted."""
        with self._lock:
            cache = self._cache(counters)
            name = ("fetch" if lane == "up" else "write back") + (f" {args['layer']}" if "layer" in args else "")
            self._in_turn(cache, lane, name, began, ended, device, dict(args))

    # What is made of it

    def _cache(self, counters: Counters) -> _Cache:
        found = self._caches.get(id(counters))
        if found is None:
            # The counters are kept, so that no other ones can have their number.
            found = self._caches[id(counters)] = _Cache(f"cache {len(self._caches)}", counters, self.began)
        return found

    def _tell(self, cache: _Cache, span: _Span) -> None:
        cache.spans.append(span)
        self._advance(cache)
        if len(cache.spans) > WAITING:
            cache.spans.popleft()
            self._lost += 1

    def _advance(self, cache: _Cache) -> None:
        """Write what the device has come by."""
        spans = cache.spans
        while spans:
            span = spans[0]
            began = span.began if isinstance(span.began, float) else span.began.seconds()
            ended = span.ended if isinstance(span.ended, float) else span.ended.seconds()
            if began is None or ended is None:
                return
            spans.popleft()
            if span.kind == "step":
                self._end_step(cache, began, span.device, span.totals)
                cache.step, cache.attended = span, False
                cache.computed = max(cache.computed, began)
            elif span.kind == "plan":
                self._add(cache, Event("step", "plan", began, None, span.args, cache.name))
            elif span.kind in ("stall", "wait"):
                self._in_turn(cache, span.kind, span.name, began, ended, span.device, span.args)
                if span.cuts:
                    cache.stalls.append((began, ended))
            else:
                self._computed(cache, f"layer {span.name}", began, span.device, span.args)
                self._computed(cache, f"attention {span.name}", ended, span.device, span.args)
                cache.attended, cache.device = True, span.device

    def _computed(self, cache: _Cache, name: str, until: float, device: str, args: dict[str, Any]) -> None:
        """The device computed from where its work is known up to `until`, but for stalls, and waits for the host."""
        start, left = cache.computed, list[tuple[float, float]]()
        for began, ended in cache.stalls:
            if began < until:
                self._piece(cache, name, start, began, device, args)
                start = max(start, ended)
            if ended > until:
                left.append((began, ended))
        self._piece(cache, name, start, until, device, args)
        cache.computed, cache.stalls = max(cache.computed, until), left

    def _piece(self, cache: _Cache, name: str, start: float, end: float, device: str, args: dict[str, Any]) -> None:
        if end > start:
            self._add(cache, Event("compute", name, start, end - start, args, cache.name, device))

    def _end_step(self, cache: _Cache, at: float | None, device: str, totals: tuple[float, ...]) -> None:
        """The step that `cache` is in ends; None: with its last attention, or now if it had none."""
        step = cache.step
        if step is None:
            return
        assert isinstance(step.began, float)
        if at is not None:
            end = at
        elif cache.attended:
            end = max([cache.computed, *(ended for _, ended in cache.stalls)])
        else:
            end = time.perf_counter()
        end = max(end, step.began)
        self._computed(cache, "rest" if cache.attended else "forward", end, cache.device or device, step.args)
        cache.stalls.clear()
        cache.step = None
        counted = {name: now - was for name, was, now in zip(_COUNTED, step.totals, totals, strict=True)}
        self._add(cache, Event("step", step.name, step.began, end - step.began, {**step.args, **counted}, cache.name))

    def _in_turn(
        self, cache: _Cache, lane: str, name: str, began: float, ended: float, device: str, args: dict[str, Any]
    ) -> None:
        """An event of a lane where one thing follows another, though clocks may disagree by a little."""
        began = max(began, cache.ends.get((device, lane), began))
        ended = cache.ends[device, lane] = max(began, ended)
        self._add(cache, Event(lane, name, began, ended - began, args, cache.name, device))

    def _add(self, cache: _Cache, event: Event) -> None:
        assert self._writer is not None
        if event.start >= self.began:
            self._writer.add(event)


def _totals(counters: Counters) -> tuple[float, ...]:
    return tuple(getattr(counters, name) for name in _COUNTED)


_switching = threading.Lock()
#: The trace that is told; None: nobody listens.
active: Trace | None = None
