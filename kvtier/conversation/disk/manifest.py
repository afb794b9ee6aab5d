"""`Manifest`: what a folder of saved sequences knows about itself, in an SQLite database.

Transactions, a log and recovery are SQLite's business (write-ahead log, every commit on the disk before it returns).
SQLite finds damage to its own structure only: each row carries a digest of what it says, and one that does not match is
not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.conversation.disk.pieces import GROWING, Listed, Written, read_list, save_list
from kvtier.conversation.disk.pieces import digest as digest_of
from kvtier.errors import ConfigError

#: Of the folder's layout. `_OLDER` are taken as they are: 3 has no pieces, and 4 a digest of all pieces of a list next
#: to those of each. Any other one is refused.
VERSION = 5
_OLDER = ("3", "4")
#: Bytes of a row, at the most: a damaged database may claim any number, and SQLite would allocate it.
LONGEST = 2**28
#: Pages that are free and not given back yet, at the most, and as a share of all: what is saved next takes them first.
_SPARE, _SPARE_SHARE = 16, 8
#: `used` beyond this is damage.
_LATEST = 2**60

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE IF NOT EXISTS chunks (number INTEGER PRIMARY KEY, key TEXT, parent INTEGER, start INTEGER, "
    "ids BLOB, nbytes INTEGER, checksum BLOB, digest BLOB, used INTEGER)",
    "CREATE TABLE IF NOT EXISTS prices (machine TEXT PRIMARY KEY, value TEXT)",
    # What lists them reads the first columns only.
    "CREATE TABLE IF NOT EXISTS conversations "
    "(name BLOB PRIMARY KEY, ranked INTEGER, mark BLOB, state TEXT, digest BLOB)",
    # Items `start` to `stop` of a list, as JSON. The digest of all of them is in the conversation's state.
    "CREATE TABLE IF NOT EXISTS pieces (name BLOB, field TEXT, start INTEGER, stop INTEGER, text TEXT, "
    "PRIMARY KEY (name, field, start)) WITHOUT ROWID",
    # What was saved of conversations that were damaged, as it was found, under a number for each; without a field it is
    # the state.
    "CREATE TABLE IF NOT EXISTS aside (number INTEGER, name BLOB, field TEXT, start INTEGER, stop INTEGER, text TEXT)",
)

# What is there already is not written again: nobody waits for a disk then. And it keeps its place in the order.
_SAVE_CONVERSATION = (
    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET ranked = excluded.ranked, "
    "mark = excluded.mark, state = excluded.state, digest = excluded.digest WHERE (ranked, mark, state, digest) "
    "IS NOT (excluded.ranked, excluded.mark, excluded.state, excluded.digest)"
)


class Row(NamedTuple):
    """A chunk, as it is saved.

    Attributes:
        number: of its file.
        key: see `Disk`.
        parent: number of the chunk that it continues; None: it begins a sequence.
        start: its first token.
        ids: its own, packed.
        nbytes, checksum: of its file.
        digest: of all this, and of the parent's digest: so of all tokens before it, too.
    """

    number: int
    key: str
    parent: int | None
    start: int
    ids: bytes
    nbytes: int
    checksum: bytes
    digest: bytes

    @classmethod
    def of(
        cls, number: int, key: str, parent: tuple[int, bytes] | None, start: int, ids: bytes, nbytes: int, sums: bytes
    ) -> Row:
        """A row that says this; of the parent, its number and digest."""
        text = repr((number, key, parent, start, nbytes, sums)).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(text + b"\0" + ids, digest_size=16).digest()
        return cls(number, key, None if parent is None else parent[0], start, ids, nbytes, sums, digest)


class _Read(NamedTuple):
    """What is saved of a conversation.

    Attributes:
        state: what it is: of a list that is damaged, what precedes the damage.
        lists: what is saved of its lists.
        cut: the lists whose ends are lost.
        damaged: whether some piece is not what was written.
    """

    state: dict[str, Any]
    lists: dict[str, Listed]
    cut: set[str]
    damaged: bool


class Manifest:
    """The database of a folder. Not for several threads at once.

    Args:
        file: there already, for its owner only.
        fingerprint: of the model, see `hf.models.generation.fingerprint`. None: whatever model it is of.
        read_only: nothing is written; another process may have it open, and may write.

    Raises:
        ConfigError: it is of another model or version, is something else, or is damaged.
    """

    def __init__(self, file: Path, fingerprint: Mapping[str, str] | None, *, read_only: bool = False) -> None:
        self.file = file
        self._read_only = read_only
        self._owner = os.getpid()
        try:
            name = f"{file.absolute().as_uri()}?mode=ro" if read_only else file
            self._db = sqlite3.connect(name, isolation_level=None, check_same_thread=False, uri=read_only)
        except sqlite3.Error as error:
            raise self._refused(error) from error
        _heed_forks()
        _opened.add(self)
        try:
            # Damage to a text is found by the digest of its row, and costs no other row.
            self._db.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            self._db.execute("PRAGMA trusted_schema=OFF")
            self._db.execute("PRAGMA cell_size_check=ON")
            if read_only:
                self._check_about(fingerprint)
                return
            # Of a folder that is new. One of before gives back what is free when it is compacted, and from then on.
            if not self._pragma("page_count"):
                self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self.transaction():
                for table in _SCHEMA:
                    self._db.execute(table)
                self._check_about(fingerprint)
            trees = self._db.execute("SELECT count(*) FROM sqlite_master WHERE rootpage > 0").fetchone()[0]
            self._empty = trees + 2  # pages: what lists the trees, and what lists the pages
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError) or not isinstance(error, (sqlite3.Error, ValueError)):
                raise
            raise self._refused(error) from error  # bytes that are no string are a ValueError

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.file} is no manifest of saved sequences, is damaged, or cannot be used: {error}. Make sure that "
            "there is room and that it may be written, or move it away to begin with an empty folder."
        )

    def about(self) -> dict[str, str]:
        """The version of its layout, and the model that it is of.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        return dict(self._db.execute("SELECT name, value FROM about"))

    def _check_about(self, fingerprint: Mapping[str, str] | None) -> None:
        about, there = {"version": str(VERSION), **(fingerprint or {})}, self.about()
        if not there:
            if fingerprint is None:
                raise ConfigError(f"{self.file.parent} holds no saved sequences.")
            self._db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            return
        if there.get("version") in _OLDER:
            there["version"] = str(VERSION)
            if not self._read_only:
                self._db.execute("UPDATE about SET value = ? WHERE name = 'version'", (str(VERSION),))
        for name, value in about.items():
            if there.get(name) != value:
                raise ConfigError(
                    f"{self.file.parent} was saved with another {name}: {there.get(name)!r} there, {value!r} here. "
                    "What is saved is of no use to this model: give another directory, or remove that one."
                )

    # Chunks

    def rows(self) -> Iterator[tuple[int, Row | None, int]]:
        """All chunks, parents before what continues them: the number of each, its row if that is what was written,
        and when it was used last.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        digests: dict[int, bytes] = {}
        select = "SELECT number, key, parent, start, ids, nbytes, checksum, digest, used FROM chunks ORDER BY number"
        for number, key, parent, start, ids, nbytes, checksum, digest, used in self._db.execute(select):
            row = None
            kinds = (type(key), type(start), type(ids), type(nbytes), type(checksum))
            if kinds == (str, int, bytes, int, bytes) and (parent is None or parent in digests):
                above = None if parent is None else (parent, digests[parent])
                made = Row.of(number, key, above, start, ids, nbytes, checksum)
                if made.digest == digest and number not in digests:
                    row, digests[number] = made, made.digest
            yield number, row, used if type(used) is int and 0 <= used < _LATEST else 0

    def add(self, row: Row, used: int) -> None:
        """Add a chunk.

        Raises:
            sqlite3.Error: it was not added.
        """
        values = (row.number, row.key, row.parent, row.start, row.ids, row.nbytes, row.checksum, row.digest, used)
        self._db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove chunks.

        Raises:
            sqlite3.Error: they were not removed.
        """
        self._db.executemany("DELETE FROM chunks WHERE number = ?", [(number,) for number in numbers])

    def use(self, used: Mapping[int, int]) -> None:
        """Note when chunks were used last.

        Raises:
            sqlite3.Error: that was not noted.
        """
        self._db.executemany("UPDATE chunks SET used = ? WHERE number = ?", [(at, n) for n, at in used.items()])

    # Prices

    def prices(self, machine: str) -> Any:
        """What loading and computing took on a machine, as `save_prices` was given it; None: nothing is known.

        Raises:
            sqlite3.Error, ValueError, RecursionError: the database is damaged.
        """
        for (value,) in self._db.execute("SELECT value FROM prices WHERE machine = ?", (machine,)):
            return json.loads(value) if type(value) is str else None
        return None

    def save_prices(self, machine: str, value: Any) -> None:
        """Save what loading and computing took on a machine.

        Raises:
            sqlite3.Error: it was not saved.
        """
        self._db.execute("INSERT OR REPLACE INTO prices VALUES (?, ?)", (machine, json.dumps(value)))

    # Conversations

    def save_conversation(
        self, name: str, state: Mapping[str, Any], ranked: bool, written: Written | None = None
    ) -> None:
        """Save what a conversation is, in place of what it was, and whether it has a rank of its own. Of the lists that
        grow at their end, what was added is written.

        Args:
            written: what is saved of it, and what is when this returns; without it, all that is saved is read.

        Raises:
            sqlite3.Error: it was not saved. TypeError, ValueError, RecursionError: JSON does not take it.
        """
        packed, written = _name(name), Written() if written is None else written
        # Until the end nobody knows what is saved: a commit that fails may have been done.
        was, written.digest = written.digest, None
        lists, written.lists = written.lists, {}
        with self.transaction():
            select = "SELECT name, ranked, mark, digest FROM conversations WHERE name = ?"
            *there, now = self._db.execute(select, (packed,)).fetchone() or (None, None)
            if there[0] is not None and not _marked(*there) and not self._is_of(packed):  # it is not listed
                self._set_aside(packed)
            known = lists if was is not None and was == now else {}
            digest, lists = self._save(packed, state, ranked, known)
        written.digest, written.lists = digest, lists

    def _save(
        self, name: bytes, state: Mapping[str, Any], ranked: bool, known: Mapping[str, Listed]
    ) -> tuple[bytes, dict[str, Listed]]:
        """Returns the digest of the row, and what is saved of the lists."""
        lists = {x: state[x] for x in GROWING if isinstance(state.get(x), list)}
        saved = {x: save_list(self._db, name, x, values, known.get(x)) for x, values in lists.items()}
        digests = {x: [piece.digest for piece in listed.pieces] for x, listed in saved.items()}
        text = json.dumps({x: value for x, value in state.items() if x not in lists} | {"digests": digests})
        row = (name, int(ranked), digest_of(name, f"{int(ranked)}"), text, digest_of(name, text))
        self._db.execute(_SAVE_CONVERSATION, row)
        return row[-1], saved

    def _read(self, name: Any, state: Any, digest: Any) -> _Read | None:
        """What a row and its pieces say; None: the row is not what was written."""
        if type(name) is not bytes or type(state) is not str or digest_of(name, state) != digest:
            return None
        found: dict[str, Any] = json.loads(state)
        digests, wholes = found.pop("digests", {}), found.pop("pieces", {})
        read = _Read(found, {}, set(), False)
        for field in wholes | digests:
            items, listed, is_whole, is_damaged = read_list(
                self._db, name, field, digests.get(field), wholes.get(field)
            )
            found[field], read.lists[field] = items, listed
            if not is_whole:
                read.cut.add(field)
            read = read._replace(damaged=read.damaged or is_damaged)
        return read

    def _state(self, name: Any, state: Any, digest: Any, written: Written | None = None) -> dict[str, Any] | None:
        """What a row and its pieces say; None: that is not what was written."""
        read = self._read(name, state, digest)
        if read is None or read.damaged:
            return None
        if written is not None:
            written.digest, written.lists = digest, read.lists
        return read.state

    def mend(self, name: str) -> dict[str, Any] | None:
        """Set a conversation that is damaged aside, as it is, and save in its place what of it is whole: of each list
        what precedes the first piece that is damaged. What that is; None: nothing, or there is no such conversation.

        Raises:
            sqlite3.Error, ValueError, RecursionError: it was not set aside, and is what it was.
        """
        packed = _name(name)
        with self.transaction():
            select = "SELECT ranked, state, digest FROM conversations WHERE name = ?"
            for ranked, state, digest in self._db.execute(select, (packed,)).fetchall():
                left = self._left(packed, state, digest)
                self._set_aside(packed)
                for table in ("conversations", "pieces"):
                    self._db.execute(f"DELETE FROM {table} WHERE name = ?", (packed,))
                if left is not None:
                    self._save(packed, left, ranked != 0, {})
                return left
        return None

    def _set_aside(self, name: bytes) -> None:
        (number,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM aside").fetchone()
        for source in ("NULL, NULL, NULL, state FROM conversations", "field, start, stop, text FROM pieces"):
            self._db.execute(f"INSERT INTO aside SELECT ?, name, {source} WHERE name = ?", (number, name))

    def _left(self, name: Any, state: Any, digest: Any) -> dict[str, Any] | None:
        """What is whole of a conversation; None: nothing."""
        read = self._read(name, state, digest)
        if read is None:
            return None
        return _whole_turns(read.state) if "messages" in read.cut else read.state

    def aside(self) -> int:
        """How many conversations were set aside.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'aside'").fetchone():
            return 0  # it is only read, and of before
        return int(self._db.execute("SELECT count(DISTINCT number) FROM aside").fetchone()[0])

    def drop_conversation(self, name: str) -> None:
        """Forget a conversation, and what was set aside of it.

        Raises:
            sqlite3.Error: it is there still.
        """
        with self.transaction():
            for table in ("conversations", "pieces", "aside"):
                self._db.execute(f"DELETE FROM {table} WHERE name = ?", (_name(name),))
        self.give_back()

    def drop_damaged_conversations(self) -> None:
        """Forget what is not what was written of conversations, and what was set aside.

        Raises:
            sqlite3.Error: they are there still.
        """
        rows = self._db.execute("SELECT rowid, * FROM conversations").fetchall()
        for number, name, ranked, mark, state, digest in rows:
            if _marked(name, ranked, mark) and self._state(name, state, digest) is not None:
                continue
            left = self._left(name, state, digest)
            self._db.execute("DELETE FROM conversations WHERE rowid = ?", (number,))
            if left is not None:
                self._db.execute("DELETE FROM pieces WHERE name = ?", (name,))
                self._save(name, left, ranked != 0, {})
        self._db.execute("DELETE FROM pieces WHERE name NOT IN (SELECT name FROM conversations)")
        self._db.execute("DELETE FROM aside")

    def names(self) -> Iterator[tuple[str, bool] | None]:
        """Of all conversations, in the order of their making, and whether each has a rank of its own; None for one that
        is damaged. What they are is not read, unless that is damaged: then it may have a rank.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        for name, ranked, mark in self._db.execute("SELECT name, ranked, mark FROM conversations ORDER BY rowid"):
            marked = _marked(name, ranked, mark)
            if marked or self._is_of(name):
                yield name.decode("utf-8", "surrogatepass"), bool(ranked) or not marked
            else:
                yield None

    def _is_of(self, name: Any) -> bool:
        """Whether the state that a name has was written under it."""
        select = "SELECT state, digest FROM conversations WHERE name = ?"
        found = self._db.execute(select, (name,)).fetchone() if type(name) is bytes else None
        return found is not None and type(found[0]) is str and digest_of(name, found[0]) == found[1]

    def conversation(self, name: str, written: Written | None = None) -> dict[str, Any] | None:
        """The state of a conversation; None: there is none, or it is not what was written.

        Args:
            written: what is saved of it, from now on.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        packed = _name(name)
        for state, digest in self._db.execute("SELECT state, digest FROM conversations WHERE name = ?", (packed,)):
            return self._state(packed, state, digest, written)
        return None

    def conversations(self) -> Iterator[tuple[str, dict[str, Any]] | None]:
        """All that are saved: the name and the state of each; None for one that is damaged.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        for name, state, digest in self._db.execute("SELECT name, state, digest FROM conversations ORDER BY rowid"):
            found = self._state(name, state, digest)
            yield None if found is None else (name.decode("utf-8", "surrogatepass"), found)

    # Life

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """All that is read within is of one moment, whatever others write.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, but for what an empty database has; whole pages.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        size, pages, free = (self._pragma(x) for x in ("page_size", "page_count", "freelist_count"))
        return max(pages - free - self._empty, 0) * size

    def give_back(self) -> None:
        """Give pages that are free back to the file system, where they are many. In no transaction."""
        with contextlib.suppress(sqlite3.Error):
            if self._pragma("freelist_count") > max(self._pragma("page_count") // _SPARE_SHARE, _SPARE):
                self._db.executescript("PRAGMA incremental_vacuum")  # `execute` ends it after one page

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def vacuum(self) -> None:
        """Give what was removed back to the file system.

        Raises:
            sqlite3.Error: that was not done; nothing is lost.
        """
        self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a folder of before: it takes effect now
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is changed within, or nothing.

        Raises:
            sqlite3.Error: nothing was changed; or, where the disk fails in a commit, perhaps all was.
        """
        if self._db.in_transaction:  # an end that failed
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the database. Idempotent. Nothing, in a process that was forked since: see `_leave_open`."""
        if self._owner != os.getpid():
            return
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


_opened: weakref.WeakSet[Manifest] = weakref.WeakSet()


def _leave_open() -> None:
    """This process was forked. A connection that it has from its parent must not be closed here, not even when this
    process ends: SQLite takes a log that is of no use to it for one that is of no use to anybody, and removes it."""
    for manifest in list(_opened):
        if manifest._owner != os.getpid():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(manifest._db))  # so that nothing ever frees it


@functools.cache
def _heed_forks() -> None:
    """From the first manifest on: nothing is registered at import."""
    os.register_at_fork(after_in_child=_leave_open)


def _whole_turns(state: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose last messages are lost, up to the end of a turn: what is said next follows an answer."""
    messages, ends = state["messages"], dict(state.get("ends", ()))
    turns = [n for n in ends if n <= len(messages)]
    users = [i for i, x in enumerate(messages) if isinstance(x, dict) and x.get("role") == "user"]
    until = max(turns, default=users[-1] if users else 0)
    found = state | {"messages": messages[:until]}
    if "ends" in state:
        found["ends"] = [[n, tokens] for n, tokens in ends.items() if n <= until]
    if until in ends and "ids" in state:
        found["ids"] = state["ids"][: ends[until]]
    return found


def _marked(name: Any, ranked: Any, mark: Any) -> bool:
    """Whether a name, and that its conversation has a rank or not, are what was written."""
    return type(name) is bytes and type(ranked) is int and digest_of(name, f"{ranked}") == mark


def _name(name: str) -> bytes:
    """Any string of Python's, also one that is no Unicode."""
    return name.encode("utf-8", "surrogatepass")
