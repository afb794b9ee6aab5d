"""The fetches of a step's plan on one compute device: begun as early as there is room, given up after their use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.attention.reader import LayerReader
from kvtier.memory.blocks.block import Run, State
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState
from kvtier.tables.table import distinct

_DEVICE, _LEAVING, _BOTH, _ARRIVING, _HOST = map(
    int, (State.DEVICE, State.LEAVING, State.BOTH, State.ARRIVING, State.HOST)
)


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
        self._leaves = False
        # What was seen of each layer, and what a policy was told of it.
        self._seen: list[tuple[int, int, int, int, bool]] = []
        self._layers: list[LayerState] = []
        # For each layer, whether all that was planned was fetched for its next use.
        self._complete: list[bool] = [False for _ in self.readers]

    @property
    def active(self) -> bool:
        """Whether the step's plan has something to do behind a layer."""
        return self._ahead > 0 or self._leaves

    def state(
        self, tokens: int, hosted: Sequence[bool], last: StepRecord | None, *, by_rows: bool = False
    ) -> StepState:
        """What a policy sees; `by_rows`: what rows hold, too. The caller holds the lock."""
        device = self.readers[0].device
        assert device.slabs is not None
        # Written out, as it runs once for each layer and step; what is made of it is kept while it stays the same.
        now = []
        for reader, host_attention in zip(self.readers, hosted, strict=True):
            layer = reader.layer
            counts = layer.counts
            on_device = counts[_DEVICE] + counts[_LEAVING] + counts[_BOTH] + counts[_ARRIVING]
            now.append((on_device, layer.blocks.transient, counts[_HOST], len(layer.tables), host_attention))
        if now != self._seen:
            self._seen, self._layers = now, [_layer_state(x, *each) for x, each in zip(self.readers, now, strict=True)]
        found = StepState(tokens, self._layers, device.free_bytes, device.slabs.budget.limit, last)
        if by_rows:
            found.row_bytes, found.row_spilled = self._rows()
        return found

    def _rows(self) -> tuple[list[int], list[int]]:
        """Bytes of each row's sealed blocks, and of those on the host only; what rows share counts for the first."""
        size = max([len(reader.layer.rows) for reader in self.readers])
        total, spilled = [0] * size, [0] * size
        for reader in self.readers:
            nbytes, seen = reader.layer.layout.nbytes, set[Run]()
            for row, table in enumerate(reader.layer.rows):
                for run in table.resolve():
                    if run not in seen and run.sealed:
                        seen.add(run)
                        total[row] += run.count * nbytes
                        spilled[row] += run.count * nbytes if run.state is State.HOST else 0
        return total, spilled

    def begin(self, plan: StepPlan) -> None:
        """A step begins: fetch what is due before its first layer. The caller holds the lock.

        Args:
            plan: of as many layers; see `planning.step.checked`.
        """
        self._plans = plan.layers
        self._ahead = max((x.ahead for x in plan.layers if x.fetch), default=0)
        self._leaves = any([x.leave > 0 for x in plan.layers])
        self._complete = [False] * len(self.readers)
        if plan.on_host is not None:
            for reader in self.readers:
                self._move_rows(reader, plan.on_host)
        for reader, each in zip(self.readers, plan.layers, strict=True):
            reader.keep = each.keep
        if plan.reserve:
            reader = self.readers[0]
            fetched = sum([x.fetched_blocks * x.layer.layout.nbytes for x in self.readers])
            reader.device.keep_free(reader.layer.blocks.pools, plan.reserve - fetched)
        self._advance(-1)

    def after(self, reader: LayerReader) -> None:
        """A layer was attended to: its fetched blocks may leave, others are fetched. The caller holds the lock."""
        place = self._place[reader.layer]
        if reader.fetched:
            reader.retire()
        if self._plans[place].leave > 0:
            blocks = reader.layer.blocks
            reader.device.leave(list(blocks.resident), self._plans[place].leave)
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
        got = reader.device.fetch(runs, most, layer.blocks, evict=False, counters=reader.counters)
        count = sum([run.count for run in got])
        reader.expect(got)
        reader.counters.prefetched += count
        return count >= most

    @staticmethod
    def _move_rows(reader: LayerReader, on_host: Collection[int]) -> None:
        """Let these rows' sealed blocks be on the host and all others on the device, as far as there is room."""
        layer = reader.layer
        staying = distinct([table for row, table in enumerate(layer.rows) if row not in on_host])
        leaving = [run for run in layer.runs() if run not in staying and run.sealed and run.device is not None]
        reader.device.leave(leaving, layer.count)
        coming = [run for run in staying if run.state is State.HOST]
        reader.device.fetch(coming, layer.count, layer.blocks, evict=False, counters=reader.counters)

    def drop(self) -> None:
        """Rows, lengths or layers changed: what was fetched is like any block on the device."""
        for reader in self.readers:
            reader.forget()
        self._complete = [False] * len(self.readers)


def _layer_state(
    reader: LayerReader, on_device: int, fetched: int, spilled: int, sequences: int, host_attention: bool
) -> LayerState:
    fetched = min(fetched, on_device)  # whoever needed room may have taken some of them back
    layer = reader.layer
    return LayerState(
        layer.index,
        layer.layout.nbytes,
        on_device - fetched,
        fetched,
        spilled + fetched,
        sequences,
        host_attention,
    )
