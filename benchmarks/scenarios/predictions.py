"""How far predictions are from what was measured: copies, host attention and prefill, for sizes left out of fits.

All sizes are timed in turn. Every second one is left out, and the fit of the others predicts it. Beside each prediction
stands how far the same size is from itself: what was measured first against what was measured next. No prediction can
do better than that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Bench
from benchmarks.records import table
from kvtier.calibration.measurements import attention, link
from kvtier.calibration.measurements import model as models
from kvtier.cpu import native
from kvtier.memory.storage.layout import BlockLayout
from kvtier.planning.fit import relative_errors
from kvtier.planning.hardware.predictors import Curve, Prefill, PrefillSize

SUMMARY = "how far predicted seconds are from measured ones: copies, host attention, prefill, for sizes left out"
CASES = ("copies", "host", "prefill")
#: The most that the mean absolute relative error may be.
TARGETS = {"copies": 0.05, "host attention": 0.05, "prefill": 0.06}
#: Seconds of each measurement, which is made twice.
SECONDS, QUICK_SECONDS = 15.0, 0.3
LARGEST, ARENA = 16 * 2**20, 256 * 2**20
QUICK_LARGEST, QUICK_ARENA = 2**20, 8 * 2**20
#: A layer of Llama 3.1 8B, and a model small enough for any machine.
LAYOUT, GROUP = (8, 8, 128, 128), 4
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
QUICK: dict[str, Any] = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}

Points = list[tuple[Any, float]]
Fit = Callable[[Sequence[tuple[Any, float]]], Callable[[Any], float]]


def run(bench: Bench) -> None:
    """Run the scenario."""
    rows: list[list[str]] = []
    for name, case in {"copies": run_copies, "host": run_host, "prefill": run_prefill}.items():
        if bench.selected(name):
            try:
                rows += case(bench)
            except Exception as error:
                bench.fail("predictions", name, error, unit="relative error", workload={"model": name})
    print("predictions · seconds of sizes that were left out of the fit")
    print(table(["", "sizes", "mean error", "largest", "target", "", "measured again"], rows))
    print(flush=True)


def run_copies(bench: Bench) -> list[list[str]]:
    """Copies over the link, by bytes, both ways."""
    if not bench.in_time("predictions", "predictions · copies", {"model": "copies"}):
        return []
    settings = bench.settings
    largest = QUICK_LARGEST if settings.quick else LARGEST

    def measure() -> dict[str, Points]:
        found = link.measure(settings.device, _seconds(bench) / 2, largest=largest)
        return {"up": found.up, "down": found.down}

    return _compared(bench, "copies", measure, _curve)


def run_host(bench: Bench) -> list[list[str]]:
    """Attention on the host, by bytes, for each number of threads."""
    if not native.available():
        print("predictions, host: the native library is not compiled", flush=True)
        return []
    if not bench.in_time("predictions", "predictions · host attention", {"model": "host attention"}):
        return []
    settings = bench.settings
    size = settings.block_size or 64
    layout = BlockLayout(*LAYOUT, size, torch.bfloat16)
    nbytes = QUICK_ARENA if settings.quick else ARENA

    def measure() -> dict[str, Points]:
        found = attention.measure_host(layout, GROUP, torch.device("cpu"), _seconds(bench), nbytes=nbytes)
        return {f"{n} thread{'s' if n > 1 else ''}": points for n, points in found.threads.items()}

    return _compared(bench, "host attention", measure, _curve)


def run_prefill(bench: Bench) -> list[list[str]]:
    """Prefill of a model, by new and cached tokens."""
    if not bench.in_time("predictions", "predictions · prefill", {"model": "prefill"}):
        return []
    settings = bench.settings
    if settings.model is not None:
        model = bench.model(settings.model)
    else:
        config = AutoConfig.for_model("llama", **(QUICK if settings.quick else SMALL))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=settings.dtype).to(settings.device).eval()
    trial = models.Trial(model, settings.block_size or None)

    def measure() -> dict[str, Points]:
        return {"": models.measure_prefill(trial, 2 * _seconds(bench))}

    def fit(points: Sequence[tuple[Any, float]]) -> Callable[[Any], float]:
        found = Prefill.fit(points)
        return lambda size: found.seconds(size.new, size.past, size.batch)

    try:
        return _compared(bench, "prefill", measure, fit)
    finally:
        trial.close()


def _seconds(bench: Bench) -> float:
    if bench.settings.quick:
        return QUICK_SECONDS
    left = bench.settings.deadline - time.monotonic()
    return max(min(SECONDS, left / (2 * len(CASES))), QUICK_SECONDS)


def _curve(points: Sequence[tuple[Any, float]]) -> Callable[[Any], float]:
    return Curve.fit(points).seconds


def _compared(bench: Bench, name: str, measure: Callable[[], dict[str, Points]], fit: Fit) -> list[list[str]]:
    """Rows of the table, one for each set of points, and their records."""
    bench.progress(f"predictions, {name}")
    first, again = measure(), measure()
    bench.progress("")
    rows = []
    for key, points in first.items():
        held = points[1:-1:2]
        predict = fit([x for x in points if x not in held])
        errors = relative_errors(predict, held)
        later = dict(again[key])
        repeated = [abs(later[x] - seconds) / seconds for x, seconds in held if x in later]
        error, noise = _mean(errors), _mean(repeated)
        label = f"{name}, {key}" if key else name
        bench.record(
            "predictions",
            contender=label,
            unit="relative error",
            n=len(errors),
            median=error,
            workload={"model": name, "case": key},
            facts={
                "largest": max(errors, default=None),
                "measured_again": noise,
                "target": TARGETS[name],
                "points": [[_described(x), seconds, predict(x)] for x, seconds in held],
            },
        )
        met = "" if error is None else "met" if error <= TARGETS[name] else "missed"
        rows.append(
            [
                label,
                str(len(errors)),
                _percent(error),
                _percent(max(errors, default=None)),
                _percent(TARGETS[name]),
                met,
                _percent(noise),
            ]
        )
    return rows


def _described(size: Any) -> Any:
    return [size.new, size.past, size.batch] if isinstance(size, PrefillSize) else size


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
