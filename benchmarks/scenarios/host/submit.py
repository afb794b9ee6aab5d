"""`submit`: how soon it returns, and how much Python gets done while the library's threads attend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.cores import words
from benchmarks.harness import Bench
from benchmarks.scenarios.host.arena import TURN_SECONDS, Arena, Shape
from benchmarks.scenarios.host.calls import native_shape, random_query, tables
from benchmarks.scenarios.host.threads import USUAL, cores
from benchmarks.turns import Start
from kvtier.cpu import native
from kvtier.kernels.params import AttentionParams

#: Share of a call's time for which Python runs meanwhile: the call is still under way at the end.
MEANWHILE = 0.6


class Submitter:
    """Submits a problem again and again, each time on other bytes, and waits for each."""

    def __init__(self, arena: Arena, shape: Shape) -> None:
        arena.fill(shape.dtype)
        self.shape = shape
        self.layout, self.query = native_shape(shape), random_query(shape)
        self.params = AttentionParams(shape.dim**-0.5)
        out = torch.empty((len(shape.lengths), shape.heads, 1, shape.dim), dtype=torch.float32)
        lse = torch.empty((len(shape.lengths), shape.heads, 1), dtype=torch.float32)
        all_tables = list(tables(arena, shape))
        self.tables: Iterator[native.Sequences] = cycle(all_tables)
        # As split attention does: a call is prepared once for a layer's blocks.
        self.prepared: Iterator[native.Call] = cycle(
            [native.Call(self.layout, self.query, x, self.params, out, lse) for x in all_tables]
        )
        for _ in range(3):
            self.submit().wait()

    def submit(self) -> native.Future:
        """The next one."""
        return next(self.prepared).submit(self.shape.threads)

    def attend(self) -> None:
        """The same as one call that is waited for."""
        native.attend(self.layout, self.query, next(self.tables), self.params, threads=self.shape.threads)

    def measure(self) -> float:
        """One turn."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Drop what is held."""
        self.tables = self.prepared = iter(())


class Submit(Submitter):
    """How soon `submit` returns."""

    def __init__(self, arena: Arena, shape: Shape) -> None:
        self.times: list[float] = []
        super().__init__(arena, shape)

    def measure(self) -> float:
        """Microseconds, the median of one turn."""
        times: list[float] = []
        began = time.perf_counter()
        while not times or time.perf_counter() - began < TURN_SECONDS:
            start = time.perf_counter()
            future = self.submit()
            times.append((time.perf_counter() - start) * 1e6)
            future.wait()
        self.times += times
        return statistics.median(times)

    def facts(self) -> dict[str, Any]:
        """How single calls spread, in us."""
        times = sorted(self.times)
        return {"calls": len(times), "p90_us": times[len(times) * 9 // 10], "worst_us": times[-1]}


class Attend(Submitter):
    """How long the whole call takes."""

    def measure(self) -> float:
        """Microseconds, the median of one turn."""
        times: list[float] = []
        began = time.perf_counter()
        while not times or time.perf_counter() - began < TURN_SECONDS:
            start = time.perf_counter()
            self.attend()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def python_loops(seconds: float) -> float:
    """Loops per second that plain Python does in so much time, whatever takes the core or the GIL away meanwhile."""
    count = 0
    began = time.perf_counter()
    end = began + seconds
    while (now := time.perf_counter()) < end:
        count += 1
    return count / (now - began)


class Meanwhile(Submitter):
    """A Python loop between `submit` and `wait`; or the same loop alone."""

    def __init__(self, arena: Arena, shape: Shape, *, alone: bool) -> None:
        super().__init__(arena, shape)
        self.alone = alone
        self.over_early: list[bool] = []
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.attend()
            times.append(time.perf_counter() - start)
        self.seconds = MEANWHILE * statistics.median(times)

    def measure(self) -> float:
        """Millions of loops per second, the mean of one turn."""
        rates: list[float] = []
        began = time.perf_counter()
        while not rates or time.perf_counter() - began < TURN_SECONDS:
            if self.alone:
                rates.append(python_loops(self.seconds))
                continue
            future = self.submit()
            try:
                rates.append(python_loops(self.seconds))
                self.over_early.append(future.done())
            finally:
                future.wait()
        return statistics.mean(rates) / 1e6

    def facts(self) -> dict[str, Any]:
        """How often the call was over before the loop: then the loop had the core to itself for a part of the time."""
        share = sum(self.over_early) / len(self.over_early) if self.over_early else 0.0
        return {"loop_ms": self.seconds * 1e3, "over_early": share}


def note_spread(facts: dict[str, Any]) -> str:
    """How single calls spread."""
    return f"p90 {facts['p90_us']:.0f}, worst {facts['worst_us']:.0f} us" if "p90_us" in facts else ""


def note_early(facts: dict[str, Any]) -> str:
    """How long a loop is, and how often the call did not last as long."""
    early = f", {facts['over_early']:.0%} of the calls were over before" if facts["over_early"] else ""
    return f"loops of {facts['loop_ms']:.1f} ms{early}"


def run_submit(bench: Bench, arena: Arena) -> None:
    """How soon it returns, and what Python does meanwhile, for one helping thread and for as many as cores."""
    tokens = 4096 if bench.settings.quick else 16384
    counts = sorted({1, cores()})
    shape = replace(USUAL, lengths=(tokens,), threads=counts[-1])
    workload, rounds = shape.fields(), bench.rounds(9)

    attend = f"attend, {words(shape.threads)}"
    starts: dict[str, Start] = {attend: partial(Attend, arena, shape)}
    each = {attend: {"threads": shape.threads}}
    for n in counts:
        name = f"submit, {words(n)}"
        starts[name] = partial(Submit, arena, replace(shape, threads=n))
        each[name] = {"threads": n}
    title = f"{shape}, until the call returns"
    bench.compare_plain(
        "host", title, starts, unit="us", rounds=rounds, base=attend, workload=workload, note=note_spread, each=each
    )

    starts = {"alone": partial(Meanwhile, arena, shape, alone=True)}
    each = {"alone": {"threads": 0}}
    for n in counts:
        name = f"while {words(n)} attend{'s' if n == 1 else ''}"
        starts[name] = partial(Meanwhile, arena, replace(shape, threads=n), alone=False)
        each[name] = {"threads": n}
    bench.compare_plain(
        "host",
        f"{shape}, Python meanwhile",
        starts,
        unit="Mloops/s",
        rounds=rounds,
        base="alone",
        workload=workload | {"python": 1},
        note=note_early,
        each=each,
    )
