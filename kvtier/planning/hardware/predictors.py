"""What predicts seconds: of a copy by its size, of host attention, of a model's linear part, of a prefill.

Each is fitted from measurements by `fit`, or made from a datasheet (`machines.py`), and each goes to JSON and back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.planning.fit import interpolate, least_relative, rising

#: Beyond the largest measured size, bytes pass at the rate between the largest and one of at most this share of it.
_TAIL = 0.5


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes: straight between measured sizes, where an overhead and one rate would be too coarse.

    Copies within a machine, say, are faster below the size of a cache than beyond.

    Attributes:
        knots: (bytes, seconds), rising. Fewer bytes than the first take as long as the first.
    """

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        pairs = list(itertools.pairwise(self.knots))
        _check(bool(pairs), "a curve has at least two knots")
        _check(all(a[0] < b[0] and a[1] <= b[1] for a, b in pairs), "the knots of a curve rise")
        _check(self.knots[0][0] >= 0 and self.knots[0][1] >= 0 < self.knots[-1][1], "sizes and times are not negative")
        _check(all(math.isfinite(x) for knot in self.knots for x in knot), "the knots of a curve are finite")

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Through measured (bytes, seconds), two at least; more bytes never take less. Raises ValueError."""
        points = sorted(points)
        seconds = rising([x for _, x in points])
        return cls(tuple((nbytes, x) for (nbytes, _), x in zip(points, seconds, strict=True)))

    @classmethod
    def straight(cls, overhead: float, rate: float) -> Curve:
        """An overhead in seconds, and bytes per second."""
        return cls(((0.0, overhead), (1e9, overhead + 1e9 / rate)))

    def seconds(self, nbytes: float) -> float:
        """For so many bytes; 0.0 for none."""
        if nbytes <= 0:
            return 0.0
        last, top = self.knots[-1]
        if nbytes <= last:
            return interpolate(self.knots, nbytes)
        first, low = next((x for x in reversed(self.knots[:-1]) if x[0] <= _TAIL * last), self.knots[0])
        return top + (nbytes - last) * (top - low) / (last - first)

    def line(self) -> tuple[float, float]:
        """The overhead in seconds and the rate in bytes per second that come closest."""
        points = [x for x in self.knots if x[1] > 0]
        overhead, per_byte = least_relative([(1.0, nbytes) for nbytes, _ in points], [x for _, x in points])
        if per_byte <= 0:  # what was measured is all overhead
            overhead, per_byte = 0.0, self.knots[-1][1] / self.knots[-1][0]
        return overhead, 1 / per_byte

    def as_json(self) -> dict[str, Any]:
        """See `from_json`."""
        return {"knots": [list(x) for x in self.knots]}

    @classmethod
    def from_json(cls, value: Any) -> Curve:
        """What `as_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        return cls(_pairs(value["knots"]))


@dataclass(frozen=True, slots=True)
class HostAttention:
    """Seconds of attention on the host over one layer's blocks.

    Attributes:
        threads: (threads, seconds by bytes of KV for one query), rising.
        queries: (queries per sequence, seconds as a multiple of those for one), rising from one query on.
        lost: share of the rate that is lost while the link is busy: both read the host's memory.
        round_trip: seconds that a query takes to the host, and its result back, where the device is not the host.
    """

    threads: tuple[tuple[int, Curve], ...]
    queries: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    lost: float = 0.0
    round_trip: float = 0.0

    def __post_init__(self) -> None:
        counts = [n for n, _ in self.threads]
        _check(bool(counts) and counts == sorted({*counts}) and counts[0] >= 1, "numbers of threads rise from 1 on")
        at = [x for x, _ in self.queries]
        _check(bool(at) and at == sorted({*at}) and at[0] == 1, "numbers of queries rise from 1 on")
        _check(all(0 < x < math.inf for _, x in self.queries), "factors are positive")
        _check(0 <= self.lost < 1 and 0 <= self.round_trip < math.inf, "a share lost, and seconds")

    def curve(self, threads: int | None = None) -> Curve:
        """Seconds by bytes on so many threads, or the next smaller measured number; None: the largest measured."""
        fitting = [curve for n, curve in self.threads if threads is None or n <= threads]
        return fitting[-1] if fitting else self.threads[0][1]

    def seconds(self, nbytes: float, threads: int | None = None, queries: int = 1, busy: float = 0.0) -> float:
        """For so many bytes of KV.

        Args:
            nbytes: keys and values of one layer.
            threads: None: as many as were measured.
            queries: new tokens of each sequence.
            busy: share of the time in which the link is busy, 0 to 1.
        """
        if nbytes <= 0:
            return 0.0
        alone = self.curve(threads).seconds(nbytes) * interpolate(self.queries, queries)
        return self.round_trip + alone / (1 - self.lost * busy)

    def as_json(self) -> dict[str, Any]:
        """See `from_json`."""
        return {
            "threads": [[n, curve.as_json()] for n, curve in self.threads],
            "queries": [list(x) for x in self.queries],
            "lost": self.lost,
            "round_trip": self.round_trip,
        }

    @classmethod
    def from_json(cls, value: Any) -> HostAttention:
        """What `as_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        threads = tuple((int(n), Curve.from_json(curve)) for n, curve in value["threads"])
        return cls(threads, _pairs(value["queries"]), float(value["lost"]), float(value["round_trip"]))


@dataclass(frozen=True, slots=True)
class Linear:
    """Seconds of all of a layer but attention over the past: projections, MLP, norms, and its share of the rest.

    The layers are those that are tiered, or one where none is (`ModelSize.parts`): all others are a part of the rest.

    Attributes:
        knots: (tokens of all sequences in the step, seconds per tiered layer), rising.
    """

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        _check(bool(self.knots) and all(0 < x < math.inf for knot in self.knots for x in knot), "tokens and seconds")
        _check(all(a[0] < b[0] for a, b in itertools.pairwise(self.knots)), "tokens rise")

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Linear:
        """Through measured (tokens, seconds per layer); more tokens never take less."""
        points = sorted(points)
        return cls(tuple(zip([n for n, _ in points], rising([x for _, x in points]), strict=True)))

    def seconds(self, tokens: float) -> float:
        """For a layer and so many tokens; beyond the largest measured number in proportion."""
        last, top = self.knots[-1]
        return interpolate(self.knots, tokens) if tokens <= last else top * tokens / last

    def as_json(self) -> dict[str, Any]:
        """See `from_json`."""
        return {"knots": [list(x) for x in self.knots]}

    @classmethod
    def from_json(cls, value: Any) -> Linear:
        """What `as_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        return cls(_pairs(value["knots"]))


@dataclass(frozen=True, slots=True)
class PrefillSize:
    """A prefill: so many new tokens of each sequence on so many cached ones, for a batch of sequences."""

    new: int
    past: int = 0
    batch: int = 1

    @property
    def operations(self) -> tuple[float, float, float, float, float]:
        """What a prefill's coefficients are multiplied with."""
        rows, cached = self.batch * self.new, self.batch * self.past
        return 1.0, float(rows), float(rows * self.past), rows * (self.new + 1) / 2, float(cached)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds of a whole model's forward over new tokens, on cached ones: what recomputing takes.

    Linear layers, norms and activations take time in proportion to the new tokens, attention in proportion to pairs of
    a new token and one that it sees (AdaptiveLLM, section 3.2); cached keys and values are read once per forward. A
    pair of two new tokens does not take what one with a cached token takes.

    Attributes:
        fixed: seconds of a forward.
        per_token: seconds per new token.
        per_pair: seconds per new token and cached token, all of which it sees.
        per_own: seconds per new token and new token that it sees, itself among them.
        per_past: seconds per cached token.
    """

    fixed: float
    per_token: float
    per_pair: float
    per_own: float
    per_past: float = 0.0

    def __post_init__(self) -> None:
        _check(all(0 <= x < math.inf for x in self._all) and any(self._all), "coefficients are not negative")

    @property
    def _all(self) -> tuple[float, float, float, float, float]:
        return self.fixed, self.per_token, self.per_pair, self.per_own, self.per_past

    @classmethod
    def fit(cls, points: Sequence[tuple[PrefillSize, float]]) -> Prefill:
        """From measured sizes and seconds. Raises ValueError: there are none."""
        return cls(*least_relative([size.operations for size, _ in points], [x for _, x in points]))

    def seconds(self, new: int, past: int = 0, batch: int = 1) -> float:
        """For `new` tokens of each of `batch` sequences, on `past` cached ones each; 0.0 for none."""
        if new <= 0 or batch <= 0:
            return 0.0
        return sum(a * b for a, b in zip(self._all, PrefillSize(new, past, batch).operations, strict=True))

    def as_json(self) -> dict[str, Any]:
        """See `from_json`."""
        return {
            "fixed": self.fixed,
            "per_token": self.per_token,
            "per_pair": self.per_pair,
            "per_own": self.per_own,
            "per_past": self.per_past,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Prefill:
        """What `as_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        return cls(*(float(value[name]) for name in ("fixed", "per_token", "per_pair", "per_own", "per_past")))


def _pairs(value: Any) -> tuple[tuple[float, float], ...]:
    return tuple((float(a), float(b)) for a, b in value)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
