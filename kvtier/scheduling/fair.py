"""The longest wait for the least work first: highest response ratio next, on tokens that are not cached.

AdaptiveLLM (section 4) ranks requests by (time waited + service time) / service time, the service time being that of
what must be computed: a short prompt, and one whose history is cached, need not wait for a long one, and a long one
that has waited long goes first. No one waits for longer than a bound.
"""

from __future__ import annotations

from typing import Any

from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.scheduler import Scheduler

#: Seconds of waiting behind which a job goes before all that have not waited as long.
BOUND = 60.0


class Fair(Scheduler):
    """Highest response ratio next.

    Args:
        bound: seconds behind which those who wait go first, in the order in which they came.
    """

    def __init__(self, bound: float = BOUND) -> None:
        self.bound = bound

    def key(self, job: Job, load: Load) -> Any:
        """Overdue jobs first; then by falling response ratio. A job that runs goes on before others are let in."""
        waited = load.now - job.arrived
        if job.running:
            return (0, job.number)
        if waited > self.bound:
            return (1, job.number)
        service = max(job.left, 1) / load.tokens_per_second
        return (2, -(waited + service) / service)
