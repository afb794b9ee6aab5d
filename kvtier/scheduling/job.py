"""What a scheduler sees of requests and of the machine, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Job:
    """One sequence of a request. The engine keeps the numbers up to date.

    Attributes:
        number: rises in the order of arrival.
        arrived: seconds.
        tokens: of the prompt, and those that were generated. All but those that are cached are computed next; the last
            step of a prompt, and each step behind it, gives a new one.
        most: tokens that it may come to.
        cached: tokens whose keys and values are there.
        reusable: tokens that it is expected to begin with, while it waits.
        blocks: that it holds; those that it shares are counted, too.
        priority: higher ones go first, whatever the scheduler.
        running: whether it may hold blocks.
        swapped: tokens whose keys and values are on the host while it waits: they need blocks, and no computing.
        tenant: whose it is; tenants that wait share the machine.
        saved: tokens whose keys and values are on the disk, or soon will be: they come back from there where nothing in
            memory has them any more.
    """

    number: int
    arrived: float
    tokens: int
    most: int
    cached: int = 0
    reusable: int = 0
    blocks: int = 0
    priority: int = 0
    running: bool = False
    swapped: int = 0
    tenant: str = ""
    saved: int = 0

    @property
    def left(self) -> int:
        """Tokens to compute before the next new one."""
        return self.tokens - (self.cached if self.running else max(self.reusable, self.swapped))


class Ways(Protocol):
    """What says how a job that gives up its blocks comes back. See `kvtier.scheduling.prices`."""

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        """ "swap" or "recompute", and its price in seconds, with so many blocks free on the host."""

    def step(self, load: Load) -> float:
        """Seconds of a step in which every running job gets a token."""

    def now(self) -> Ways:
        """The same as it is now, where it is still learned."""


@dataclass(slots=True)
class Load:
    """What a scheduler decides on.

    Attributes:
        now: seconds.
        running, waiting: jobs.
        free_blocks: that nobody holds; a block is `block_size` tokens of all layers.
        block_size: tokens.
        max_tokens: of a step.
        max_running: jobs that run at a time.
        chunked: whether a prompt may be computed in parts.
        tokens_per_second: of prompts, as seen so far.
        free_host_blocks: for what is swapped.
        ways: how jobs that are preempted come back; None: all are recomputed.
        served: what each tenant was served (`Shares.served`).
    """

    now: float
    running: list[Job]
    waiting: list[Job]
    free_blocks: int
    block_size: int
    max_tokens: int
    max_running: int
    chunked: bool = True
    tokens_per_second: float = 1000.0
    free_host_blocks: int = 0
    ways: Ways | None = None
    served: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """What a scheduler decides.

    Attributes:
        tokens: to compute of each job.
        preempt: jobs that give up their blocks and wait, before anything is computed.
        ways: how they come back, "swap" or "recompute"; empty where `Load.ways` is None.
    """

    tokens: dict[Job, int] = field(default_factory=dict)
    preempt: list[Job] = field(default_factory=list)
    ways: dict[Job, str] = field(default_factory=dict)
