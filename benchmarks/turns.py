"""Turns: contenders are measured one after the other, and ratios are taken round by round.

A turn is one measurement of one contender. A machine drifts (clocks, other loads) by more than contenders differ. So
each round gives every contender one turn and begins with another contender, and a ratio is the median of the ratios
within rounds.
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


class TrialEnded(Exception):
    """A trial in another process ended.

    Args:
        status: that of its `Outcome` there.
        reason: that of its `Outcome` there.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


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
    """The median and the range of some values."""

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
        if isinstance(error, TrialEnded):
            self.status, self.reason = error.status, str(error)
            return
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
    progress: Callable[[str], None],
    until: float = math.inf,
    on_turn: Callable[[str, int, Outcome], None] = lambda name, turn, outcome: None,
) -> dict[str, Outcome]:
    """Give every contender its turn in each round.

    Args:
        starts: begin a trial, by name.
        rounds: turns of each.
        together: keep all trials from round to round; else each turn has a trial of its own.
        allowance: seconds that one contender may measure in all; beyond, it sits out.
        progress: is called with what is being measured, for a terminal.
        until: `time.monotonic()` at which no further turn begins.
        on_turn: is called after each turn, so that a comparison that is cut off leaves its turns.
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
                progress(f"round {turn + 1} of {rounds}: {name}")
                try:
                    if name not in trials:
                        trials[name] = starts[name]()
                    began = time.perf_counter()
                    outcome.values[turn] = trials[name].measure()
                    spent[name] += time.perf_counter() - began
                    outcome.facts = trials[name].facts()
                    on_turn(name, turn, outcome)
                except Exception as error:
                    outcome.end(error)
                    outcome.values.clear()
                    if broken():
                        return outcomes  # no contender can go on; earlier values stay
                if outcome.status != "ok" or not together:
                    end(name)
    finally:
        for name in names:
            end(name)
        progress("")
    return outcomes


def broken() -> bool:
    """Whether the device answers no more: after an error in a kernel, CUDA refuses a process everything."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def release_memory() -> None:
    """Return memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
