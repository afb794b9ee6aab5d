"""The longest wait for the least work first: highest response ratio next, on tokens that are not cached.

AdaptiveLLM (section 4) ranks requests by (time waited + service time) / service time, the service time being that of
what must be computed: a short prompt, and one whose history is cached, need not wait for a long one, and a long one
that has waited long goes first: those that have waited for longer than a bound go before all others. A prompt of which
a part is computed is ranked by the rest.

All of that is among the requests of one tenant. Where several tenants wait, the next request is of the one that was
served least so far (`Shares`), so that a flood of one tenant delays its own.
"""

from __future__ import annotations

import heapq
from typing import Any

from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.scheduler import Scheduler

#: Seconds of waiting behind which a job goes before all that have not waited as long.
BOUND = 60.0


class Fair(Scheduler):
    """Highest response ratio next.

    Args:
        bound: seconds behind which those who wait go first among their tenant's, in the order in which they came.
    """

    def __init__(self, bound: float = BOUND) -> None:
        self.bound = bound

    def key(self, job: Job, load: Load) -> Any:
        """Those that run, in the order in which they came; then the others by turn."""
        return (0, job.number) if job.running else self._turn(job, load)

    def prompt_order(self, ranked: list[Job], load: Load) -> list[Job]:
        """By priority, tenant and turn, of prompts of which nothing is computed and of those that have begun alike.

        So a long prompt that has begun does not keep short ones waiting until its end. Those that have their prompt
        come first, by rank.
        """
        queues: dict[tuple[int, str], list[Job]] = {}
        ordered = list[Job]()
        for job in ranked:
            if job.running and job.left <= 1:
                ordered.append(job)
            else:
                queues.setdefault((-job.priority, job.tenant), []).append(job)
        heap = list[tuple[int, float, str]]()
        for (priority, tenant), queue in queues.items():
            queue.sort(key=lambda job: (self._turn(job, load), job.number), reverse=True)  # the next one last
            heap.append((priority, load.served.get(tenant, 0.0), tenant))
        heapq.heapify(heap)
        while heap:
            priority, served, tenant = heapq.heappop(heap)
            queue = queues[priority, tenant]
            ordered.append(job := queue.pop())
            if queue:
                heapq.heappush(heap, (priority, served + max(job.left, 1), tenant))
        return ordered

    def _turn(self, job: Job, load: Load) -> tuple[int, float]:
        """Overdue jobs first, in the order in which they came; then by falling response ratio."""
        waited = load.now - job.arrived
        if waited > self.bound:
            return (1, job.number)
        service = max(job.left, 1) / load.tokens_per_second
        return (2, -(waited + service) / service)
