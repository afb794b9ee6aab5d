"""How a sequence that gives up its device blocks comes back, and what that costs.

AdaptiveLLM (sections 3.3 and 3.4) compares the seconds of two copies with those of a prefill. Here a price is the
device time that all others lose. Where copies go on behind compute, they cost only what the step does not hide; a
prompt that is computed in a step which reads all weights anyway costs only arithmetic beyond that. A copy that was made
ahead (written through) is not made again.

What gives up its blocks without a place on the host may be on a disk: then it is loaded from there, if that is quicker
than to compute it again, as whoever loads it decides by the same learned rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.scheduling.job import Job, Load

SWAP, RECOMPUTE = "swap", "recompute"


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a machine and a model, for one sequence.

    Attributes:
        fixed: of a step however few tokens it has: weights are read, kernels launched.
        per_token: of arithmetic, per token of a prompt.
        per_pair: per token of a prompt and token that it sees.
        up, down: of a copy, per token's KV.
        copy: of a copy besides its bytes.
        overlaps: whether copies go on while the device computes.
        chunked: tokens of a prompt that a step computes at the most; 0: all of them.
        written_through: whether blocks are copied to the host when they are full, so that only the last one is left.
        load, load_fixed: of a token's KV from the disk to the host, and of a load besides its bytes; infinite: nothing
            is loaded, or nobody knows yet how fast.
    """

    fixed: float
    per_token: float
    per_pair: float
    up: float
    down: float
    copy: float = 0.0
    overlaps: bool = True
    chunked: int = 0
    written_through: bool = False
    load: float = math.inf
    load_fixed: float = 0.0

    def swap(self, tokens: int, block_size: int, step: float = 0.0) -> float:
        """To the host and back.

        Args:
            tokens: whose KV is moved.
            block_size: tokens.
            step: seconds of compute behind which each of the two copies hides.
        """
        if tokens <= 0:
            return 0.0
        left = tokens % block_size if self.written_through else tokens
        hidden = step if self.overlaps else 0.0
        down = left * self.down + (self.copy if left else 0.0)
        return max(down - hidden, 0.0) + max(tokens * self.up + self.copy - hidden, 0.0)

    def from_disk(self, tokens: int, step: float = 0.0) -> float:
        """From the disk to the host, by a thread of its own, and from there to the device.

        Args:
            tokens: whose KV is loaded.
            step: seconds of compute behind which the load hides, and the copy if copies hide at all.
        """
        if tokens <= 0:
            return 0.0
        hidden = step if self.overlaps else 0.0
        load = self.load_fixed + tokens * self.load
        return max(load - step, 0.0) + max(tokens * self.up + self.copy - hidden, 0.0)

    def recompute(self, tokens: int, rows: int = 0, past: int = 0) -> float:
        """As a prompt.

        Args:
            tokens: to compute.
            past: tokens that are there before them.
            rows: that get a token in the same step: what they leave of the time of reading the weights is free.
        """
        if tokens <= 0:
            return 0.0
        whole, rest = divmod(tokens, self.chunked) if self.chunked else (0, tokens)
        free = max(self.fixed - rows * self.per_token, 0.0) if rows else 0.0
        linear = whole * max(self.chunked * self.per_token - free, 0.0) + max(rest * self.per_token - free, 0.0)
        if not rows:  # it is computed alone
            linear += self.fixed * (whole + bool(rest))
        again = 0.0 if self.overlaps or not self.written_through else tokens * self.down
        return linear + again + self.per_pair * tokens * (past + (tokens + 1) / 2)

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        """The cheaper way back, and its price in seconds. What is not swapped is recomputed, or loaded if it is saved.

        Args:
            job: gives up its blocks.
            load: that is decided on.
            host_blocks: free on the host.
        """
        rows = max(len(load.running) - 1, 0)
        again, saved = self.recompute(job.cached, rows), min(job.saved, job.cached)
        if saved:
            rest = self.recompute(job.cached - saved, rows, saved)
            again = min(again, self.from_disk(saved, self.step(load)) + rest)
        if -(-job.cached // load.block_size) > host_blocks:
            return RECOMPUTE, again
        step = self.step(load)
        # What waits with its KV on the host comes back over the same link.
        queued = sum(other.swapped for other in load.waiting) * self.up if self.overlaps else 0.0
        moved = self.swap(job.cached, load.block_size, max(step - queued, 0.0))
        return (SWAP, moved) if moved <= again else (RECOMPUTE, again)

    def step(self, load: Load) -> float:
        """Seconds of a step in which every running job but the one that is preempted gets a token."""
        return max(self.fixed, (len(load.running) - 1) * self.per_token)

    def now(self) -> Prices:
        """See `Ways`: they do not change."""
        return self


@dataclass(frozen=True, slots=True)
class Always:
    """One way, whatever it costs: to compare with. What does not fit on the host is recomputed.

    Attributes:
        which: `SWAP` or `RECOMPUTE`.
    """

    which: str

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        """See `Prices.way`. All prices are equal, so that the last in rank goes."""
        fits = -(-job.cached // load.block_size) <= host_blocks
        return (self.which if fits else RECOMPUTE), 0.0

    def step(self, load: Load) -> float:
        """See `Prices.step`: nothing is weighed against it."""
        return 0.0

    def now(self) -> Always:
        """See `Ways`."""
        return self
