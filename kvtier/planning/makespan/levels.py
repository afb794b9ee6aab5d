"""How high columns are once something is taken from the highest of them, or added to the lowest."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Sinking:
    """The highest of some columns are lowered to one height.

    Args:
        columns: heights, at least 0, and how many there are of each.
    """

    def __init__(self, columns: Sequence[tuple[float, int]]) -> None:
        self._heights, self._numbers, self._taken = list[float](), list[int](), list[float]()
        number, taken, least = 0, 0.0, 0.0
        for height, count in sorted(columns, reverse=True):
            taken += (least - height) * number  # to lower those before it to this one
            number, least = number + count, height
            self._heights.append(height)
            self._numbers.append(number)
            self._taken.append(taken)

    def after(self, total: float) -> float:
        """The height once `total`, at least 0, is taken from all together; 0.0 where they have no more than that."""
        at = bisect_right(self._taken, total) - 1
        return max(self._heights[at] - (total - self._taken[at]) / self._numbers[at], 0.0) if at >= 0 else 0.0


class Rising:
    """The lowest of some columns are raised to one height.

    Args:
        columns: heights, at least 0, how much may be added to each, and how many there are of it.
    """

    def __init__(self, columns: Sequence[tuple[float, float, int]]) -> None:
        self._heights, self._numbers, self._full = list[float](), list[int](), list[float]()
        begins = [(height, count) for height, most, count in columns if most]
        ends = [(height + most, -count) for height, most, count in columns if most]
        number, reached, added = 0, 0.0, 0.0
        for height, more in sorted(begins + ends):
            if number and height > reached:
                added += number * (height - reached)
                self._heights.append(height)
                self._numbers.append(number)
                self._full.append(added)
            number, reached = number + more, height

    def after(self, total: float) -> float:
        """The height once `total`, at least 0, is added to all together; infinite where they take no more than that."""
        at = bisect_left(self._full, total)
        if at == len(self._full):
            return math.inf
        return self._heights[at] - (self._full[at] - total) / self._numbers[at]
