"""`Scheduler`: what a step works on, for any ranking of jobs.

Each running sequence that has its prompt gets one token; the rest of the step's tokens goes to prompts, in chunks, so
that a long prompt delays nobody's next token by more than a step (Sarathi-Serve; Pensieve, section 4.1, batches both in
one forward as well). A sequence is let in where there is room for its whole prompt. Where the running ones outgrow the
memory, the last in rank give up their blocks, and come back when there is room.
"""

from __future__ import annotations

from typing import Any

from kvtier.scheduling.job import Job, Load, Step
from kvtier.scheduling.prices import SWAP

#: Running jobs at the end of the ranking among which the one with the cheapest way back is preempted.
CHOICE = 4
#: Steps that must be saved by taking another one than the last in rank. It comes back later than those behind it, and
#: until then fewer may run: over random loads that costs, or gains, a step or two. Less than that is no saving but
#: chance.
OUT_OF_TURN = 2.0


class Scheduler:
    """Ranks jobs as they came. A subclass says otherwise by `key`."""

    def key(self, job: Job, load: Load) -> Any:
        """Jobs with lower keys go first, within a priority."""
        return job.number

    def order(self, load: Load) -> list[Job]:
        """All jobs by rank."""
        jobs = (*load.running, *load.waiting)
        return sorted(jobs, key=lambda job: (-job.priority, self.key(job, load), job.number))

    def plan(self, load: Load) -> Step:
        """What the next step computes. Changes nothing."""
        ranked = self.order(load)
        step, size = Step(), load.block_size
        free, budget = load.free_blocks, load.max_tokens
        running = [job for job in ranked if job.running]
        for job in [job for job in running if job.left == 1]:
            if job in step.preempt or budget <= 0:
                continue
            need = _more(job, 1, size)
            while need > free and (last := self._last(running, step, load)) is not None:
                if last is job and len(running) == len(step.preempt) + 1:
                    break  # alone
                self._preempt(last, step, load)
                free += last.blocks
                if last is job:
                    break
            if job in step.preempt:
                continue
            step.tokens[job] = 1
            free -= need
            budget -= 1
        # Whoever runs and grows by a block next is not to be preempted for someone who is let in now.
        count = sum(job not in step.preempt for job in running)
        closed, prompts = bool(step.preempt), 0
        for job in ranked:
            if budget <= 0:
                break
            if job in step.tokens or job in step.preempt:
                continue
            tokens = min(job.left, budget) if load.chunked else job.left
            # A prompt that is not cut may be longer than any step: the first one of a step is computed in any case.
            fits = tokens <= budget or not prompts
            if not job.running:
                full = count and (count >= load.max_running or _more(job, job.left, size) + count > free)
                if closed or full or not fits:
                    closed = True  # nobody behind it passes: else large ones would wait for ever
                    continue
            need = _more(job, tokens, size)
            # Whoever is alone is not kept waiting for room that nobody gives up: if there is none, the memory says so.
            if job.running and (not fits or (need > free and count > 1)):
                continue
            count += not job.running
            prompts += 1
            step.tokens[job] = tokens
            # Its whole prompt has a place from now on.
            free -= _more(job, job.left, size) if not job.running else need
            budget -= tokens
        if not step.tokens and not step.preempt and running:
            # Prompts that are half there keep each other from going on.
            last = self._last(running, step, load)
            if last is not None and len(running) > 1:
                self._preempt(last, step, load)
        return step

    @staticmethod
    def _preempt(job: Job, step: Step, load: Load) -> None:
        step.preempt.append(job)
        if load.ways is not None:
            step.ways[job] = load.ways.way(job, load, _free_on_host(step, load))[0]

    @staticmethod
    def _last(running: list[Job], step: Step, load: Load) -> Job | None:
        """The last in rank that has no part in the step yet.

        Where ways back have prices, of the last few it is the one whose blocks are the cheapest to get back, if that
        saves more than it costs to take it out of turn.
        """
        last: list[Job] = []
        for job in reversed(running):
            if job in step.preempt or job in step.tokens:
                continue
            if load.ways is None:
                return job
            if last and job.priority != last[0].priority:
                break
            last.append(job)
            if len(last) == CHOICE:
                break
        if not last or load.ways is None:
            return None
        free = _free_on_host(step, load)
        prices = [load.ways.way(job, load, free)[1] / max(job.blocks, 1) for job in last]
        best = min(range(len(last)), key=prices.__getitem__)
        saved = (prices[0] - prices[best]) * last[best].blocks
        return last[best] if saved > OUT_OF_TURN * load.ways.step(load) else last[0]


def _free_on_host(step: Step, load: Load) -> int:
    """Blocks that what is swapped in this step so far leaves on the host."""
    return load.free_host_blocks - sum(-(-x.cached // load.block_size) for x, way in step.ways.items() if way == SWAP)


def _more(job: Job, tokens: int, size: int) -> int:
    """New blocks that so many more tokens take."""
    if not job.running:  # what it begins with is there already, but for the block that it goes on in
        return -(-(max(job.reusable, job.swapped) + tokens) // size) - job.reusable // size
    return max(-(-(job.cached + tokens) // size) - job.blocks, 0)
