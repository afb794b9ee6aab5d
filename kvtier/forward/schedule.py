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

#: Of a layer: blocks on the device or on their way there, those of them fetched for one use, those on the host only,
#: and distinct tables. Empty before anybody has looked.
_Holds = tuple[int, ...]
_UNSEEN = LayerState(0, 0, 0, 0, 0, 0, False)


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
        self._keeps = self._leaves = False
        # Layers to look at before a policy is told of them, by index; their blocks enter them when they change.
        self._places = {reader.layer.index: i for i, reader in enumerate(self.readers)}
        self._stale: dict[int, None] = dict.fromkeys(self._places)
        for reader in self.readers:
            reader.layer.blocks.stale = self._stale
        # What each layer holds, the places of layers of which that has changed since a policy was told, and what it
        # was told.
        self._holds: list[_Holds] = [()] * len(self.readers)
        self._changed: dict[int, None] = {}
        self._layers = [_UNSEEN] * len(self.readers)
        self._hosted: Sequence[bool] = ()
        #: Which layers the host may attend to, if it may at all, as whoever decides that keeps it; None: to be decided.
        self.in_place: tuple[bool, list[bool]] | None = None
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
        for index in list(self._stale):
            self._look(self._places[index])
        if hosted is not self._hosted and hosted != self._hosted:
            self._changed, self._hosted = dict.fromkeys(range(len(self.readers))), hosted
        if self._changed:
            layers = list(self._layers)  # policies may keep the list, and what is in it
            for i in self._changed:
                layers[i] = _layer_state(self.readers[i], self._holds[i], self._hosted[i])
            if layers != self._layers:
                self._layers = layers
            self._changed = {}
        found = StepState(tokens, self._layers, device.free_bytes, device.slabs.budget.limit, last)
        if by_rows:
            found.row_bytes, found.row_spilled = self._rows()
        return found

    def _look(self, place: int) -> None:
        """Note what a layer holds. Cut short, it is looked at again."""
        layer = self.readers[place].layer
        counts = layer.counts
        on_device = counts[_DEVICE] + counts[_LEAVING] + counts[_BOTH] + counts[_ARRIVING]
        now = (on_device, layer.blocks.transient, counts[_HOST], len(layer.tables))
        if now != self._holds[place]:
            self._changed[place] = None
            self._holds[place] = now
        self._stale.pop(layer.index, None)

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
        keeps = any([x.keep for x in plan.layers])
        if keeps or self._keeps:
            for reader, each in zip(self.readers, plan.layers, strict=True):
                reader.keep = each.keep
        self._keeps = keeps
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
        if reader.layer.index in self._stale:  # now, for at the next step's beginning it is in no processor's cache
            self._look(place)

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
        self.in_place = None
        for reader in self.readers:
            reader.forget()
        self._complete = [False] * len(self.readers)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what a policy will be told is what layers hold. For tests and debugging."""
        for i, reader in enumerate(self.readers):
            layer = reader.layer
            assert layer.blocks.stale is self._stale, "a layer tells another schedule"
            assert layer.blocks.layer == layer.index, "a layer's blocks are another's"
            if layer.index not in self._stale:
                was = self._holds[i]
                self._look(i)
                assert was == self._holds[i], f"layer {layer.index} has changed, and policies do not hear of it"
                if i not in self._changed:
                    told = _layer_state(reader, was, self._hosted[i])
                    assert told == self._layers[i], f"policies are told something else of layer {layer.index}"


def _layer_state(reader: LayerReader, holds: _Holds, host_attention: bool) -> LayerState:
    on_device, fetched, spilled, sequences = holds
    fetched = min(fetched, on_device)  # whoever needed room may have taken some of them back
    layer = reader.layer
    return LayerState(
        layer.index, layer.layout.nbytes, on_device - fetched, fetched, spilled + fetched, sequences, host_attention
    )
