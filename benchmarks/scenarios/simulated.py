"""The adaptive policy in simulation: random settings, against every fixed share, the simple ways, and a lower bound.

Nothing here is timed: seconds are virtual, and a seed gives the same figures on every machine. `calibrated` begins with
the rates of the machine, each wrong by 3%, as a calibration leaves them; `estimated` begins with the estimates of
`Rates` and learns. Totals include the first steps. In `alike` settings all layers keep the same part of the context; in
`uneven` ones they need not, contexts may grow faster, and copies may take longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.harness import Bench
from benchmarks.records import table
from benchmarks.targets import Target, table_of
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policy import Policy
from kvtier.planning.simulation.trials import Trial, compare

SUMMARY = "the adaptive policy in simulation, against every fixed share, the simple ways and a lower bound"
STEPS, SETTINGS, ERROR = 200, 1000, 0.03
POLICIES: dict[str, Callable[[Trial], Policy]] = {
    "calibrated": lambda trial: Adaptive(trial.calibrated(ERROR)),
    "estimated": lambda trial: Adaptive(),
}
SETTINGS_OF: dict[str, Callable[[int], Trial]] = {"alike": Trial.even, "uneven": Trial.drawn}
CASES = tuple(SETTINGS_OF)
#: So many settings at a time, so that progress shows.
_PORTION = 20


def run(bench: Bench) -> None:
    """Run the scenario; `--rounds` is the number of settings of each kind."""
    settings = bench.settings.rounds or (20 if bench.settings.quick else SETTINGS)
    rows, found = [], list[Target]()
    for kind, drawn in SETTINGS_OF.items():
        if not bench.selected(kind):
            continue
        portions = []
        for first in range(0, settings, _PORTION):
            bench.progress(f"simulated: {kind} setting {first} of {settings}")
            trials = [drawn(seed) for seed in range(first, min(first + _PORTION, settings))]
            portions.append(compare(trials, POLICIES, STEPS))
        bench.progress("")
        workload = {"settings": settings, "steps": STEPS, "layers": kind}
        for name in POLICIES:
            shares, simple, bounds = (
                sorted(x for some in portions for x in getattr(some[name], part))
                for part in ("shares", "simple", "bounds")
            )
            figures = {
                "settings": settings,
                "steps": STEPS,
                "within_2_percent": _within(shares, 0.02),
                "within_5_percent": _within(shares, 0.05),
                "against_best_share": _figures(shares),
                "against_simple_ways": _figures(simple),
                "against_bound": _figures(bounds),
            }
            bench.record("simulated", contender=f"adaptive, {name}", workload=workload, **figures)
            rows.append(
                (
                    kind,
                    name,
                    *(f"{statistics.median(x):.3f}" for x in (shares, simple, bounds)),
                    *(f"{x[-1]:.3f}" for x in (shares, simple)),
                    f"{_within(shares, 0.02):.1%}",
                    f"{_within(shares, 0.05):.1%}",
                )
            )
            if name == "calibrated":
                targets = [
                    Target(f"{kind}: settings within 2% of the best fixed share", _within(shares, 0.02), ">=", 0.95),
                    Target(f"{kind}: worst setting, x the best fixed share", shares[-1], "<=", 1.05),
                    Target(f"{kind}: worst setting, x the best simple way", simple[-1], "<=", 1.02),
                ]
                found += targets
                for target in targets:
                    bench.record("simulated", workload=workload, **target.fields())
    heads = (
        "layers", "rates", "x best share", "x simple ways", "x bound", "worst share", "worst simple", "<= 2%", "<= 5%",
    )  # fmt: skip
    print(f"{settings} random settings of each kind, {STEPS} steps each; medians, and the worst\n")
    print(table(heads, rows) + "\n\n" + table_of(found) + "\n", flush=True)


def _within(ratios: Sequence[float], part: float) -> float:
    return sum(x <= 1 + part for x in ratios) / len(ratios)


def _figures(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(ratios), 4),
        "p95": round(ratios[min(int(0.95 * len(ratios)), len(ratios) - 1)], 4),
        "worst": round(ratios[-1], 4),
    }
