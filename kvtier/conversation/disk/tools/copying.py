"""A consistent copy of a folder of saved sequences, also while a store has it open and goes on writing.

Nothing is locked, and nothing is written in the folder. The manifest is copied as it is at one moment, then the files
that its rows name. A file never changes, and has lost its row before it is removed: where one is missing, a later
manifest does not name it. So manifests, and the files that are new in them, are copied until nothing is missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.conversation.disk.files.files import Buffer, Damaged, copy_file
from kvtier.conversation.disk.files.folder import MANIFEST, SECRET, WRITTEN, file_of, sync_names
from kvtier.conversation.disk.rows.manifest import Manifest, Row
from kvtier.conversation.disk.tools.contents import DATABASE, Contents, Damage, check_there, opened
from kvtier.conversation.disk.tools.upkeep import remove_rows, with_below
from kvtier.errors import ConfigError

#: Manifests that are copied, at the most: files that are removed faster than that are left out.
_MOST = 16
#: The manifest of a copy that is not whole: nobody takes a folder with this one for a store's.
_UNFINISHED = f"{MANIFEST}.new"


@dataclass(frozen=True)
class Copied:
    """What a copy holds.

    Attributes:
        conversations, files: in it.
        nbytes: of these files and of the manifest.
        left_out: files that rows name and that are not in it: they are damaged, or continue one that is, or were
            removed faster than they were copied.
        damage: rows and files that are not what was written, and are left out, and what the database lacks.
            Conversations that are damaged, or kept aside, are copied as they are.
    """

    conversations: int
    files: int
    nbytes: int
    left_out: int
    damage: list[Damage]


def copy_folder(directory: str | Path, to: str | Path) -> Copied:
    """Copy a folder. The copy has its name once it is whole and on the disk, and is for its owner only.

    Args:
        to: a folder that is not there yet, or is empty.

    Raises:
        ConfigError: there is no such folder, or it cannot be copied to there. There is no copy then, or a whole one
            whose name may not be on the disk.
    """
    source = Path(directory).absolute()
    check_there(source)
    try:
        target, within = (Path(os.path.realpath(x)) for x in (to, source))
        if within == target or within in target.parents:
            raise ValueError(f"{target} is within the folder that is copied")
        with _next_to(target) as made:
            copied = _copy(source, made)
            with contextlib.suppress(FileNotFoundError):
                _copy_plain(source / SECRET, made / SECRET)
            _sync(made / _UNFINISHED)
            os.rename(made / _UNFINISHED, made / MANIFEST)
            sync_names(made)
            os.rename(made, target)
        sync_names(target.parent)
    except (OSError, ValueError, sqlite3.Error, MemoryError) as error:
        why = str(error).removesuffix(".")  # of a manifest it is a sentence
        raise ConfigError(
            f"{source} cannot be copied to {to}: {why}. Give a folder that is not there yet, where there is room."
        ) from error
    return copied


@contextlib.contextmanager
def _next_to(target: Path) -> Iterator[Path]:
    """A folder for a copy, under a name of its own; it is removed where something fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # what cannot be replaced is told of before anything is copied
        if os.listdir(target) or os.path.ismount(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(target))
    made = Path(tempfile.mkdtemp(prefix=".kvtier-copy-", dir=target.parent))
    try:
        yield made
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _copy(source: Path, made: Path) -> Copied:
    """Copy the manifest, and the files that its rows name. Their names are not on the disk yet."""
    copied, lacking, why, buffer = dict[int, Row](), dict[int, Row](), dict[int, str](), Buffer()
    for _ in range(_MOST):
        found = _copy_manifest(source, made / _UNFINISHED)
        before, lacking = lacking, {}
        for number, row in found.rows.items():
            if copied.get(number) == row:
                continue
            try:
                copy_file(file_of(source, number), file_of(made, number), row.nbytes, row.checksum, buffer)
            except Damaged as error:
                lacking[number], why[number] = row, str(error)
            else:
                copied[number] = row
        if lacking.items() <= before.items():
            break
    # A row that is there after its file was looked for has lost it; others were removed with theirs.
    bad = [x for x in found.damage if x.number is not None]
    damage = [*bad, *(Damage(n, why[n]) for n, row in lacking.items() if before.get(n) == row)]
    damage += [x for x in found.damage if x.what == DATABASE]
    gone = [x.number for x in bad if x.number is not None] + with_below(found, lacking)
    if gone:
        _drop(made / _UNFINISHED, found, gone)
    kept = found.rows.keys() - set(gone)
    for number in copied.keys() - kept:
        file_of(made, number).unlink()
    nbytes = sum(found.rows[n].nbytes for n in kept) + (made / _UNFINISHED).stat().st_size
    return Copied(len(found.conversations), len(kept), nbytes, len(gone), damage)


def _copy_manifest(source: Path, to: Path) -> Contents:
    """Copy the manifest as it is now, in place of one of before. What it says."""
    to.unlink(missing_ok=True)
    with opened(source) as manifest:
        manifest.copy(to)
    copied = Manifest(to, None, read_only=True)
    copied.missing = manifest.missing
    try:
        return Contents.of(copied)
    finally:
        copied.close()


def _drop(file: Path, found: Contents, gone: Iterable[int]) -> None:
    manifest = Manifest(file, None)
    try:
        with manifest.transaction():
            remove_rows(manifest, found, gone)
    finally:
        manifest.close()
        file.with_name(file.name + WRITTEN).unlink(missing_ok=True)  # of a name that the database has for now only


def _copy_plain(file: Path, to: Path) -> None:
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as source, open(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        os.fsync(copy.fileno())


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
