"""More threads than one: what they gain, and what they gain while another process is busy on one of the cores."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.cores import words
from benchmarks.harness import Bench
from benchmarks.neighbour import Neighbour
from benchmarks.scenarios.host.arena import Arena, Call, Ceiling, Shape
from benchmarks.scenarios.host.calls import ours
from benchmarks.turns import Start

USUAL = Shape(torch.bfloat16, 32, 8, 128, (16384,))
#: The scheduler's time slices are milliseconds long: a turn spans many of them.
BUSY_TURN_SECONDS = 0.6


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


# Several threads


def run_threads(bench: Bench, arena: Arena) -> None:
    """One thread against two, four and so on, of the kernel and of the ceiling, each in turn."""
    most = cores()
    if most == 1:
        print("host, threads: there is one core only\n", flush=True)
        return
    counts = [*(2**i for i in range((most - 1).bit_length())), most]
    shapes = [replace(USUAL, lengths=(tokens,)) for tokens in (4096, 16384, 65536)]
    # Cores share memory, where that is the limit; arithmetic each has of its own, and fp16 is widened here.
    shapes.append(replace(USUAL, dtype=torch.float16, heads=64))
    for shape in shapes[:1] if bench.settings.quick else shapes:
        shape = replace(shape, threads=most)
        starts: dict[str, Start] = {}
        base: dict[str, str] = {}
        for name, start in (("ceiling", partial(Ceiling, arena)), ("kvtier", _call(arena))):
            for threads in counts:
                label = f"{name}, {words(threads)}"
                starts[label] = partial(start, replace(shape, threads=threads))
                base[label] = f"{name}, {words(1)}"
        outcomes = bench.compare_plain(
            "host",
            f"{shape}, up to {words(most)}",
            starts,
            unit="GB/s",
            rounds=bench.rounds(9),
            base=base,
            workload=shape.fields(),
            each={f"{name}, {words(n)}": {"threads": n} for name in ("ceiling", "kvtier") for n in counts},
        )
        shares = []
        for n in counts if outcomes else ():
            ratio = outcomes[f"kvtier, {words(n)}"].ratio(outcomes[f"ceiling, {words(n)}"])
            shares += [f"{ratio.median:.0%} with {words(n)}"] if ratio else []
        if shares:
            print(f"  of the ceiling with as many threads: {', '.join(shares)}\n", flush=True)


def _call(arena: Arena) -> Callable[[Shape], Call]:
    return lambda shape: Call(arena, shape, ours())


# A busy core


class BusyCall(Call):
    """The kernel while another process is busy on one core, or while none is."""

    def __init__(self, arena: Arena, shape: Shape, *, busy: bool, own_threads: bool = False) -> None:
        self.busy = busy
        self.times: list[float] = []
        super().__init__(arena, shape, ours(own_threads=own_threads))

    def measure(self) -> float:
        """Milliseconds a call, the mean of one turn: a core that is taken away makes few calls very long."""
        core = max(os.sched_getaffinity(0))
        times: list[float] = []
        with Neighbour(core) if self.busy else contextlib.nullcontext():
            began = time.perf_counter()
            while not times or time.perf_counter() - began < BUSY_TURN_SECONDS:
                start = time.perf_counter()
                self.calls[self.at % len(self.calls)]()
                self.at += 1
                times.append((time.perf_counter() - start) * 1e3)
        self.times += times
        return sum(times) / len(times)

    def facts(self) -> dict[str, Any]:
        """How single calls spread, in ms."""
        times = sorted(self.times)
        return {
            "calls": len(times),
            "median_ms": times[len(times) // 2],
            "p90_ms": times[len(times) * 9 // 10],
            "worst_ms": times[-1],
        }


def note_calls(facts: dict[str, Any]) -> str:
    """How single calls spread."""
    return f"a call: median {facts['median_ms']:.2f}, p90 {facts['p90_ms']:.2f}, worst {facts['worst_ms']:.1f} ms"


def run_busy(bench: Bench, arena: Arena) -> None:
    """As many threads as cores against one less, with and without a neighbour."""
    most = cores()
    if most == 1:
        print("host, busy: there is one core only\n", flush=True)
        return
    shape = replace(USUAL, threads=most)
    base = f"{words(most - 1)}, idle"
    starts: dict[str, Start] = {}
    each: dict[str, dict[str, int]] = {}
    for threads in (most - 1, most):
        for busy in (False, True):
            name = f"{words(threads)}, {'a core busy' if busy else 'idle'}"
            starts[name] = partial(BusyCall, arena, replace(USUAL, threads=threads), busy=busy)
            each[name] = {"threads": threads, "busy": int(busy), "own_threads": 0}
    # A borrowed team waits for all of its threads, also for one that has no core at the moment; the library's own
    # threads are waited for only once they have taken a task.
    for busy in (False, True):
        name = f"{words(most)}, own, {'a core busy' if busy else 'idle'}"
        starts[name] = partial(BusyCall, arena, shape, busy=busy, own_threads=True)
        each[name] = {"threads": most, "busy": int(busy), "own_threads": 1}
    bench.compare_plain(
        "host",
        f"{shape}, another process on one of {most} cores",
        starts,
        unit="ms",
        rounds=bench.rounds(9),
        base=base,
        workload=shape.fields(),
        note=note_calls,
        each=each,
    )
