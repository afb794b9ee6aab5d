"""`Costs`: what steps of an engine take, learned from those that were computed, and so what preemption costs.

Of a job that gives up its blocks the way back is priced by `scheduling.prices`: here are the seconds that go in there,
of this machine and this model (AdaptiveLLM, section 3.2, fits the same two predictors ahead of time).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from kvtier.planning.fit import least_relative
from kvtier.planning.rates import Median, Rates
from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.prices import Prices
from kvtier.stats import Counters

#: Steps of about as many tokens of which what they took is kept; and steps after which the fit is made again.
_KEPT, _AGAIN = 16, 32
#: Tokens of a step from which on its time says how fast prompts are computed; and the weight of what was known.
_TELLING, _KEEPS = 16, 0.8
#: Bytes from which on copies tell the rate of the link, and times it was looked at of which the median is taken.
_TELLING_BYTES, _LOOKS = 1 << 20, 9
#: What a step takes until something is known: seconds, and seconds per token.
_FIXED, _PER_TOKEN = 1e-3, 1e-3


class _Link:
    """One direction of the link: bytes per second, the median of the last times it was looked at."""

    def __init__(self) -> None:
        self._rates = Median(_LOOKS)
        self._nbytes, self._seconds = 0, 0.0

    @property
    def rate(self) -> float | None:
        """None: too little was copied yet."""
        return self._rates.value

    def observe(self, nbytes: int, seconds: float) -> None:
        """So much was copied in all, in so many seconds of copying."""
        nbytes, seconds = nbytes - self._nbytes, seconds - self._seconds
        if nbytes >= _TELLING_BYTES and seconds > 0:
            self._rates.add(nbytes / seconds)
            self._nbytes, self._seconds = self._nbytes + nbytes, self._seconds + seconds


class Costs:
    """Seconds of steps, and prices made of them. It is a `Ways`.

    Args:
        max_tokens: of a step.
        rates: of the link, until copies have shown them.

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
        # By the logarithm of their tokens: those that decode would drive out those of prompts, and tell less.
        self._steps = defaultdict[int, deque[tuple[tuple[float, float, float], float]]](lambda: deque(maxlen=_KEPT))
        self._new = 0
        self._prices: Prices | None = None
        self._up, self._down = _Link(), _Link()

    def machine(self, token_bytes: int, overlaps: bool, rates: Rates | None = None) -> None:
        """What moves: bytes of a token, all layers; whether copies hide behind steps; and the link, if more is known of
        it than before."""
        self.token_bytes, self.overlaps = token_bytes, overlaps
        self.rates = rates or self.rates

    def copied(self, totals: Counters) -> None:
        """Copies between the tiers took so long, all of them until now: the link's rates are learned."""
        for way, nbytes, seconds in (
            (self._up, totals.bytes_up, totals.seconds_up),
            (self._down, totals.bytes_down, totals.seconds_down),
        ):
            way.observe(nbytes, seconds)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """A step took so long.

        Args:
            tokens: that were computed.
            pairs: of these tokens and tokens that they saw.
        """
        if seconds > 0 and tokens:
            self._steps[tokens.bit_length()].append(((1.0, float(tokens), float(pairs)), seconds))
            self._new += 1
        if seconds > 0 and tokens >= _TELLING:
            self.rate = _KEEPS * self.rate + (1 - _KEEPS) * tokens / seconds

    def prices(self) -> Prices:
        """Of this machine and model, as far as they are known."""
        load_fixed, load = self.loads() or (0.0, math.inf)
        return replace(
            self._computing(),
            load=load,
            load_fixed=load_fixed,
            up=self.token_bytes / (self._up.rate or self.rates.up),
            down=self.token_bytes / (self._down.rate or self.rates.down),
            copy=self.rates.copy_overhead,
            overlaps=self.overlaps,
        )

    def _computing(self) -> Prices:
        """Of steps alone."""
        if self._prices is None or self._new >= _AGAIN:
            self._new = 0
            fixed, per_token, per_pair = _FIXED, _PER_TOKEN, 0.0
            if self._steps:
                sizes, seconds = zip(*itertools.chain.from_iterable(self._steps.values()), strict=True)
                fixed, per_token, per_pair = least_relative(sizes, seconds)
            self._prices = Prices(fixed, per_token, per_pair, 0.0, 0.0, chunked=self._max_tokens, written_through=True)
        return self._prices

    def one_by_one(self, tokens: int, whole: int) -> bool:
        """Whether tokens are computed one at a time, each in a step, sooner than so many at once. May be asked within a
        change of the memory, so it asks nobody what loads take."""
        prices = self._computing()
        return tokens * (prices.fixed + prices.per_token) <= prices.fixed + whole * prices.per_token

    def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
        """See `Ways`."""
        return self.prices().way(job, load, host_blocks)

    def step(self, load: Load) -> float:
        """See `Ways`."""
        return self.prices().step(load)

    def now(self) -> Prices:
        """See `Ways`."""
        return self.prices()
