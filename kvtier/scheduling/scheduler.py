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

    def prompt_order(self, ranked: list[Job], load: Load) -> list[Job]:
        """The order in which prompts are computed, of all jobs by rank. Who is preempted depends on the rank alone."""
        return ranked

    def plan(self, load: Load) -> Step:
        """What the next step computes. Changes nothing."""
        ranked = self.order(load)
        made = _Planning(load, [job for job in ranked if job.running])
        made.decode()
        made.compute_prompts(self.prompt_order(ranked, load))
        if not made.step.tokens and not made.step.preempt:
            made.end_deadlock()
        return made.step


class _Planning:
    """One step while it is made.

    Args:
        load: what there is to do.
        running: the running jobs by rank.

    Attributes:
        step: as far as it is made.
        free: device blocks that nothing of the step takes.
        budget: tokens that may still be computed.
    """

    def __init__(self, load: Load, running: list[Job]) -> None:
        self._load = load
        self._running = running
        self.step = Step()
        self.free = load.free_blocks
        self.budget = load.max_tokens

    def decode(self) -> None:
        """Give each running job that has its prompt one token, by rank. The last in rank make room for it."""
        for job in self._running:
            if self.budget <= 0:
                break
            if job.left != 1 or job in self.step.preempt:
                continue
            need = _more(job, 1, self._load.block_size)
            if self._has_room(job, need):
                self._compute(job, 1, need)

    def compute_prompts(self, ordered: list[Job]) -> None:
        """Give the rest of the tokens to prompts in this order: of jobs that run, and of those that are let in."""
        load, step = self._load, self.step
        running = [job for job in self._running if job not in step.preempt]
        # Whoever runs and grows by a block next is not to be preempted for someone who is let in now.
        count = len(running)
        # Nor does anybody who is let in take the room of prompts that are computed in part.
        kept = sum(_more(job, job.left, load.block_size) for job in running if job not in step.tokens)
        closed, first = bool(step.preempt), True
        for job in ordered:
            if self.budget <= 0:
                break
            if job in step.tokens or job in step.preempt:
                continue
            tokens = min(job.left, self.budget) if load.chunked else job.left
            # A prompt that is not cut may be longer than any step: the first one of a step is computed in any case.
            fits = tokens <= self.budget or first
            # Who is let in has a place for the whole prompt from now on.
            need = _more(job, tokens if job.running else job.left, load.block_size)
            if job.running:
                # Whoever is alone is not kept waiting for room that nobody gives up: if there is none, the memory
                # says so.
                if not fits or (need > self.free and count > 1):
                    continue
                kept -= _more(job, job.left, load.block_size)
            else:
                # Nobody behind one that is not let in passes it: else large ones would wait for ever.
                closed = (
                    closed or not fits or bool(count and (count >= load.max_running or need + count + kept > self.free))
                )
                if closed:
                    continue
                count += 1
            self._compute(job, tokens, need)
            first = False

    def end_deadlock(self) -> None:
        """Preempt the last in rank where nothing can be computed: unfinished prompts keep each other from going on."""
        last = self._last() if len(self._running) > 1 else None
        if last is not None:
            self._preempt(last)

    def _has_room(self, job: Job, need: int) -> bool:
        """Preempt the last in rank until so many blocks are free. Whether the job itself was not among them."""
        while need > self.free and (last := self._last()) is not None:
            if last is job and len(self._running) == len(self.step.preempt) + 1:
                break  # alone: if there is no room, the memory says so
            self._preempt(last)
            self.free += last.blocks
            if last is job:
                return False
        return True

    def _compute(self, job: Job, tokens: int, blocks: int) -> None:
        self.step.tokens[job] = tokens
        self.free -= blocks
        self.budget -= tokens

    def _preempt(self, job: Job) -> None:
        self.step.preempt.append(job)
        if self._load.ways is not None:
            self.step.ways[job] = self._load.ways.way(job, self._load, self._free_on_host())[0]

    def _last(self) -> Job | None:
        """The last in rank that has no part in the step yet.

        Where ways back have prices, of the last few it is the one whose blocks are the cheapest to get back, if that
        saves more than it costs to take it out of turn.
        """
        load, last = self._load, list[Job]()
        for job in reversed(self._running):
            if job in self.step.preempt or job in self.step.tokens:
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
        free = self._free_on_host()
        prices = [load.ways.way(job, load, free)[1] / max(job.blocks, 1) for job in last]
        best = min(range(len(last)), key=prices.__getitem__)
        saved = (prices[0] - prices[best]) * last[best].blocks
        return last[best] if saved > OUT_OF_TURN * load.ways.step(load) else last[0]

    def _free_on_host(self) -> int:
        """Blocks that what is swapped in this step so far leaves on the host."""
        swapped = (job.cached for job, way in self.step.ways.items() if way == SWAP)
        return self._load.free_host_blocks - sum(-(-cached // self._load.block_size) for cached in swapped)


def _more(job: Job, tokens: int, size: int) -> int:
    """New blocks that so many more tokens take."""
    if not job.running:  # what it begins with is there already, but for the block that it goes on in
        return -(-(max(job.reusable, job.swapped) + tokens) // size) - job.reusable // size
    return max(-(-(job.cached + tokens) // size) - job.blocks, 0)
