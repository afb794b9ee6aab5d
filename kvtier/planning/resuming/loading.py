"""What of the saved beginning of a conversation is loaded from a disk, and what is computed: whichever is sooner.

Both are learned from what they took: a load as an overhead and a rate, a prefill by the terms of its operations
(AdaptiveLLM, section 3.2), and what they take when they overlap: where they share cores or memory, both are slower.
`resume.decide` answers, with these prices.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.planning.fit import least_relative
from kvtier.planning.hardware.predictors import Prefill, PrefillSize
from kvtier.planning.rates import FASTEST
from kvtier.planning.resuming.prefix import Busy, PrefixRun, Prices, Resume, SavedPrefix
from kvtier.planning.resuming.resume import decide

#: The last loads, and the last prefills, from which is learned.
_WINDOW = 24
#: What is expected to be within this factor of the best is taken where it is simpler: loading, and then computing, all.
MARGIN = 1.05
#: An overhead is told from a rate by loads of which one is so many times as large as another.
SIZES_TELL = 2
#: After so many times that something was computed, all is loaded: the disk may be faster by now.
PROBE = 16
#: Of the places where a tail may begin, those on each side of where computing and loading take as long.
NEAR = 2


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
            "computed": self._computed,
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
        for known, those in (
            (made._loads_overlapped, "loads_overlapped"),
            (made._computed_overlapped, "computed_overlapped"),
        ):
            found = [_positive(x) for x in value[those]]
            known.clear()
            known.extend(found or [1.0])
        made._computed = int(value.get("computed", 0))
        return made

    # Expect

    def seconds_to_load(self, nbytes: int) -> float | None:
        """None: nothing was loaded yet."""
        if not self._loads:
            return None
        if self._load is None:
            sizes, seconds = zip(*self._loads, strict=True)
            # Loads of about one size do not tell an overhead from a rate. A fit would make half of them overhead, and
            # to load a tail would seem to take long.
            overhead = 1.0 if min(sizes) * SIZES_TELL <= max(sizes) else 0.0
            fixed, per_byte = least_relative([(overhead, size) for size in sizes], seconds)
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

    def choose(self, saved: SavedPrefix) -> int:
        """From which token on to load what is saved. 0: all of it; `saved.length`: nothing; else the head before that
        token, as far as it is not in memory, is computed meanwhile."""
        files, length, past, more, step = saved.files, saved.length, saved.past, saved.more, saved.step
        starts = set() if step is None else {-(-max(first, past) // step) * step for first, _ in files}
        # What is there need not be read again.
        whole = past if past in starts else 0
        if self.seconds_to_load(0) is None or self.seconds_to_compute(1, 0, 0) is None:
            return whole  # nobody knows, so it is tried
        firsts = [first for first, _ in files]
        below = [0, *itertools.accumulate(nbytes for _, nbytes in files)]

        def nbytes_from(start: int) -> int:
            """Of the files that have what follows a head: each is read as a whole."""
            return below[-1] - below[max(bisect.bisect_right(firsts, start) - 1, 0)]

        cuts = [past, *sorted(start for start in starts if past < start < length), length]
        cuts = self._next_to_crossing(cuts, saved.batch, nbytes_from)
        left = [nbytes_from(whole), *map(nbytes_from, cuts[1:-1]), 0]
        runs = [PrefixRun("device", past, 0)] + [
            PrefixRun("disk", cuts[i + 1] - cuts[i], left[i] - left[i + 1]) for i in range(len(cuts) - 1)
        ]
        # Computing slows the whole load down, its overhead too; a load of all is behind no computing.
        overhead, slower = self.seconds_to_load(0) or 0.0, self._slower()[1]
        found = decide(
            Resume(
                runs, more, layers=1, batch=saved.batch, block=length, host_queries=0
            ),  # a run is one block: files stay whole
            self._price(),
            Busy(disk=slower * overhead),
        )
        load_all = found.alternatives["load"] - (slower - 1) * overhead
        start = next((x.start for x in found.choices if x.verb == "load"), length)
        if start <= past or load_all <= MARGIN * found.seconds or self._computed >= PROBE:
            self._computed = 0
            return whole
        self._computed += 1
        return start

    def _next_to_crossing(self, cuts: list[int], batch: int, nbytes_from: Callable[[int], int]) -> list[int]:
        """Of the places where a tail may begin those that may be best, and both ends. A longer head takes longer to
        compute, and its tail less to load: the longer of both is least where they cross. `decide` looks at each of its
        runs, and a long conversation has files by the hundred.

        Args:
            cuts: tokens before each place, rising, from those in memory to all that is saved.
            batch: rows.
            nbytes_from: bytes that are loaded for what follows so many tokens.
        """
        assert self._prefill is not None
        computing, loading = self._slower()
        prefill, past = self._prefill.seconds, cuts[0]

        def is_bound_by_computing(start: int) -> bool:
            load = loading * (self.seconds_to_load(nbytes_from(start)) or 0.0)
            return computing * prefill(start - past, past, batch) >= load

        at = bisect.bisect_left(cuts, True, 1, len(cuts) - 1, key=is_bound_by_computing)
        return [*cuts[:1], *cuts[max(at - NEAR, 1) : min(at + NEAR, len(cuts) - 1)], *cuts[-1:]]

    def _slower(self) -> tuple[float, float]:
        """What computing and loading take while the other goes on, as multiples of what they take alone."""
        return statistics.median(self._computed_overlapped), statistics.median(self._loads_overlapped)

    def _price(self) -> Prices:
        """What was learned, as `decide` takes it. What is loaded is then in host memory: it passes no link."""
        assert self._load is not None
        assert self._prefill is not None
        computing, loading = self._slower()
        return Prices(
            self._prefill.seconds,
            up=math.inf,
            disk=1 / self._load[1] if self._load[1] > 0 else FASTEST,  # not at once: its overhead is waited for
            copy_overhead=0.0,
            computing=computing,
            loading=loading,
        )


def _positive(value: float) -> float:
    found = float(value)
    if not 0 < found < math.inf:
        raise ValueError(f"{value!r} is not positive")
    return found
