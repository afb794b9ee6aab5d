"""What of the saved beginning of a conversation is loaded from a disk, and what is computed: whichever is sooner.

Both are learned from what they took: a load as an overhead and a rate, a prefill by the terms of its operations
(AdaptiveLLM, section 3.2). A token is computed from those before it, and is loaded without them: so a head may be
computed while the tail is loaded (published as Cake), which takes as long as the longer of the two. The later the tail
begins, the longer the head takes and the shorter the tail: the best beginning is where they cross.

What both take when they overlap is learned too: where they share cores or memory, both are slower.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.planning.fit import least_relative
from kvtier.planning.predictors import Prefill, PrefillSize

#: The last loads, and the last prefills, from which is learned.
_WINDOW = 24
#: What is expected to be within this factor of the best is taken where it is simpler: loading, and then computing, all.
MARGIN = 1.05
#: After so many times that something was computed, all is loaded: the disk may be faster by now.
PROBE = 16


class LoadOrCompute:
    """Learns what loading and computing take, and chooses. Seconds and bytes of one model on one machine."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._prefills: deque[tuple[PrefillSize, float]] = deque(maxlen=_WINDOW)
        self._load: tuple[float, float] | None = None
        self._prefill: Prefill | None = None
        # As multiples of what they take alone.
        self._loads_overlapped: deque[float] = deque([1.0], maxlen=_WINDOW // 2)
        self._computed_overlapped: deque[float] = deque([1.0], maxlen=_WINDOW // 2)
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

    def loaded_overlapped(self, nbytes: int, seconds: float) -> None:
        """So many bytes were read while the model computed all the time."""
        alone = self.seconds_to_load(nbytes)
        if alone and seconds > 0:
            self._loads_overlapped.append(seconds / alone)

    def computed_overlapped(self, new: int, past: int, batch: int, seconds: float) -> None:
        """As `computed`, while something was read all the time."""
        alone = self.seconds_to_compute(new, past, 0, batch)
        if alone and seconds > 0:
            self._computed_overlapped.append(seconds / alone)

    def as_json(self) -> dict[str, Any]:
        """What was learned; see `from_json`."""
        return {
            "loads": [list(x) for x in self._loads],
            "prefills": [[size.new, size.past, size.batch, seconds] for size, seconds in self._prefills],
            "loads_overlapped": list(self._loads_overlapped),
            "computed_overlapped": list(self._computed_overlapped),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoadOrCompute:
        """What `as_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        made = cls()
        for nbytes, seconds in value["loads"]:
            made.loaded(int(_positive(nbytes)), _positive(seconds))
        for new, past, batch, seconds in value["prefills"]:
            if int(past) < 0:
                raise ValueError("tokens are not negative")
            made.computed(int(_positive(new)), int(past), int(_positive(batch)), _positive(seconds))
        for beside, those in (
            (made._loads_overlapped, "loads_overlapped"),
            (made._computed_overlapped, "computed_overlapped"),
        ):
            found = [_positive(x) for x in value[those]]
            beside.clear()
            beside.extend(found or [1.0])
        return made

    # Expect

    def seconds_to_load(self, nbytes: int) -> float | None:
        """None: nothing was loaded yet."""
        if not self._loads:
            return None
        if self._load is None:
            fixed, per_byte = least_relative([(1.0, size) for size, _ in self._loads], [x for _, x in self._loads])
            self._load = fixed, per_byte
        return self._load[0] + self._load[1] * nbytes

    def seconds_to_compute(self, tokens: int, past: int, more: int, batch: int = 1) -> float | None:
        """What `tokens` on `past` cached ones, in each of `batch` rows, add to a prefill of `more` tokens behind them.
        None: no prefill yet."""
        if not any(size.new > 1 for size, _ in self._prefills):
            return None
        if self._prefill is None:
            self._prefill = Prefill.fit(self._prefills)
        # Where a forward is mostly overhead, noise may make more tokens cheaper than fewer.
        seconds = self._prefill.seconds
        return max(seconds(tokens + more, past, batch) - seconds(more, past + tokens, batch), 0.0)

    # Choose

    def choose(
        self,
        files: Sequence[tuple[int, int]],
        length: int,
        past: int,
        more: int,
        step: int | None = None,
        *,
        batch: int = 1,
    ) -> int:
        """From which of the first `length` tokens on to load. 0: all of them; `length`: none; else the head before it,
        as far as it is not there, is computed meanwhile.

        Args:
            files: the first token and the bytes of each, in order.
            past: tokens that are there.
            more: tokens that are computed behind all of these.
            step: a tail begins at multiples of this, so that it is whole blocks; None: all is loaded, or none.
            batch: rows that are computed, of these tokens each (beams): what is loaded is loaded once for all.
        """
        starts = [] if step is None else sorted({-(-max(first, past) // step) * step for first, _ in files})
        starts = [start for start in starts if 0 < start < length]
        # What is there need not be read again.
        whole = past if past in starts else 0
        below = [0, *itertools.accumulate(nbytes for _, nbytes in files)]

        def tail(start: int) -> float:
            """Seconds to load what follows a head, if something is known of loads."""
            first = max(bisect.bisect_right(files, start, key=lambda file: file[0]) - 1, 0)
            return self.seconds_to_load(below[-1] - below[first]) or 0.0

        def head(start: int) -> float:
            return self.seconds_to_compute(start - past, past, 0, batch) or 0.0

        def both(start: int) -> float:
            return max(head(start) * computed_overlapped, tail(start) * loads_overlapped)

        compute = self.seconds_to_compute(length - past, past, more, batch)
        if not self._loads or compute is None:
            return whole  # nobody knows, so it is tried
        computed_overlapped, loads_overlapped = map(
            statistics.median, (self._computed_overlapped, self._loads_overlapped)
        )
        crossing = bisect.bisect_left(
            starts, True, key=lambda start: head(start) * computed_overlapped >= tail(start) * loads_overlapped
        )
        load = tail(whole)
        split = min(
            (start for start in starts[max(crossing - 1, 0) : crossing + 1] if start > past), key=both, default=0
        )
        best = min(load, compute, both(split)) if split else min(load, compute)
        if load <= MARGIN * best or self._computed >= PROBE:
            self._computed = 0
            return whole
        self._computed += 1
        return split if split and both(split) * MARGIN < compute else length


def _positive(value: float) -> float:
    found = float(value)
    if not 0 < found < math.inf:
        raise ValueError(f"{value!r} is not positive")
    return found
