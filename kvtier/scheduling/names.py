"""Schedulers by name."""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.scheduler import Scheduler

_NAMES: dict[str, type[Scheduler]] = {"fair": Fair, "fcfs": FirstComeFirstServed}


def scheduler_of(given: Scheduler | str) -> Scheduler:
    """A scheduler, or the one of a name. Raises `ConfigError`."""
    if isinstance(given, Scheduler):
        return given
    if not isinstance(given, str) or given not in _NAMES:
        raise ConfigError(f"scheduler={given!r}: give a kvtier.Scheduler, or one of {', '.join(map(repr, _NAMES))}.")
    return _NAMES[given]()
