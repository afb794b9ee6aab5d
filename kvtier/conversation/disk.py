"""`Disk`: what a store keeps, in a folder, for processes to come.

A saved sequence is a chain of *chunks*: the tokens that a turn added, one safetensors file each. A chunk begins
anywhere within its parent, so that what sequences share is saved once and a turn writes its own tokens and no others.
The chain, the token ids and a checksum of every file are rows of an SQLite database (write-ahead log): a file is
complete before its row is there, and a file without a row is removed when the folder is opened.

Whatever is damaged, missing or of other weights is not used: a chunk whose bytes are not what its row says is
forgotten, with all that continues it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier.conversation.files import Damaged, read_tensors, write_tensors
from kvtier.conversation.index import WIDTH, PrefixIndex
from kvtier.errors import ClosedError, ConfigError, StoreInUseError

#: Of the folder's layout. Another one is refused.
VERSION = 1
#: Bytes that a row takes besides its file, at the most, for the budget.
_ROW = 512


@dataclass(eq=False)
class Chunk:
    """Some tokens of a saved sequence.

    Attributes:
        number: of its row and file.
        key: what its keys and values depend on besides the ids, see `PrefixIndex`.
        parent: that it continues; None: it begins a sequence.
        start: its first token; the chain before it ends there.
        ids: of the whole sequence up to its end, packed.
        nbytes: of its file.
        checksum: of its file.
    """

    number: int
    key: str
    parent: Chunk | None
    start: int
    ids: bytes
    nbytes: int
    checksum: bytes

    @property
    def stop(self) -> int:
        """Behind its last token."""
        return len(self.ids) // WIDTH


class Disk:
    """A folder of saved sequences. One process at a time; any of its threads.

    Args:
        directory: made if it is missing, for its owner only.
        budget: bytes of all files together; what was used longest ago goes first. None: no limit.
        fingerprint: of the model, see `hf.generation.fingerprint`. Sequences of another one are refused.

    Raises:
        ConfigError: the folder is of another model or version, or is something else.
        StoreInUseError: another process, or another store, has it open.
    """

    def __init__(self, directory: str | Path, budget: int | None, fingerprint: Mapping[str, str]) -> None:
        self.path = Path(directory)
        self.budget = budget
        #: Files that were not what their rows say, and what kept a sequence from being saved last.
        self.damaged, self.problem = 0, ""
        self._lock = threading.RLock()
        self._chunks: dict[int, Chunk] = {}
        self._children: dict[int, int] = {}
        self._index: PrefixIndex[Chunk] = PrefixIndex()
        self.closed = False
        self._release: weakref.finalize[..., Disk] | None = None
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"directory={str(directory)!r} cannot be used: {error}") from error
        try:
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreInUseError(f"{self.path} is open in another store or process. Close that first.") from None
            # Who drops a store without closing it lets others open the folder.
            self._release = weakref.finalize(self, os.close, self._held)
            self._open(fingerprint)
        except BaseException:
            os.close(self._held) if self._release is None else self._release()
            raise

    def _open(self, fingerprint: Mapping[str, str]) -> None:
        try:
            self._db = sqlite3.connect(self.path / "manifest.sqlite", isolation_level=None, check_same_thread=False)
            os.chmod(self.path / "manifest.sqlite", 0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                self._db.execute("CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS chunks (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT, "
                    "parent INTEGER, start INTEGER, ids BLOB, nbytes INTEGER, checksum BLOB, used INTEGER)"
                )
                self._db.execute("CREATE TABLE IF NOT EXISTS conversations (name TEXT PRIMARY KEY, state TEXT)")
            self._check_about(fingerprint)
            self._load()
        except ConfigError:
            raise
        except (sqlite3.Error, ValueError) as error:  # texts that are none, too
            raise ConfigError(
                f"{self.path / 'manifest.sqlite'} is no manifest of saved sequences, or is damaged: {error}. Move it "
                "away to begin with an empty folder."
            ) from error

    def _check_about(self, fingerprint: Mapping[str, str]) -> None:
        about = {"version": str(VERSION), **fingerprint}
        there = dict(self._db.execute("SELECT name, value FROM about"))
        if not there:
            with self._transaction():
                self._db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            return
        for name, value in about.items():
            if there.get(name) != value:
                raise ConfigError(
                    f"{self.path} was saved with another {name}: {there.get(name)!r} there, {value!r} here. What is "
                    "saved is of no use to this model: give another directory, or remove that one."
                )

    def _load(self) -> None:
        """Read all rows; forget those that do not fit together, and files that have none."""
        rows = self._db.execute("SELECT number, key, parent, start, ids, nbytes, checksum FROM chunks ORDER BY number")
        bad = []
        for number, *row in rows:
            chunk = self._read_row(number, *row)
            if chunk is None:
                bad.append(number)
            else:
                self._add(chunk)
        with self._transaction():
            self._db.executemany("DELETE FROM chunks WHERE number = ?", [(number,) for number in bad])
        self.damaged += len(bad)
        known = {self._file(chunk.number).name for chunk in self._chunks.values()}
        for file in self.path.glob("*.safetensors*"):
            if file.name not in known:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _read_row(
        self, number: int, key: Any, parent: Any, start: Any, ids: Any, nbytes: Any, checksum: Any
    ) -> Chunk | None:
        """The chunk of a row; None where it says nothing that can be. What it says is compared with its file later."""
        kinds = (type(key), type(start), type(ids), type(nbytes), type(checksum))
        above = self._chunks.get(parent) if type(parent) is int else None
        if kinds != (str, int, bytes, int, bytes) or len(ids) % WIDTH or (above is None) != (parent is None):
            return None
        if not 0 <= start <= (0 if above is None else above.stop) or not (start or ids):
            return None
        before = b"" if above is None else above.ids[: start * WIDTH]
        return Chunk(number, key, above, start, before + ids, nbytes, checksum)

    # Find, read, write

    def find(self, key: str, ids: bytes) -> tuple[int, Chunk | None]:
        """The longest beginning of a sequence that is saved: tokens, and the chunk that has the last of them."""
        with self._lock:
            return self._index.find(key, ids)

    def ends(self, key: str, ids: bytes) -> list[Chunk]:
        """The chunks at whose end a sequence begins with all that is saved, the longest first."""
        with self._lock:
            return [chunk for _, chunk in self._index.prefixes(key, ids)]

    def read(self, chunk: Chunk, length: int) -> tuple[list[tuple[int, dict[str, torch.Tensor], str]], int]:
        """The tensors of the first tokens of a chain.

        Returns:
            For each chunk, in order: its first token, its tensors, what was said of it; and how many tokens they are:
            fewer than `length` where some were damaged, and 0 where all were.
        """
        chain: list[Chunk] = []
        at: Chunk | None = chunk
        while at is not None:
            chain.insert(0, at)
            at = at.parent
        found, until = [], 0
        for i, each in enumerate(chain):
            stop = min(length, chain[i + 1].start if i + 1 < len(chain) else each.stop)
            try:
                tensors, said = read_tensors(self._file(each.number), each.nbytes, each.checksum)
                about, _, said = said.partition(" ")
                if about != _about(each.key, each.start, each.ids):
                    raise Damaged(f"chunk {each.number} is of other tokens than its row says")
            except (Damaged, OSError) as error:
                self.problem = str(error)
                self.damaged += 1
                self.forget(each)
                break
            found.append((each.start, tensors, said))
            until = stop
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._use([x.number for x in chain])
        return found, until

    def write(
        self, key: str, ids: bytes, start: int, parent: Chunk | None, tensors: Mapping[str, torch.Tensor], said: str
    ) -> Chunk | None:
        """Save the tokens of a sequence from one on, behind a chunk that is saved. None where that cannot be, and
        `problem` says why; nothing that was saved before is lost."""
        with self._lock:
            self._check_open()
            if parent is not None and parent.number not in self._chunks:
                return None
            nbytes = sum(x.nbytes for x in tensors.values()) + _ROW + len(ids)
            if not self._make_room(nbytes, parent):
                self.problem = f"{nbytes} bytes are more than the disk budget leaves"
                return None
            number = 0
            try:
                with self._transaction():
                    # A number that no file ever had.
                    cursor = self._db.execute("INSERT INTO chunks (key) VALUES (NULL)")
                    number = int(cursor.lastrowid or 0)
                    named = f"{_about(key, start, ids)} {said}"
                    written, checksum = write_tensors(self._file(number), tensors, named)
                    self._db.execute(
                        "UPDATE chunks SET key=?, parent=?, start=?, ids=?, nbytes=?, checksum=?, used=? "
                        "WHERE number=?",
                        (
                            key,
                            None if parent is None else parent.number,
                            start,
                            ids[start * WIDTH :],
                            written,
                            checksum,
                            number,
                            number,
                        ),
                    )
            except (OSError, sqlite3.Error) as error:
                self.problem = str(error)
                with contextlib.suppress(OSError):
                    self._file(number).unlink(missing_ok=True)
                return None
            chunk = Chunk(number, key, parent, start, ids, written, checksum)
            self._add(chunk)
            return chunk

    def forget(self, chunk: Chunk) -> None:
        """Remove a chunk and all that continues it."""
        with self._lock:
            gone = [chunk]
            for each in list(self._chunks.values()):  # in rising order: whoever continues one comes later
                if each.parent in gone:
                    gone.append(each)
            for each in reversed(gone):
                self._remove(each)

    def _remove(self, chunk: Chunk) -> None:
        if self._chunks.pop(chunk.number, None) is None:
            return
        self._index.remove(chunk)
        if chunk.parent is not None:
            self._children[chunk.parent.number] -= 1
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("DELETE FROM chunks WHERE number = ?", (chunk.number,))
        with contextlib.suppress(OSError):
            self._file(chunk.number).unlink(missing_ok=True)

    def _make_room(self, nbytes: int, keep: Chunk | None) -> bool:
        """Remove what was used longest ago and nobody continues, until so many bytes fit."""
        if self.budget is None:
            return True
        kept = set[int]()
        while keep is not None:
            kept.add(keep.number)
            keep = keep.parent
        while self.nbytes + nbytes > self.budget:
            for (number,) in self._db.execute("SELECT number FROM chunks ORDER BY used, number").fetchall():
                if number in self._chunks and number not in kept and not self._children.get(number):
                    self._remove(self._chunks[number])
                    break
            else:
                return False
        return True

    # Conversations

    def save_conversation(self, name: str, state: Mapping[str, Any]) -> None:
        """Save what a conversation is, in place of what it was."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._check_open()
            self._db.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?)", (name, json.dumps(state)))

    def drop_conversation(self, name: str) -> None:
        """Forget a conversation."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.execute("DELETE FROM conversations WHERE name = ?", (name,))

    def conversations(self) -> dict[str, dict[str, Any]]:
        """All that are saved, by name; those that are damaged are left out."""
        found = {}
        with self._lock, contextlib.suppress(sqlite3.Error, UnicodeError):
            for name, state in self._db.execute("SELECT name, state FROM conversations").fetchall():
                with contextlib.suppress(ValueError, TypeError):
                    made = json.loads(state)
                    if isinstance(name, str) and isinstance(made, dict):
                        found[name] = made
        return found

    # Life

    @property
    def nbytes(self) -> int:
        """Bytes of all files, and of what is kept of each."""
        with self._lock:
            return sum(x.nbytes + _ROW + (x.stop - x.start) * WIDTH for x in self._chunks.values())

    @property
    def chunks(self) -> int:
        """Saved chunks."""
        return len(self._chunks)

    def close(self) -> None:
        """Let others open the folder. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            assert self._release is not None
            self._release()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path} was closed.")

    def _use(self, numbers: list[int]) -> None:
        (last,) = self._db.execute("SELECT COALESCE(MAX(used), 0) FROM chunks").fetchone()
        self._db.executemany("UPDATE chunks SET used = ? WHERE number = ?", [(last + 1, n) for n in numbers])

    def _add(self, chunk: Chunk) -> None:
        self._chunks[chunk.number] = chunk
        if chunk.parent is not None:
            self._children[chunk.parent.number] = self._children.get(chunk.parent.number, 0) + 1
        self._index.add(chunk.key, chunk.ids, chunk)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:012}.safetensors"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _about(key: str, start: int, ids: bytes) -> str:
    """What a file is of: a row whose ids were damaged does not find it."""
    return hashlib.blake2b(repr((key, start)).encode() + ids, digest_size=16).hexdigest()
