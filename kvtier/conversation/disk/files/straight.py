"""Files that the system has in memory, straight into blocks: no buffer, and no second copy of what is loaded.

What is read is checked as it is anywhere: by the checksum of every byte where it is now. Blocks are open until all of a
file is what was written, and go if it is not. Whatever is unusual here, bytes that are not in memory, another shape, a
checksum that differs, is no error: the file is read again as all others are (`read_tensors`), and that says what it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from kvtier.conversation.disk.files.files import DTYPES, SEGMENT, Damaged, opened
from kvtier.cpu.cached import CachedFile, can_read_cached

#: Where tensors of more than this part of a file are not all in memory, it is read as others are, while a thread reads
#: the next one.
_ABSENT_SHARE = 4
#: Bytes that are looked at.
_LOOKS = 8
#: A longer header is not one of ours.
_LONGEST_HEADER = 2**20


class Entry(NamedTuple):
    """A tensor of a file, as its header says, which nobody has checked yet.

    Attributes:
        dtype, shape: of the tensor.
        begin, end: its bytes, behind the header.
    """

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


class Blocks(Protocol):
    """Where the tokens of files go, one file behind the other."""

    def expect(self, tokens: Sequence[int]) -> None:
        """These files come next, of so many tokens each: blocks for all may be taken with those of the first."""

    def reserve(self, tokens: int, entries: Mapping[str, Entry]) -> bool:
        """Take blocks for so many tokens, if what a file has fits what is there. Whether it does.

        Raises:
            BudgetError: there is no room.
        """

    def fill(self, name: str, file: CachedFile) -> bool:
        """Read what is next in the file, a tensor. Whether it was in memory."""

    def seal(self) -> None:
        """All of it is what was written."""

    def drop(self) -> None:
        """It is not, or not known to be: there are the files before it, and no blocks for others."""


def seems_cached(file: Path, nbytes: int) -> bool:
    """Whether a file may be in memory, by some bytes of it."""
    if not can_read_cached():
        return False
    with contextlib.suppress(Damaged, OSError), opened(file, nbytes) as handle:
        return all(os.preadv(handle, [bytearray(1)], nbytes * i // _LOOKS, os.RWF_NOWAIT) for i in range(_LOOKS))
    return False


def read_straight(file: Path, nbytes: int, sums: bytes, tokens: int, into: Blocks) -> bool:
    """Read a file of so many tokens into blocks, on a system that can (`seems_cached`). False where that cannot be;
    whoever reads it otherwise learns why. Then, and where it raises, `into` has the files before it.

    Raises:
        Damaged, OSError, MemoryError: as `read_tensors`. BudgetError: there is no room for it.
    """
    is_whole = False
    try:
        with opened(file, nbytes) as handle:
            cached = CachedFile(handle, nbytes, SEGMENT)
            entries = _entries(cached, nbytes)
            if entries is not None and into.reserve(tokens, entries):
                filled = _fill(cached, entries, into, nbytes // _ABSENT_SHARE)
                is_whole = filled and cached.at == nbytes and cached.sums == sums
    finally:
        if not is_whole:  # also where the disk fails: what was reserved is not tokens yet
            into.drop()
    if is_whole:
        into.seal()
    return is_whole


def _fill(file: CachedFile, entries: Mapping[str, Entry], into: Blocks, most: int) -> bool:
    """Read all tensors. A system drops pages one by one: up to `most` bytes are brought back."""
    for name, entry in entries.items():
        if into.fill(name, file):
            continue
        most -= entry.end - entry.begin
        if most < 0:
            return False
        file.bring(entry.end - entry.begin)
        if not into.fill(name, file):
            return False
    return True


def _entries(file: CachedFile, nbytes: int) -> dict[str, Entry] | None:
    """The tensors of a file in its order, if they are end to end and all that it has."""
    size = int.from_bytes(file.take(8) or b"", "little")
    said = file.take(size) if 0 < size <= min(nbytes - 8, _LONGEST_HEADER) else None
    if said is None:
        return None
    try:
        header: dict[str, Any] = json.loads(said)
        header.pop("__metadata__", None)
        found = {name: Entry(DTYPES[x["dtype"]], x["shape"], *x["data_offsets"]) for name, x in header.items()}
        entries = dict(sorted(found.items(), key=lambda item: item[1].begin))
        ends = [0, *(x.end for x in entries.values())]
        fits = all(
            x.begin == end and x.end - x.begin == math.prod(x.shape) * x.dtype.itemsize
            for x, end in zip(entries.values(), ends, strict=False)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return entries if fits and file.at + ends[-1] == nbytes else None
