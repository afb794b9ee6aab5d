"""`Writer`: how a chunk is saved: room is made, a file is written, and its row is added with the chunk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from kvtier.conversation.disk.chunks import ROW, Chunk, Chunks
from kvtier.conversation.disk.files.files import write_tensors
from kvtier.conversation.disk.files.folder import Folder
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.room import FAILURES, Room
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import LONGEST, Manifest, Row
from kvtier.conversation.index import WIDTH

#: Bytes that the header of a file takes for each tensor, at the most, besides its name.
_HEADER = 256
_GROWN = "what conversations are has grown meanwhile"


class New(NamedTuple):
    """What is to be saved.

    Attributes:
        key: see `Disk`.
        ids: of a sequence, packed.
        start: the first token of its that is to be saved.
        tensors: of the tokens from that one on.
        said: of the tensors.
    """

    key: str
    ids: bytes
    start: int
    tensors: Mapping[str, torch.Tensor]
    said: str

    @property
    def own(self) -> bytes:
        """Ids of the tokens that are to be saved."""
        return self.ids[self.start * WIDTH :]

    @property
    def nbytes(self) -> int:
        """Of its file, at the most."""
        tensors = sum(x.nbytes + len(name) + _HEADER for name, x in self.tensors.items())
        return tensors + len(json.dumps(self.said)) + _HEADER


class Writer:
    """Saves chunks, one at a time, which is up to the caller. Whoever looks for something meanwhile waits for the
    commit of a row, and for no file.

    Args:
        folder, manifest, conversations, chunks, order, room, lock: of the folder.

    Attributes:
        next: the number of the next file. None is used again as long as the folder is open, whatever becomes of its
            file.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        conversations: ConversationRows,
        chunks: Chunks,
        order: Order,
        room: Room,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.next = 1
        self._folder = folder
        self._manifest = manifest
        self._conversations = conversations
        self._chunks = chunks
        self._order = order
        self._room = room
        self._lock = lock

    def forked(self, lock: contextlib.AbstractContextManager[Any]) -> None:
        """In a process that was forked, the folder has another lock."""
        self._lock = lock

    def write(
        self, new: New, parent: Chunk | None, refused: Callable[[], str], clock: Callable[[], float]
    ) -> tuple[Chunk | None, str]:
        """Save something behind a chunk. Returns its chunk, and a problem: why there is none, or what else could not be
        done; "": nothing.

        Args:
            refused: why nothing is saved now; "": it is. It is asked under the lock.
        """
        while parent is not None and parent.start >= new.start:
            parent = parent.parent  # what has the tokens before it
        try:
            return self._write(new, parent, refused, clock)
        finally:
            self._room.end()

    def _write(
        self, new: New, parent: Chunk | None, refused: Callable[[], str], clock: Callable[[], float]
    ) -> tuple[Chunk | None, str]:
        own = new.own
        taken, most = ROW + len(own), ROW + len(own) + new.nbytes
        with self._lock:
            why = refused() or self._impossible(own, parent) or self._room.begin(most, parent, clock)
            number, self.next = self.next, self.next + 1
        if why:
            return None, why
        why = self._room.sweep(whole=True)
        if not self._room.fits(most):
            return None, f"{why or _GROWN}: there is no room, and a sequence was not saved"
        try:
            written, sums = write_tensors(self._folder.file(number), new.tensors, new.said)
        except FAILURES as error:
            return None, self._not_written(number, f"{error}: a sequence was not saved")
        with self._lock:
            why = refused() or self._impossible(own, parent)  # what it continues may have been forgotten meanwhile
            if not why and not self._room.fits(written + taken):
                why = f"{_GROWN}, and a sequence was not saved"
            if not why:
                parent = None if parent is None else self._chunks.get(parent.number)
                above = None if parent is None else (parent.number, parent.digest)
                row = Row.of(number, new.key, above, new.start, own, written, sums)
                try:
                    return self._add(row, parent, new.ids), ""
                except FAILURES as error:
                    why = f"{error}: a sequence was not saved"
        return None, self._not_written(number, why)

    def _add(self, row: Row, parent: Chunk | None, ids: bytes) -> Chunk:
        """Add a row, and its chunk. Histories that have waited for it end there."""
        with contextlib.ExitStack() as within:
            with self._manifest.transaction():
                self._manifest.add(row, self._chunks.uses + 1)
                self._manifest.use(self._chunks.unsaved)
                within.enter_context(self._chunks.change())  # a commit that fails may have been done
                chunk = self._chunks.add(row, parent)
                grown = self._order.grown(row.key, ids, row.start)
                self._conversations.note(grown)
            self._chunks.unsaved.clear()
            self._order.move(grown)
            self._chunks.use(chunk)
        return chunk

    def _not_written(self, number: int, why: str) -> str:
        self._room.discard(self._folder.file(number))
        return self._room.sweep() or why

    def _impossible(self, own: bytes, parent: Chunk | None) -> str:
        """Why tokens cannot be saved behind a chunk; "": they can."""
        if parent is not None and self._chunks.get(parent.number) is None:
            return "what a sequence continues was removed meanwhile"
        if len(own) > LONGEST // 2:
            return f"{len(own) // WIDTH} tokens are more than one turn can save"
        return ""
