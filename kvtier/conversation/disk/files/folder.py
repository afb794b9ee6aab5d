"""`Folder`: a directory that one store has to itself."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import stat
import weakref
from pathlib import Path

from kvtier.errors import ConfigError, StoreInUseError
from kvtier.forks import heed

#: Of the database and what SQLite keeps next to it; the log and its index have the mode of the database.
MANIFEST = "manifest.sqlite"
LOG = "-wal"
#: Of what `Commits` keeps there. By name it comes behind the log: what copies a folder in that order while a store
#: writes has no file here that is older than the log.
WRITTEN = "-written"
_DATABASE = (MANIFEST, *(MANIFEST + end for end in (LOG, "-shm", "-journal", WRITTEN)))
#: Of the file from which a server derives the salts of its clients: what is saved under these is not found without it.
SECRET = "server.secret"
#: Of the files of chunks, whose numbers SQLite takes. What is named otherwise is never touched: a directory may hold
#: files of others.
_NAME = re.compile(r"(\d{12,18})\.safetensors(\.new)?", re.ASCII)
#: Bytes of the database's path, links resolved, that SQLite takes: 512, of which 8 are for "-journal".
_LONGEST_PATH = 504


class Folder:
    """A directory, locked as long as it is open. The lock ends with the process, however that ends, and whatever it has
    forked.

    The directory itself may be a symbolic link: whoever gives it decides where it is. What a store keeps in it may not,
    nor may its lock and its database be hard links, so that nothing outside is read or written.

    Args:
        directory: made if it is missing, for its owner only.

    Raises:
        ConfigError: it cannot be used, or holds something of the store's names that is not a regular file, or is one of
            another directory too.
        StoreInUseError: another process, or another store, has it open.
    """

    def __init__(self, directory: str | Path) -> None:
        if not isinstance(directory, (str, os.PathLike)):
            raise ConfigError(f"directory={directory!r} is no path: give a string or a Path.")
        # A process may change its working directory while the store is open.
        self.path = Path(directory).absolute()
        self._owner = os.getpid()
        refused = f"directory={str(directory)!r} cannot be used: "
        try:
            is_too_long = len(os.fsencode(os.path.realpath(self.path / MANIFEST))) > _LONGEST_PATH
        except (OSError, ValueError):  # a path that no system takes: said below
            is_too_long = False
        if is_too_long:
            raise ConfigError(
                refused + f"SQLite opens no file whose path has more than {_LONGEST_PATH} bytes, as that of "
                f"{MANIFEST} there has. Give a shorter one."
            )
        try:
            made_now = not self.path.exists()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = io.FileIO(os.fspath(self.path / "lock"), "r+", opener=_open_lock)
        except (OSError, ValueError) as error:  # a path that no system takes, too
            raise ConfigError(refused + f"{error}. Give one that this process may write to.") from error
        # Who drops a store without closing it lets others open the folder.
        self._dropped = weakref.finalize(self, _release, self._held, self._owner)
        heed(self)
        linked = (
            "there is one file with another one, a hard link as `cp -al` makes it: what is saved in one changes "
            "the other. Copy the folder with `kvtier store copy`, and use the copy."
        )
        try:
            if os.fstat(self._held.fileno()).st_nlink > 1:  # before whoever holds the other one is told of
                raise ConfigError(f"{refused}lock {linked}")
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreInUseError(f"{self.path} is open in another store or process. Close that first.") from None
            keep_owner(self._held.fileno(), self.path)
            self._identity = _identity(os.fstat(self._held.fileno()))
            if not self.there():
                raise StoreInUseError(f"{self.path} is being removed by another process. Try again.")
            for name in _DATABASE:
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(self.path / name)
                    if not stat.S_ISREG(found.st_mode):
                        raise ConfigError(refused + f"{name} there is not a regular file. Give another directory.")
                    if found.st_nlink > 1:
                        raise ConfigError(f"{refused}{name} {linked}")
            # SQLite would make it readable for others.
            made = os.open(self.path / MANIFEST, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(made, 0o600)
            finally:
                os.close(made)
            sync_names(self.path)
            if made_now:
                with contextlib.suppress(PermissionError):
                    sync_names(self.path.parent)
        except OSError as error:
            self.close()
            raise ConfigError(refused + f"{error}. Give one that this process may write to.") from error
        except BaseException:
            self.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that opened it: the directory is that one's alone."""
        return os.getpid() != self._owner

    def there(self) -> bool:
        """Whether the directory is still the one that this process locked: it may be removed, and made again by
        others."""
        try:
            return (
                not self.is_inherited
                and _identity(os.stat(self.path / "lock", follow_symlinks=False)) == self._identity
            )
        except OSError:
            return False

    @property
    def is_elsewhere(self) -> bool:
        """Whether the directory was removed, renamed or replaced, as far as this process can say."""
        return not (self.is_inherited or self.there())

    @property
    def left_alone(self) -> str:
        """Why nothing is saved there; "": it is."""
        if self.is_inherited:
            return (
                f"{self.path} is open in the process that this one was forked from, and nothing is saved here. Make "
                "the store in the process that uses it."
            )
        if self.is_elsewhere:
            return f"{self.path} was removed, or replaced, while it was open: nothing is saved. Open it again."
        return ""

    def file(self, number: int) -> Path:
        """Of a chunk."""
        return file_of(self.path, number)

    def files(self) -> tuple[set[int], list[Path]]:
        """The numbers of all chunks that have a file, and files that were not written to their end.

        Raises:
            OSError: the directory cannot be read.
        """
        numbers, rest = set[int](), list[Path]()
        for name in os.listdir(self.path):
            found = _NAME.fullmatch(name)
            if found and not found[2] and _name_of(int(found[1])) == name:
                numbers.add(int(found[1]))
            elif found:
                rest.append(self.path / name)
        return numbers, rest

    def close(self) -> None:
        """Let others open it. Idempotent; where it was cut short, the next call goes on."""
        _release(self._held, self._owner)
        self._dropped.detach()

    def forked(self) -> None:
        """As of `Inherited`: the lock is of the open file, which both processes have. Where the parent is killed, this
        one would keep it as long as it lives."""
        self._dropped.detach()
        with contextlib.suppress(OSError):
            self._held.close()


def file_of(directory: Path, number: int) -> Path:
    """Of a chunk."""
    return directory / _name_of(number)


def _name_of(number: int) -> str:
    return f"{number:012}.safetensors"


def sync_names(directory: Path) -> None:
    """Return when the names in a directory are on the disk: a file that was made or renamed is there after a crash.

    Raises:
        OSError: they are not.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_owner(handle: int, directory: Path) -> None:
    """A file that was made belongs to whom the database does, as with those that SQLite makes: root may put in order
    what is another user's, who reads it then. Whoever may not give it away keeps it."""
    with contextlib.suppress(OSError):
        owner = os.stat(directory / MANIFEST, follow_symlinks=False)
        if os.fstat(handle).st_uid != owner.st_uid:  # not that of this process: a file system may say others
            os.fchown(handle, owner.st_uid, owner.st_gid)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _open_lock(file: str, _: int) -> int:
    # No link is followed: the store would lock, and write, somewhere else.
    return os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _release(held: io.FileIO, owner: int) -> None:
    # A process that is being forked right now shares the lock, and must not end that of its parent. Nor may it keep it
    # when the parent has closed.
    if os.getpid() == owner and not held.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        held.close()
