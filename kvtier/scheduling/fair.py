"""The longest wait for the least work first: highest response ratio next, on tokens that are not cached.

AdaptiveLLM (section 4) ranks requests by (time waited + service time) / service time, the service time being that of
what must be computed: a short prompt, and one whose history is cached, need not wait for a long one, and a long one
that has waited long goes first: those that have waited for longer than a bound go before all others.

All of that is among the requests of one tenant. Where several tenants wait, the next request is of the one that was
served least so far (`Shares`), so that a flood of one tenant delays its own.
"""

from __future__ import annotations

import heapq
from collections import deque
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
        """Overdue jobs first; then by falling response ratio. A job that runs goes on before others are let in."""
        waited = load.now - job.arrived
        if job.running:
            return (0, job.number)
        if waited > self.bound:
            return (1, job.number)
        service = max(job.left, 1) / load.tokens_per_second
        return (2, -(waited + service) / service)

    def order(self, load: Load) -> list[Job]:
        """As of `Scheduler`; those that wait take turns by tenant."""
        ranked = super().order(load)
        if len({job.tenant for job in load.waiting}) < 2:
            return ranked
        queues: dict[tuple[int, str], deque[Job]] = {}
        for job in ranked:
            if not job.running:
                queues.setdefault((-job.priority, job.tenant), deque()).append(job)
        served = {tenant: load.served.get(tenant, 0.0) for _, tenant in queues}
        heap = [(priority, served[tenant], tenant) for priority, tenant in queues]
        heapq.heapify(heap)
        turns: list[Job] = []
        while heap:
            priority, before, tenant = heapq.heappop(heap)
            queue = queues[priority, tenant]
            job = queue.popleft()
            turns.append(job)
            if queue:
                heapq.heappush(heap, (priority, before + max(job.left, 1), tenant))
        # Running jobs of a priority go before those that wait with the same one.
        return sorted(
            [*(job for job in ranked if job.running), *turns], key=lambda job: (-job.priority, not job.running)
        )
