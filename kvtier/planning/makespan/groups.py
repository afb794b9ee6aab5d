"""Layers that are alike: a model has few kinds, so that what is said of each kind does not grow with layers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from kvtier.planning.step import LayerState

#: Layers that are alike, and how many.
Group = tuple[LayerState, int]


class Groups(list[Group]):
    """Groups of layers, in the order of their first ones.

    Args:
        groups: a layer of each, and how many are like it.
        order: the group of each layer, in the order of a forward.
        layers: all of them, in that order; None: they follow each other in the model.
    """

    def __init__(
        self, groups: Iterable[Group], order: Sequence[int], layers: Sequence[LayerState] | None = None
    ) -> None:
        super().__init__(groups)
        self.order = order
        self.layers = layers

    @functools.cached_property
    def gaps(self) -> list[int]:
        """Of each layer, how many layers of the model come with it: itself, and those since the one before that are
        none of these. Of the first one only itself: layers before it may be on another device."""
        if self.layers is None:
            return [1] * len(self.order)
        indices = [x.layer for x in self.layers]
        return [1, *(index - before for before, index in itertools.pairwise(indices))]


def alike(layers: Sequence[LayerState]) -> Groups:
    """Layers with the same numbers, counted: a model has few kinds, so that a prediction does not grow with layers."""
    numbers: dict[tuple[int, int, int, bool], int] = {}
    first: list[LayerState] = []
    counts: list[int] = []
    order: list[int] = []
    for x in layers:
        number = numbers.setdefault((x.block_bytes, x.resident, x.spilled, x.host_attention), len(first))
        if number == len(first):
            first.append(x)
            counts.append(0)
        counts[number] += 1
        order.append(number)
    return Groups(zip(first, counts, strict=True), order, layers)


def height_after(heights: Sequence[tuple[float, int]], total: float) -> float:
    """The height to which the highest are lowered, so that `total` is taken from all together; 0.0 where they have no
    more than that.

    Args:
        heights: at least 0, and how many there are of each.
        total: at least 0.
    """
    number, taken, least = 0, 0.0, 0.0
    for height, count in sorted(heights, reverse=True) if len(heights) > 1 else heights:
        more = (least - height) * number  # to lower those before it to this one
        if more > total - taken:
            break
        taken, number, least = taken + more, number + count, height
    return max(least - (total - taken) / number, 0.0) if number else 0.0


def raised_to(heights: Sequence[tuple[float, float, int]], total: float) -> float:
    """The height to which the lowest are raised, so that `total` is added to all together; infinite where they take no
    more than that.

    Args:
        heights: at least 0, how much may be added to each, and how many there are of it.
        total: at least 0.
    """
    begins = [(height, count) for height, most, count in heights if most]
    ends = [(height + most, -count) for height, most, count in heights if most]
    number, reached = 0, 0.0
    for height, more in sorted(begins + ends):
        if number and number * (height - reached) >= total:
            return reached + total / number
        total -= number * (height - reached)
        number, reached = number + more, height
    return math.inf


def fetched_blocks(layer: LayerState, share: float) -> int:
    """Whole blocks that a share of a layer's spilled ones is."""
    return int(layer.spilled * share + 0.5) if layer.host_attention else layer.spilled
