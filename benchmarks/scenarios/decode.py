"""Decode tokens/s against context, one token at a time.

loop      the model called again and again, its most likely token fed back
generate  `model.generate`, which does more for each token
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import BASELINE
from benchmarks.cores import words
from benchmarks.harness import Bench, dtype_name
from benchmarks.models import label
from benchmarks.records import number, size, table
from benchmarks.sessions import WARM_UP_TOKENS
from benchmarks.turns import Outcome

SUMMARY = "decode tokens/s at 64 to 32k tokens of context, everything resident"
CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@100%", "static", "fp8", "quanto", "hqq", "offloaded")
CASES = ("loop", "generate")
#: What is usual with `--against`.
AGAINST_CONTEXTS = (1024, 8192, 32768)
AGAINST_CONTENDERS = ("dynamic", "kvtier")
AGAINST_MODELS = ("pylm", "qwen3-0.6b")


def note(facts: dict[str, Any]) -> str:
    """The budget, and the bytes that are fetched."""
    if not facts.get("device_budget") or not facts.get("bytes_up_per_token"):
        return ""
    return f"budget {size(facts['device_budget'])}, {size(facts['bytes_up_per_token'])} fetched per token"


def compare_decode(
    bench: Bench, scenario: str, contexts: tuple[int, ...], names: tuple[str, ...], through: str, *usual_models: str
) -> None:
    """Compare decoding with these contenders at each context, then say how it depends on the context."""
    tokens, rounds = bench.tokens(32), bench.rounds(5)
    for model_name in bench.model_names(*usual_models):
        found: dict[int, dict[str, Outcome]] = {}
        for case in bench.cases(scenario, model_name, contexts, WARM_UP_TOKENS + rounds * tokens):
            starts = bench.starts(through, model_name, case, tokens, *names)
            found[case.context] = bench.compare(
                scenario,
                model_name,
                case,
                starts,
                unit="tokens/s",
                rounds=rounds,
                base=bench.bases(starts),
                note=note,
                detail=f"{through}, {words(torch.get_num_threads())}" if case.device.type == "cpu" else through,
                tokens_per_turn=tokens,
                through=through,
            )
        if len(found) > 2:  # through two points there is always a line
            summarize(bench, scenario, model_name, found, through)


def summarize(
    bench: Bench, scenario: str, model: str, found: Mapping[int, Mapping[str, Outcome]], through: str
) -> None:
    """Of each contender: its worst ratio at any context, and how near to a line in the context a step's time is."""
    batch = bench.settings.batch
    rows = []
    for name in next(iter(found.values())):
        medians = {
            context: statistics.median(outcomes[name].values.values())
            for context, outcomes in found.items()
            if outcomes[name].values
        }
        if len(medians) < 3:
            continue
        ratios = {
            context: ratio.median
            for context in medians
            if BASELINE in found[context] and (ratio := found[context][name].ratio(found[context][BASELINE]))
        }
        least = min(ratios, key=lambda context: ratios[context], default=None)
        line = fit({context: 1e3 * batch / median for context, median in medians.items()})
        facts = {"contexts": list(medians), "off_line": line.off, "base_ms": line.base}
        if least is not None:
            facts |= {"least_ratio": ratios[least], "least_ratio_context": least}
        rows.append(
            [
                name,
                "-" if least is None else f"{ratios[least]:.2f} at {least:,}",
                number(line.base),
                number(line.slope * 1024),
                f"{line.off:.0%}",
            ]
        )
        bench.record(
            scenario,
            contender=name,
            unit="ms/step per 1k tokens",
            n=len(medians),
            median=line.slope * 1024,
            ratio=None,
            workload={
                "model": label(model),
                "dtype": dtype_name(bench.settings.dtype),
                "context": max(medians),
                "batch": batch,
                "through": through,
                "summary": 1,
            },
            facts=facts,
        )
    if rows:
        together = f" · batch of {batch}" if batch > 1 else ""
        print(f"{scenario} · {label(model)}{together} · {through} · over all contexts: the time of a step, as a line")
        header = ["", f"least x {BASELINE}", "ms/step", "+ ms per 1k tokens", "farthest from the line"]
        print(table(header, rows, left=(0,)) + "\n", flush=True)


@dataclass(frozen=True)
class Line:
    """`base + slope x context`; `off` is the largest relative distance of a point from it."""

    base: float
    slope: float
    off: float


def fit(points: Mapping[int, float]) -> Line:
    """The line with the least relative squares through at least two points, all positive."""
    # Relative errors: each point counts with 1 / y^2.
    weights = {x: 1 / y**2 for x, y in points.items()}
    total = sum(weights.values())
    mean_x = sum(weights[x] * x for x in points) / total
    mean_y = sum(weights[x] * y for x, y in points.items()) / total
    spread = sum(weights[x] * (x - mean_x) ** 2 for x in points)
    slope = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in points.items()) / spread
    base = mean_y - slope * mean_x
    return Line(base, slope, max(abs(y - base - slope * x) / y for x, y in points.items()))


def run(bench: Bench) -> None:
    """Run the scenario."""
    for through in CASES:
        if not bench.selected(through):
            continue
        if bench.settings.against is None:
            compare_decode(bench, "decode", CONTEXTS, CONTENDERS, through, "pylm")
        else:
            compare_decode(bench, "decode", AGAINST_CONTEXTS, AGAINST_CONTENDERS, through, *AGAINST_MODELS)
