"""How the kernel's time is split: scores from keys, softmax, weighted values, and the rest.

The same sources are compiled once more, with clocks in them, into a temporary folder: the library in use stays as is.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Unavailable
from benchmarks.harness import Bench
from benchmarks.records import table as text_table
from benchmarks.scenarios.host.arena import Arena, Call, Shape
from benchmarks.scenarios.host.calls import native_shape, ours, random_query, tables
from benchmarks.scenarios.host.threads import USUAL
from benchmarks.turns import Start
from kvtier.cpu import build, native
from kvtier.cpu.loader import check
from kvtier.kernels.params import AttentionParams

PHASES = ("keys", "softmax", "values", "rest")
CLOCKED = "kvtier, with clocks"


class Clocked:
    """The library with clocks. Raises `Unavailable` where it cannot be compiled, or has none."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                built = build.build(Path(folder) / "libkvtier_phases.so", extra=("-DKVTIER_PHASES",))
            except build.BuildError as error:
                raise Unavailable(f"the library with clocks was not compiled: {error}") from error
            self.library = ctypes.CDLL(str(built))
        if not hasattr(self.library, "kvtier_phases"):
            raise Unavailable("these sources have no clocks")
        self.library.kvtier_use_instruction_set(native.instruction_set().encode())
        self.ticks = (ctypes.c_uint64 * len(PHASES))()

    def take(self) -> list[int]:
        """Ticks of each phase since the last call."""
        self.library.kvtier_phases(self.ticks)
        return list(self.ticks)


class ClockedCall(Call):
    """A call of that library; its facts are the shares of the phases, in percent."""

    def __init__(self, arena: Arena, shape: Shape, clocked: Clocked) -> None:
        self.clocked = clocked
        self.spent = [0] * len(PHASES)
        super().__init__(arena, shape, self._calls)

    def _calls(self, arena: Arena, shape: Shape) -> Iterator[Callable[[], Any]]:
        layout, query, params = native_shape(shape), random_query(shape), AttentionParams(shape.dim**-0.5)
        attend = self.clocked.library.kvtier_attend
        for table in tables(arena, shape):
            prepared = native.Call(layout, query, table, params)

            # The addresses in a problem are good as long as the call is.
            def call(prepared: native.Call = prepared) -> None:
                check(attend(ctypes.byref(prepared.problem), shape.threads))

            yield call

    def measure(self) -> float:
        """GB/s, and what the clocks say of this turn."""
        self.clocked.take()
        rate = super().measure()
        self.spent = [a + b for a, b in zip(self.spent, self.clocked.take(), strict=True)]
        return rate

    def facts(self) -> dict[str, Any]:
        """Percent of the time inside tasks."""
        total = sum(self.spent) or 1
        return {"percent": {name: 100 * x / total for name, x in zip(PHASES, self.spent, strict=True)}}


def note(facts: dict[str, Any]) -> str:
    """The shares."""
    return ", ".join(f"{name} {share:.0f}%" for name, share in facts.get("percent", {}).items())


def problems(*, quick: bool) -> Iterator[Shape]:
    """What is measured: one sequence on one thread."""
    if quick:
        yield replace(USUAL, lengths=(1024,))
        return
    heads = ((32, 8), (16, 8), (32, 32))
    for dtype, contexts in ((torch.bfloat16, (4096, 16384)), (torch.float16, (16384,)), (torch.float32, (16384,))):
        for query_heads, kv_heads in heads:
            for tokens in contexts:
                yield replace(USUAL, dtype=dtype, heads=query_heads, kv_heads=kv_heads, lengths=(tokens,))


def run_phases(bench: Bench, arena: Arena) -> None:
    """The kernel with clocks beside the kernel without: their ratio says what the clocks cost."""
    bench.progress("host, phases: compiling")
    try:
        clocked = Clocked()
    except Unavailable as error:
        bench.progress("")
        print(f"host, phases: {error}\n", flush=True)
        return
    bench.progress("")
    rows = []
    for shape in problems(quick=bench.settings.quick):
        starts: dict[str, Start] = {
            "kvtier": partial(Call, arena, shape, ours()),
            CLOCKED: partial(ClockedCall, arena, shape, clocked),
        }
        outcomes = bench.compare_plain(
            "host",
            f"{shape}, phases",
            starts,
            unit="GB/s",
            rounds=bench.rounds(5),
            base="kvtier",
            workload=shape.fields() | {"phases": 1},
            note=note,
        )
        if outcomes and outcomes[CLOCKED].facts:
            percent = outcomes[CLOCKED].facts["percent"]
            rows.append([str(shape), *(f"{percent[name]:.0f}%" for name in PHASES)])
    if rows:
        print("host · share of the kernel's time\n" + text_table(["", *PHASES], rows, left=(0,)) + "\n", flush=True)
