"""`Disk`: what a store keeps, in a folder, for processes to come.

A saved sequence is a chain of *chunks*: the tokens that a turn added, one safetensors file each. A chunk begins
anywhere within its parent, so that what sequences share is saved once and a turn writes its own tokens and no others.
The chain, the token ids and a checksum of every file are rows of the folder's `Manifest`: a file is complete, and on
the disk with its name, before its row is there; a row is gone before its file is; and a file without a row is removed
when the folder is opened.

Whatever is damaged, missing or of other weights is not used: a chunk whose bytes are not what its row says is
forgotten, with all that continues it. What cannot be read now, for want of handles or memory, stays.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtier.conversation.disk.chunks import Chunk, Chunks
from kvtier.conversation.disk.files.files import Damaged
from kvtier.conversation.disk.files.folder import MANIFEST, Folder
from kvtier.conversation.disk.files.reserve import Reserve
from kvtier.conversation.disk.files.straight import Blocks
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.ranked import noting
from kvtier.conversation.disk.reading import ChainReader, DamagedChunk, Part, reaching
from kvtier.conversation.disk.recovery import Recovery
from kvtier.conversation.disk.room import FAILURES, Room
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.disk.rows.pieces import Written
from kvtier.conversation.disk.writing import New, Writer
from kvtier.errors import BudgetError, ClosedError, ConfigError
from kvtier.eviction.rank import Rank
from kvtier.forks import heed


class Disk:
    """A folder of saved sequences. One process at a time; any of its threads. A process that is forked from it reads
    files that were there before, and changes nothing.

    Args:
        directory: made if it is missing, for its owner only.
        budget: bytes of all files together, and of the manifest's rows; the files that were used longest ago go first.
            None: no limit. What conversations are is saved in any case, for it cannot be computed again.
        fingerprint: of the model, see `hf.models.identity.fingerprint`. Sequences of another one are refused.
        prefix: of the keys that are looked for. What is under others stays for processes that look for it, and goes
            first where room is needed, pinned or not.
        stateful: see `Order`.

    Attributes:
        room: what it takes, and its budget.
        others: keys that begin otherwise, when the folder was opened, and the bytes of the files of each.

    Raises:
        ConfigError: the folder is of another model or version, or is something else.
        StoreInUseError: another process, or another store, has it open.
    """

    #: Seconds, of a clock that other processes have too.
    clock = staticmethod(time.time)

    def __init__(
        self,
        directory: str | Path,
        budget: int | None,
        fingerprint: Mapping[str, str],
        prefix: str = "",
        stateful: bool = False,
    ) -> None:
        #: Files and rows that were not what was written, and what kept a sequence from being saved or loaded last.
        self.damaged, self.problem = 0, ""
        self.closed = False
        self._lock = threading.RLock()
        # Taken before that one, by whoever writes a file. Nobody who looks for something waits for a file.
        self._writing = threading.Lock()
        self._chunks = Chunks()
        self._order = Order(self._chunks, stateful)
        self.others = dict[str, int]()
        #: Conversations that were forgotten and are not, or perhaps not, removed from the manifest yet.
        self.forgotten = set[str]()
        # Whether the manifest's log may hold words of those that were removed.
        self._tells = False
        self._folder = Folder(directory)
        try:
            self.path = self._folder.path
            self._reader = ChainReader(self._folder)
            reserve = Reserve(self.path, budget)
            self._manifest = Manifest(self.path / MANIFEST, fingerprint, reserve=reserve)
            self._conversations = ConversationRows(self._manifest)
            parts = self._folder, self._manifest, self._conversations, self._chunks, self._order
            self.room = Room(budget, reserve.nbytes, *parts, self._lock)
            self._writer = Writer(*parts, self.room, self._lock)
            self._recovery = Recovery(self._folder, self._manifest, self._chunks, self._order, self.room, prefix)
            try:
                self._load()
                self.room.count()
                reserve.keep(self.room.is_within)
            except BaseException:
                self._manifest.close()
                raise
            heed(self)
        except BaseException:
            self._folder.close()
            raise

    def forked(self) -> None:
        """As of `Inherited`: a thread that was saving may have had the locks. What they guard is whole, or in doubt:
        then nothing that is saved is found here."""
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self.room.forked(self._lock)
        self._writer.forked(self._lock)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the folder open, which saves what it knows itself."""
        return self._folder.is_inherited

    def _load(self) -> None:
        try:
            found = self._recovery.load()
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"{self.path} cannot be read, or its manifest is damaged: {error}. Make sure that there is room and "
                f"that it may be written, or move {MANIFEST} and what is named like it away to begin with an empty "
                "folder."
            ) from error
        self._writer.next, self.others = found.next, found.others
        self.damaged += found.damaged
        self._sweep()

    def _is_settled(self) -> bool:
        """Whether it is known what is saved. Where a change was cut short, that is read now: see `Recovery`. The caller
        has the lock, and is in no change."""
        if not self._chunks.in_doubt:
            return True
        if self.closed:
            return False
        is_known, why = self._recovery.settle()
        self.problem = why or self.problem
        return is_known

    # Find, read, write

    def find(self, key: str, ids: bytes) -> tuple[int, Chunk | None]:
        """The longest beginning of a sequence that is saved: tokens, and the chunk that has the last of them."""
        with self._lock:
            return self._chunks.find(key, ids) if self._is_settled() else (0, None)

    def ends(self, key: str, ids: bytes) -> list[Chunk]:
        """The chunks at whose end a sequence begins with all that is saved, the longest first."""
        with self._lock:
            return self._chunks.ends(key, ids) if self._is_settled() else []

    def is_silent(self, chunk: Chunk) -> bool:
        """Whether nothing was said of the tensors of a chunk. What is damaged, or cannot be read now, is not."""
        try:
            return self._reader.is_silent(chunk)
        except (Damaged, KeyError, TypeError, *FAILURES):
            return False

    def read(self, chunk: Chunk, length: int, start: int = 0, blocks: Blocks | None = None) -> Generator[Part]:
        """The tokens of a chain from `start` to `length`, a chunk at a time, every byte checked before it is given.

        Fewer come where some are damaged or cannot be read, and none where all are. While one part
        is used, a thread reads the next one, see `read_ahead`: whoever does not go to the end closes the iterator. All
        are read into two buffers, which take their time to get from the system only once, so that the tensors of a part
        are valid until the next one is asked for.

        Args:
            blocks: what the system has in memory of whole chunks goes there at once, see `read_straight`: such a part
                has no tensors.

        Raises:
            BudgetError: there is no room in `blocks`.
        """
        chunk = reaching(chunk, length)
        with self._lock:
            if self._is_settled():
                self._chunks.use(chunk)
        try:
            yield from self._reader.parts(chunk, length, start, blocks)
        except BudgetError:  # of `blocks`: it is a MemoryError too
            raise
        except DamagedChunk as error:
            if self._folder.is_elsewhere:  # with the rows of its files
                self.problem = self._folder.left_alone
                return
            with self._lock:
                is_there = self._is_there(error.chunk) and not self.closed  # or it made room meanwhile
                if is_there:
                    self.problem, self.damaged = str(error), self.damaged + 1
            if is_there:
                self.forget(error.chunk)
        except FAILURES as error:
            self.problem = f"{error}: what is saved of a sequence was not read, and is computed"

    def write(
        self, key: str, ids: bytes, start: int, parent: Chunk | None, tensors: Mapping[str, torch.Tensor], said: str
    ) -> Chunk | None:
        """Save the tokens of a sequence from one on, behind a chunk that is saved. None where that cannot be, and
        `problem` says why; nothing that was saved before is lost, but for what the budget makes go."""
        new = New(key, ids, start, tensors, said)
        with self._writing:
            self.problem = self.room.sweep(whole=True) or self.problem  # what could not be removed before leaves room
            chunk, why = self._writer.write(new, parent, self._refused, self.clock)
            self.problem = why or self.problem
            return chunk

    def _refused(self) -> str:
        """Why nothing is saved; "": it is."""
        self._check_open()
        return self._folder.left_alone or ("" if self._is_settled() else f"{self.problem}: a sequence was not saved")

    def _sweep(self) -> None:
        self.problem = self.room.sweep() or self.problem

    def forget(self, chunk: Chunk) -> None:
        """Remove a chunk and all that continues it."""
        with self._lock:
            found = self._chunks.get(chunk.number) if self._is_there(chunk) else None
            if found is None:
                return
            gone, failed = [found], False
            for each in gone:
                gone += each.children or ()
            moved = self._order.without(gone)
            with self._chunks.change():
                if not self._folder.is_inherited:
                    try:
                        with self._manifest.removal():
                            self._manifest.remove([x.number for x in gone])
                            self._conversations.note(moved)
                    except FAILURES as error:
                        self.problem, failed = str(error), True  # without their files the rows are of no use either
                self.room.drop(gone[::-1])
                self._order.move(moved)
            self._chunks.in_doubt = failed  # then they go as soon as anybody looks
        self._sweep()

    def erase(self, salt: object, ids: bytes, start: int) -> None:
        """Remove the chunks that begin behind `start` tokens of a sequence or more, and whose own sequences have more
        of its tokens than these, under every key of a salt.

        Raises:
            ConfigError: they cannot be removed now, or some file of no use cannot.
        """
        with self._lock:
            self._check_open()
            why = self._folder.left_alone or ("" if self._is_settled() else self.problem)
            if not why:
                found = self._chunks.beyond(salt, ids, start)
                self._tells = self._tells or bool(found)
                why = self.room.let_go(found)
        why = why or self.room.sweep(whole=True)
        if why:
            raise ConfigError(f"What is saved of a sequence in {self.path} is not removed: {why}. Try again.")
        self.clear_log()

    def _is_there(self, chunk: Chunk) -> bool:
        """Whether a chunk is saved still. Its number is no other's; the chunk may be, behind a change that was cut
        short."""
        return self._is_settled() and self._chunks.get(chunk.number) is not None

    # Ranks

    def rank(self, name: str, salt: object, ids: bytes, rank: Rank, used: float, *, waits: bool = False) -> None:
        """What is saved of a conversation's history has a rank, in place of what was ranked by that name before. What
        several share has the highest; which adapter a conversation is used with is not known, and chunks of any are
        ranked, where the salt is its own.

        Args:
            salt, ids: of its calls; of its history, packed.
            used: when it went on last, seconds of `clock`.
            waits: what is not saved of its history will be, and has its rank then. Otherwise it has from when this is
                said again. Until all is saved, the ids are in memory.
        """
        with self._lock:
            is_known = self._is_settled()  # else it is looked for again once that is known
            self._order.rank(name, salt, ids, rank, used, waits=waits or not is_known)

    def rank_saved(self, names: Mapping[str, str | None]) -> list[str]:
        """Let conversations have the ranks that they were saved with, as `names` told them. What they are is not read.
        Returns the names of those whose row tells too little: it is of a folder of before, is damaged, or refers to
        what is not there. Who reads them ranks them, and calls `note_ranks`."""
        with self._lock:
            unread, later = self._order.read(names, self.clock())
            self.note_ranks(later)
        return unread

    def note_ranks(self, names: Sequence[str]) -> None:
        """Save the ranks of conversations that are saved, all or none: the next opening reads none of these."""
        with self._lock, self._telling("ranks are read again when the folder is opened", lesser=True):
            found = {name: self._order.get(name) for name in names}
            if found and not self._folder.left_alone:
                with noting(found.values()):
                    self._conversations.rank({n: "" if x is None else x.said(x.tips) for n, x in found.items()})

    def expire(self) -> int:
        """Remove what has not been used for its time to live, but for what others continue. Returns the chunks."""
        with self._lock:
            gone = self._order.expired(self.clock) if self._is_settled() else []
            why = self.room.let_go(gone)
        self.problem = why or self.problem
        self._sweep()
        return 0 if why else len(gone)

    def fit(self) -> None:
        """Remove what is over the budget, which may be a smaller one than that of whoever had the folder before."""
        with self._lock:
            if self._is_settled():
                self.problem = self.room.give_way(self.clock) or self.problem
        self._sweep()

    # Prices

    def prices(self, machine: str) -> Any:
        """What loading and computing took on a machine, as `save_prices` was given it; None: nobody knows."""
        with self._lock, contextlib.suppress(*FAILURES, ValueError, RecursionError):
            return self._manifest.prices(machine)
        return None

    def save_prices(self, machine: str, value: Any) -> None:
        """Save what loading and computing took on a machine, for later processes."""
        with self._lock, self._telling("what loading took was not saved", lesser=True):
            self._check_open()
            if not self._folder.is_inherited:
                self._manifest.save_prices(machine, value)

    # Conversations

    def save_conversation(self, name: str, state: Mapping[str, Any], written: Written | None = None) -> bool:
        """Save what a conversation is, in place of what it was. Whether it is saved; `problem` says why not.

        Args:
            written: what is saved of it, and what is afterwards: with it, what was saved before is not read.
        """
        is_saved = False
        with self._lock, self._telling(f"conversation {name!r} was not saved"):
            self._check_open()
            why = self._folder.left_alone
            if why:
                self.problem = why
                return False
            ranked = self._order.get(name)
            with noting([ranked]):
                self._conversations.save(name, state, "" if ranked is None else ranked.said(ranked.tips), written)
            is_saved = True
            self.forgotten.discard(name)
            if self._is_settled():
                self.problem = self.room.give_way(self.clock) or self.problem
        self._sweep()
        return is_saved

    def drop_conversation(self, name: str) -> None:
        """Forget a conversation: now, or when another one is forgotten, or at the end. What it said is in the log of
        the manifest until `clear_log`."""
        with self._lock:
            self._check_open()
            self._order.forget(name)
            self.forgotten.add(name)
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        if self._folder.is_inherited:
            self.problem = self._folder.left_alone
            return
        for name in list(self.forgotten):
            with self._telling(f"conversation {name!r} was not removed"):
                self._conversations.drop(name)
                self.forgotten.discard(name)
                self._tells = True
        self.room.count()

    def clear_log(self) -> None:
        """Remove what the manifest's log holds of conversations that were removed, which takes as long as to save one.
        As long as another process reads the manifest, a later call does; and so does `close`."""
        with self._lock:
            if self._tells and not self.closed and not self._folder.is_inherited:
                self._tells = not self._manifest.clear_log()

    def names(self) -> dict[str, str | None]:
        """Of all conversations that are saved: the rank of each, see `ConversationRows.names`. What they are is not
        read, for that takes time in the length of each; those that are damaged are left out.

        Raises:
            ConfigError: they cannot be read now. Who went on without them would save others under their names.
        """
        found: dict[str, str | None] = {}
        if self._folder.is_inherited:
            raise ConfigError(f"The conversations in {self.path} cannot be read: {self._folder.left_alone}")
        try:
            with self._lock:
                for each in self._conversations.names():
                    if each is None:
                        self.damaged += 1
                    else:
                        found[each[0]] = each[1]
        except (OSError, MemoryError, sqlite3.OperationalError) as error:
            raise ConfigError(
                f"The conversations in {self.path} cannot be read: {error}. They are there: try again."
            ) from error
        except sqlite3.Error as error:
            self.damaged += 1
            self.problem = f"{error}: some conversations are damaged"
        return found

    def used(self) -> dict[str, float]:
        """When each conversation that is saved went on last, seconds of `time.time`, as far as that can be read."""
        found: dict[str, float] = {}
        if self._folder.is_inherited:  # whose connection is the parent's
            return found
        with self._lock, self._telling("when conversations went on last is not known"):
            found.update(self._conversations.used())
        return found

    def conversation(self, name: str, written: Written | None = None) -> dict[str, Any] | None:
        """What a conversation is that is saved; of one that is damaged, what precedes the damage; None: nothing of it
        is left. `problem` says so, and the manifest keeps aside what was saved.

        Args:
            written: what is saved of it, from now on.

        Raises:
            ConfigError: it cannot be read now. Who went on without it would save another under its name.
        """
        if self._folder.is_inherited:
            raise ConfigError(f"Conversation {name!r} cannot be read: {self._folder.left_alone}")
        try:
            with self._lock:
                self._check_open()
                found = self._conversations.read(name, written)
                if found is None:
                    found = self._conversations.mend(name)
                    ranked = self._order.get(name)
                    if found is None:
                        self._order.forget(name)
                    elif ranked is not None:
                        ranked.noted = False  # what is left is another history
                    self.damaged += 1
                    what = "nothing of it is left" if found is None else "what precedes the damage is left"
                    self.problem = f"conversation {name!r} is damaged: {what}, and what was saved is kept aside"
                if written is not None:
                    written.was_saved = found is not None
                return found
        except (OSError, MemoryError, sqlite3.OperationalError) as error:
            raise ConfigError(
                f"Conversation {name!r} in {self.path} cannot be read: {error}. It is there: try again."
            ) from error
        except (sqlite3.Error, ValueError, RecursionError) as error:
            self.damaged += 1
            self.problem = f"conversation {name!r} is damaged: {error}"
        return None

    @contextlib.contextmanager
    def _telling(self, what: str, *, lesser: bool = False) -> Iterator[None]:
        """Go on where something fails that no call waits for, and say so; where it is `lesser`, in the place of no
        other problem."""
        try:
            yield
        except (*FAILURES, TypeError, ValueError, RecursionError) as error:
            if not (lesser and self.problem):
                self.problem = f"{error}: {what}"

    # Life

    @property
    def chunks(self) -> int:
        """Saved chunks."""
        return len(self._chunks)

    def close(self) -> None:
        """Let others open the folder. Idempotent; where it was cut short, the next call goes on."""
        with self._writing, self._lock:
            is_open = not self.closed and self._folder.there()  # never in a process that was forked
            if is_open and self.forgotten:
                self._drop_forgotten()
            elif self.forgotten and self._folder.is_elsewhere:
                self.forgotten.clear()  # with the folder
            if is_open and self._is_settled() and self._chunks.unsaved:
                with self._telling("what was used last is not noted", lesser=True), self._manifest.transaction():
                    self._manifest.use(self._chunks.unsaved)
            self.closed = True
            self._manifest.close()
            self._folder.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is counted and ordered agrees. For tests and debugging."""
        with self._lock:
            if not self._is_settled():
                return
            self._chunks.check_integrity()
            self._order.check_integrity()
            with contextlib.suppress(*FAILURES):
                rows = {(number, row.digest) for number, row, _ in self._manifest.rows() if row is not None}
                assert rows >= {(x.number, x.digest) for x in self._chunks}, "what continues it is lost later"

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path} was closed.")
