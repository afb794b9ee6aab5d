"""What `kvtier bench` prints and draws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvtier.cli.plan.plot import save
from kvtier.scheduling.simulation.outcome import Outcome

_COLUMNS = {
    "TTFT mean s": "ttft_mean",
    "p50": "ttft_p50",
    "p99": "ttft_p99",
    "per token s": "tpot_mean",
    "tokens/s": "tokens_per_second",
    "normalised s": "normalised_mean",
    "turnaround": "turnaround",
    "fairness": "fairness",
    "re-used": "reused",
    "swapped": "swapped",
    "recomputed": "recomputed",
}


class Found(NamedTuple):
    """What a load came to.

    Attributes:
        heading: lines above the table.
        facts: of all schedulers, for JSON.
        outcomes: by scheduler.
    """

    heading: list[str]
    facts: Mapping[str, Any]
    outcomes: Mapping[str, Outcome]

    def __str__(self) -> str:
        return "\n".join([*self.heading, "", _table(self.outcomes)])

    def as_json(self) -> str:
        """All of it."""
        schedulers = {name: _figures(outcome) for name, outcome in self.outcomes.items()}
        return json.dumps({**self.facts, "schedulers": schedulers}, indent=1)

    def draw(self, path: str) -> None:
        """Draw times to the first token into a file. Raises ConfigError: it cannot be written."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name, outcome in self.outcomes.items():
            waits = sorted(x.first - x.arrived for x in outcome.requests)
            axes.plot(waits, [(i + 1) / len(waits) for i in range(len(waits))], drawstyle="steps-post", label=name)
        title = "simulated" if self.facts["simulated"] else "measured"
        axes.set(title=title, xlabel="time to the first token (s)", ylabel="share of requests", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())  # names of all ticks are printed one over the other
        axes.grid(alpha=0.3)
        axes.legend()
        save(figure, path)


def _figures(outcome: Outcome) -> dict[str, float | None]:
    """By name; None, for JSON has no NaN: nothing has one, as the seconds per token of answers of one token."""
    return {name: x if math.isfinite(x) else None for name, x in outcome.figures().items()}


def _table(outcomes: Mapping[str, Outcome]) -> str:
    lines = [["scheduler", *_COLUMNS]]
    for name, outcome in outcomes.items():
        figures = outcome.figures()
        lines.append([name, *(f"{figures[column]:.4g}" for column in _COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
