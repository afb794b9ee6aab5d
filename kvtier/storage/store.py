"""`LayerStore`: the KV of one layer. Rows of the batch point at tables, tables list blocks."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from kvtier.errors import MismatchError
from kvtier.storage.block import Block, BlockLayout, Group, Table, blocks_needed, group_rows
from kvtier.storage.pool import Tails
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import join
from kvtier.types import Direction


class LayerStore:
    """The keys and values of one layer, `length` tokens for each of `batch` rows.

    Every change is all or nothing for the layer: `append` sets `length` last, and blocks beyond it do not count.

    Attributes:
        index: the layer's index in the model.
        layout: of its blocks.
        tiers: the memories it lives in.
        length: tokens per row.
        count: distinct blocks.
        version: changes whenever a slot that a reader would use changes.
        host_plan: what split attention remembers of where the blocks lie. Dropped when tables change otherwise than by
            blocks behind their last; it then follows what moved.
        moved: indices of blocks that got or lost a near slot since the reader of `host_plan` cleared this.
        epoch: changes whenever tokens are dropped, replaced or reordered; views of an older epoch are stale.
        resident: sealed blocks with a near slot, oldest first.
        unwritten: those of them without a far copy, oldest first.
        dense: whether attention lays this layer out in the workspace; taken to be so until seen otherwise.
        attended: whether attention did so once.
        carries_graph: whether keys or values came with an autograd graph, which is not kept.
        last_far: the far slot written last; the next write-back continues there.
    """

    def __init__(self, index: int, layout: BlockLayout, tiers: Tiers) -> None:
        self.index = index
        self.layout = layout
        self.tiers = tiers
        self.pool = tiers.near_pool(layout)
        self.length = 0
        self.count = 0
        self.version = 0
        self.epoch = 0
        self.dense = True
        self.resident: dict[Block, None] = {}
        self.unwritten: dict[Block, None] = {}
        self.plan: object = None
        self.host_plan: object = None
        self.moved: set[int] = set()
        self.last_far: int | None = None
        self.carries_graph = False
        self.attended = False
        self._missing: tuple[int, list[Block]] = (-1, [])
        self._missing_count = (-1, 0)
        self._token_shapes: tuple[tuple[int, ...], ...] = ((), ())
        self._rows: list[Table] = []
        self._tables: list[Table] = []
        self._tails: Tails | None = None
        tiers.layers.append(self)

    # What it holds

    @property
    def batch(self) -> int:
        """Rows; 0 before the first append."""
        return len(self._rows)

    @property
    def rows(self) -> Sequence[Table]:
        """The table of each row; equal rows share one."""
        return self._rows

    def tables(self) -> list[Table]:
        """The distinct tables."""
        return self._tables

    def distinct_blocks(self) -> dict[Block, None]:
        """The distinct blocks of all tables, in table order."""
        return {block: None for table in self._tables for block in table.blocks}

    def missing(self) -> list[Block]:
        """Distinct blocks without a near slot, in table order."""
        if self._missing[0] != self.version:
            self._missing = (self.version, [block for block in self.distinct_blocks() if block.near is None])
        return self._missing[1]

    def missing_count(self) -> int:
        """How many these are, found without looking at more than the last of each table."""
        if self._missing_count[0] != self.version:
            last = {table.blocks[-1] for table in self._tables if table.blocks}
            unsealed = sum(not block.sealed for block in last)
            self._missing_count = (self.version, self.count - len(self.resident) - unsealed)
        return self._missing_count[1]

    def missing_estimate(self) -> int:
        """Blocks without a near slot, counted without looking at them."""
        unsealed = len(self._tables) if self.length % self.layout.block_size else 0
        return max(self.count - len(self.resident) - unsealed, 0)

    def workspace_bytes(self, tokens: int, batch: int = 0) -> int:
        """Bytes in which `tokens` per row of this layer are one tensor of keys and one of values, whole blocks."""
        blocks = -(-tokens // self.layout.block_size)
        exact = max(batch or self.batch, 1) * blocks * self.layout.block_size * self.layout.token_bytes
        return -(-exact // 64) * 64

    # Append

    def is_token(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are one more token for every row, in the layer's own shape, dtype and device. Fast."""
        shapes = self._token_shapes
        return (
            keys.shape == shapes[0]
            and values.shape == shapes[1]
            and keys.dtype is values.dtype is self.layout.dtype
            and keys.device == values.device == self.tiers.device
        )

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `MismatchError` unless `keys` and `values` continue what the layer holds."""
        self.layout.check(keys, values, self.index)
        if keys.device != self.tiers.device or values.device != keys.device:
            raise MismatchError(
                f"Layer {self.index} lives on {self.tiers.device}, but was given keys on {keys.device} and values on "
                f"{values.device}. `reset()` the cache after moving a model."
            )
        if self.length and keys.shape[0] != self.batch:
            raise MismatchError(
                f"Layer {self.index} holds {self.batch} rows, but was given {keys.shape[0]}. Continue with the same "
                "batch, select rows with `batch_select_indices`, or `reset()`."
            )

    def group(self, keys: torch.Tensor, values: torch.Tensor) -> list[Group]:
        """Which rows share a table when `keys` and `values` are appended; see `group_rows`."""
        return group_rows(self._rows if self.length else (), self.layout, keys, values)

    def blocks_needed(self, groups: Sequence[Group], tokens: int) -> int:
        """New slots that appending `tokens` to `groups` takes, copies on write included."""
        return blocks_needed(groups, self.length, tokens, self.layout.block_size)

    def append_token(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Add one token to every row where that takes no new slot: the steady state of decoding.

        Returns:
            False, and nothing done, if it does.
        """
        size = self.layout.block_size
        offset = self.length % size
        tails = self._tails
        if tails is None or not offset:
            return False
        tails.write(keys, values, offset)
        self.length += 1
        if offset + 1 == size:
            self._tails = None
            self._seal([table.blocks[-1] for table in self._tables])
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
        tokens = keys.shape[2]
        self._tails = None
        tables = self._regroup(groups, keys.shape[0])
        try:
            for group, table in zip(groups, tables, strict=True):
                done = 0
                if group.shared is not None:
                    done = group.shared_blocks * self.layout.block_size
                    table.blocks = Table(tables[group.shared].blocks[: group.shared_blocks]).fork().blocks
                self._write(table, keys[group.row], values[group.row], done)
        except Exception:
            self._trim(self.length)
            raise
        self.length += tokens
        if self.length % self.layout.block_size and len(self._tables) == self.batch:
            self._tails = Tails.of(self.pool, [table.blocks[-1].near for table in self._tables], self.tiers.device)

    def _regroup(self, groups: Sequence[Group], batch: int) -> list[Table]:
        """Give every group a table of its own."""
        if self.length == 0:
            self._drop(self._tables)
        tables = []
        rows: list[Table | None] = [None] * batch
        for group in groups:
            table = Table() if group.table is None else group.table.fork() if group.fork else group.table
            tables.append(table)
            for row in group.rows:
                rows[row] = table
        self._set_rows(rows)  # type: ignore[arg-type]
        return tables

    def _write(self, table: Table, keys: torch.Tensor, values: torch.Tensor, done: int) -> None:
        """Append `keys[:, done:]` to one table, `[heads, tokens, dim]`."""
        size, tokens = self.layout.block_size, keys.shape[1]
        offset = (self.length + done) % size
        if offset and tokens > done:
            block = self._open_tail(table)
            n = min(tokens - done, size - offset)
            tail_keys, tail_values = self._tail_views(block)
            tail_keys[0, :, offset : offset + n].copy_(keys[:, done : done + n])
            tail_values[0, :, offset : offset + n].copy_(values[:, done : done + n])
            done += n
            if offset + n == size:
                self._seal([block])
        while tokens - done >= size:
            blocks = self._new_blocks(table, (tokens - done) // size)
            assert blocks[0].near is not None
            first, n = blocks[0].near, len(blocks)
            span = slice(done, done + n * size)
            self.pool.keys(first, n).copy_(keys[:, span].unflatten(1, (n, size)).transpose(0, 1))
            self.pool.values(first, n).copy_(values[:, span].unflatten(1, (n, size)).transpose(0, 1))
            done += n * size
            self._seal(blocks)
        if tokens > done:
            block = self._new_blocks(table, 1)[0]
            tail_keys, tail_values = self._tail_views(block)
            tail_keys[0, :, : tokens - done].copy_(keys[:, done:])
            tail_values[0, :, : tokens - done].copy_(values[:, done:])

    def _new_blocks(self, table: Table, count: int) -> list[Block]:
        """Up to `count` new blocks at the end of `table`, in neighbouring slots; at least one."""
        blocks: list[Block] = []
        if count > 1:
            self.tiers.prepare(self.layout, count)
        previous = table.blocks[-1].near if table.blocks else None
        while len(blocks) < count and (not blocks or self.tiers.obtainable(self.layout)):
            block = Block(self, len(table.blocks))
            slot = self.tiers.take(self, previous, block)
            if blocks and slot != previous + 1:  # type: ignore[operator]
                # Not a neighbour: this run ends here, the next call begins with a slot like it.
                self.pool.release(slot)
                break
            block.near = previous = slot
            self.count += 1
            blocks.append(block)
            table.blocks.append(block)
        self.version += 1
        if self.tiers.far is not None:
            self.tiers.keep_reserve(self.layout)
        return blocks

    def _tail_views(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        assert block.near is not None
        assert not block.sealed
        assert block.refs == 1
        return self.pool.keys(block.near, 1), self.pool.values(block.near, 1)

    def _open_tail(self, table: Table) -> Block:
        """The last block of `table`, made writable: unsealed, near, held by this table alone."""
        block = table.blocks[-1]
        if block.refs == 1 and not block.sealed:
            return block
        if block.refs > 1:
            copy = Block(self, block.index)
            copy.near = self._copy_of(block, copy)
            self.count += 1
            block.refs -= 1
            table.blocks[-1] = copy
            self.block_moved(copy)
            return copy
        if block.near is None:
            block.near = self._copy_of(block, block)
            self.block_moved(block)
        if block.pending is not None:
            block.pending.wait()  # it reads what is about to be written over
        # A fetch on its way would later pass for the block's new contents.
        self.tiers.staging.drop(self)
        self.resident.pop(block, None)
        self.unwritten.pop(block, None)
        block.sealed = False
        if block.far is not None:
            self.tiers.far_pools[self.layout].release(block.far)
            block.far = block.pending = None
        return block

    def _copy_of(self, block: Block, owner: Block) -> int:
        """A near slot with the bytes of `block`."""
        slot = self.tiers.take(self, None, owner)
        try:
            if block.near is not None:
                self.pool.bytes(slot, 1).copy_(self.pool.bytes(block.near, 1))
            else:
                far = self.tiers.far_pools[self.layout]
                after = [block.pending] if block.pending is not None else []
                assert block.far is not None
                copies = join(far, [block.far], self.pool, [slot])
                self.tiers.engine.submit(copies, Direction.FETCH, after=after).wait()
        except BaseException:
            self.pool.release(slot)
            raise
        return slot

    def _seal(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.sealed = True
            self.resident[block] = None
            if self.tiers.far is not None:
                self.unwritten[block] = None
        self.tiers.sealed(self, len(blocks))

    # Drop, pick, share

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of every row."""
        assert 0 <= length <= self.length
        if length < self.length:
            self.tiers.staging.drop(self)
            self._trim(length)
            self.length = length
            self.epoch += 1
            self.tiers.workspace.release_surplus(2)

    def pick_rows(self, indices: Sequence[int]) -> None:
        """Make the rows `indices` of before the rows of now. Copies nothing; rows picked twice share their table."""
        rows = [self._rows[i] for i in indices]
        kept = set(rows)
        dropped = [table for table in self._tables if table not in kept]
        self.tiers.staging.drop(self)
        self._set_rows(rows)
        self._drop(dropped)
        self.epoch += 1
        self.tiers.workspace.release_surplus(2)

    def clear(self) -> None:
        """Drop every token."""
        dropped = self._tables
        self.tiers.staging.drop(self)
        self._set_rows([])
        self._drop(dropped)
        self.length = 0
        self.carries_graph = False
        self.epoch += 1

    def forget_plan(self) -> None:
        """Drop what readers and the writer remember of where blocks lie: slots moved."""
        self.plan = self._tails = None
        self._changed()

    def block_moved(self, block: Block) -> None:
        """Told that a block in the tables has another near slot, or none any more."""
        self.version += 1
        if self.host_plan is not None:
            self.moved.add(block.index)

    def _changed(self) -> None:
        """The tables are not what they were, up to blocks behind their last."""
        self.version += 1
        self.host_plan = None
        self.moved.clear()

    def _set_rows(self, rows: list[Table]) -> None:
        self._tails = None
        if len(rows) == len(self._rows) and all(map(operator.is_, rows, self._rows)):
            return
        self._rows = rows
        self._tables = list(dict.fromkeys(rows))
        layout, batch = self.layout, len(rows)
        self._token_shapes = ((batch, layout.k_heads, 1, layout.k_dim), (batch, layout.v_heads, 1, layout.v_dim))
        self._changed()

    def _trim(self, length: int) -> None:
        """Drop the blocks behind `length` tokens."""
        keep = -(-length // self.layout.block_size)
        self._tails = None
        for table in self._tables:
            if len(table.blocks) > keep:
                for block in table.blocks[keep:]:
                    self._unref(block)
                del table.blocks[keep:]
                self._changed()

    def _drop(self, tables: Sequence[Table]) -> None:
        for table in tables:
            for block in table.blocks:
                self._unref(block)
            table.blocks = []
        self._changed()

    def _unref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self.count -= 1
            self.tiers.free_block(block)
