"""`Reserve`: room on the disk that is kept for removing what is saved.

To remove something from a database takes room in its log, and to open a database makes files. So a disk that is full of
saved sequences could not be emptied, nor looked at: neither by a store nor by `kvtier store rm` and `kvtier store ls`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from kvtier.conversation.disk.files.folder import MANIFEST, keep_owner

#: Of the file.
RESERVE = f"{MANIFEST}-reserve"
#: Its bytes: pages of the log in which some hundred rows are removed, whose files give more.
SIZE = 2**20
#: Of a budget it is so large a part, where that is less.
SHARE = 16
#: What is smaller is of no use: to open the database takes 32 KiB, and to remove a conversation up to as much.
LEAST = 2**17
#: It is made where the disk has so many times its bytes.
PLENTY = 64


class Reserve:
    """A file of a folder without content of use.

    Args:
        directory: of a store.
        budget: see `Disk`. Where there is a file of another size than it leaves, that is removed.

    Attributes:
        nbytes: of the budget that are left to it, whether it is there or not; 0 without a budget.
        is_short: whether the disk had less room than it takes, when somebody looked last.
    """

    def __init__(self, directory: Path, budget: int | None = None) -> None:
        self._file, self._size = directory / RESERVE, SIZE if budget is None else min(SIZE, budget // SHARE)
        if self._size < LEAST:
            self._size = 0
        self.nbytes = 0 if budget is None else self._size
        self.is_short = False
        self._within: weakref.WeakMethod[Callable[[], bool]] | None = None  # it is only given up
        if budget is not None:
            with contextlib.suppress(OSError):
                if os.lstat(self._file).st_size != self._size:
                    self.remove()

    def keep(self, within: Callable[[], bool]) -> None:
        """Make it, now or later, where the disk has plenty of room and the folder has room for it, as `within` says: a
        method, whose object owns this one. It is not kept alive by it: whoever is interrupted while a folder is
        opened drops it, and that must let others open it at once."""
        if self._size:
            self._within = weakref.WeakMethod(within)
            self.settle()

    def remove(self) -> None:
        """Give it up. What cannot be done is tried again the next time."""
        with contextlib.suppress(OSError):
            os.unlink(self._file)

    def settle(self) -> bool:
        """Give it up where the disk has less room than it takes; make it where there is plenty. Whether it was given
        up."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._file.parent)
            left = disk.f_bavail * disk.f_frsize
            self.is_short = left < (self._size or SIZE)
            is_there = os.path.lexists(self._file)  # who reads the folder may have given it up, in another process
            if is_there and self.is_short:
                self.remove()
                return not os.path.lexists(self._file)
            if not is_there and left >= PLENTY * self._size and self._is_within():
                self._make()
        return False

    def _is_within(self) -> bool:
        within = None if self._within is None else self._within()
        return within is not None and within()

    def _make(self) -> None:
        handle = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            keep_owner(handle, self._file.parent)
            os.write(handle, os.urandom(self._size))  # zeros may take no room
        except BaseException:
            os.unlink(self._file)
            raise
        finally:
            os.close(handle)
