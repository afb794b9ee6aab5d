"""How fast a machine is, and the median by which a rate is learned."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError

#: Steps over which a rate is the median. A change is believed once it fills half of them; a shorter burst is not.
WINDOW = 15
#: Bytes per second that nothing reaches.
FASTEST = 1e15


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a machine is. The defaults are estimates: a PCIe 4.0 x16 link, a server's memory, an A100's.

    Attributes:
        up, down: of the link, bytes per second to the device and from it.
        host: of attention on the host, bytes of KV per second.
        device: of attention on the device, bytes of KV per second.
        copy_overhead: seconds that one layer's fetch takes besides.
        host_overhead: seconds that one layer's host attention takes besides: query down, threads woken, result up.
        shared: share of the host's rate that is lost while the link is busy.
        measured: whether these were measured on this machine.
    """

    up: float = 22e9
    down: float = 22e9
    host: float = 60e9
    device: float = 1.2e12
    copy_overhead: float = 10e-6
    host_overhead: float = 60e-6
    shared: float = 0.2
    measured: bool = False

    def __post_init__(self) -> None:
        # Compared as a whole first: rates are replaced at each step that shows others.
        speeds, overheads = (self.up, self.down, self.host, self.device), (self.copy_overhead, self.host_overhead)
        try:
            right = min(speeds) > 0 and sum(speeds) < math.inf and min(overheads) >= 0 and sum(overheads) < math.inf
            right = right and 0 <= self.shared < 1
        except TypeError:
            right = False
        if not right:
            raise ConfigError(
                f"{self}: give up, down, host and device in bytes per second, more than 0; copy_overhead and "
                "host_overhead in seconds; and shared from 0 to less than 1."
            )


class Median:
    """The median of the last values. It follows a lasting change after half a window, and ignores a shorter one."""

    __slots__ = ("_error", "_sorted", "_values", "value")

    def __init__(self, window: int = WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._sorted: list[float] = []
        self._error: float | None = None  # until another value comes or one goes
        self.value: float | None = None

    def add(self, value: float) -> None:
        """One more value, in place of the oldest."""
        values, found = self._values, self._sorted
        if len(values) == values.maxlen:
            del found[bisect_left(found, values[0])]
        values.append(value)
        insort(found, value)  # several are taken at each step: not sorted each time
        self.value, self._error = _middle(found), None

    def forget(self, least: int) -> None:
        """The oldest value is no more, unless there are only so many."""
        if len(self._values) > least:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
            self.value, self._error = _middle(self._sorted) if self._sorted else None, None

    def scale(self, factor: float) -> None:
        """Each of the values is so many times what it was."""
        self._values = deque([x * factor for x in self._values], self._values.maxlen)
        self._sorted = sorted(self._values)
        self.value, self._error = _middle(self._sorted) if self._sorted else None, None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def least(self) -> float:
        """The least of the last values, of which there is at least one."""
        return self._sorted[0]

    @property
    def mean(self) -> float:
        """The mean of the last values, of which there is at least one."""
        return sum(self._values) / len(self._values)

    @property
    def error(self) -> float:
        """The standard error of the median, from the median distance to it; 0.0 for equal values, and for none."""
        if self.value is None:
            return 0.0
        if self._error is None:
            # Of a normal distribution: 1.4826 makes its standard deviation of that distance, 1.2533 a median's error of
            # a mean's. Of sorted values the distances are two runs, which `sorted` only merges.
            distance = _middle(sorted([abs(x - self.value) for x in self._sorted]))
            self._error = 1.2533 * 1.4826 * distance / math.sqrt(len(self._values))
        return self._error


def _middle(found: Sequence[float]) -> float:
    """The median of sorted values."""
    half = len(found) // 2
    return found[half] if len(found) % 2 else (found[half - 1] + found[half]) / 2
