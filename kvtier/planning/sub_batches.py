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

from kvtier.planning.costs import Median

#: Ways to divide rows with blocks on the host that are looked at.
WAYS = 16
#: By how much a prediction has to be better for two forwards to be used: they take turns on the CPU, too.
WORTH = 0.03
#: Steps in a row in which a row may be left out.
MOST_LEFT = 4


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
    """Seconds of a layer.

    Attributes:
        layers: of the model.
    """

    layers: int

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
        rows: that are computed, by number.
        second: of these, those of the second of two forwards; none: there is one.
        seconds: that it is predicted to take.
        others: the best of each other way, by name: rows and seconds.
    """

    rows: tuple[int, ...]
    second: frozenset[int]
    seconds: float
    others: dict[str, tuple[int, float]]

    @property
    def name(self) -> str:
        """Of the way: "device only" (rows with blocks on the host wait), "together", "sub-batches"."""
        return "sub-batches" if self.second else "together" if len(self.rows) == self.others["together"][0] else _ONLY


_ONLY = "device only"


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
        may_leave: whether rows with blocks on the host may wait for a later step, at most `MOST_LEFT` steps.
        factor: by which two forwards have taken longer than was predicted.
    """
    every = tuple(range(len(rows)))
    whole = stage(rows, times)
    one = together(whole, times.layers)
    ways: dict[str, tuple[tuple[int, ...], frozenset[int], float]] = {"together": (every, frozenset(), one)}
    hosted = sorted((i for i in every if rows[i].host_bytes), key=lambda i: (rows[i].host_bytes, i))
    if hosted and len(rows) > 1:
        second = _second(rows, hosted, times)
        if second:
            first = stage([rows[i] for i in every if i not in second], times)
            both = apart(first, stage([rows[i] for i in every if i in second], times), times.layers)
            ways["sub-batches"] = every, frozenset(second), factor * both
        others = tuple(i for i in every if not rows[i].host_bytes)
        if may_leave and others and all(rows[i].left < MOST_LEFT for i in hosted):
            alone = together(stage([rows[i] for i in others], times), times.layers)
            ways[_ONLY] = others, frozenset(), alone
    worth = {name: len(way[0]) / max(way[2], 1e-12) for name, way in ways.items()}
    best = max(worth, key=lambda name: worth[name])
    if worth[best] < (1 + WORTH) * worth["together"]:
        best = "together"
    return Choice(*ways[best], {name: (len(way[0]), way[2]) for name, way in ways.items()})


def _second(rows: Sequence[Row], hosted: Sequence[int], times: Times) -> set[int]:
    """Rows of the second forward: of those with blocks on the host, the largest ones, as many as are best."""
    most = len(hosted) - (len(hosted) == len(rows))  # somebody is in the first
    counts = sorted({max(round(most * i / WAYS), 1) for i in range(1, WAYS + 1)}) if most else []
    best: set[int] = set()
    shortest = math.inf
    for count in counts:
        some = set(hosted[len(hosted) - count :])
        first = stage([row for i, row in enumerate(rows) if i not in some], times)
        pace = _pace(first, stage([rows[i] for i in some], times))
        if pace < shortest:
            best, shortest = some, pace
    return best


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
