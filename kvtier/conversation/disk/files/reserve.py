"""`Reserve`: room on the disk that is kept for removing what is saved.

To remove something from a database takes room in its log, and to open a database makes files. So a disk that is full of
saved sequences could not be emptied: neither by a store nor by `kvtier store rm`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvtier.conversation.disk.files.folder import keep_owner

#: Of the file.
RESERVE = "reserve"
#: Its bytes: pages of the log in which some hundred rows are removed, whose files give more.
SIZE = 2**20
#: It is made where the disk has so many times its bytes.
PLENTY = 64


class Reserve:
    """A file of a folder without content of use.

    Args:
        directory: of a store.
    """

    def __init__(self, directory: Path) -> None:
        self._file, self._is_there = directory / RESERVE, False

    def settle(self) -> None:
        """Give it up where the disk has less room than it takes; make it where there is plenty. What cannot be done is
        tried again the next time."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._file.parent)
            left = disk.f_bavail * disk.f_frsize
            if left < SIZE:
                self._is_there = False
                os.unlink(self._file)
            elif left >= PLENTY * SIZE and not self._is_there:
                with contextlib.suppress(FileExistsError):
                    self._make()
                self._is_there = True

    def _make(self) -> None:
        handle = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            keep_owner(handle, self._file.parent)
            os.write(handle, os.urandom(SIZE))  # zeros may take no room
        except BaseException:
            os.unlink(self._file)
            raise
        finally:
            os.close(handle)
