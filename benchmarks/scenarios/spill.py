"""Decode tokens/s against the device budget: the cost of keeping part of the KV on the host."""

from __future__ import annotations

from benchmarks.harness import Bench
from benchmarks.scenarios.decode import compare_decode

SUMMARY = "decode tokens/s at device budgets of 10, 25, 50 and 100% of the KV"
CONTEXTS = (2048, 8192, 32768)
CONTENDERS = (
    "dynamic",
    "kvtier@100%",
    *(f"{way}@{share}%" for share in (50, 25, 10) for way in ("kvtier", "fetch")),
    "offloaded",
)


def run(bench: Bench) -> None:
    """Run the scenario."""
    compare_decode(bench, "spill", CONTEXTS, CONTENDERS, "loop", "pylm")
