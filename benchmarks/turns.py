"""Turns: contenders in one process, one after the other, with their ratio taken round by round.

A machine drifts (clocks, other loads) more than contenders differ. So nobody runs all of its rounds at once: each round
gives every contender one turn, begins with another of them, and a ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.contenders import Unavailable, first_line
from benchmarks.records import number
from kvtier import BudgetError


class Trial(Protocol):
    """One contender at work on one case. Making it does all that is not measured, warming up included."""

    def measure(self) -> float:
        """One turn; returns its value."""

    def facts(self) -> dict[str, Any]:
        """What else is worth recording, asked after the last turn."""

    def close(self) -> None:
        """Give all memory back."""


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and how far they lie apart."""

    n: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(len(values), statistics.median(values), min(values), max(values))

    def fields(self) -> dict[str, float]:
        """For a record."""
        return {"n": self.n, "median": self.median, "min": self.low, "max": self.high}

    def __str__(self) -> str:
        return f"{number(self.low)} .. {number(self.high)}"


@dataclass
class Outcome:
    """What became of one contender.

    Attributes:
        values: by round; a contender that used up its time sits out the later ones.
        status: `ok`; `unavailable`, it cannot be built here; `refused`, its budget is too small; `skipped`, memory is
            short; `not reached in time`; `failed`.
        reason: of anything but `ok`.
        facts: from its trial.
    """

    values: dict[int, float] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def end(self, error: Exception) -> None:
        """Note why it cannot go on."""
        self.status = (
            "unavailable"
            if isinstance(error, Unavailable)
            else "refused"
            if isinstance(error, BudgetError)
            else "failed"
        )
        name = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
        self.reason = name + first_line(error)

    def ratio(self, base: Outcome) -> Spread | None:
        """To another, within the rounds that both ran; None if there is none."""
        both = [self.values[i] / base.values[i] for i in self.values if base.values.get(i)]
        return Spread.of(both) if both else None


Start = Callable[[], Trial]


def compare(
    starts: Mapping[str, Start],
    *,
    rounds: int,
    together: bool,
    allowance: float,
    tell: Callable[[str], None],
    until: float = math.inf,
    made: Callable[[str, int, Outcome], None] = lambda name, turn, outcome: None,
) -> dict[str, Outcome]:
    """Give every contender its turn in each round.

    Args:
        starts: begin a trial, by name.
        rounds: turns of each.
        together: keep all trials from round to round; else each turn has a trial of its own.
        allowance: seconds that one contender may measure in all; beyond, it sits out.
        tell: is told what is going on.
        until: `time.monotonic()` at which no further turn begins.
        made: is told of each turn as soon as it is made: whatever comes later may be cut off.
    """
    outcomes = {name: Outcome() for name in starts}
    trials: dict[str, Trial] = {}
    spent = dict.fromkeys(starts, 0.0)
    names = list(starts)

    def end(name: str) -> None:
        trial = trials.pop(name, None)
        if trial is not None:
            # Where a device is broken, giving back fails too: the values of others are kept all the same.
            with contextlib.suppress(Exception):
                trial.close()
            del trial
            with contextlib.suppress(Exception):
                release_memory()

    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                outcome = outcomes[name]
                if outcome.status != "ok" or spent[name] > allowance:
                    continue
                if time.monotonic() > until:
                    if not outcome.values:
                        outcome.status = "not reached in time"
                    continue
                tell(f"round {turn + 1} of {rounds}: {name}")
                try:
                    if name not in trials:
                        trials[name] = starts[name]()
                    began = time.perf_counter()
                    outcome.values[turn] = trials[name].measure()
                    spent[name] += time.perf_counter() - began
                    outcome.facts = trials[name].facts()
                    made(name, turn, outcome)
                except Exception as error:
                    outcome.end(error)
                    outcome.values.clear()
                    if _broken():
                        return outcomes  # nobody can go on; what was measured before stays
                if outcome.status != "ok" or not together:
                    end(name)
    finally:
        for name in names:
            end(name)
        tell("")
    return outcomes


def _broken() -> bool:
    """Whether the device answers no more: after an error in a kernel, CUDA refuses a process everything."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def release_memory() -> None:
    """Return what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
