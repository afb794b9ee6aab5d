"""Block tables by address, in the two forms that attention reads: packed for host threads, as a table for a device."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence

import torch

from kvtier.kernels.tables import AddressTable

#: A device's kernels are compiled for what they read beginning at multiples of so many bytes.
_ALIGNMENT = 16


class Addresses:
    """Some blocks of each row of a batch: an index and an address each, indices rising within a row.

    All rows lie end to end in memory with room to grow, which changes in place: a block that is added or leaves costs
    no more than moving what lies behind it. The tensors over that memory stay the same until it is outgrown.

    Args:
        rows: for each row its (indices, addresses).

    Attributes:
        begins: `[rows + 1]` int64, where the rows begin and end.
        blocks: `[room]` int64, the addresses.
        indices: `[room]` int32, which block of its row each is.
    """

    __slots__ = ("_addresses", "_begins", "_indices", "begins", "blocks", "indices")

    def __init__(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        begins = [0]
        for _, addresses in rows:
            begins.append(begins[-1] + len(addresses))
        with torch.inference_mode(False):
            self._begins = memoryview(array("q", begins))
            self.begins = torch.frombuffer(self._begins, dtype=torch.int64)
        self._addresses, self._indices = memoryview(array("q")), memoryview(array("i"))
        self._reserve(begins[-1], kept=0)
        for begin, (indices, addresses) in zip(begins, rows, strict=False):
            end = begin + len(addresses)
            self._addresses[begin:end] = memoryview(array("q", addresses))
            self._indices[begin:end] = memoryview(array("i", indices))

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._begins) - 1

    def __len__(self) -> int:
        """Entries of all rows."""
        return self._begins[-1]

    def row(self, row: int) -> list[tuple[int, int]]:
        """(index, address) of the blocks of one row."""
        span = slice(self._begins[row], self._begins[row + 1])
        return list(zip(self._indices[span].tolist(), self._addresses[span].tolist(), strict=True))

    def push(self, new: Sequence[tuple[int, int] | None]) -> None:
        """Add an (index, address) behind each row, or None: nothing."""
        shift = sum(x is not None for x in new)
        if len(self) + shift > len(self._addresses):
            self._reserve(len(self) + shift)
        for row in range(self.rows - 1, -1, -1):
            if not shift:
                return
            begin, end = self._begins[row], self._begins[row + 1]
            self._begins[row + 1] = end + shift
            entry = new[row]
            if entry is not None:
                shift -= 1
                self._indices[end + shift], self._addresses[end + shift] = entry
            self._move(begin, end, shift)

    def put(self, row: int, index: int, address: int) -> None:
        """Let a block of a row lie at `address`, whether it was among them or not."""
        at = self._find(row, index)
        if at == self._begins[row + 1] or self._indices[at] != index:
            total = len(self)
            if total == len(self._addresses):
                self._reserve(total + 1)
            self._move(at, total, 1)
            self._indices[at] = index
            self._count(row, 1)
        self._addresses[at] = address

    def remove(self, row: int, index: int) -> None:
        """Let a block of a row not be among them, whether it was or not."""
        at = self._find(row, index)
        if at < self._begins[row + 1] and self._indices[at] == index:
            self._move(at + 1, len(self), -1)
            self._count(row, -1)

    def table(self, device: torch.device) -> AddressTable:
        """These blocks as a device's kernels find them, in memory of its own: kernels in flight read older ones.

        Addresses, positions and counts go up in one copy, from page-locked memory that torch gives back when the copy
        has ended, so that nothing waits for the device.
        """
        rows, begins = self.rows, self._begins
        most = max((begins[i + 1] - begins[i] for i in range(rows)), default=0)
        # In multiples of 4 bytes.
        positions = _aligned(8 * rows * most) // 4
        counts = positions + _aligned(4 * rows * most) // 4
        buffer = bytearray(max(4 * counts + _aligned(4 * rows), _ALIGNMENT))
        longs, ints = memoryview(buffer).cast("q"), memoryview(buffer).cast("i")
        whole = True
        for i in range(rows):
            begin, end = begins[i], begins[i + 1]
            n, at = end - begin, i * most
            longs[at : at + n] = self._addresses[begin:end]
            ints[positions + at : positions + at + n] = self._indices[begin:end]
            ints[counts + i] = n
            whole = whole and (not n or self._indices[end - 1] == n - 1)
        with torch.inference_mode(False):
            flat = torch.frombuffer(buffer, dtype=torch.int32)
            if device.type != "cpu":
                flat = flat.pin_memory().to(device, non_blocking=True)
            addresses = flat[: 2 * rows * most].view(torch.int64).view(rows, most)
            where = None if whole else flat[positions : positions + rows * most].view(rows, most)
            return AddressTable(addresses, flat[counts : counts + rows], where)

    def _find(self, row: int, index: int) -> int:
        return bisect.bisect_left(self._indices, index, self._begins[row], self._begins[row + 1])

    def _move(self, begin: int, end: int, by: int) -> None:
        if by and begin < end:
            for x in (self._addresses, self._indices):
                x[begin + by : end + by] = x[begin:end]

    def _count(self, row: int, change: int) -> None:
        for i in range(row + 1, len(self._begins)):
            self._begins[i] += change

    def _reserve(self, entries: int, kept: int | None = None) -> None:
        """Move to memory with room for so many entries and as many again, at most."""
        kept = len(self) if kept is None else kept
        room = 1 << max(entries, 15).bit_length()
        addresses, indices = memoryview(array("q", bytes(8 * room))), memoryview(array("i", bytes(4 * room)))
        addresses[:kept], indices[:kept] = self._addresses[:kept], self._indices[:kept]
        self._addresses, self._indices = addresses, indices
        with torch.inference_mode(False):
            self.blocks = torch.frombuffer(addresses, dtype=torch.int64)
            self.indices = torch.frombuffer(indices, dtype=torch.int32)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
