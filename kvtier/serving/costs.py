"""`Costs`: what steps of an engine take, learned from those that were computed, and so what preemption costs.

Of a job that gives up its blocks the way back is priced by `scheduling.prices`: here are the seconds that go in there,
of this machine and this model (AdaptiveLLM, section 3.2, fits the same two predictors ahead of time).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from kvtier.planning.costs import Rates
from kvtier.planning.hardware.fit import least_relative
from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.prices import Prices

#: Steps of which what they took is kept; and steps after which the fit is made again.
_KEPT, _AGAIN = 128, 32
#: Tokens of a step from which on its time says how fast prompts are computed; and the weight of what was known.
_TELLING, _KEEPS = 16, 0.8
#: What a step takes until something is known: seconds, and seconds per token.
_FIXED, _PER_TOKEN = 1e-3, 1e-3


class Costs:
    """Seconds of steps, and prices made of them. It is a `Ways`.

    Args:
        max_tokens: of a step.
        rates: of the link.

    Attributes:
        rate: tokens of prompts that are computed in a second.
        loads: says what a store has learned of loading from its disk: seconds of a load and of a token; None: nothing
            is loaded, or was so far.
    """

    def __init__(self, max_tokens: int, rates: Rates) -> None:
        self.rates = rates
        self.rate = 1000.0
        self.loads: Callable[[], tuple[float, float] | None] = lambda: None
        self.machine(0, False)
        self._max_tokens = max_tokens
        self._steps: deque[tuple[tuple[float, float, float], float]] = deque(maxlen=_KEPT)
        self._new = 0
        self._prices: Prices | None = None

    def machine(self, token_bytes: int, overlaps: bool) -> None:
        """What moves: bytes of a token, all layers; and whether copies hide behind steps."""
        self.token_bytes, self.overlaps = token_bytes, overlaps

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """A step took so long.

        Args:
            tokens: that were computed.
            pairs: of these tokens and tokens that they saw.
        """
        if seconds > 0 and tokens:
            self._steps.append(((1.0, float(tokens), float(pairs)), seconds))
            self._new += 1
        if seconds > 0 and tokens >= _TELLING:
            self.rate = _KEEPS * self.rate + (1 - _KEEPS) * tokens / seconds

    def prices(self) -> Prices:
        """Of this machine and model, as far as they are known."""
        if self._prices is None or self._new >= _AGAIN:
            self._new = 0
            fixed, per_token, per_pair = _FIXED, _PER_TOKEN, 0.0
            if self._steps:
                fixed, per_token, per_pair = least_relative([x for x, _ in self._steps], [x for _, x in self._steps])
            self._prices = Prices(fixed, per_token, per_pair, 0.0, 0.0, chunked=self._max_tokens, written_through=True)
        load_fixed, load = self.loads() or (0.0, math.inf)
        return replace(
            self._prices,
            load=load,
            load_fixed=load_fixed,
            up=self.token_bytes / self.rates.up,
            down=self.token_bytes / self.rates.down,
            copy=self.rates.copy_overhead,
            overlaps=self.overlaps,
        )

    def one_by_one(self, tokens: int, whole: int) -> bool:
        """Whether tokens are computed one at a time, each in a step, sooner than so many at once."""
        prices = self.prices()
        return tokens * (prices.fixed + prices.per_token) <= prices.fixed + whole * prices.per_token

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        """See `Ways`."""
        return self.prices().way(job, load, host_blocks)

    def step(self, load: Load) -> float:
        """See `Ways`."""
        return self.prices().step(load)
