"""A disk that fails, and that forgets what it was not told to keep, as far as `kvtier.conversation` sees it.

Its modules get this instead of `os` and `sqlite3`: nothing else in the process does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Calls that may fail; those of DONE may have been done and fail.
CALLS = (
    *("open", "write", "fsync", "replace", "unlink", "link", "readv"),
    *("listdir", "fstat", "lstat", "stat", "fchmod", "close"),
)
DONE = ("fsync", "replace", "unlink", "close", "fchmod", "link")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)


class Killed(BaseException):
    """The process, or the machine, has ended here."""


class RoughDisk:
    """What goes wrong with the folders of one world.

    Args:
        rng: decides.
        root: where folders are made.

    Attributes:
        failing: probability that a call fails.
        killing: probability that the process ends at a call.
        power: whether, when it ends, the machine does: what was not synchronized may be lost.
        folder: that is in use.
        left: after `Killed`, what is there of it.
        failed: calls that have failed.
        idle: called before some reads: other threads may have their turn there.
    """

    def __init__(self, rng: random.Random, root: Path) -> None:
        self.rng, self.root = rng, root
        self.failing = self.killing = 0.0
        self.power = False
        self.folder: Path | None = None
        self.left: Path | None = None
        self.failed = self._made = 0
        self.idle: Callable[[], None] = lambda: None
        # Of files, by device and inode; of names since their folder was synchronized, what undoes each change.
        self._unsynced: set[tuple[int, int]] = set()
        self._names: list[Callable[[Path], None]] = []
        self._kept = 0

    # Faults

    def fails(self) -> bool:
        """Whether the next call does."""
        if self.killing and self.rng.random() < self.killing:
            self.kill()
        if self.failing and self.rng.random() < self.failing:
            self.failed += 1
            return True
        return False

    def kill(self) -> None:
        """The process ends here: what is there of the folder is kept apart from what it does from now on."""
        self.left = self._image()
        self.failing = self.killing = 0.0
        raise Killed

    def new_folder(self) -> Path:
        """That is not there yet."""
        self._made += 1
        return self.root / f"{self._made}"

    def _image(self) -> Path:
        assert self.folder is not None
        found = self.new_folder()
        found.mkdir(mode=0o700)
        if not self.folder.exists():
            return found
        for each in os.scandir(self.folder):
            if each.name.startswith("manifest"):
                if not each.name.endswith("-shm"):
                    shutil.copyfile(each.path, found / each.name)
            elif ".safetensors" in each.name:
                os.link(each.path, found / each.name)
        if self.power:
            kept = self.rng.randint(0, len(self._names))
            for undo in reversed(self._names[kept:]):
                with contextlib.suppress(FileNotFoundError):  # it was damaged
                    undo(found)
            for file in sorted(found.iterdir()):
                about = file.stat()
                if (about.st_dev, about.st_ino) in self._unsynced:
                    # Another file: the process goes on with this one until it is unwound.
                    data = file.read_bytes()
                    file.unlink()
                    file.write_bytes(data[: self.rng.randrange(len(data) + 1)])
        return found

    # What the modules call

    def call(self, name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call of `os`."""
        if name == "readv" and self.rng.random() < 0.5:
            self.idle()
        if name == "close":  # a handle that nobody closes is left when a process ends, and here it would stay
            self._do(name, real, *args, **options)
            real = lambda *args: None  # noqa: E731
        if self.fails():
            done = name in DONE and self.rng.random() < 0.5
            if done:
                self._do(name, real, *args, **options)
            error = self.rng.choice(_ERRORS)
            raise OSError(error, os.strerror(error))
        return self._do(name, real, *args, **options)

    def _do(self, name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        note = getattr(self, f"_{name}", None)
        return real(*args, **options) if note is None else note(real, *args, **options)

    def _write(self, real: Callable[..., int], handle: int, data: memoryview) -> int:
        about = os.fstat(handle)
        self._unsynced.add((about.st_dev, about.st_ino))
        if len(data) > 1 and self.rng.random() < 0.2:
            data = data[: self.rng.randrange(1, len(data))]
        return real(handle, data)

    def _readv(self, real: Callable[..., int], handle: int, buffers: list[memoryview]) -> int:
        if len(buffers[0]) > 1 and self.rng.random() < 0.2:
            buffers = [buffers[0][: self.rng.randrange(1, len(buffers[0]))]]
        return real(handle, buffers)

    def _fsync(self, real: Callable[[int], None], handle: int) -> None:
        about = os.fstat(handle)
        name = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.isdir(name):
            if Path(name) == self.folder:
                self._names.clear()
        else:
            self._unsynced.discard((about.st_dev, about.st_ino))

    def _replace(self, real: Callable[..., None], source: Path, target: Path) -> None:
        real(source, target)
        self._names.append(lambda at: os.replace(at / target.name, at / source.name))

    def _link(self, real: Callable[..., None], source: Path, target: Path) -> None:
        real(source, target)
        self._names.append(lambda at: os.unlink(at / target.name))

    def _unlink(self, real: Callable[..., None], file: Path) -> None:
        self._kept += 1
        shadow = self.root / f"shadow{self._kept}"
        with contextlib.suppress(OSError):
            os.link(file, shadow)
        real(file)
        self._names.append(lambda at: os.replace(shadow, at / file.name))

    # What happens to files

    def rot(self, file: Path) -> str:
        """Damage a file, or remove it."""
        how = self.rng.choice(("gone", "cut", "flipped", "flipped", "written over"))
        size = file.stat().st_size
        if how == "gone" or not size:
            file.unlink()
        elif how == "cut":
            os.truncate(file, self.rng.randrange(size))
        elif how == "written over":  # values that nobody takes for those that were there
            some = self.rng.randrange(1, size + 1)
            with open(file, "r+b") as stream:
                stream.seek(size - some)
                stream.write(self.rng.randbytes(some))
        else:
            with open(file, "r+b") as stream:
                stream.seek(self.rng.randrange(size))
                byte = stream.read(1)[0] ^ 1 << self.rng.randrange(8)
                stream.seek(-1, 1)
                stream.write(bytes([byte]))
        return f"{file.name} {how}"

    def use(self, folder: Path | None) -> None:
        """Another folder is in use, and all of it is on the disk."""
        self.folder = folder
        self._unsynced.clear()
        self._names.clear()


class Rough:
    """Stands in for a module; without a disk, it is that module."""

    disk: RoughDisk | None = None

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _wrapped(rough: Rough, name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        disk = Rough.disk
        return real(*args, **options) if disk is None else disk.call(name, real, *args, **options)

    return call


class Connection(sqlite3.Connection):
    """Of a database on such a disk. A commit that fails may have been done."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """As SQLite's."""
        return self._call(super().execute, *args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        """As SQLite's."""
        return self._call(super().executemany, *args)

    def _call(self, method: Callable[..., sqlite3.Cursor], *args: Any) -> sqlite3.Cursor:
        disk = Rough.disk
        if disk is None or not disk.fails():
            return method(*args)
        if disk.rng.random() < 0.5:
            method(*args)
        raise sqlite3.OperationalError("disk I/O error")


@contextlib.contextmanager
def rough() -> Iterator[None]:
    """The modules of `kvtier.conversation` use `Rough.disk`, where there is one."""
    system, database = Rough(os), Rough(sqlite3)
    for name in CALLS:
        vars(system)[name] = _wrapped(system, name)
    vars(database)["connect"] = lambda *args, **options: sqlite3.connect(*args, **options, factory=Connection)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("kvtier.conversation."):
                for which, stand_in in (("os", system), ("sqlite3", database)):
                    if which in vars(module):
                        patch.setattr(module, which, stand_in)
        yield
