"""What a transfer moves: spans of blocks between slabs, or one tensor into another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Neighbouring blocks of one slab.

    Attributes:
        slab: `uint8`, the whole allocation.
        offset: bytes before the span.
        nbytes: of the span.
        block: bytes of one block.
        mapped: whether a program on the device can use its addresses: device memory, or page-locked host memory.
    """

    slab: torch.Tensor
    offset: int
    nbytes: int
    block: int
    mapped: bool

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.slab.data_ptr() + self.offset

    def bytes(self) -> torch.Tensor:
        """The bytes, a view."""
        return self.slab[self.offset : self.offset + self.nbytes]

    def precedes(self, other: Span) -> bool:
        """Whether `other` begins where this span ends, in the same slab."""
        return self.slab is other.slab and self.offset + self.nbytes == other.offset


@dataclass(slots=True)
class Copy:
    """Blocks from one span to another of the same size. Whoever submits it keeps both until the transfer has ended."""

    source: Span
    target: Span

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.source.nbytes

    def run(self, non_blocking: bool = False) -> None:
        """Move the bytes, on the current stream."""
        self.target.bytes().copy_(self.source.bytes(), non_blocking=non_blocking)

    def destination(self) -> torch.Tensor:
        """The bytes that it writes."""
        return self.target.bytes()


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One tensor into another of the same shape. The caller keeps both until the transfer has ended."""

    source: torch.Tensor
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.target.nbytes

    def run(self, non_blocking: bool = False) -> None:
        """Move the bytes, on the current stream."""
        self.target.copy_(self.source, non_blocking=non_blocking)

    def destination(self) -> torch.Tensor:
        """What it writes."""
        return self.target


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """Copies that are neighbours at both ends as one copy each, in the order given."""
    found: list[Copy] = []
    for copy in copies:
        last = found[-1] if found else None
        if last is not None and last.source.precedes(copy.source) and last.target.precedes(copy.target):
            last.source = last.source._replace(nbytes=last.source.nbytes + copy.source.nbytes)
            last.target = last.target._replace(nbytes=last.target.nbytes + copy.target.nbytes)
        else:
            found.append(Copy(copy.source, copy.target))
    return found
