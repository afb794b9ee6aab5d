"""`Recovery`: what a folder has, as its rows and files say: when it is opened, and when a change was cut short."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier.conversation.disk.chunks import Chunks, fits
from kvtier.conversation.disk.files.folder import Folder
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.room import FAILURES, Room
from kvtier.conversation.disk.rows.manifest import Manifest


class Found(NamedTuple):
    """What a folder had when it was opened.

    Attributes:
        next: a number that no file has, nor one behind it.
        damaged: chunks that are not what was written, had no file, or continued one of these. Their rows are removed.
        others: keys of others, and the bytes of the files of each.
    """

    next: int
    damaged: int
    others: dict[str, int]


class Recovery:
    """Fills the chunks of a folder with what its rows say. The caller has the lock, and is in no change.

    Args:
        folder, manifest, chunks, order, room: of the folder.
        prefix: of keys; see `Disk`.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, chunks: Chunks, order: Order, room: Room, prefix: str
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._chunks = chunks
        self._order = order
        self._room = room
        self._prefix = prefix

    def load(self) -> Found:
        """Read all rows; forget those that are damaged, that have no file or that continue these. Files that have no
        row are of no use: they are discarded.

        Raises:
            OSError, sqlite3.Error, ValueError: the folder cannot be read, or its manifest is damaged.
        """
        with _uncollected():
            numbers, rest = self._folder.files()
            bad, others = self._fill(self._chunks, numbers.__contains__)
            if bad:
                with self._manifest.removal():
                    self._manifest.remove(bad)
        for number in numbers.difference(self._chunks.numbers):
            rest.append(self._folder.file(number))
        for file in rest:
            self._room.discard(file)
        # Files that cannot be removed keep their numbers: what is counted as theirs may be removed later.
        return Found(max(numbers, default=0) + 1, len(bad), others)

    def settle(self) -> tuple[bool, str]:
        """A change was cut short: what the rows say holds, if their files are there and stay. That is read now, which
        takes as long as it did when the folder was opened. Returns whether it is known now what is saved, and what
        could not be done; "": nothing."""
        found, bad, why = Chunks(), list[int](), self._folder.left_alone
        try:
            if not why:
                self._manifest.end_transaction()
                bad, _ = self._fill(found, self._has_file)
                why = self._folder.left_alone  # then a file that is not there says nothing
        except (*FAILURES, ValueError) as error:
            why = f"{error}: what is saved is not known"
        if why:
            return False, why
        try:
            if bad:
                with self._manifest.removal():
                    self._manifest.remove(bad)
        except FAILURES as error:  # they go when this is done again, or when the folder is opened
            why = f"{error}: what is of no use is not removed"
        for chunk in self._chunks:
            if found.get(chunk.number) is None:
                self._room.discard(self._folder.file(chunk.number), chunk.nbytes)
        self._order.settle(found)
        self._chunks.become(found)  # last: what is cut short is done again
        return True, why

    def _fill(self, chunks: Chunks, has_file: Callable[[int], bool]) -> tuple[list[int], dict[str, int]]:
        """Add what all rows say. Returns the numbers of those that are damaged, have no file, or continue these; and
        what `Found.others` is."""
        bad, others, used = list[int](), dict[str, int](), dict[int, int]()
        for number, row, last in self._manifest.rows():
            parent = chunks.get(row.parent) if row is not None and row.parent is not None else None
            if row is None or not has_file(number) or not fits(row, parent):
                bad.append(number)
                continue
            chunks.add(row, parent)
            used[number] = last
            if not row.key.startswith(self._prefix):
                self._order.others.add(number)
                others[row.key] = others.get(row.key, 0) + row.nbytes
        chunks.order(used)
        return bad, others

    def _has_file(self, number: int) -> bool:
        """Whether a chunk has a file that stays. Each is asked for: a list of them may lack some while others go.

        Raises:
            OSError: nobody knows.
        """
        file = self._folder.file(number)
        try:
            os.lstat(file)
        except FileNotFoundError:
            return False
        return self._room.keeps(file)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collections, which would look at everything again and again while it is made: for what makes no
    cycles that are dropped. The next one after it looks at all of it once."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
