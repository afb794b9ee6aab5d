"""First come, first served."""

from __future__ import annotations

from kvtier.scheduling.scheduler import Scheduler


class FirstComeFirstServed(Scheduler):
    """Jobs in the order in which they came."""
