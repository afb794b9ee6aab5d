"""What a scheduler sees of requests and of the machine, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        last_ran: seconds, when a step last worked on it.
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
    last_ran: float = 0.0

    @property
    def left(self) -> int:
        """Tokens to compute before the next new one."""
        return self.tokens - (self.cached if self.running else self.reusable)


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


@dataclass(slots=True)
class Step:
    """What a scheduler decides.

    Attributes:
        tokens: to compute of each job.
        preempt: jobs that give up their blocks and wait, before anything is computed.
    """

    tokens: dict[Job, int] = field(default_factory=dict)
    preempt: list[Job] = field(default_factory=list)
