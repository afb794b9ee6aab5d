"""A trivial engine around a scheduler: true blocks, a clock that steps, no model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvtier.scheduling.job import Job, Load, Step
from kvtier.scheduling.scheduler import Scheduler


def blocks_of(tokens: int, size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // size)


class Broken(AssertionError):
    """A scheduler did what it must not."""


@dataclass
class World:
    """Jobs with blocks of their own.

    Attributes:
        total, size: blocks, and tokens of one.
        ends: tokens at which each job ends.
        order: of first steps, and of ends.
    """

    scheduler: Scheduler
    total: int
    size: int
    max_tokens: int
    max_running: int = 8
    chunked: bool = True
    step_seconds: float = 1.0
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    ends: dict[Job, int] = field(default_factory=dict)
    began: dict[Job, float] = field(default_factory=dict)
    ended: dict[Job, float] = field(default_factory=dict)
    order: list[Job] = field(default_factory=list)
    preempted: int = 0
    steps: int = 0

    def add(self, prompt: int, new: int, priority: int = 0) -> Job:
        """A job that is to get `new` tokens behind its prompt."""
        made = Job(len(self.jobs), self.now, prompt, prompt + new, priority=priority)
        assert blocks_of(prompt + new - 1, self.size) <= self.total, "it never fits"
        self.jobs.append(made)
        self.ends[made] = prompt + new
        return made

    @property
    def live(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self.jobs if job not in self.ended]

    def load(self) -> Load:
        """What the scheduler is told."""
        running = [job for job in self.live if job.running]
        for job in running:
            job.blocks = blocks_of(job.cached, self.size)
        return Load(
            self.now,
            running,
            [job for job in self.live if not job.running],
            self.total - sum(job.blocks for job in running),
            self.size,
            self.max_tokens,
            self.max_running,
            self.chunked,
        )

    def step(self) -> Step:
        """One step, every rule of it checked."""
        load = self.load()
        before = [(job, job.cached, job.running, job.blocks) for job in self.jobs]
        step = self.scheduler.plan(load)
        assert before == [(job, job.cached, job.running, job.blocks) for job in self.jobs], "it only says"
        self._check(load, step)
        for job in step.preempt:
            job.running, job.cached, job.blocks = False, 0, 0
            self.preempted += 1
        for job, tokens in step.tokens.items():
            if job not in self.began:
                self.began[job] = self.now
                self.order.append(job)
            job.running = True
            job.cached += tokens
            if job.cached == job.tokens:
                job.tokens += 1
                if job.tokens == self.ends[job]:
                    self.ended[job] = self.now
                    job.running, job.blocks = False, 0
        self.steps += 1
        self.now += self.step_seconds
        return step

    def _check(self, load: Load, step: Step) -> None:
        def must(right: bool, what: str) -> None:
            if not right:
                raise Broken(f"step {self.steps}: {what}")

        prompts = [job for job in step.tokens if job.left > 1]
        must(all(1 <= n <= job.left for job, n in step.tokens.items()), "tokens that there are not")
        must(not step.tokens.keys() & set(step.preempt), "a job is preempted and run")
        must(all(job.running for job in step.preempt), "who waits is preempted")
        must(len(set(step.preempt)) == len(step.preempt), "preempted twice")
        taken = sum(step.tokens.values())
        if self.chunked:
            must(taken <= load.max_tokens, f"{taken} tokens")
        else:
            must(all(step.tokens[job] == job.left for job in prompts), "a part of a prompt")
            must(taken <= load.max_tokens or len(prompts) <= 1, f"{taken} tokens of {len(prompts)} prompts")
        # Blocks, truly: what is preempted is free, and what runs grows.
        held = sum(job.blocks for job in load.running if job not in step.preempt)
        grows = sum(blocks_of(job.cached + n, self.size) - job.blocks for job, n in step.tokens.items())
        must(held + grows <= self.total, f"{held + grows} of {self.total} blocks")
        after = {job for job in load.running if job not in step.preempt} | step.tokens.keys()
        must(len(after) <= max(load.max_running, len(load.running)), f"{len(after)} run")
        # A next token waits for no prompt.
        decodes = [job for job in load.running if job.left == 1 and job not in step.preempt]
        out = [job for job in decodes if job not in step.tokens]
        must(not out or sum(step.tokens.get(job, 0) for job in decodes) >= load.max_tokens, "a prompt goes before")
        # Who is let in leaves the room that the prompts need which are computed in part.
        new = [job for job in step.tokens if not job.running]
        if new and len(after) > 1:
            whole = sum(blocks_of(job.tokens, self.size) for job in after)
            must(whole <= self.total, "one is let in on the room of another")
        # Nobody gives up blocks that nobody lacks.
        if step.preempt:
            needs = sum(job.cached % self.size == 0 for job in load.running if job.left == 1)
            stuck = not step.tokens and len(load.running) > 1
            must(needs > load.free_blocks or stuck, "preempted for nothing")
            must(not any(not job.running for job in step.tokens), "one comes while another goes")
            kept = [job for job in load.running if job not in step.preempt]
            if kept:
                highest = max(job.priority for job in step.preempt)
                must(highest <= min(job.priority for job in kept), "a higher priority gives way")

    def run(self, most: int = 20_000) -> None:
        """Until all have ended."""
        idle = 0
        while self.live:
            step = self.step()
            idle = 0 if step.tokens else idle + 1
            if idle > len(self.jobs) + 2 or self.steps > most:
                raise Broken(f"no end: {len(self.live)} jobs after {self.steps} steps")


def random_world(seed: int, scheduler: Scheduler, *, chunked: bool | None = None, priorities: bool = True) -> World:
    """A world with a small memory, and jobs that come while others run; run to its end."""
    random_ = random.Random(seed)
    size = random_.choice((1, 2, 4, 16))
    world = World(
        scheduler,
        total=random_.choice((2, 3, 5, 8, 20, 60)),
        size=size,
        max_tokens=random_.choice((1, 2, 3, 7, 16, 64)),
        max_running=random_.choice((1, 2, 3, 8)),
        chunked=random_.random() < 0.8 if chunked is None else chunked,
        step_seconds=random_.choice((0.01, 1.0, 30.0)),
    )
    room = world.total * size + 1
    for _ in range(random_.randint(1, 12)):
        for _ in range(random_.choice((0, 0, 1, 3, 30))):
            if world.live:
                world.step()
        whole = random_.randint(2, room)
        prompt = random_.randint(1, random_.choice((whole - 1, min(whole - 1, 3 * size))))
        new = min(random_.choice((1, 2, 5, 40, room)), whole - prompt)
        world.add(prompt, new, random_.choice((0, 0, 0, 1, -1)) if priorities else 0)
        if random_.random() < 0.1 and world.live:  # one is cancelled
            job = random_.choice(world.live)
            world.ended[job] = world.now
            job.running = False
    world.run()
    return world
