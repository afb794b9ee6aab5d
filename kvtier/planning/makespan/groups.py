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


def spilled_after(groups: Sequence[Group], more: float) -> list[float]:
    """Blocks that a layer of each group has spilled once other room is kept free: between two whole numbers some layers
    have the one and others the other.

    Args:
        groups: as they are.
        more: bytes that are kept free besides: those layers spill that have most on the device. Where negative, so much
            comes back, to those that have least there.
    """
    if not more:
        return [x.spilled for x, _ in groups]
    height = (
        height_after([(x.resident * x.block_bytes, count) for x, count in groups], more)
        if more > 0
        else raised_to([(x.resident * x.block_bytes, x.spilled * x.block_bytes, count) for x, count in groups], -more)
    )
    found = []
    for layer, _ in groups:
        held, most = layer.resident, layer.resident + layer.spilled
        stays = height / layer.block_bytes
        found.append(most - (min(held, stays) if more > 0 else min(max(held, stays), most)))
    return found


def parted(spilled: float, share: float, most: float) -> tuple[float, float, float]:
    """What a share of a layer's spilled blocks is. Where these are between two whole numbers, some layers have the one
    and others the other, and a share of either is whole blocks.

    Args:
        spilled: blocks, on average.
        share: that is fetched.
        most: blocks that it may be.

    Returns:
        blocks that a layer fetches, on average; the part of the layers that fetch some; and of those that leave some.
    """
    below = int(spilled)
    more = spilled - below
    least = min(int(below * share + 0.5), most)
    if not more:
        return least, least > 0, least < below
    next_one = min(int((below + 1) * share + 0.5), most)
    return (
        least + (next_one - least) * more,
        (least > 0) * (1 - more) + (next_one > 0) * more,
        (least < below) * (1 - more) + (next_one <= below) * more,
    )
