"""`ChainReader`: the tensors of a chain of chunks, part by part, every byte checked before it is given."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Generator
from typing import NamedTuple

import torch

from kvtier.conversation.disk.chunks import Chunk
from kvtier.conversation.disk.files.ahead import read_ahead
from kvtier.conversation.disk.files.files import Buffer, Damaged, read_tensors, said_of
from kvtier.conversation.disk.files.folder import Folder
from kvtier.conversation.disk.files.straight import Blocks, read_straight, seems_cached


class Part(NamedTuple):
    """What was read of one chunk.

    Attributes:
        start, stop: tokens of the sequence; the tensors may hold more, which another sequence continues.
        tensors, said: as they were saved, but for tokens before `start`. No tensors: the tokens are where they belong.
    """

    start: int
    stop: int
    tensors: dict[str, torch.Tensor]
    said: str


class DamagedChunk(Damaged):
    """The file of a chunk is not what was written.

    Attributes:
        chunk: of which nothing was given.
    """

    def __init__(self, chunk: Chunk, why: str) -> None:
        super().__init__(why)
        self.chunk = chunk


class ChainReader:
    """Reads files of chunks, and changes nothing. Any threads may use it, each for chains of its own.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def is_silent(self, chunk: Chunk) -> bool:
        """Whether nothing was said of the tensors of a chunk.

        Raises:
            Damaged, KeyError, TypeError: the file is not what was written.
            OSError, MemoryError: it cannot be read now.
        """
        return not said_of(self._folder.file(chunk.number), chunk.nbytes)

    def parts(self, chunk: Chunk, length: int, start: int, blocks: Blocks | None) -> Generator[Part]:
        """The tokens of a chain from `start` to `length`, as of `Disk.read`.

        Args:
            chunk: has some of these tokens, see `reaching`.

        Raises:
            DamagedChunk: some chunk is; what precedes it was given.
            BudgetError: there is no room in `blocks`.
            OSError, MemoryError: a file cannot be read now.
        """
        chain = chunk.chain()[::-1]
        while len(chain) > 1 and chain[1].start <= start:
            del chain[0]
        # Until where each is of use: the next one may begin within it.
        stops = [min(length, x) for x in (*(each.start for each in chain[1:]), chain[-1].stop)]
        each = chain[0]
        try:
            at = 0
            first = int(each.start < start)  # of which not all is of use
            whole = list(itertools.takewhile(lambda i: stops[i] == chain[i].stop, range(first, len(chain))))
            if blocks is not None and whole and self._seems_cached(chain[first]):
                if first:
                    yield _part(each, start, stops[0], *self._read(each, Buffer()))
                blocks.expect([chain[i].stop - chain[i].start for i in whole])
                for at in whole:
                    each = chain[at]
                    if not self._read_straight(each, blocks):
                        break
                    yield Part(each.start, each.stop, {}, "")
                else:
                    at += 1
            with contextlib.closing(read_ahead([functools.partial(self._read, x) for x in chain[at:]])) as found:
                for i in range(at, len(chain)):
                    each = chain[i]
                    yield _part(each, start, stops[i], *next(found))
        except Damaged as error:
            raise DamagedChunk(each, str(error)) from error

    def _seems_cached(self, chunk: Chunk) -> bool:
        return seems_cached(self._folder.file(chunk.number), chunk.nbytes)

    def _read_straight(self, chunk: Chunk, blocks: Blocks) -> bool:
        file, tokens = self._folder.file(chunk.number), chunk.stop - chunk.start
        return read_straight(file, chunk.nbytes, chunk.checksum, tokens, blocks)

    def _read(self, chunk: Chunk, buffer: Buffer) -> tuple[dict[str, torch.Tensor], str]:
        return read_tensors(self._folder.file(chunk.number), chunk.nbytes, chunk.checksum, buffer)


def reaching(chunk: Chunk, length: int) -> Chunk:
    """Where a chain ends that is read up to `length` tokens: what was found goes on, and its end may be of no use."""
    while chunk.parent is not None and chunk.start >= length and chunk.stop > length:
        chunk = chunk.parent
    return chunk


def _part(chunk: Chunk, start: int, stop: int, tensors: dict[str, torch.Tensor], said: str) -> Part:
    """What is of use of a chunk's tensors: no tokens before `start`."""
    if start > chunk.start:
        tensors = {x: t[:, start - chunk.start :] if x[0] in "kv" else t for x, t in tensors.items()}
    return Part(max(start, chunk.start), stop, tensors, said)
