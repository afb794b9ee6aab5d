"""Schedulers by name."""

from __future__ import annotations

from typing import Literal

from kvtier.errors import ConfigError
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.scheduler import Scheduler

#: As a type checker knows them.
SchedulerName = Literal["fair", "fcfs"]
SCHEDULERS: dict[str, type[Scheduler]] = {"fair": Fair, "fcfs": FirstComeFirstServed}


def scheduler_of(given: Scheduler | str) -> Scheduler:
    """A scheduler, or the one of a name. Raises `ConfigError`."""
    if isinstance(given, Scheduler):
        return given
    if not isinstance(given, str) or given not in SCHEDULERS:
        raise ConfigError(
            f"scheduler={given!r}: give a kvtier.Scheduler, or one of {', '.join(map(repr, SCHEDULERS))}."
        )
    return SCHEDULERS[given]()


def name_of(scheduler: Scheduler) -> str:
    """What a scheduler is called: its name, or that of its class."""
    return next((name for name, kind in SCHEDULERS.items() if type(scheduler) is kind), type(scheduler).__name__)
