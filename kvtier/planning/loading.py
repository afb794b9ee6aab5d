"""Whether the saved beginning of a conversation is read from a disk or computed again: whichever is expected sooner.

Both are learned from what they took: a load as an overhead and a rate, a prefill by the terms of its operations
(AdaptiveLLM, section 3.2). What precedes a token has to be there before it, and what is saved begins where a
conversation does; so with one forward it is the whole or nothing. `resume` has the choice where loads go on while the
device computes.
"""

from __future__ import annotations

from collections import deque

from kvtier.planning.fit import least_relative
from kvtier.planning.predictors import Prefill, PrefillSize

#: The last loads, and the last prefills, from which is learned.
_WINDOW = 24
#: A load that is expected to take more than this many times as long as computing is not made.
MARGIN = 1.05
#: After so many times that it was computed, it is loaded once: the disk may be faster by now.
PROBE = 16


class LoadOrCompute:
    """Learns what loading and computing take, and chooses. Seconds and bytes of one model on one machine."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._prefills: deque[tuple[PrefillSize, float]] = deque(maxlen=_WINDOW)
        self._load: tuple[float, float] | None = None
        self._prefill: Prefill | None = None
        self._computed = 0

    # Learn

    def loaded(self, nbytes: int, seconds: float) -> None:
        """So many bytes were read and put where they are used."""
        if nbytes > 0 and seconds > 0:
            self._loads.append((float(nbytes), seconds))
            self._load = None

    def computed(self, new: int, past: int, batch: int, seconds: float) -> None:
        """A forward computed `new` tokens of each of `batch` rows on `past` cached ones."""
        if new > 0 and batch > 0 and seconds > 0:
            self._prefills.append((PrefillSize(new, past, batch), seconds))
            self._prefill = None

    # Expect

    def seconds_to_load(self, nbytes: int) -> float | None:
        """None: nothing was loaded yet."""
        if not self._loads:
            return None
        if self._load is None:
            fixed, per_byte = least_relative([(1.0, size) for size, _ in self._loads], [x for _, x in self._loads])
            self._load = fixed, per_byte
        return self._load[0] + self._load[1] * nbytes

    def seconds_to_compute(self, tokens: int, past: int, more: int) -> float | None:
        """What `tokens` on `past` cached ones add to a prefill of `more` tokens behind them. None: no prefill yet."""
        if not any(size.new > 1 for size, _ in self._prefills):
            return None
        if self._prefill is None:
            self._prefill = Prefill.fit(self._prefills)
        return self._prefill.seconds(tokens + more, past) - self._prefill.seconds(more, past + tokens)

    # Choose

    def loads(self, nbytes: int, tokens: int, past: int, more: int) -> bool:
        """Whether to load `tokens` tokens of `nbytes` bytes behind `past` ones, before `more` are computed."""
        load, compute = self.seconds_to_load(nbytes), self.seconds_to_compute(tokens, past, more)
        if load is None or compute is None or load <= MARGIN * compute or self._computed >= PROBE:
            self._computed = 0
            return True
        self._computed += 1
        return False
