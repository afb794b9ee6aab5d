"""`Commits`: how many commits a database has had, in a file next to it, so that an older database is told from it.

SQLite keeps the last commits in a log, a file of its own. A folder that was copied or restored without that log, or
with a log or a database of another moment, opens as that of an earlier moment, and nothing says what is missing.

Each commit counts itself in the database's header, and when it is on the disk, the file here has its number, too. That
is written, and nobody waits until it is on the disk: where the machine ends, the file may say less than there is, so
that less of what is missing is found. It never says more.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sqlite3
import weakref
import zlib
from pathlib import Path

from kvtier.conversation.disk.files.folder import LOG, WRITTEN, keep_owner

#: Of the counter: SQLite's header has room for so many.
_MOST = 2**31 - 1
#: Of the database's header: how it begins, and where it counts.
_MAGIC, _COUNT = b"SQLite format 3\0", slice(60, 64)
#: Of the log's header, where it says which log it is: SQLite begins a new one when all of it is in the database.
_SALTS = slice(16, 24)
_SAID = re.compile(rb"(\d{10}) (\d{10}) ([0-9a-f]{8})\n")


class Commits:
    """The file next to a database. Not for several threads at once.

    Args:
        database: of a folder.

    Attributes:
        count: commits that the database has at the least; 0: nothing is known.
        base: of these, those that its own file has, without the log.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._log = database.with_name(database.name + LOG)
        self._file = database.with_name(database.name + WRITTEN)
        self.count, self.base = _read(self._file)
        self._held: io.FileIO | None = None
        # Of the log as it was when something was noted; b"": there was none; None: nobody knows.
        self._salts: bytes | None = None

    def missing(self) -> str:
        """What the database lacks, in a sentence; "": nothing that is known. Nothing is written, neither to the
        database nor to its log. For who has the folder to itself.

        Raises:
            OSError, sqlite3.Error: it cannot be read.
        """
        # Closing any handle ends SQLite's locks of this process. No store has it open; what reads it here at the same
        # time, as `Contents`, loses its lock, as by `Folder`.
        head, has_log = _head(self._database), os.path.exists(self._log)
        if head and not head.startswith(_MAGIC):
            return ""  # SQLite says what is wrong
        own = int.from_bytes(head[_COUNT], "big")
        found, least = own, max(self.count, own)
        if has_log and least and own >= self.base and head:  # of a file that is empty SQLite would remove the log
            found = self._counted()
        if found >= least:
            return ""
        is_of_another = has_log and (own < self.base or found < own)
        left = own if is_of_another else found
        gone = [self._log.name] * is_of_another + [self._file.name] * (left < self.count)
        why = (
            f"{self._database.parent} is not whole: {self._database.name} there has {found} of at least {least} "
            f"commits. So it is where a folder was copied while a store had it open, or without {self._log.name}, or "
            "where one of the two was restored from another moment. Nothing was changed: put both of one moment there, "
            "or another copy of the folder, as `kvtier store copy` makes it. To go on with "
            f"{f'the first {left}' if left < least else 'all of them'}, remove {' and '.join(gone)}"
        )
        if left == least:
            return why
        return f"{why}: what was said after that is lost, and keys and values that were saved after that are removed"

    def _counted(self) -> int:
        """Commits that the database has. It is only read: whoever could write to it would move the log there when it is
        closed."""
        name = f"{self._database.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(name, isolation_level=None, uri=True)) as db:
            return counted(db)

    def lacking(self, found: int) -> str:
        """What a database lacks that has so many, for who only reads it, while others may write."""
        if found >= self.count:
            return ""
        return f"{self._database} has {found} of at least {self.count} commits, and is not whole: a store refuses it"

    def begin(self, count: int) -> None:
        """The database is whole, and has so many: from now on they are noted. Where that cannot be, nothing is."""
        self._salts = self._read_salts()
        with contextlib.suppress(OSError):
            self._held = io.FileIO(os.fspath(self._file), "r+", opener=_open)
            self._dropped = weakref.finalize(self, self._held.close)
            keep_owner(self._held.fileno(), self._file.parent)
        self.note(count)

    def note(self, count: int) -> None:
        """The last commit, on the disk, was this one."""
        if self._held is None:
            return
        before, self._salts = self._salts, self._read_salts()
        if None not in (before, self._salts) and before != self._salts:
            self.base = max(count - 1, 0)  # the log was begun again: what was before is in the database
        self.count = count
        said = b"%010d %010d" % (self.count, self.base)
        with contextlib.suppress(OSError):
            os.pwrite(self._held.fileno(), b"%s %08x\n" % (said, zlib.crc32(said)), 0)

    def _read_salts(self) -> bytes | None:
        try:
            return _head(self._log)[_SALTS]
        except FileNotFoundError:
            return b""
        except OSError:
            return None

    def close(self) -> None:
        """Note no more. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.close()


def counted(db: sqlite3.Connection) -> int:
    """Commits that a database has had.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def count_one(db: sqlite3.Connection) -> int:
    """The transaction that is under way is one more. Returns how many there are then.

    Raises:
        sqlite3.Error: it is not counted.
    """
    count = min(counted(db) + 1, _MOST)
    db.execute(f"PRAGMA user_version = {count}")
    return count


def _open(file: str, _: int) -> int:
    return os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _read(file: Path) -> tuple[int, int]:
    """What a file says; nothing, where there is none, or it was not written to its end when the machine ended.

    Raises:
        OSError: it cannot be read now.
    """
    try:
        said = _SAID.fullmatch(_head(file))
    except FileNotFoundError:
        return 0, 0
    if said is None or int(said[3], 16) != zlib.crc32(said[0][:21]):
        return 0, 0
    return int(said[1]), int(said[2])


def _head(file: Path) -> bytes:
    """How a file begins.

    Raises:
        OSError: it cannot be read now, or there is none.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(handle, 64, 0)
    finally:
        os.close(handle)
