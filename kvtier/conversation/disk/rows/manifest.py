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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.conversation.disk.files.reserve import Reserve
from kvtier.conversation.disk.keys import prefix_of
from kvtier.conversation.disk.rows.commits import Commits, count_one, counted
from kvtier.errors import ConfigError
from kvtier.forks import heed

#: Of the folder's layout. `_OLDER` are taken as they are: 3 has no pieces, 4 a digest of all pieces of a list next to
#: those of each, and 5 says of a conversation only whether it has a rank. Any other one is refused.
VERSION = 6
_OLDER = ("3", "4", "5")
#: The config of the model as one version of Transformers reads it: a later one adds attributes, with values that were
#: fixed before. What is called "config" is that of the first one, and all that a folder of before has.
_CONFIG_OF = "config of "
#: Bytes of a row, at the most: a damaged database may claim any number, and SQLite would allocate it.
LONGEST = 2**28
#: Pages that are free and not given back yet, at the most, and as a share of all: what is saved next takes them first.
_SPARE, _SPARE_SHARE = 16, 8
#: Seconds that a process waits for another one that uses the database.
_WAIT = 5
#: What SQLite calls a database that gives pages back when it is told to.
_INCREMENTAL = 2
#: `used` beyond this is damage.
_LATEST = 2**60
#: Databases that were open in the parent of this process when that forked, by device and inode. SQLite keeps the locks
#: of a process by these: here it would take those of the parent for its own, and other processes would not heed it.
_inherited = set[tuple[int, int]]()

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT)",
    "CREATE TABLE IF NOT EXISTS chunks (number INTEGER PRIMARY KEY, key TEXT, parent INTEGER, start INTEGER, "
    "ids BLOB, nbytes INTEGER, checksum BLOB, digest BLOB, used INTEGER)",
    "CREATE TABLE IF NOT EXISTS prices (machine TEXT PRIMARY KEY, value TEXT)",
    # What lists them reads the first columns only. `ranked` is 0, or JSON of the rank and of where the saved history
    # ends, which stays text in a column of any type; 1 in folders of before, and where the state has to tell.
    "CREATE TABLE IF NOT EXISTS conversations "
    "(name BLOB PRIMARY KEY, ranked INTEGER, mark BLOB, state TEXT, digest BLOB)",
    # Items `start` to `stop` of a list, as JSON. The digest of all of them is in the conversation's state.
    "CREATE TABLE IF NOT EXISTS pieces (name BLOB, field TEXT, start INTEGER, stop INTEGER, text TEXT, "
    "PRIMARY KEY (name, field, start)) WITHOUT ROWID",
    # What was saved of conversations that were damaged, as it was found, under a number for each; without a field it is
    # the state.
    "CREATE TABLE IF NOT EXISTS aside (number INTEGER, name BLOB, field TEXT, start INTEGER, stop INTEGER, text TEXT)",
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


class Manifest:
    """The database of a folder. Not for several threads at once.

    Args:
        file: there already, for its owner only.
        fingerprint: of the model, see `hf.models.identity.fingerprint`. None: whatever model it is of. Who reads it
            by another code than all before may have another config.
        read_only: nothing is written; another process may have it open, and may write.
        reserve: gives room to open it, and to remove rows, on a disk that is full; None: nothing does.

    Attributes:
        db: the connection, for those who own the rows of other tables: see `ConversationRows`.
        missing: what is known to be missing, in a sentence, where it is only read; "": nothing.

    Raises:
        ConfigError: it is of another model or version, is something else, or is damaged; it was written on since, see
            `Commits`; another process has it locked; or this process was forked from one that had it open then.
    """

    def __init__(
        self,
        file: Path,
        fingerprint: Mapping[str, str] | None,
        *,
        read_only: bool = False,
        reserve: Reserve | None = None,
    ) -> None:
        self.file = file
        self._read_only = read_only
        self._owner = os.getpid()
        self._reserve = reserve
        self._identity = _identity(file)
        if self._identity in _inherited:
            raise ConfigError(
                f"{file} was open in the process that this one was forked from, and SQLite would take the locks of "
                "that one for its own. Open the folder in a process that is forked while no store has it open, or that "
                "is started otherwise, as multiprocessing's 'spawn' does."
            )
        self._settle()
        try:
            self._commits = Commits(file)
            self.missing = "" if read_only else self._commits.missing()
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from error
        if self.missing:
            raise ConfigError(f"{self.missing}.")
        try:
            # On a disk that nobody can write to, as of a backup, SQLite could not make the files of its log.
            frozen = "&immutable=1" if read_only and _is_frozen(file) else ""
            name = f"{file.absolute().as_uri()}?mode=ro{frozen}" if read_only else file
            # Each commit has a statement of its own: see `count_one`. They are kept until there are so many.
            options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "cached_statements": 48}
            self.db = sqlite3.connect(name, timeout=_WAIT, uri=read_only, **options)
        except sqlite3.Error as error:
            raise self._refused(error) from error
        heed(self)
        try:
            # Damage to a text is found by the digest of its row, and costs no other row.
            self.db.text_factory = functools.partial(str, encoding="utf-8", errors="surrogateescape")
            self.db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            self.db.execute("PRAGMA trusted_schema=OFF")
            self.db.execute("PRAGMA cell_size_check=ON")
            if read_only:
                self.missing = self._commits.lacking(counted(self.db))
                self._check_about(fingerprint)
                return
            # Of a folder that is new. One of before gives back what is free when it is compacted, and from then on.
            if not self._pragma("page_count"):
                self.db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=FULL")
            # What is removed is overwritten. Otherwise how SQLite was built decides.
            self.db.execute("PRAGMA secure_delete=ON")
            with self.transaction():
                for table in _SCHEMA:
                    self.db.execute(table)
                self._check_about(fingerprint)
            self._commits.begin(counted(self.db))
            trees = self.db.execute("SELECT count(*) FROM sqlite_master WHERE rootpage > 0").fetchone()[0]
            self._empty = trees + 2  # pages: what lists the trees, and what lists the pages
        except BaseException as error:
            self.close()
            if isinstance(error, ConfigError) or not isinstance(error, (sqlite3.Error, ValueError)):
                raise
            raise self._refused(error) from error  # bytes that are no string are a ValueError

    def _refused(self, error: Exception) -> ConfigError:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF == sqlite3.SQLITE_BUSY:
            return ConfigError(
                f"{self.file} cannot be used now: another process has it locked, perhaps one that is stopped, and has "
                f"not let it go for {_WAIT} seconds. Nothing is lost: try again when that one goes on, or has ended."
            )
        return ConfigError(
            f"{self.file} is no manifest of saved sequences, is damaged, or cannot be used: {error}. Make sure that "
            "there is room and that it may be written, or move it and what is named like it away to begin with an "
            "empty folder."
        )

    def about(self) -> dict[str, str]:
        """The version of its layout, and the model that it is of.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        if not self.db.execute("SELECT 1 FROM sqlite_master").fetchone():
            return {}  # whoever makes the folder has not come to its tables, or was killed before
        # In a damaged one there is anything.
        return {str(name): str(value) for name, value in self.db.execute("SELECT name, value FROM about")}

    def _check_about(self, fingerprint: Mapping[str, str] | None) -> None:
        about, there = {"version": str(VERSION), **(fingerprint or {})}, self.about()
        read_by = about.pop("read_by", "")
        own = _CONFIG_OF + read_by
        if not there:
            if fingerprint is None:
                raise ConfigError(f"{self.missing or f'{self.file.parent} holds no saved sequences'}.")
            self.db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            there = dict(about)
        if there.get("version") in _OLDER:
            there["version"] = str(VERSION)
            if not self._read_only:
                self.db.execute("UPDATE about SET value = ? WHERE name = 'version'", (str(VERSION),))
        if own in there:
            there["config"] = there[own]
        elif any(name.startswith(_CONFIG_OF) for name in there) and not self._has_computed(read_by):
            there["config"] = about.get("config", "")  # others have read it so far, and see other attributes
        for name, value in about.items():
            if there.get(name) != value:
                raise ConfigError(self._is_other(name, there.get(name), value))
        if "config" in about and not self._read_only:
            self.db.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (own, about["config"]))

    def _is_other(self, name: str, there: str | None, here: str) -> str:
        """Why the folder cannot be used that says something else than is so here."""
        folder = self.file.parent
        if name == "version" and there is not None and there.isdecimal() and int(there) > VERSION:
            return (
                f"{folder} was written by a newer kvtier, whose layout is {there}; this one reads layouts up to "
                f"{VERSION}. Nothing is lost: update kvtier, or give another directory."
            )
        load = f"load the model with dtype {there!r}, " if name == "dtype" and there is not None else ""
        why = (
            f"{folder} was saved with another {name}: {there!r} there, {here!r} here. What is saved is of no use to "
            f"this model: {load}give another directory, or remove that one."
        )
        if name == "version" or not self.db.execute("SELECT 1 FROM conversations LIMIT 1").fetchone():
            return why
        return (
            f"{why} What its conversations say is there, and needs no model: `kvtier store ls` lists them, and "
            "`kvtier store show` prints them."
        )

    def _has_computed(self, version: str) -> bool:
        """Whether this version has computed chunks, of the config that it read then."""
        found = self.db.execute("SELECT 1 FROM chunks WHERE instr(key, ?) = 1 LIMIT 1", (prefix_of(version),))
        return found.fetchone() is not None

    # Chunks

    def rows(self) -> Iterator[tuple[int, Row | None, int]]:
        """All chunks, parents before what continues them: the number of each, its row if that is what was written,
        and when it was used last.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        digests: dict[int, bytes] = {}
        select = "SELECT number, key, parent, start, ids, nbytes, checksum, digest, used FROM chunks ORDER BY number"
        for number, key, parent, start, ids, nbytes, checksum, digest, used in self.db.execute(select):
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
        self.db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove chunks.

        Raises:
            sqlite3.Error: they were not removed.
        """
        self.db.executemany("DELETE FROM chunks WHERE number = ?", [(number,) for number in numbers])

    def use(self, used: Mapping[int, int]) -> None:
        """Note when chunks were used last.

        Raises:
            sqlite3.Error: that was not noted.
        """
        self.db.executemany("UPDATE chunks SET used = ? WHERE number = ?", [(at, n) for n, at in used.items()])

    # Prices

    def prices(self, machine: str) -> Any:
        """What loading and computing took on a machine, as `save_prices` was given it; None: nothing is known.

        Raises:
            sqlite3.Error, ValueError, RecursionError: the database is damaged.
        """
        for (value,) in self.db.execute("SELECT value FROM prices WHERE machine = ?", (machine,)):
            return json.loads(value) if type(value) is str else None
        return None

    def save_prices(self, machine: str, value: Any) -> None:
        """Save what loading and computing took on a machine.

        Raises:
            sqlite3.Error: it was not saved.
        """
        self.db.execute("INSERT OR REPLACE INTO prices VALUES (?, ?)", (machine, json.dumps(value)))

    # Life

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """All that is read within is of one moment, whatever others write.

        Raises:
            sqlite3.Error: it cannot be read.
        """
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")

    def copy(self, to: Path) -> None:
        """Copy the database as it is at one moment, whatever others write, and nothing of what was removed from it.

        Args:
            to: is not there yet. It is for its owner only; who needs it on the disk sees to that.

        Raises:
            sqlite3.Error, OSError: it was not copied.
        """
        os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # SQLite would make it readable for others
        self.db.execute("VACUUM INTO ?", (os.fspath(to),))

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
                self.db.executescript("PRAGMA incremental_vacuum")  # `execute` ends it after one page

    def clear_log(self) -> bool:
        """Move what is in the log to the database, so that what was removed is in neither. In no transaction. Whether
        that was done: nobody waits for another process that reads."""
        with contextlib.suppress(sqlite3.Error):
            self.db.execute("PRAGMA busy_timeout=0")
            try:
                return bool(self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
            finally:
                self.db.execute(f"PRAGMA busy_timeout={_WAIT * 1000}")
        return False

    def _pragma(self, name: str) -> int:
        return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    def vacuum(self) -> None:
        """Give what was removed back to the file system. What rows say is written nowhere but in the folder.

        Raises:
            sqlite3.Error, MemoryError: that was not done; nothing is lost.
        """
        if self._pragma("auto_vacuum") == _INCREMENTAL:
            self.db.executescript("PRAGMA incremental_vacuum")
        else:  # a folder of before
            self.db.execute("PRAGMA temp_store=MEMORY")  # else a copy is in SQLite's folder for temporary files
            self.db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # it takes effect now
            self.db.execute("VACUUM")
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is changed within, or nothing.

        Raises:
            sqlite3.Error: nothing was changed; or, where the disk fails in a commit, perhaps all was.
        """
        self.end_transaction()
        self.db.execute("BEGIN IMMEDIATE")
        before, count = self.db.total_changes, None
        try:
            yield
            if self.db.total_changes != before:  # else nothing is written, and nobody waits for the disk
                count = count_one(self.db)
            self.db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
            raise
        if count is not None:
            self._commits.note(count)

    @contextlib.contextmanager
    def removal(self) -> Iterator[None]:
        """A transaction that leaves less: also on a disk that is full.

        Raises:
            sqlite3.Error: as of `transaction`.
        """
        self._settle()
        if self._reserve is not None and self._reserve.is_short:
            self.clear_log()  # what it takes is room for this; a disk without any refuses that, and loses nothing
        with self.transaction():
            yield

    def _settle(self) -> None:
        if self._reserve is not None:
            self._reserve.settle()

    def end_transaction(self) -> None:
        """Roll back a transaction whose own end failed, or was cut short.

        Raises:
            sqlite3.Error: it is there still.
        """
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the database. Idempotent. Nothing, in a process that was forked since: see `forked`."""
        if self._owner != os.getpid():
            return
        self._commits.close()
        with contextlib.suppress(sqlite3.Error):
            self.db.close()
            self._identity = None

    def forked(self) -> None:
        """As of `Inherited`. A connection that is the parent's must not be closed here, not even when this process
        ends: SQLite takes a log that is of no use to it for one that is of no use to anybody, and removes it."""
        self._commits.close()
        if self._identity is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.db))  # so that nothing ever frees it
            _inherited.add(self._identity)


def _identity(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):  # SQLite says what is wrong
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return None


def _is_frozen(file: Path) -> bool:
    """Whether a database is on a disk that is mounted read-only, and nobody has it open elsewhere: there is no log,
    which would have changes that are not in it yet."""
    try:
        is_open = any(file.with_name(file.name + end).exists() for end in ("-wal", "-shm"))
        return bool(os.statvfs(file).f_flag & os.ST_RDONLY) and not is_open
    except OSError:
        return False  # SQLite says what is wrong
