"""`PackedLayerKV`: one layer of any number of sequences, each of its own length."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from kvtier.memory.blocks.block import BlockSet, Run
from kvtier.tables import writing
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable

#: Versions of rows: two of them are never taken for each other.
_versions = itertools.count(-1, -1)


class PackedLayerKV(LayerKV):
    """One layer whose rows are the sequences of the step under way, in the order of the packed batch.

    A sequence that takes no part in a step keeps its table: `tables` are those of all, `rows` those of the step.

    Args: as of `LayerKV`.

    Attributes:
        length: of all rows together: the tokens of a packed tensor of keys.
        divided: layers that `divide` has made.
    """

    divided: tuple[PackedLayerKV, ...] = ()

    def enter(self, table: BlockTable) -> None:
        """A sequence comes, with the blocks that it has."""
        self.tables.append(table)
        self.blocks.touch()
        self.shape_version += 1

    def leave(self, table: BlockTable) -> None:
        """A sequence ends: blocks that nobody else holds are freed."""
        self.tables = [each for each in self.tables if each is not table]
        self.blocks.touch()
        if any(row is table for row in self.rows):
            self.rows = [row for row in self.rows if row is not table]
            self.length -= table.length
        for part in self.divided:
            part.rows = part.tables = [row for row in part.rows if row is not table]
            part.shape_version += 1
        self.shape_version += 1
        table.clear(self.device.free)

    def choose(self, rows: Sequence[BlockTable]) -> None:
        """The tables of a step's sequences."""
        if len(rows) != len(self.rows) or any(a is not b for a, b in zip(rows, self.rows, strict=True)):
            self.rows = list(rows)
            self.shape_version += 1
        self.length = sum([table.length for table in rows])

    def append_packed(self, keys: torch.Tensor, values: torch.Tensor, cu_tokens: Sequence[int]) -> None:
        """Add tokens to the rows; see `writing.append_packed`."""
        writing.append_packed(self.device, self.blocks, self.rows, keys, values, cu_tokens)
        self.length += cu_tokens[-1]

    def crop_table(self, table: BlockTable, length: int) -> None:
        """Keep the first tokens of one sequence."""
        if length < table.length:
            if any(row is table for row in self.rows):
                self.length -= table.length - length
            table.crop(length, self.layout.block_size, self.device.free)
            self.shape_version += 1
            self.epoch += 1

    def row(self, row: int) -> LayerKV:
        """One sequence, as a layer of its own that only reads."""
        return _Row(self, self.rows[row])

    def divide(self) -> PackedLayerKV:
        """A layer of the same sequences with rows of its own: for one of several forwards that take turns in a step."""
        made = _Divided(self)
        self.divided += (made,)
        return made

    def follow(self, parked: BlockSet, rows: Sequence[BlockTable], length: int) -> None:
        """Sequences come, with tables of parked blocks; see `LayerKV.follow`."""
        self._hold(parked)
        for table in rows:
            self.enter(table)

    def check_integrity(self) -> None:
        """Raise AssertionError unless tables, runs and references agree."""
        size, refs = self.layout.block_size, dict[Run, int]()
        assert all(any(row is table for table in self.tables) for row in self.rows), "a row without a sequence"
        assert self.length == sum(table.length for table in self.rows), "the rows' tokens are counted wrong"
        listed = {id(table) for table in self.tables}
        assert all(id(row) in listed for part in self.divided for row in part.rows), (
            "a row of a sub-batch is no sequence"
        )
        for table in self.tables:
            assert table.blocks == -(-table.length // size), "a table does not match its length"
            for run in table.resolve():
                refs[run] = refs.get(run, 0) + 1
        mine = {run: n for run, n in refs.items() if run.blocks is self.blocks}
        assert mine.keys() == self.blocks.runs.keys(), "runs are listed wrong"
        assert all(run.refs == n for run, n in mine.items()), "a run miscounts its tables"


class _Row(LayerKV):
    """A row of a packed layer, for readers of one sequence."""

    def __init__(self, of: PackedLayerKV, table: BlockTable) -> None:
        super().__init__(of.index, of.layout, of.device, of.blocks, of.counters)
        self.rows = [table]
        self.tables = [table]
        self.length = table.length
        self.parked = of.parked
        self.shape_version = next(_versions)


class _Divided(PackedLayerKV):
    """Some sequences of a packed layer."""

    def __init__(self, of: PackedLayerKV) -> None:
        super().__init__(of.index, of.layout, of.device, of.blocks, of.counters)
        self._of = weakref.ref(of)  # which has a list of these

    def choose(self, rows: Sequence[BlockTable]) -> None:
        """See `PackedLayerKV.choose`. Views of an earlier step are stale."""
        super().choose(rows)
        of = self._of()
        assert of is not None, "a layer that has ended"
        self.tables, self.parked = self.rows, of.parked
        self.epoch += 1

    def append_packed(self, keys: torch.Tensor, values: torch.Tensor, cu_tokens: Sequence[int]) -> None:
        """See `PackedLayerKV.append_packed`."""
        super().append_packed(keys, values, cu_tokens)
        of = self._of()
        assert of is not None, "a layer that has ended"
        of.length += cu_tokens[-1]
