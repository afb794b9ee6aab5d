"""What attention on the host reads: the shape of blocks, and lists of where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """What stays the same from call to call.

    Attributes:
        dtype: of queries, keys and values: fp32, bf16 or fp16.
        kv_heads, k_dim, v_dim, block_size: of the blocks, keys `[kv_heads, block_size, k_dim]`, then values
            `[kv_heads, block_size, v_dim]`.
    """

    dtype: torch.dtype
    kv_heads: int
    k_dim: int
    v_dim: int
    block_size: int


class BlockList:
    """The blocks of a batch of sequences, as addresses.

    Args:
        blocks: for each sequence, the addresses of its blocks in host memory.
        indices: for each sequence, which of its blocks these are, rising; None: all from the first on.

    Attributes:
        lengths: `[sequences]` int64, tokens of each sequence; whoever calls `attend` sets them.
        length: what they were last set to, where all are equal.
        prepared: under 0, a call over them that is at rest, to be repeated: what it was made for, and the call.
    """

    __slots__ = ("begins", "blocks", "indices", "length", "lengths", "prepared", "sequences")

    def __init__(self, blocks: list[list[int]], indices: list[list[int]] | None = None) -> None:
        with torch.inference_mode(False), torch.device("cpu"):  # whatever the default device is
            counts = [0]
            for row in blocks:
                counts.append(counts[-1] + len(row))
            # Never empty: a tensor without elements has no address, which would be taken for no list at all.
            which = None if indices is None else torch.tensor([x for row in indices for x in row] or [0])
            self._set(
                torch.tensor(counts),
                torch.tensor([x for row in blocks for x in row] or [0]),
                None if which is None else which.to(torch.int32),
            )

    @classmethod
    def over(cls, begins: torch.Tensor, blocks: torch.Tensor, indices: torch.Tensor | None) -> BlockList:
        """A list in memory of the caller's, who may change it between two calls: each call reads it anew.

        Args:
            begins: `[sequences + 1]` int64, where the blocks of each sequence begin and end.
            blocks: int64, their addresses, all sequences end to end; not empty.
            indices: int32, as above; None: all from the first on.
        """
        self = cls.__new__(cls)
        with torch.inference_mode(False), torch.device("cpu"):
            self._set(begins, blocks, indices)
        return self

    def _set(self, begins: torch.Tensor, blocks: torch.Tensor, indices: torch.Tensor | None) -> None:
        self.sequences = begins.numel() - 1
        self.begins, self.blocks, self.indices = begins, blocks, indices
        self.lengths = torch.zeros(self.sequences, dtype=torch.int64)
        self.length = 0
        self.prepared: dict[int, tuple[tuple[object, ...], Any]] = {}
