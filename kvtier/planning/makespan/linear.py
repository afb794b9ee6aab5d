"""`LinearPart`: what a step takes besides attention and waiting, learned from what is left of each."""

from __future__ import annotations

import math

from kvtier.planning.rates import WINDOW, Median

#: Steps over which the linear part is the median. It follows slowly: what differs between two choices is then told of
#: each by its own record, and is not taken for a change of all.
LINEAR = 63
#: Steps that waited for the link of which the median is taken, and the steps that did not wait that are kept then: what
#: a disturbance has shown is gone soon behind it.
LATE, KEPT = 31, WINDOW
#: Steps from which a kind is known: fewer may all be slow, as first ones are.
TRUSTED = WINDOW
#: Steps of either kind that tell the overhead of host attention.
OF_EACH = 3
#: Standard errors from which a difference counts as one.
SIGNIFICANT = 3.0


class LinearPart:
    """What is left of steps with host attention and of steps without it: medians, each of its kind.

    While fetches wait for room, and reads for fetches, the device is idle for longer than it stalls, and that is no
    part of steps that fetch less. So what is left of steps that waited for the link is a bound: the linear part is at
    most their median, and does not become longer with that.

    The first steps of a kind are slow, and may be all that there are of it: it is not chosen again for what they took.
    So until `TRUSTED` steps of a kind are seen it takes no longer than the other one, if that is known. Steps that
    waited for the link count there: they are a bound of the first ones, too.

    Attributes:
        value: seconds, of steps of the kind that the last one was of; less than 0 where their parts are taken for more
            than all. None before the first.
        with_host, without: of steps of either kind that did not wait for the link.
    """

    def __init__(self, seconds: float | None = None, *, hosted: bool = False) -> None:
        self.with_host, self.without = Median(LINEAR), Median(LINEAR)
        self._late, self._most = Median(LATE), math.inf
        self._hosted = hosted
        if seconds is not None:
            (self.with_host if hosted else self.without).add(seconds)
        self.value = self.of(hosted)

    def of(self, hosted: bool) -> float | None:
        """The same of steps with host attention, or without."""
        kind, other = (self.with_host, self.without) if hosted else (self.without, self.with_host)
        found = kind.value
        if hosted:
            seen = found if len(kind) else self._late.value
            found = None if seen is None else min(seen, self._most)
        steps = len(kind) + len(self._late) if hosted else len(kind)
        if steps >= TRUSTED or len(other) < TRUSTED or found is None:
            return found
        assert other.value is not None
        return min(found, other.value)

    def __len__(self) -> int:
        """Steps that it is known from."""
        return len(self.with_host) + len(self._late) if self._hosted else len(self.without)

    def add(self, seconds: float, *, hosted: bool, late: bool = False) -> None:
        """What is left of one more step.

        Args:
            seconds: of it.
            hosted: whether it had host attention.
            late: whether it waited for the link; only of steps with host attention.
        """
        self._hosted = hosted
        if not hosted:
            self.without.add(seconds)
        elif late:
            self._bound(seconds)
            self.with_host.forget(KEPT)
        else:
            self.with_host.add(seconds)
            self._late.forget(0)
            if not len(self._late):
                self._most = math.inf
        self.value = self.of(hosted)

    def _bound(self, seconds: float) -> None:
        self._late.add(seconds)
        late, seen = self._late, self.with_host.value
        known = self._most if seen is None else min(seen, self._most)
        assert late.value is not None
        # Of many medians the least is only noise, unless it is less for sure.
        if len(late) >= WINDOW // 2 and late.value < known - SIGNIFICANT * late.error:
            self._most = late.value

    def more_with_host(self) -> float | None:
        """By how much it is longer with host attention than without; None: that may be noise."""
        with_host, without = self.with_host, self.without
        if with_host.value is None or without.value is None or min(len(with_host), len(without)) < OF_EACH:
            return None
        more = with_host.value - without.value
        if more > 0 and len(with_host) < TRUSTED:  # first steps are slow: the least is nearest to what others will be
            more = max(with_host.least - without.value, 0.0)
        return more if abs(more) >= SIGNIFICANT * math.hypot(with_host.error, without.error) else None
