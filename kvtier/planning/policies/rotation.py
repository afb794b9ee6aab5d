"""Pie's swapping of whole layers, as the paper has it (sections 3.3 and 3.4.2): a protocol on the clock of layers.

It is here to be compared with, and to show that the simulator gives what the paper reports. `Rotation` decides at the
start of each layer; `rotate` plays it in virtual time, and reproduces the paper's figures 4 and 5. For the steps of a
real cache `pie.WholeLayers` asks `Rotation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Swap:
    """One layer on its way.

    Attributes:
        layer: which, from 1.
        out: to the host; else to the device.
        start, end: in the time unit of the simulation.
    """

    layer: int
    out: bool
    start: float
    end: float


@dataclass(slots=True)
class Rotation:
    """Which layer leaves, and which one comes back, whenever a layer begins.

    Args:
        layers: of the model.
        on_host: how many of them are on the host: the expansion is `layers / (layers - on_host)`.
    """

    layers: int
    on_host: int

    def distance(self, layer: int, now: int) -> int:
        """Layers until `layer` is needed, while `now` is computed: 0 for that one itself."""
        return (layer - now) % self.layers

    def swap_out(self, now: int, device: set[int], host: set[int]) -> int | None:
        """The coldest layer on the device, unless all that are on the host are colder (section 3.3)."""
        idle = device - {now}
        if not idle:
            return None
        coldest = max(idle, key=lambda x: self.distance(x, now))
        if host and all(self.distance(x, now) > self.distance(coldest, now) for x in host):
            return None
        return coldest

    def swap_in(self, now: int, host: set[int]) -> int | None:
        """The hottest layer on the host."""
        return min(host, key=lambda x: self.distance(x, now), default=None)


@dataclass(slots=True)
class Rotated:
    """What a rotation did.

    Attributes:
        swaps: in the order of their start.
        starts: (token, layer, time) at which each layer's computation began.
        stalls: by token, the time that computation waited.
        on_host: by token, how many layers the rotation was to keep on the host.
        held: by token, how many were there when it ended, those on their way not counted.
    """

    swaps: list[Swap] = field(default_factory=list)
    starts: list[tuple[int, int, float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    on_host: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class Expansion:
    """How many layers are on the host (section 3.4.2): more while swapping idles, fewer when computation waits.

    It is here to reproduce the paper's figure 5. Caches do not expand so: what is spilled follows from the sequences
    that they have, and `adaptive.Adaptive` chooses what of it is fetched.

    Args:
        layers: of the model.
        tolerated: tokens in a row with a wait before it shrinks, so that one burst changes nothing.
        calm: tokens in a row without a wait, and with the link idle, before it grows.
    """

    def __init__(self, layers: int, *, tolerated: int = 3, calm: int = 3) -> None:
        self._most = layers - 2
        self._tolerated, self._calm = tolerated, calm
        self._waits = self._idle = 0
        #: Tokens before a number of layers that made computation wait is tried again.
        self._barred: dict[int, int] = {}
        self.on_host = 0

    def observe(self, stalled: float, idle: float, *, useful: bool = True) -> int:
        """A token was computed. Returns how many layers are on the host from now on.

        Args:
            stalled: time that computation waited for swaps.
            idle: time in which nothing was swapped in.
            useful: whether the load has a use for more room.
        """
        self._barred = {n: left - 1 for n, left in self._barred.items() if left > 1}
        self._waits = self._waits + 1 if stalled > 0 else 0
        self._idle = self._idle + 1 if stalled <= 0 and idle > 0 else 0
        if self._waits >= self._tolerated and self.on_host:
            self._barred[self.on_host] = 16 * self._calm
            self.on_host -= 1
            self._waits = self._idle = 0
        elif self._idle >= self._calm and useful and self.on_host < self._most:
            if self.on_host + 1 not in self._barred:
                self.on_host += 1
            self._idle = 0
        return self.on_host


def rotate(
    layers: int,
    on_host: int,
    *,
    compute: float,
    swap: float | list[float],
    tokens: int,
    expansion: Expansion | None = None,
) -> Rotated:
    """Play the protocol.

    Args:
        layers: of the model.
        on_host: that begin on the host: the last ones. The device has room for the others.
        compute: time of one layer.
        swap: time of one layer either way; a list: by token.
        tokens: to compute.
        expansion: changes how many are on the host between two tokens; None: `on_host` stays.
    """
    found = Rotated()
    rule = Rotation(layers, on_host)
    device = set(range(1, layers - on_host + 1))
    host = set(range(layers - on_host + 1, layers + 1))
    leaving: Swap | None = None
    coming: Swap | None = None
    clock = 0.0

    def room() -> bool:
        """Whether the device has room for one layer more."""
        taken = len(device) + sum(x is not None for x in (leaving, coming))
        return taken < layers - rule.on_host

    for token in range(tokens):
        each = swap[min(token, len(swap) - 1)] if isinstance(swap, list) else swap
        stalled, busy, began = 0.0, 0.0, clock
        for now in range(1, layers + 1):
            leaving, coming = _settle(clock, leaving, coming, device, host)
            while now not in device:
                # It was not asked for in time, or there was no room: computation waits for both.
                if coming is None and now in host and (room() or leaving is None):
                    if not room():
                        leaving = _begin(
                            found, device, max(device, key=lambda x: rule.distance(x, now)), True, clock, each
                        )
                    else:
                        coming = _begin(found, host, now, False, clock, each)
                        busy += each
                after = min(x.end for x in (leaving, coming) if x is not None)
                stalled += after - clock
                clock = after
                leaving, coming = _settle(clock, leaving, coming, device, host)
            found.starts.append((token, now, clock))
            hottest = rule.swap_in(now, host)
            if coming is None and hottest is not None and room():
                coming = _begin(found, host, hottest, False, clock, each)
                busy += each
            coldest = rule.swap_out(now, device, host)
            if leaving is None and coldest is not None and rule.on_host and len(host) <= rule.on_host:
                leaving = _begin(found, device, coldest, True, clock, each)
            clock += compute
        found.stalls.append(stalled)
        found.on_host.append(rule.on_host)
        found.held.append(len(host))
        if expansion is not None:
            rule.on_host = expansion.observe(stalled, max(clock - began - busy, 0.0))
    return found


def _begin(found: Rotated, of: set[int], layer: int, out: bool, clock: float, seconds: float) -> Swap:
    of.discard(layer)
    made = Swap(layer, out, clock, clock + seconds)
    found.swaps.append(made)
    return made


def _settle(
    clock: float, leaving: Swap | None, coming: Swap | None, device: set[int], host: set[int]
) -> tuple[Swap | None, Swap | None]:
    """Swaps that have ended by now."""
    if leaving is not None and leaving.end <= clock:
        host.add(leaving.layer)
        leaving = None
    if coming is not None and coming.end <= clock:
        device.add(coming.layer)
        coming = None
    return leaving, coming
