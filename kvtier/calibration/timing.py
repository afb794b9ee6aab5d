"""Timing calls on a machine that others use too: in turn, until their times agree or the time for it is over."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

#: Rounds at the least, where there is time for them, and at the most.
LEAST_ROUNDS, MOST_ROUNDS = 5, 200
#: Samples that were not preempted, from which on others are ignored.
_ENOUGH = 3
#: Seconds of a call below which it is made once more before each sample.
SHORT = 1e-3
#: A time is believed once the lower half of its samples spreads over at most this share of it.
SPREAD = 0.03
#: Of the samples of a call, the share that is below its time: others on the machine only ever add to it.
QUANTILE = 0.25


class Samples:
    """The times of one call."""

    def __init__(self) -> None:
        self._whole: list[float] = []
        self._cut: list[float] = []

    def add(self, seconds: float, *, preempted: bool) -> None:
        """One more; `preempted`: the process was taken off a core meanwhile."""
        (self._cut if preempted else self._whole).append(seconds)

    def _kept(self) -> list[float]:
        """Those that were not preempted, or all where these are hardly any."""
        return sorted(self._whole if len(self._whole) >= _ENOUGH else self._whole + self._cut)

    @property
    def seconds(self) -> float:
        """The lower quartile: close to what the call takes on its own, and no lucky sample."""
        kept = self._kept()
        return kept[int(QUANTILE * (len(kept) - 1))]

    @property
    def settled(self) -> bool:
        """Whether more samples would change little."""
        kept = self._kept()
        return len(kept) >= LEAST_ROUNDS and statistics.median(kept) - kept[0] <= 2 * SPREAD * kept[0]


Call = Callable[[], object]


def in_turn(
    calls: Sequence[Call],
    seconds: float,
    *,
    after: Sequence[Call] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each call: all are timed in turn, again and again, so that a busy moment meets each of them alike.

    Args:
        calls: each waits for what it began.
        seconds: for all of it, about. One round is made in any case, after one that does not count.
        after: for each call what follows it, not timed; empty: nothing does.
        clock: in seconds.
    """
    until = clock() + seconds
    samples = [Samples() for _ in calls]
    following = after or [_nothing] * len(calls)
    short = []
    for call, then in zip(calls, following, strict=True):
        began = clock()
        call()
        short.append(clock() - began < SHORT)
        then()
    turns, order = list(range(len(calls))), random.Random(0)
    for done in range(1, MOST_ROUNDS + 1):
        order.shuffle(turns)  # or each would always follow the same one, and find what that left in caches
        for i in turns:
            call, then = calls[i], following[i]
            if short[i]:
                call()  # a short call after a long one is mostly about code that has left the caches
                then()
            switches, began = _switches(), clock()
            call()
            took = clock() - began
            samples[i].add(took, preempted=_switches() != switches)
            then()
        if clock() >= until or (done >= LEAST_ROUNDS and all(x.settled for x in samples)):
            break
    return [x.seconds for x in samples]


def _nothing() -> None:
    pass


def _switches() -> int:
    """How often this process was taken off a core that it would have gone on using."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0
