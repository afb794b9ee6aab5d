"""Microseconds of Python for the kernels of a layer in a decode step: append one token, attend, merge.

The launches go to a driver that runs nothing, so what is counted is Python and torch's dispatch alone, and a machine
without a GPU shows it too. `plain` checks and prepares each call, `prepared` compares it with the layer's last one.
Needs Triton, which compiles a few programs first; where Triton interprets, there is nothing to count.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import stub
from benchmarks.harness import Bench
from benchmarks.turns import Start
from kvtier.config import DEVICE_BLOCK
from kvtier.kernels import copies, launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

SUMMARY = "us of Python for a layer's kernels in a decode step, over a driver that runs nothing"
LAYERS = 32
TURN_STEPS, QUICK_TURN_STEPS = 40, 2


@dataclass(frozen=True)
class Step:
    """What a layer does: Llama 3.1 8B's heads over so many tokens of each row."""

    rows: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}, {self.rows} x {self.tokens:,} tokens"


class Layers:
    """Some layers' calls, made one after the other."""

    def __init__(self, step: Step, turn: int, *, prepared: bool) -> None:
        self.turn = turn
        layout = BlockLayout(step.kv_heads, step.kv_heads, step.dim, step.dim, DEVICE_BLOCK, torch.bfloat16)
        blocks = -(-step.tokens // DEVICE_BLOCK)
        # As projections give them: heads within tokens.
        new = [torch.zeros((step.rows, 1, step.kv_heads, step.dim), dtype=torch.bfloat16) for _ in range(2)]
        keys, values = (x.transpose(1, 2) for x in new)
        query = torch.zeros((step.rows, 1, step.heads, step.dim), dtype=torch.bfloat16).transpose(1, 2)
        params = AttentionParams(step.dim**-0.5)
        self.calls: list[Callable[[int], object]] = []
        for _ in range(LAYERS):
            positions = torch.zeros((step.rows, blocks), dtype=torch.int32)
            table = AddressTable(torch.zeros((step.rows, blocks), dtype=torch.int64), positions=positions)
            last = torch.zeros((step.rows, 1), dtype=torch.int64)
            append = copies.PreparedAppend(layout) if prepared else partial(_append, layout)
            attend = paged.Prepared(layout, torch.bfloat16) if prepared else partial(_attend, layout)

            def call(
                token: int,
                append: Any = append,
                attend: Any = attend,
                table: AddressTable = table,
                last: torch.Tensor = last,
            ) -> None:
                append(keys, values, last, token)
                attend(query, table, step.tokens - DEVICE_BLOCK + token, params)

            self.calls.append(call)
        for call in self.calls:
            call(0)

    def measure(self) -> float:
        """Microseconds of a layer."""
        began = time.perf_counter()
        for token, call in itertools.product(range(self.turn), self.calls):
            call(token % DEVICE_BLOCK)
        return (time.perf_counter() - began) / self.turn / len(self.calls) * 1e6

    def facts(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Drop the calls."""
        self.calls.clear()


def _append(layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor, last: torch.Tensor, token: int) -> None:
    copies.append(keys, values, last, layout, token)


def _attend(
    layout: BlockLayout, query: torch.Tensor, table: AddressTable, length: int, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    return paged.attend(query, table, layout, length, params, out=torch.empty_like(query))


def run(bench: Bench) -> None:
    """Run the scenario."""
    if not launch._installed() or os.environ.get("TRITON_INTERPRET"):
        print("launch: needs Triton, and not its interpreter\n", flush=True)
        return
    quick = bench.settings.quick
    with stub.installed(stub.Driver()):
        for step in (Step(1, 32768), Step(1, 256), Step(16, 4096))[: 1 if quick else 3]:
            starts: dict[str, Start] = {
                name: partial(Layers, step, QUICK_TURN_STEPS if quick else TURN_STEPS, prepared=name == "prepared")
                for name in ("plain", "prepared")
            }
            workload = {"batch": step.rows, "context": step.tokens, "layers": LAYERS, "model": "launch"}
            bench.compare_plain(
                "launch", str(step), starts, unit="us/layer", rounds=bench.rounds(15), base="plain", workload=workload
            )
