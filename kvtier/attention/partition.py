"""Which blocks of some sequences are where: on the device, arriving there, or on the host."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch

from kvtier.cpu import native
from kvtier.kernels.tables import AddressTable
from kvtier.memory.blocks import audit
from kvtier.memory.blocks.block import Pools, Run, State
from kvtier.memory.storage.pool import BlockPool
from kvtier.tables.table import BlockTable

#: Neighbouring blocks of a sequence: index of the first, its address, and how many.
AddressRun = tuple[int, int, int]

#: A device's kernels are compiled for what they read beginning at multiples of so many bytes.
_ALIGNMENT = 16


class Part:
    """Some blocks of each sequence, as kernels find them. It never changes.

    Attributes:
        rows: for each sequence its runs, rising.
        nbytes: from one block of a run to the next.
        blocks: distinct ones.
    """

    __slots__ = ("_sequences", "_table", "blocks", "nbytes", "rows")

    def __init__(self, rows: list[list[AddressRun]], nbytes: int, blocks: int) -> None:
        self.rows = rows
        self.nbytes = nbytes
        self.blocks = blocks
        self._table: AddressTable | None = None
        self._sequences: native.Sequences | None = None

    def __bool__(self) -> bool:
        return self.blocks > 0

    def sequences(self) -> native.Sequences:
        """For the native library, whose caller sets the lengths."""
        if self._sequences is None:
            made = self._sequences = native.Sequences(len(self.rows), self.nbytes)
            for row, runs in enumerate(self.rows):
                made.set_runs(row, [(address, index, count) for index, address, count in runs])
        return self._sequences

    def table(self, device: torch.device) -> AddressTable:
        """For the device's kernels, in memory of its own: kernels in flight go on reading older tables.

        Addresses, positions and counts go up in one copy, from page-locked memory that torch gives back when the copy
        has ended, so that nothing waits for the device.
        """
        if self._table is None:
            self._table = _table(self.rows, self.nbytes, device)
        return self._table


class Partition:
    """The first blocks of some sequences, in three disjoint parts.

    Attributes:
        device: what is on the device.
        arriving: what a fetch is bringing there, with `incoming` to wait for.
        host: what is on the host only.
        incoming: the distinct runs of `arriving`.
        moves: what brings them. Another thread may give a fetch up meanwhile: whoever reads its slots waits for it
            still, and they are held as long.
    """

    __slots__ = ("_whole", "arriving", "device", "host", "incoming", "moves")

    def __init__(self, pools: Pools, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        known: dict[tuple[int, int], tuple[list[AddressRun], list[AddressRun], list[AddressRun]]] = {}
        seen: tuple[dict[Run, int], ...] = ({}, {}, {})
        rows: tuple[list[list[AddressRun]], ...] = ([], [], [])
        blocks = [0, 0, 0]
        for table, count in zip(tables, counts, strict=True):
            key = (id(table), count)
            if key not in known:
                known[key] = _split(pools, table, count, seen, blocks)
            for row, runs in zip(rows, known[key], strict=True):
                row.append(runs)
        n = pools.layout.nbytes
        self.device, self.arriving, self.host = (Part(row, n, b) for row, b in zip(rows, blocks, strict=True))
        self._whole: Part | None = None
        self.incoming = list(seen[1])
        self.moves = list(dict.fromkeys(run.move for run in self.incoming if run.move is not None))

    def whole(self) -> Part:
        """All parts as one: for whoever reads the device's memory as well as the host's."""
        if self._whole is None:
            parts = [part for part in (self.device, self.arriving, self.host) if part]
            if len(parts) == 1:
                self._whole = parts[0]
            else:
                rows = [sorted(itertools.chain(*row)) for row in zip(*(part.rows for part in parts), strict=True)]
                self._whole = Part(rows, self.host.nbytes, sum(part.blocks for part in parts))
        return self._whole

    def keep(self, before: Partition | None) -> Partition:
        """Take over from an older partition the parts that are the same, with what was made of them."""
        if before is not None:
            kept = 0
            for name in ("device", "arriving", "host"):
                old, new = getattr(before, name), getattr(self, name)
                if old.rows == new.rows:
                    setattr(self, name, old)
                    kept += 1
            if kept == 3:
                self._whole = before._whole
        return self


def _split(
    pools: Pools, table: BlockTable, count: int, seen: tuple[dict[Run, int], ...], blocks: list[int]
) -> tuple[list[AddressRun], list[AddressRun], list[AddressRun]]:
    """The first `count` blocks of one table by part; neighbours joined, distinct blocks counted."""
    parts: tuple[list[AddressRun], list[AddressRun], list[AddressRun]] = ([], [], [])
    n, index = pools.layout.nbytes, 0
    for run in table.resolve():
        if index >= count:
            break
        audit.check(run)
        taken = min(run.count, count - index)
        if run.state is State.ARRIVING:
            which, address = 1, _address(pools.device, run.device)
        elif run.device is not None:
            which, address = 0, _address(pools.device, run.device)
        else:
            which, address = 2, _address(pools.host, run.host)
        part = parts[which]
        if part and part[-1][0] + part[-1][2] == index and part[-1][1] + part[-1][2] * n == address:
            first, start, before = part[-1]
            part[-1] = (first, start, before + taken)
        else:
            part.append((index, address, taken))
        known = seen[which].get(run, 0)  # rows that share a run may not see as much of it
        if taken > known:
            seen[which][run] = taken
            blocks[which] += taken - known
        index += taken
    return parts


def _address(pool: BlockPool | None, slot: int | None) -> int:
    assert pool is not None
    assert slot is not None, "a block has no bytes"
    return pool.address(slot)


def _table(rows: Sequence[Sequence[AddressRun]], nbytes: int, device: torch.device) -> AddressTable:
    counts = [sum(count for _, _, count in row) for row in rows]
    most = max(counts, default=0)
    # In multiples of 4 bytes.
    positions = _aligned(8 * len(rows) * most) // 4
    begin = positions + _aligned(4 * len(rows) * most) // 4
    buffer = bytearray(max(4 * begin + _aligned(4 * len(rows)), _ALIGNMENT))
    longs, ints = memoryview(buffer).cast("q"), memoryview(buffer).cast("i")
    whole = True
    for i, row in enumerate(rows):
        at = i * most
        for index, address, count in row:
            longs[at : at + count] = memoryview(array("q", range(address, address + count * nbytes, nbytes)))
            ints[positions + at : positions + at + count] = memoryview(array("i", range(index, index + count)))
            whole = whole and index == at - i * most
            at += count
        ints[begin + i] = counts[i]
    with torch.inference_mode(False):
        flat = torch.frombuffer(buffer, dtype=torch.int32)
        if device.type != "cpu":
            flat = flat.pin_memory().to(device, non_blocking=True)
        addresses = flat[: 2 * len(rows) * most].view(torch.int64).view(len(rows), most)
        where = None if whole else flat[positions : positions + len(rows) * most].view(len(rows), most)
        return AddressTable(addresses, flat[begin : begin + len(rows)], where)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
