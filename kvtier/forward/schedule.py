"""The fetches of a step's plan on one compute device: begun as early as there is room, given up after their use."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.attention.reader import LayerReader
from kvtier.memory.block import State
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState


class Schedule:
    """Layers take turns, step after step: behind the last one comes the first one of the next step.

    Args:
        readers: of the layers, in the order of the forward.
    """

    def __init__(self, readers: Sequence[LayerReader]) -> None:
        self.readers = list(readers)
        self._place = {reader.layer: i for i, reader in enumerate(self.readers)}
        self._plans: list[LayerPlan] = [LayerPlan() for _ in self.readers]
        self._ahead = 0
        # For each layer, whether all that was planned was fetched for its next use.
        self._complete: list[bool] = [False for _ in self.readers]

    @property
    def active(self) -> bool:
        """Whether the step's plan has fetches."""
        return self._ahead > 0

    def state(self, tokens: int, hosted: Sequence[bool], last: StepRecord | None) -> StepState:
        """What a policy sees. The caller holds the lock."""
        device = self.readers[0].device
        assert device.slabs is not None
        layers = []
        for reader, host_attention in zip(self.readers, hosted, strict=True):
            layer = reader.layer
            fetched = reader.fetched_blocks
            on_device = layer.blocks.evictable + layer.blocks.counts[State.ARRIVING]
            layers.append(
                LayerState(
                    layer.index,
                    layer.layout.nbytes,
                    on_device - fetched,
                    fetched,
                    layer.spilled + fetched,
                    len(layer.tables),
                    host_attention,
                )
            )
        free = device.slabs.budget.free + sum(p.free * p.layout.nbytes for p in device.device_pools)
        return StepState(tokens, layers, free, device.slabs.budget.limit, last)

    def begin(self, plan: StepPlan) -> None:
        """A step begins: fetch what is due before its first layer. The caller holds the lock."""
        self._plans = plan.layers
        self._ahead = max((x.ahead for x in plan.layers if x.fetch), default=0)
        self._complete = [False] * len(self.readers)
        for reader, each in zip(self.readers, plan.layers, strict=True):
            reader.keep = each.keep
        if plan.reserve:
            reader = self.readers[0]
            fetched = sum([x.fetched_blocks for x in self.readers]) * reader.layer.layout.nbytes
            reader.device.keep_free(reader.layer.blocks.pools, plan.reserve - fetched)
        self._advance(-1)

    def after(self, reader: LayerReader) -> None:
        """A layer was attended to: its fetched blocks may leave, others are fetched. The caller holds the lock."""
        place = self._place[reader.layer]
        if reader.fetched:
            reader.retire()
        self._complete[place] = False
        if self._ahead:
            self._advance(place)

    def _advance(self, place: int) -> None:
        """Begin the fetches that are due, nearest first, until there is no room."""
        n = len(self.readers)
        for distance in range(1, min(self._ahead, n) + 1):
            i = (place + distance) % n
            plan, reader = self._plans[i], self.readers[i]
            if self._complete[i] or distance > plan.ahead or not plan.fetch:
                continue
            if not self._fetch(reader, plan.fetch - reader.fetched_blocks):
                return
            self._complete[i] = True

    def _fetch(self, reader: LayerReader, most: int) -> bool:
        """Begin to fetch up to `most` blocks of a layer. Whether there was room for all of them."""
        layer = reader.layer
        most = min(most, layer.spilled)
        if most <= 0:
            return True
        runs = [run for run in layer.runs() if run.state is State.HOST]
        got = reader.device.fetch(runs, most, layer.blocks, evict=False)
        count = sum([run.count for run in got])
        reader.expect(got)
        reader.counters.prefetched += count
        return count >= most

    def drop(self) -> None:
        """Rows, lengths or layers changed: what was fetched is like any block on the device."""
        for reader in self.readers:
            reader.forget()
        self._complete = [False] * len(self.readers)
