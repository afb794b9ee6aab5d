"""`Room`: what a folder takes on the disk, and what goes where that is more than its budget.

What goes does so in two steps, so that nobody who looks for something waits for a file system: rows and chunks under
the folder's lock, their files without it. A file counts as long as it is there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier.conversation.disk.chunks import Chunk, Chunks
from kvtier.conversation.disk.files.folder import Folder
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import Manifest

#: What a file or the manifest says where it cannot be changed or read now.
FAILURES = (OSError, sqlite3.Error, MemoryError)


class Room:
    """The bytes of a folder, for any threads. What cannot be done is told in a sentence; "": it is done.

    Args:
        budget: see `Disk`.
        reserved: bytes of the budget that a `Reserve` has.
        folder, manifest, conversations, chunks, order, lock: of the folder.

    Attributes:
        rest: bytes that the manifest takes besides what is counted there of the rows of chunks: conversations, mostly.
    """

    def __init__(
        self,
        budget: int | None,
        reserved: int,
        folder: Folder,
        manifest: Manifest,
        conversations: ConversationRows,
        chunks: Chunks,
        order: Order,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.budget = budget
        self.rest = 0
        self._reserved = reserved
        self._folder = folder
        self._manifest = manifest
        self._conversations = conversations
        self._chunks = chunks
        self._order = order
        self._lock = lock
        # Files that are to be removed, or could not be, and what each takes.
        self._stray: dict[Path, int] = {}
        # Of these, those that a thread is removing.
        self._going = set[Path]()
        # Bytes of the file that is being written, at the most.
        self._promised = 0

    def forked(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """In a process that was forked, the folder has another lock."""
        self._lock = lock

    @property
    def nbytes(self) -> int:
        """Bytes of all files, of what is kept of each, and of files that are not removed yet. Who asks without the lock
        waits for no commit; a file that goes at that moment may be counted twice."""
        return self._chunks.nbytes + sum(list(self._stray.values()))

    @property
    def _apart(self) -> int:
        """Bytes of the budget that are not for keys and values."""
        return self.rest + self._reserved

    def keeps(self, file: Path) -> bool:
        """Whether a file does not wait to be removed."""
        return file not in self._stray

    def count(self) -> None:
        """Count what the manifest takes."""
        with self._lock, contextlib.suppress(*FAILURES):
            self.rest = max(self._manifest.nbytes - self._chunks.row_bytes, 0)

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the budget."""
        with self._lock:
            return self.budget is None or self.nbytes + self._apart + nbytes <= self.budget

    def is_within(self) -> bool:
        """Whether the folder is there still, and all in it within the budget. Without the folder's lock, which others
        take before the manifest's."""
        return self._folder.there() and (self.budget is None or self.nbytes + self._apart <= self.budget)

    def leaves(self, nbytes: int, parent: Chunk | None) -> str:
        """Why so many bytes behind a chunk are not within the budget, all else aside; "": they are."""
        with self._lock:
            kept = 0 if parent is None else sum(x.kept for x in parent.chain())
            if self.budget is None or nbytes + kept + sum(self._stray.values()) + self._apart <= self.budget:
                return ""
            why = f"{nbytes} bytes are more than the disk budget of {self.budget} leaves"
            if self.rest:
                why += f", of which {self.rest} are taken by what conversations are"
            return f"{why}, and {self._reserved} by a file that is given up on a full disk" if self._reserved else why

    # A file

    def begin(self, nbytes: int, keep: Chunk | None, clock: Callable[[], float]) -> str:
        """Promise so many bytes to a file behind a chunk, until `end`: let go what was used longest ago and nobody
        continues, until they fit; nothing, where that cannot be. Ranks go before that: see `going`. The files of what
        goes are there until `sweep`. Why there is no room for it."""
        if self.budget is None:
            return ""
        with self._lock:
            self.count()
            if not self.fits(nbytes):  # to order all chunks takes time
                why = self.leaves(nbytes, keep)
                if why:
                    return why
                if keep is not None:
                    self._chunks.use(keep)  # so that it goes last
                most = self.budget - self._apart - nbytes
                gone, left = self._order.first(self.nbytes, most, keep, clock)
                if left > most:
                    why = f"{nbytes} bytes are more than the disk budget of {self.budget} leaves"
                    return f"{why}, with {self._pinned} pinned"
                why = self.let_go(gone)
                if why:
                    return f"{why}: nothing made room, and a sequence was not saved"
            self._promised = nbytes
        return ""

    def end(self) -> None:
        """The file is a chunk by now, or is not written."""
        self._promised = 0

    # What goes

    def give_way(self, clock: Callable[[], float]) -> str:
        """Let go what is over the budget: what conversations are has grown, and cannot be computed again, or the budget
        is a smaller one than before."""
        with self._lock:
            self.count()
            if self.budget is None or self.fits(self._promised):
                return ""
            most = self.budget - self._apart
            gone, left = self._order.first(self.nbytes + self._promised, most, None, clock)
            why = self.let_go(gone)
            left -= self._promised
            if most < 0:
                return (
                    f"what conversations are takes {self.rest} bytes, more than the disk budget of {self.budget} "
                    "leaves, and no keys and values are saved"
                )
            if left > most:
                pinned = f", with {self._pinned} pinned" if self._order.pinned else ""
                return f"{left} bytes of keys and values are more than the disk budget of {self.budget} leaves{pinned}"
            return why

    @property
    def _pinned(self) -> str:
        """Names of conversations that are pinned."""
        return ", ".join(map(repr, self._order.pinned[:8]))

    def let_go(self, gone: Sequence[Chunk]) -> str:
        """Remove the rows of chunks, what continues a chunk before it, and the chunks. Why they are there still."""
        if not gone:
            return ""
        with self._lock:
            try:
                moved = self._order.without(gone)
                with self._chunks.change():  # a commit that fails may have been done
                    with self._manifest.removal():
                        self._manifest.remove([x.number for x in gone])
                        self._conversations.note(moved)
                    self.drop(gone)
                    self._order.move(moved)
            except FAILURES as error:
                return str(error)
            self._manifest.give_back()
        return ""

    def drop(self, gone: Sequence[Chunk]) -> None:
        """Remove chunks that have no rows any more, what continues a chunk before it. Within the change of whoever has
        removed the rows."""
        with self._lock:
            for chunk in gone:
                self.discard(self._folder.file(chunk.number), chunk.nbytes)  # first: see `nbytes`
                self._chunks.remove(chunk)

    def discard(self, file: Path, nbytes: int = 0) -> None:
        """A file is of no use: the next `sweep` removes it. What it takes, where the system does not say."""
        with self._lock:
            self._stray[file] = nbytes

    def sweep(self, *, whole: bool = False) -> str:
        """Remove the files that are of no use; one that stays counts, and the next time may remove it. Who holds the
        lock has everybody wait for the file system.

        Args:
            whole: also those that another thread is removing, so that none of them counts any more; else they are left
                to it, and not waited for.
        """
        with self._lock:
            files = [x for x in self._stray if whole or x not in self._going]
            self._going.update(files)
        try:
            return self._remove(files)
        finally:
            with self._lock:
                self._going.difference_update(files)

    def _remove(self, files: Sequence[Path]) -> str:
        why = ""
        for file in files:
            nbytes = 0
            try:
                if not self._folder.there():
                    raise FileNotFoundError(f"{file.parent} is not the folder that was opened, or cannot be seen now")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
            except OSError as error:
                why = f"{file.name} is not removed: {error}"
                with contextlib.suppress(OSError):
                    nbytes = os.lstat(file).st_size
                with self._lock:
                    if file in self._stray:  # else another thread has removed it
                        self._stray[file] = nbytes or self._stray[file]
            else:
                with self._lock:
                    self._stray.pop(file, None)
        return why
