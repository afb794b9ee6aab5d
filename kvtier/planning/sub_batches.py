"""Which rows a step computes, and in one forward or in two that take turns (Neo, section 3.2), by predicted makespan.

With one forward, attention on the host hides behind the device's own attention of the same layer. With two, it also
hides behind all that the device computes of a layer for the other one; but each reads the weights. So two pay where the
host takes longer than a layer's linear part, or where that is long, as with a part of a prompt. Rows without anything
on the host are in the first forward; those with the most on the host are in the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.planning.rates import Median

#: Numbers of rows with blocks on the host that are looked at, and ways to divide so many.
WAYS = 8
#: By how much a prediction has to be better for two forwards to be used: they take turns on the CPU, too.
WORTH = 0.03
#: Steps in a row in which a row may be left out.
MOST_LEFT = 16
_TINY = 1e-12


class Row(NamedTuple):
    """A part of a step.

    Attributes:
        tokens: to compute.
        device_bytes, host_bytes: of the KV of one layer that are attended to on the device, and on the host.
        left: steps in a row, before this one, in which it was left out.
    """

    tokens: int
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    left: int = 0


class Stage(NamedTuple):
    """What one forward takes in a layer, in seconds.

    Attributes:
        linear: on the device, all but attention over blocks.
        device: of attention there, behind that.
        host: of attention on the host, behind the linear part too.
    """

    linear: float
    device: float = 0.0
    host: float = 0.0


class Times(Protocol):
    """Seconds of a layer."""

    @property
    def layers(self) -> int:
        """Of the model."""

    def linear(self, tokens: int) -> float:
        """All but attention over blocks, of one forward."""

    def device(self, nbytes: float) -> float:
        """Attention on the device."""

    def host(self, nbytes: float) -> float:
        """Attention on the host."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Times by rates.

    Attributes:
        layers: of the model.
        linear_seconds: of a layer by tokens of a forward.
        device_rate, host_rate: bytes per second.
        host_overhead: seconds of a call.
    """

    layers: int
    linear_seconds: Callable[[int], float]
    device_rate: float = math.inf
    host_rate: float = math.inf
    host_overhead: float = 0.0

    def linear(self, tokens: int) -> float:
        """See `Times`."""
        return self.linear_seconds(tokens)

    def device(self, nbytes: float) -> float:
        """See `Times`."""
        return nbytes / self.device_rate

    def host(self, nbytes: float) -> float:
        """See `Times`."""
        return nbytes / self.host_rate + self.host_overhead if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """How a step is computed.

    Attributes:
        name: of the way: "together" (all rows in one forward), "sub-batches" (two), "in part" (one; some rows with
            blocks on the host wait), "device only" (all of these wait).
        rows: that are computed, by number.
        second: of these, those of the second of two forwards; none: there is one.
        seconds: that it is predicted to take.
        others: the best of each way, by name: rows and seconds.
    """

    name: str
    rows: tuple[int, ...]
    second: frozenset[int]
    seconds: float
    others: dict[str, tuple[int, float]]


def stage(rows: Sequence[Row], times: Times) -> Stage:
    """What a forward over rows takes in a layer."""
    return Stage(
        times.linear(sum([row.tokens for row in rows])),
        times.device(sum([row.device_bytes for row in rows])),
        times.host(sum([row.host_bytes for row in rows])),
    )


def together(of: Stage, layers: int) -> float:
    """Seconds of one forward: host and device attend to a layer at once."""
    return layers * (of.linear + max(of.device, of.host))


def apart(first: Stage, second: Stage, layers: int) -> float:
    """Seconds of two forwards that take turns at each attention call.

    The device does what it is given in that order. One thread gives it the first forward's layer up to its attention,
    then the second's; then, in turn, it attends on the host as soon as a query has arrived, and gives the device that
    forward's next layer.
    """
    thread = device = 0.0
    asked = [0.0, 0.0]
    stages = (first, second)
    for layer in range(layers + 1):
        for i, each in enumerate(stages):
            if layer and each.host:
                thread = max(thread, asked[i]) + each.host
            if layer < layers:
                asked[i] = max(thread, device) + each.linear
                device = asked[i] + each.device
    return max(thread, device)


def _pace(first: Stage, second: Stage) -> float:
    """Seconds of a layer in the middle of `apart`."""
    busy = first.linear + first.device + second.linear + second.device
    return max(busy, first.host + second.host, first.linear + first.host, second.linear + second.host)


def choose(rows: Sequence[Row], times: Times, *, may_leave: bool = False, factor: float = 1.0) -> Choice:
    """The way that computes the most rows in a second.

    Args:
        rows: of a step.
        times: of a layer.
        may_leave: whether rows with blocks on the host may wait for a later step, at most `MOST_LEFT` steps in a row.
        factor: by which two forwards have taken longer than was predicted.
    """
    layers = times.layers
    here = [i for i, row in enumerate(rows) if not row.host_bytes]
    # Who has waited longest has a part in the step first; of others the smallest.
    away = sorted(
        (i for i, row in enumerate(rows) if row.host_bytes), key=lambda i: (-rows[i].left, rows[i].host_bytes)
    )
    sums = [(0, 0.0, 0.0)]
    for i in away:
        tokens, device, host = sums[-1]
        sums.append((tokens + rows[i].tokens, device + rows[i].device_bytes, host + rows[i].host_bytes))
    base = sum([rows[i].tokens for i in here]), sum([rows[i].device_bytes for i in here]), 0.0
    none = 0, 0.0, 0.0

    def of(start: int, stop: int, more: tuple[int, float, float]) -> Stage:
        """Of some of the rows with blocks on the host, and more."""
        tokens, device, host = (b - a + c for a, b, c in zip(sums[start], sums[stop], more, strict=True))
        return Stage(times.linear(int(tokens)), times.device(device), times.host(host))

    # By name: rows, of these with blocks on the host, of these in the second forward, seconds.
    ways: dict[str, tuple[int, int, int, float]] = {}

    def consider(name: str, some: int, second: int, seconds: float) -> None:
        count, before = len(here) + some, ways.get(name)
        if before is None or count / max(seconds, _TINY) > before[0] / max(before[3], _TINY):
            ways[name] = count, some, second, seconds

    must = sum(rows[i].left >= MOST_LEFT for i in away) if may_leave else len(away)
    for some in _numbers(must, len(away)):
        if not here and not some:
            continue
        name = "together" if some == len(away) else "in part" if some else "device only"
        consider(name, some, 0, together(of(0, some, base), layers))
        paces = [
            (_pace(of(0, some - second, base), of(some - second, some, none)), second)
            for second in _numbers(1, some if here else some - 1)
        ]
        if paces:
            second = min(paces)[1]
            seconds = factor * apart(of(0, some - second, base), of(some - second, some, none), layers)
            consider("sub-batches", some, second, seconds)
    worth = {name: way[0] / max(way[3], _TINY) for name, way in ways.items()}
    best = max(worth, key=lambda name: worth[name])
    if worth[best] < (1 + WORTH) * worth["together"]:
        best = "together"
    _, some, second, seconds = ways[best]
    chosen = tuple(sorted([*here, *away[:some]]))
    others = {name: (way[0], way[3]) for name, way in ways.items()}
    return Choice(best, chosen, frozenset(away[some - second : some]), seconds, others)


def _numbers(first: int, last: int) -> list[int]:
    """Some of the numbers from one to another, both included: as many as are looked at."""
    return sorted({first + round((last - first) * i / WAYS) for i in range(WAYS + 1)}) if first <= last else []


class Learned:
    """Times that steps have shown. Nothing is predicted before the first one has.

    Args:
        layers: of the model.

    Attributes:
        rate: bytes per second that the host attends to; None: not known.
        device_rate: the same of the device.
    """

    def __init__(self, layers: int, device_rate: float = math.inf) -> None:
        self.layers = layers
        self.device_rate = device_rate
        self._rate = Median()
        self._linear: dict[int, Median] = {}
        self._factor = Median()

    @property
    def rate(self) -> float | None:
        """Bytes per second that the host attends to; None: not known."""
        return self._rate.value

    @property
    def known(self) -> bool:
        """Whether anything can be predicted."""
        return bool(self._linear) and self._rate.value is not None

    @property
    def factor(self) -> float:
        """By how much steps of two forwards have taken longer than was predicted."""
        return max(self._factor.value or 1.0, 1.0)

    def linear(self, tokens: int) -> float:
        """See `Times`. Fewer tokens than any that were seen take as long as those; more take in proportion."""
        at = _bucket(tokens)
        found = self._linear.get(at)
        if found is not None and found.value is not None:
            return found.value
        above = min((x for x in self._linear if x > at), default=None)
        if above is not None:
            return self._linear[above].value or 0.0
        below = max(self._linear)
        return (self._linear[below].value or 0.0) * 2.0 ** (at - below)

    def device(self, nbytes: float) -> float:
        """See `Times`."""
        return nbytes / self.device_rate

    def host(self, nbytes: float) -> float:
        """See `Times`."""
        return nbytes / self._rate.value if nbytes and self._rate.value else 0.0

    def observe(self, rows: Sequence[Row], choice: Choice | None, seconds: float, host: tuple[float, float]) -> None:
        """Learn from a step.

        Args:
            rows: that it computed.
            choice: how; None: in one forward.
            seconds: that it took.
            host: bytes that the host attended to, and the seconds that this took.
        """
        nbytes, hosted = host
        if nbytes and hosted > 0 and all(row.tokens == 1 for row in rows if row.host_bytes):
            self._rate.add(nbytes / hosted)
        if seconds <= 0:
            return
        if choice is not None and choice.second:
            self._factor.add(seconds * self.factor / choice.seconds)
            return
        waited = max(self.device(sum([row.device_bytes for row in rows])), hosted / self.layers)
        tokens = sum([row.tokens for row in rows])
        self._linear.setdefault(_bucket(tokens), Median()).add(max(seconds / self.layers - waited, 0.0))


def _bucket(tokens: int) -> int:
    """Numbers of tokens that are taken to take as long: up to the next power of two."""
    return max(tokens - 1, 0).bit_length()
