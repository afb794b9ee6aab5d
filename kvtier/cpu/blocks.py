"""What attention on the host reads: the shape of blocks, and where the blocks of each sequence are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Words of a `kvtier_sequence` in src/attention.h, and of a `kvtier_run`: an address, then index and count.
_WORDS, _RUNS, _RUN_COUNT, _LENGTH = 3, 0, 1, 2
_COUNT_SHIFT, _INDEX_MASK = 32, (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same from call to call.

    Attributes:
        dtype: of queries, keys and values: fp32, bf16 or fp16 for attention.
        kv_heads, k_dim, v_dim, block_size: of the blocks, keys `[kv_heads, block_size, k_dim]`, then values
            `[kv_heads, block_size, v_dim]`.
    """

    dtype: torch.dtype
    kv_heads: int
    k_dim: int
    v_dim: int
    block_size: int


class Sequences:
    """The stored tokens of a batch of sequences: for each, runs of neighbouring blocks, and a length.

    Held in memory that the native library reads, and changed in place between two calls. A call reads it when it
    begins: once `attend` or `submit` has returned, it may change, also while a submitted job is in flight. The blocks
    themselves must stay valid until the job is done.

    Args:
        rows: sequences of the batch. All begin empty.
        block_stride: bytes from one block to the next within a run; at least the bytes of a block.
        keep: the owner of the blocks' memory; it lives at least as long as any call over them.

    Attributes:
        length_words: the length of each row, as the library reads it.
        prepared: at most one call that is at rest, to be repeated.
    """

    __slots__ = ("_runs", "_words", "address", "block_stride", "keep", "length_words", "prepared", "rows")

    def __init__(self, rows: int, block_stride: int, keep: object = None) -> None:
        self.rows = rows
        self.block_stride = block_stride
        self.keep = keep
        self._runs = [array("q") for _ in range(rows)]
        self._words = memoryview(array("q", bytes(8 * _WORDS * max(rows, 1))))
        self.length_words = self._words[_LENGTH : _WORDS * rows : _WORDS]
        self.address = _address(self._words.obj)
        self.prepared: list[Any] = []

    def set_runs(self, row: int, runs: Iterable[tuple[int, int, int]]) -> None:
        """Replace the runs of a row.

        Args:
            row: which sequence.
            runs: (address of the first block, its index in the sequence, blocks), rising by index, not overlapping.
        """
        words = array("q")
        for address, index, count in runs:
            words.append(address)
            words.append(index | count << _COUNT_SHIFT)
        self._runs[row] = words
        self._publish(row, words)

    def append_run(self, row: int, address: int, index: int, count: int = 1) -> None:
        """Add blocks behind those of a row. The last run is extended if they are its neighbours."""
        words = self._runs[row]
        if words:
            last_index, last_count = _unpack(words[-1])
            if index == last_index + last_count and address == words[-2] + last_count * self.block_stride:
                words[-1] += count << _COUNT_SHIFT
                return
        words.append(address)
        words.append(index | count << _COUNT_SHIFT)
        self._publish(row, words)

    def runs(self, row: int) -> list[tuple[int, int, int]]:
        """(address, index, count) of each run of a row."""
        words = self._runs[row]
        return [(words[i], *_unpack(words[i + 1])) for i in range(0, len(words), 2)]

    def set_length(self, length: int) -> None:
        """Set the length of every row, in tokens, those of the call to come included."""
        if self.rows == 1:
            self.length_words[0] = length
        else:
            self.set_lengths((length,) * self.rows)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the length of each row, in tokens."""
        self.length_words[:] = memoryview(array("q", lengths))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.length_words.tolist()

    def take(self, query: torch.Tensor, params: Any) -> Any:
        """The call at rest, if it was made with this query and these parameters: for the caller alone from now on."""
        call = self.prepared.pop() if self.prepared else None
        if call is None or call.was_for(query, params):
            return call
        self.prepared.append(call)
        return None

    def _publish(self, row: int, words: array[int]) -> None:
        at = _WORDS * row
        self._words[at + _RUNS], size = words.buffer_info()
        self._words[at + _RUN_COUNT] = size // 2


def _address(words: Any) -> int:
    return int(words.buffer_info()[0])


def _unpack(word: int) -> tuple[int, int]:
    return word & _INDEX_MASK, word >> _COUNT_SHIFT
