"""`LayerKV`: the keys and values of one layer of one cache. Rows of the batch point at block tables."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import copies
from kvtier.memory.access.change import undone
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet, Run, State
from kvtier.memory.storage.layout import BlockLayout, fits
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.stats import Counters
from kvtier.tables import sharing, writing
from kvtier.tables.sharing import Alike, Group
from kvtier.tables.table import BlockTable, distinct, release

#: An address and bytes of each piece of one head, heads, and bytes from one head to the next one.
Pieces = tuple[list[tuple[int, int]], int, int]


class LayerKV:
    """One layer, `length` tokens for each of `batch` rows.

    Every change is all or nothing for the layer. The caller holds the memory's lock.

    Args:
        index: the layer's index in the model.
        layout: of its blocks.
        device: that attends to it.
        blocks: the set that the memory counts its blocks in.
        counters: of the cache.

    Attributes:
        rows: the table of each row; equal rows share one.
        tables: the distinct tables.
        length: tokens per row.
        epoch: changes whenever tokens are dropped, replaced or reordered; views of an older epoch are stale.
        shape_version: changes whenever rows or tables do, other than by tokens added behind their last.
        carries_graph: whether keys or values came with an autograd graph, which is not kept.
        parked: the set of parked blocks that it continues, whose runs its tables may hold too; None: there is none.
    """

    def __init__(
        self, index: int, layout: BlockLayout, device: ComputeDevice, blocks: BlockSet, counters: Counters
    ) -> None:
        self.index = index
        self.layout = layout
        self.device = device
        self.counters = counters
        self.blocks = blocks
        self.rows: list[BlockTable] = []
        self.tables: list[BlockTable] = []
        self.length = 0
        self.epoch = 0
        self.shape_version = 0
        self.carries_graph = False
        self.parked: BlockSet | None = None
        self._counted: tuple[int, int] = (-1, -1)
        self._counts: list[int] = []
        self._tails: writing.TailWriter | None = None
        self._prepared = copies.PreparedAppend(layout)
        self._token_shapes: tuple[tuple[int, ...], ...] = ((), ())

    # What it holds

    @property
    def batch(self) -> int:
        """Rows; 0 before the first append."""
        return len(self.rows)

    @property
    def counts(self) -> list[int]:
        """Distinct blocks by `State`."""
        if self.parked is None:
            return self.blocks.counts
        now = (self.blocks.version, self.shape_version)
        if self._counted != now:
            self._counts = list(self.blocks.counts)
            for run in self.runs():
                if run.blocks is not self.blocks:
                    self._counts[run.state] += run.count
            self._counted = now
        return self._counts

    @property
    def may_be_spilled(self) -> bool:
        """Whether any block may be on the host only. For whoever does not hold the lock."""
        blocks = self.blocks
        return blocks.spilled > 0 or (self.parked is not None and blocks.pools.spilled > 0)

    @property
    def count(self) -> int:
        """Distinct blocks."""
        return sum(self.counts)

    @property
    def spilled(self) -> int:
        """Blocks that are not on the device, nor on their way."""
        return self.counts[State.HOST] if self.blocks.pools.device is not None else 0

    def runs(self) -> dict[Run, None]:
        """The distinct runs of all tables, in table order."""
        return distinct(self.tables)

    def workspace_bytes(self, tokens: int, batch: int = 0) -> int:
        """Bytes in which `tokens` per row of this layer are one tensor of keys and one of values, whole blocks."""
        blocks = -(-tokens // self.layout.block_size)
        exact = max(batch or self.batch, 1) * blocks * self.layout.block_size * self.layout.token_bytes
        return -(-exact // 64) * 64

    # Append

    def _is_token(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are one more token for every row, in the layer's own shape, dtype and device."""
        shapes, device = self._token_shapes, self.device
        return (
            keys.device == values.device == device.device
            and keys.dtype is values.dtype is self.layout.dtype
            and keys.shape == shapes[0]
            and values.shape == shapes[1]
        )

    def widened(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, of one dtype, in that of the layer if they fit there; else as they are, for `check`."""
        held = self.layout.dtype
        if keys.dtype is held or not fits(keys, held):
            return keys, values
        return keys.to(held), values.to(held)

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `MismatchError` unless `keys` and `values` continue what the layer holds."""
        self.check_kind(keys, values)
        if self.length and keys.shape[0] != self.batch:
            raise MismatchError(
                f"The batch has {keys.shape[0]} rows, and the cache holds {self.batch} (layer {self.index}). Continue "
                "with the same batch, select rows with `batch_select_indices`, repeat them with "
                "`batch_repeat_interleave` (for beams, or several answers), or `reset()`."
            )

    def check_kind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `MismatchError` unless keys and values, of any number of rows, are of the layer's layout and device."""
        self.layout.check(keys, values, self.index)
        if keys.device != self.device.device or values.device != keys.device:
            raise MismatchError(
                f"Layer {self.index} is on {self.device.device}, but was given keys on {keys.device} and values on "
                f"{values.device}. After moving a model `reset()` the cache, or make another engine."
            )

    def group(
        self, keys: torch.Tensor, values: torch.Tensor, known: Alike | None = None
    ) -> tuple[list[Group], Alike | None]:
        """Which rows share a table when `keys` and `values` are appended; see `sharing.group_rows`."""
        return sharing.group_rows(self.rows if self.length else (), self.layout, keys, values, known)

    def append_token(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Add one token to every row where that takes no new slot: the steady state of decoding.

        Returns:
            False, and nothing done, if it does, or if these are not one token for every row.

        Raises:
            Exception: of a policy; no token was added.
        """
        offset = self.length % self.layout.block_size
        tails = self._tails
        if tails is None or not offset:
            return False
        # As pairs, which ask whether streams are equal: asked whether they differ, one of torch's says no to None.
        if (tails.version, tails.stream) != (self.blocks.version, self.device.engine.stream):
            tails = self._tails = writing.TailWriter.of(self.device, self.blocks, self.tables, self._prepared)
            if tails is None:
                return False
        last = tails.last
        if last is None or not last.repeat(keys, values, offset):
            if not self._is_token(keys, values):
                return False
            tails.write(keys, values, offset)
        if offset + 1 == self.layout.block_size:
            self._tails = None
            for table in self.tables:
                self.device.seal(table.resolve()[-1])  # first: where a policy raises, there is no token more
        self.length += 1
        for table in self.tables:
            table.length += 1
        return True

    def append(self, keys: torch.Tensor, values: torch.Tensor, groups: Sequence[Group]) -> None:
        """Add tokens to every row.

        Args:
            keys: `[batch, k_heads, tokens, k_dim]`; copied, the caller keeps its tensor.
            values: `[batch, v_heads, tokens, v_dim]`.
            groups: what `group` answered for them.

        Raises:
            BudgetError, TransferError: nothing was appended.
        """
        self._tails = None
        tables = self._regroup(groups, keys.shape[0])
        try:
            for group, table in zip(groups, tables, strict=True):
                done = 0
                if group.shared is not None:
                    done = group.shared_blocks * self.layout.block_size
                    table.runs = tables[group.shared].head(group.shared_blocks).runs
                writing.append(self.device, self.blocks, table, keys[group.row], values[group.row], done)
        except Exception as error:
            if undone(error):
                self._trim(self.length)
            raise
        self.length += keys.shape[2]
        if self.length % self.layout.block_size and 0 < len(self.tables) == self.batch:
            self._tails = writing.TailWriter.of(self.device, self.blocks, self.tables, self._prepared)

    def reserve(self, tokens: int, groups: Sequence[Group]) -> None:
        """Add tokens to a layer of one row, or of none yet, to be written where `pieces` says; `complete` ends that.

        Args:
            tokens: how many.
            groups: what `group` answered for one row.

        Raises:
            BudgetError, TransferError: nothing was added.
        """
        self._tails = None
        (table,) = self._regroup(groups, 1)
        try:
            writing.reserve(self.device, self.blocks, table, tokens)
        except Exception as error:
            if undone(error):
                self._trim(self.length)
            raise
        self.length += tokens
        self.shape_version += 1

    def pieces(self, which: str, first: int, tokens: int) -> Pieces:
        """Where the keys, or the values, of reserved tokens are. Valid as long as the lock is held.

        Args:
            which: `"k"` or `"v"`.
            first: of the tokens.
            tokens: how many.
        """
        layout = self.layout
        if which == "k":
            heads, dim, begin = layout.k_heads, layout.k_dim, 0
        else:
            heads, dim, begin = layout.v_heads, layout.v_dim, layout.k_numel * layout.dtype.itemsize
        nbytes = dim * layout.dtype.itemsize
        places = writing.places(self.blocks, self.tables[0], first, tokens)
        pieces = [(block + begin + skip * nbytes, n * nbytes) for block, skip, n in places]
        return pieces, heads, layout.block_size * nbytes

    def complete(self, length: int) -> None:
        """Of a layer with reserved tokens the first `length` are written; whoever reserved the others crops them."""
        writing.seal_full(self.device, self.blocks, self.tables[0], length)
        self.shape_version += 1

    def _regroup(self, groups: Sequence[Group], batch: int) -> list[BlockTable]:
        """Give every group a table of its own."""
        if self.length == 0:
            self._drop(self.tables)
        tables = []
        rows: list[BlockTable | None] = [None] * batch
        for group in groups:
            table = BlockTable() if group.table is None else group.table.fork() if group.fork else group.table
            tables.append(table)
            for row in group.rows:
                rows[row] = table
        self._set_rows(rows)  # type: ignore[arg-type]
        return tables

    # Drop, pick, share

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of every row."""
        assert 0 <= length <= self.length
        if length < self.length:
            self._trim(length)
            self.length = length
            self.epoch += 1

    def pick_rows(self, indices: Sequence[int]) -> None:
        """Make the rows `indices` of before the rows of now. Copies nothing; rows picked twice share their table."""
        rows = [self.rows[i] for i in indices]
        kept = set(rows)
        dropped = [table for table in self.tables if table not in kept]
        self._set_rows(rows)
        self._drop(dropped)
        self.epoch += 1

    def clear(self) -> None:
        """Drop every token."""
        dropped = self.tables
        self._set_rows([])
        self._drop(dropped)
        self.length = 0
        self.carries_graph = False
        self.epoch += 1

    def forget(self) -> None:
        """It ends: whoever frees all blocks of its set asks no table, which may have been cut short in a change."""
        parked = self.parked
        if parked is not None:
            for table in self.tables:
                runs = table.resolve()
                table.runs = []  # first: whatever cuts this short, nobody counts them for this table
                for run in runs:
                    if run.blocks is parked:
                        release(run, self.device.free)
            if self in parked.holders:
                parked.holders.remove(self)
            self.parked = None
        self._set_rows([])
        self.length = 0
        self.epoch += 1

    # Park, continue

    def follow(self, parked: BlockSet, rows: Sequence[BlockTable], length: int) -> None:
        """Continue tables of parked blocks, as an empty layer of as many rows.

        Args:
            parked: the set of their runs.
            rows: of `length` tokens; the layer's from now on.
            length: tokens per row.
        """
        assert not self.tables, "a layer that holds tokens"
        self._hold(parked)
        self._set_rows(list(rows))
        self.length = length
        self.epoch += 1

    def follow_on(self, parked: BlockSet, tokens: BlockTable) -> None:
        """Go on with a table of parked blocks, behind the tokens that the layer holds: whole blocks, in every row.

        Args:
            parked: the set of its runs.
            tokens: a table that nobody else has.
        """
        assert self.length % self.layout.block_size == 0, "a last block that is not full"
        self._hold(parked)
        self._tails = None
        for table in self.tables:
            mine = tokens if table is self.tables[-1] else tokens.fork()
            table.runs = [*table.resolve(), *mine.resolve()]
            table.length += mine.length
        self.length += tokens.length
        self.shape_version += 1
        self.epoch += 1

    def park(self, parked: BlockSet, row: int, length: int) -> BlockTable:
        """A table of the first tokens of a row, whose blocks a set of parked blocks counts from now on.

        The layer goes on: whatever it adds to the last block goes into a copy.
        """
        self._hold(parked)
        self._tails = None
        table = self.rows[row].fork()
        table.crop(length, self.layout.block_size, self.device.free)
        for run in table.resolve():
            if run.state is State.FILLING:
                self.device.seal(run)
        for run in table.resolve():
            residency.adopt(run, parked)
        self.shape_version += 1
        return table

    def _hold(self, parked: BlockSet) -> None:
        assert self.parked in (None, parked), "a layer continues one set"
        if self.parked is None:
            self.parked = parked  # first: `forget` finds it
            parked.holders.append(self)

    def parked_runs(self) -> Iterator[Run]:
        """The parked runs in its tables, as often as they are there."""
        for table in self.tables:
            for run in table.resolve():
                if run.blocks is self.parked:
                    yield run

    def _set_rows(self, rows: list[BlockTable]) -> None:
        self._tails = None
        if len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows)):
            return
        self.rows = rows
        self.tables = list(dict.fromkeys(rows))
        self.blocks.touch()
        layout, batch = self.layout, len(rows)
        self._token_shapes = ((batch, layout.k_heads, 1, layout.k_dim), (batch, layout.v_heads, 1, layout.v_dim))
        self.shape_version += 1

    def _trim(self, length: int) -> None:
        """Drop the blocks behind `length` tokens."""
        gone = [table.crop(length, self.layout.block_size, self.device.free) for table in self.tables]
        if any(gone):
            self._tails = None
            self.shape_version += 1

    def _drop(self, tables: Sequence[BlockTable]) -> None:
        for table in tables:
            table.clear(self.device.free)

    # For tests

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, tables, runs, references and counts agree with each other."""
        assert list(dict.fromkeys(self.rows)) == self.tables, "a row points at no table, or a table has no row"
        layout, rows = self.layout, len(self.rows)
        shapes = ((rows, layout.k_heads, 1, layout.k_dim), (rows, layout.v_heads, 1, layout.v_dim))
        assert not rows or self._token_shapes == shapes, "a token has another shape"
        size = self.layout.block_size
        refs: dict[Run, int] = {}
        for table in self.tables:
            runs = table.resolve()
            assert table.length == self.length, "rows of one layer have one length"
            assert table.blocks == -(-table.length // size), "a table does not match its length"
            for i, run in enumerate(runs):
                refs[run] = refs.get(run, 0) + 1
                assert run.parts is None
                assert run.blocks in (self.blocks, self.parked), "a block of another set"
                whole = i < len(runs) - 1 or table.length % size == 0
                assert run.sealed or (not whole and run.count == 1), "a full block is not sealed"
        mine = {run: n for run, n in refs.items() if run.blocks is self.blocks}
        assert mine.keys() == self.blocks.runs.keys(), "runs are listed wrong"
        assert all(run.refs == n for run, n in mine.items()), "a run miscounts its tables"
        assert all(run.refs >= n and run.sealed for run, n in refs.items() if run not in mine), "a parked run is open"
        for state in State:
            assert self.counts[state] == sum(run.count for run in refs if run.state is state), state
            assert self.blocks.counts[state] == sum(run.count for run in mine if run.state is state), state
        if self._tails is not None and self._tails.version == self.blocks.version:
            self._tails.check_integrity([table.resolve()[-1] for table in self.tables])
