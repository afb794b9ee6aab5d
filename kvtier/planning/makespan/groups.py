"""Layers that are alike: a model has few kinds, so that what is said of each kind does not grow with layers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

from kvtier.planning.makespan.levels import Rising, Sinking
from kvtier.planning.step import LayerState

#: Of a block, such a part is none.
EXACT = 1e-6
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
        self._spilled: dict[float, list[float]] = {}
        self._most: dict[float, list[tuple[LayerState, int]]] = {}

    @functools.cached_property
    def total(self) -> int:
        """Layers, in all groups."""
        return sum([count for _, count in self])

    @functools.cached_property
    def gaps(self) -> list[int]:
        """Of each layer, how many layers of the model come with it: itself, and those since the one before that are
        none of these. Of the first one only itself: layers before it may be on another device."""
        if self.layers is None:
            return [1] * len(self.order)
        indices = [x.layer for x in self.layers]
        return [1, *(index - before for before, index in itertools.pairwise(indices))]

    def spilled_after(self, more: float) -> list[float]:
        """Blocks that a layer of each group has spilled once other room is kept free: between two whole numbers some
        layers have the one and others the other. Kept, for shares that are compared need the same room.

        Args:
            more: bytes that are kept free besides: those layers spill that have most on the device. Where negative, so
                much comes back, to those that have least there.
        """
        found = self._spilled.get(more)
        if found is None:
            found = self._spilled[more] = self._spill(more)
        return found

    def most_spilled(self, more: float) -> list[tuple[LayerState, int]]:
        """Whole blocks that those layers have spilled which have most, once other room is kept free: for each size of
        blocks, where the host attends and where it does not.

        Args:
            more: as of `spilled_after`.
        """
        found = self._most.get(more)
        if found is None:
            spilled = self.spilled_after(more)
            found = [(x, math.ceil(max([spilled[i] for i in places]) - EXACT)) for x, places in self._sizes]
            self._most[more] = found
        return found

    @functools.cached_property
    def _sizes(self) -> list[tuple[LayerState, list[int]]]:
        """Groups of equal blocks, to which the host attends or does not: one of their layers, and which they are."""
        found = dict[tuple[int, int, bool], tuple[LayerState, list[int]]]()
        for i, (x, _) in enumerate(self):
            found.setdefault((x.block_bytes, x.sequences, x.host_attention), (x, []))[1].append(i)
        return list(found.values())

    @functools.cached_property
    def _sinking(self) -> Sinking:
        return Sinking([(x.resident * x.block_bytes, n) for x, n in self])

    @functools.cached_property
    def _rising(self) -> Rising:
        return Rising([(x.resident * x.block_bytes, x.spilled * x.block_bytes, n) for x, n in self])

    def _spill(self, more: float) -> list[float]:
        if not more:
            return [x.spilled for x, _ in self]
        height = self._sinking.after(more) if more > 0 else self._rising.after(-more)
        found = []
        for layer, _ in self:
            held, most = layer.resident, layer.resident + layer.spilled
            stays = height / layer.block_bytes
            found.append(most - (min(held, stays) if more > 0 else min(max(held, stays), most)))
        return found


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
