"""New tokens into open blocks: any number into one table, or one into each of several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvtier.cpu import native
from kvtier.kernels import copies, launch
from kvtier.memory.access.change import undone
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet, Run, State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.tables.table import BlockTable, release


def append(
    device: ComputeDevice, blocks: BlockSet, table: BlockTable, keys: torch.Tensor, values: torch.Tensor, skip: int = 0
) -> None:
    """Append tokens to one table, all but the first `skip`, which it has already.

    Args:
        device: that attends to the blocks.
        blocks: the set that counts them.
        table: its length is that before `keys`, and is set at the end.
        keys: `[k_heads, tokens, k_dim]`, copied.
        values: `[v_heads, tokens, v_dim]`, copied.

    Raises:
        BudgetError, TransferError: the length is what it was; blocks behind it may have been added, see
            `BlockTable.crop`.
    """
    size, tokens, done = blocks.pools.layout.block_size, keys.shape[1], skip
    pool = blocks.pools.home
    offset = (table.length + done) % size
    if offset and tokens > done:
        run = writable(device, blocks, table)
        n = min(tokens - done, size - offset)
        slot = run.home
        pool.keys(slot, 1)[0, :, offset : offset + n].copy_(keys[:, done : done + n])
        pool.values(slot, 1)[0, :, offset : offset + n].copy_(values[:, done : done + n])
        done += n
        if offset + n == size:
            device.seal(run)
    while tokens - done >= size:
        run = _allocate(device, blocks, table, (tokens - done) // size)
        slot, n = run.home, run.count
        span = slice(done, done + n * size)
        pool.keys(slot, n).copy_(keys[:, span].unflatten(1, (n, size)).transpose(0, 1))
        pool.values(slot, n).copy_(values[:, span].unflatten(1, (n, size)).transpose(0, 1))
        done += n * size
        device.seal(run)
    if tokens > done:
        slot = _allocate(device, blocks, table, 1).home
        pool.keys(slot, 1)[0, :, : tokens - done].copy_(keys[:, done:])
        pool.values(slot, 1)[0, :, : tokens - done].copy_(values[:, done:])
    table.length += tokens
    table.defragment()


def reserve(device: ComputeDevice, blocks: BlockSet, table: BlockTable, tokens: int) -> None:
    """Add open blocks for tokens that are written later, into their `places`, and sealed then (`seal_full`).

    Raises: as `append`.
    """
    size, left = blocks.pools.layout.block_size, tokens
    if table.length % size:
        writable(device, blocks, table)
        left -= min(left, size - table.length % size)
    while left >= size:
        left -= _allocate(device, blocks, table, left // size).count * size
    if left:  # what is not full is a run of its own
        _allocate(device, blocks, table, 1)
    table.length += tokens


def places(blocks: BlockSet, table: BlockTable, first: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Where tokens of a table are, block by block: the block's address, the first of its tokens, and how many. Valid as
    long as the lock is held."""
    pool, size, begin = blocks.pools.home, blocks.pools.layout.block_size, 0
    for run in table.resolve():
        for i in range(max((first - begin) // size, 0), run.count):
            at = begin + i * size
            if at >= first + tokens:
                return
            skip = max(first - at, 0)
            yield pool.address(run.home + i), skip, min(size, first + tokens - at) - skip
        begin += run.count * size


def seal_full(device: ComputeDevice, blocks: BlockSet, table: BlockTable, length: int) -> None:
    """The first `length` tokens of a table are written: blocks that are full of them are sealed."""
    left = length // blocks.pools.layout.block_size
    for run in table.resolve():
        if not left:
            break
        if left < run.count:
            run, _ = residency.cut(run, left)
        if run.state is State.FILLING:
            device.seal(run)
        left -= run.count
    table.defragment()


def append_packed(
    device: ComputeDevice,
    blocks: BlockSet,
    tables: Sequence[BlockTable],
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_tokens: Sequence[int],
) -> None:
    """Append tokens to several tables, to each as many as it is given; to all or to none.

    Args:
        device: that attends to the blocks.
        blocks: the set that counts them.
        tables: all different; of any lengths.
        keys: `[1, k_heads, total, k_dim]`, the new tokens of all tables end to end; copied.
        values: `[1, v_heads, total, v_dim]`, copied.
        cu_tokens: `[tables + 1]`, where the tokens of each table begin and end; a table may be given none.

    Raises:
        BudgetError, TransferError: nothing was appended.
    """
    layout = blocks.pools.layout
    size, before = layout.block_size, [table.length for table in tables]
    short: list[tuple[BlockTable, Run, tuple[int, int, int]]] = []
    try:
        for table, (begin, end) in zip(tables, itertools.pairwise(cu_tokens), strict=True):
            offset, tokens = table.length % size, end - begin
            if not tokens:
                continue
            if offset + tokens > size:
                append(device, blocks, table, keys[0, :, begin:end], values[0, :, begin:end])
                continue
            run = writable(device, blocks, table) if offset else _allocate(device, blocks, table, 1)
            short.append((table, run, (offset, begin, tokens)))
        # Slots are known for good only now: making room for one block may move another.
        _write_spans(blocks.pools.home, keys, values, [(run.home, *span) for _, run, span in short])
        for table, run, (offset, _, tokens) in short:
            table.length += tokens
            if offset + tokens == size:
                device.seal(run)
    except Exception as error:
        if undone(error):
            for table, length in zip(tables, before, strict=True):
                table.crop(length, size, device.free)
        raise


def _write_spans(
    pool: BlockPool, keys: torch.Tensor, values: torch.Tensor, spans: Sequence[tuple[int, int, int, int]]
) -> None:
    """Write tokens of a packed batch: (slot, its first token to write, the first new token, tokens) each."""
    if keys.device.type == "cpu" and native.available():
        if keys.stride(3) != 1 or values.stride(3) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        _appender(pool.layout).append(
            keys, values, [[(pool.address(slot), offset, begin, n)] for slot, offset, begin, n in spans]
        )
        return
    if len(spans) > 1 and launch.available(keys.device):
        _launch_spans(pool, keys, values, spans)
        return
    for slot, offset, begin, tokens in spans:
        pool.keys(slot, 1)[0, :, offset : offset + tokens].copy_(keys[0, :, begin : begin + tokens])
        pool.values(slot, 1)[0, :, offset : offset + tokens].copy_(values[0, :, begin : begin + tokens])


def _launch_spans(
    pool: BlockPool, keys: torch.Tensor, values: torch.Tensor, spans: Sequence[tuple[int, int, int, int]]
) -> None:
    """Write tokens into open blocks, as `_write_spans` does, by one launch of the device."""
    ends = [begin + tokens for _, _, begin, tokens in spans]
    begins = [begin for _, _, begin, _ in spans]
    if begins[1:] != ends[:-1]:  # tokens of other tables are between: those of `spans` alone, end to end
        index = _up([i for a, b in zip(begins, ends, strict=True) for i in range(a, b)], torch.int64, keys.device)
        keys, values = keys.index_select(2, index), values.index_select(2, index)
    else:
        keys, values = keys[:, :, begins[0] : ends[-1]], values[:, :, begins[0] : ends[-1]]
    counts = [tokens for *_, tokens in spans]
    numbers = _up([offset for _, offset, _, _ in spans], torch.int32, keys.device)
    bounds = _up([0, *itertools.accumulate(counts)], torch.int32, keys.device)
    addresses = _up([[pool.address(slot)] for slot, *_ in spans], torch.int64, keys.device)
    new_keys, new_values = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    copies.append(new_keys, new_values, addresses, pool.layout, numbers, cu_tokens=bounds)


def _up(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a device, from page-locked memory, so that nothing waits for it."""
    made = torch.tensor(numbers, dtype=dtype, device="cpu")  # whatever torch's default device is
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _allocate(device: ComputeDevice, blocks: BlockSet, table: BlockTable, count: int) -> Run:
    run = device.allocate(blocks, count, table.last() if table.runs else None)
    table.runs.append(run)
    return run


def writable(device: ComputeDevice, blocks: BlockSet, table: BlockTable) -> Run:
    """The last block of a table, made open: not sealed, where blocks begin, held by this table alone, of this set.

    Raises:
        BudgetError, TransferError: nothing was changed.
    """
    run = table.last()
    if run.state is State.FILLING and run.refs == 1:
        return run
    if run.count > 1:
        residency.cut(run, run.count - 1)
        run = table.resolve()[-1]
    if run.refs > 1 or run.blocks.parked:
        copy = device.copy_of(run, blocks)
        run = table.resolve()[-1]
        table.runs[-1] = copy
        release(run, device.free)
        return copy
    if blocks.pools.device is not None:
        device.bring(run)
    residency.reopen(run)
    return run


class TailWriter:
    """Writes one token into the last block of each of some tables: the steady state of decoding.

    Made for open blocks, all different, and good until the set that counts them changes.

    Attributes:
        version: of the set, when this was made.
        stream: of the device, on which it writes.
        last: writes tokens like the last ones, as quickly as can be; None: there is nothing that does.
    """

    __slots__ = (
        *("_addresses", "_blocks", "_keys", "_layout", "_native", "_prepared", "_slots", "_values"),
        *("last", "stream", "version"),
    )

    def __init__(
        self, device: ComputeDevice, blocks: BlockSet, runs: Sequence[Run], prepared: copies.PreparedAppend
    ) -> None:
        pool = blocks.pools.home
        self.version, self.stream = blocks.version, device.engine.stream
        self._layout: BlockLayout = pool.layout
        self._slots: torch.Tensor | None = None
        self._addresses: torch.Tensor | None = None
        self._native: native.Appender | None = None
        self.last: native.TokenWriter | None = None
        self._prepared = prepared
        slots = [run.home for run in runs]
        self._blocks = [pool.address(slot) for slot in slots]
        # Made outside of inference mode: later calls may be.
        with torch.inference_mode(False):
            if launch.available(device.device) and (len(slots) > 1 or device.device.type != "cpu"):
                self._addresses = torch.tensor([[address] for address in self._blocks], device="cpu")
                if device.device.type != "cpu":
                    # From page-locked memory, so that nothing waits for the device.
                    self._addresses = self._addresses.pin_memory().to(device.device, non_blocking=True)
                return
            if device.device.type == "cpu" and native.available():
                self._native = _appender(self._layout)
                return
            self._keys, self._values = pool.keys(slots[0], 1), pool.values(slots[0], 1)
            if len(slots) > 1:
                slab = pool.slab(slots[0])
                self._keys, self._values = slab.keys, slab.values
                self._slots = torch.tensor([slot - slab.base for slot in slots], device=device.device)

    @classmethod
    def of(
        cls, device: ComputeDevice, blocks: BlockSet, tables: Sequence[BlockTable], prepared: copies.PreparedAppend
    ) -> TailWriter | None:
        """A writer for the tables' last blocks; None if they must be written one by one.

        Args:
            device: that attends to the blocks.
            blocks: the set that counts them.
            tables: one for each row, all different.
            prepared: the launches of the layer's writers.
        """
        pool, runs = blocks.pools.home, [table.resolve()[-1] for table in tables]
        if any(run.state is not State.FILLING or run.refs > 1 for run in runs):
            return None
        by_address = launch.available(device.device) or (device.device.type == "cpu" and native.available())
        if len(runs) > 1 and not by_address:
            slab = pool.slab(runs[0].home)
            if any(pool.slab(run.home) is not slab for run in runs):
                return None
        return cls(device, blocks, runs, prepared)

    def write(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Write a token of each row, `[rows, heads, 1, dim]`, as number `offset` of its block."""
        if self._native is not None:
            if keys.stride(3) != 1 or values.stride(3) != 1:
                keys, values = keys.contiguous(), values.contiguous()
            self.last = self._native.token_writer(keys, values, len(self._blocks))
            self.last.write(keys, values, self._blocks, offset)
        elif self._addresses is not None:
            self._prepared(keys, values, self._addresses, offset)
        elif self._slots is None:
            self._keys.narrow(2, offset, 1).copy_(keys)
            self._values.narrow(2, offset, 1).copy_(values)
        else:
            self._keys.select(2, offset).index_copy_(0, self._slots, keys.select(2, 0))
            self._values.select(2, offset).index_copy_(0, self._slots, values.select(2, 0))

    def check_integrity(self, runs: Sequence[Run]) -> None:
        """Raise AssertionError unless this writes into the blocks `runs`."""
        pool = runs[0].blocks.pools.home
        assert self._blocks == [pool.address(run.home) for run in runs], "new tokens go to where a block was"
        assert all(run.state is State.FILLING and run.refs == 1 for run in runs), "a writer of blocks that are sealed"


# One for each layout: all layers of a model write tokens of one shape.


@functools.lru_cache(maxsize=64)
def _appender(layout: BlockLayout) -> native.Appender:
    shape = native.Shape(layout.dtype, layout.k_heads, layout.k_dim, layout.v_dim, layout.block_size)
    return native.Appender(shape, v_heads=layout.v_heads, values_offset=layout.k_numel * layout.dtype.itemsize)
