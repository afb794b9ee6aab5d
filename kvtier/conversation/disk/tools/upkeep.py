"""`Upkeep` of a folder of saved sequences: what nobody refers to is removed, small files are merged, what is damaged is
forgotten. Without the model that it is of, and while no store has it open.

As in `Disk`, a file is whole, and on the disk with its name, before its row is committed, and a row is gone before its
file is: whenever the process ends, what the rows say is there, and files without rows go when the folder is opened.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.conversation.disk.files.files import LARGEST, Damaged, read_tensors, write_tensors
from kvtier.conversation.disk.files.folder import MANIFEST, Folder, sync_names
from kvtier.conversation.disk.files.reserve import Reserve
from kvtier.conversation.disk.ranked import renumbered
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import LONGEST, Manifest, Row
from kvtier.conversation.disk.tools.contents import Contents, check_there, compare, stop_of
from kvtier.errors import ConfigError

#: A number of a chunk beyond this is damage.
_MOST = 10**18
_NOT_MERGED = "some files are not merged. `kvtier store verify` tells what is damaged"


@dataclass(frozen=True)
class Compaction:
    """What merging did.

    Attributes:
        files, merged: files before, and those of them that are part of another one now.
        nbytes, left: bytes of all files and of the manifest, before and after.
        problem: why something was not merged that could have been, or is not given back; "": all is done.
    """

    files: int
    merged: int
    nbytes: int
    left: int
    problem: str = ""


class Upkeep:
    """A folder that nobody else has open.

    Args:
        directory: of a store.

    Raises:
        ConfigError: there is no store's folder, or it cannot be used.
        StoreInUseError: a store has it open.
    """

    def __init__(self, directory: str | Path) -> None:
        check_there(Path(directory).absolute())
        self._next, self._merged, self._problem = 1, 0, ""
        # By the number of a chunk that was replaced: its digest, and what it is part of.
        self._became: dict[int, tuple[bytes, Row]] = {}
        self._folder = Folder(directory)
        try:
            self._manifest = Manifest(self._folder.path / MANIFEST, None, reserve=Reserve(self._folder.path))
        except BaseException:
            self._folder.close()
            raise

    def contents(self) -> Contents:
        """What is there.

        Raises:
            ConfigError: it cannot be read.
        """
        return Contents.of(self._manifest)

    # Forget

    def drop_conversation(self, name: str) -> None:
        """Forget a conversation. What is saved of its tokens stays, for those that begin the same.

        Raises:
            ConfigError: there is none of that name, or it could not be removed.
        """
        if name not in self.contents().conversations:
            raise ConfigError(f"{self._folder.path} has no conversation {name!r}.")
        with self._telling():
            ConversationRows(self._manifest).drop(name)

    def collect(self) -> tuple[int, int]:
        """Remove what no conversation refers to, and files that no row names. Returns files and bytes.

        Raises:
            ConfigError: the folder cannot be read or written.
        """
        found = self.contents()
        gone = unreferred(found)
        files, nbytes = self._strays(found)
        with self._telling(), self._manifest.removal():
            remove_rows(self._manifest, found, gone)
        self._unlink(gone)
        return files + len(gone), nbytes + sum(found.rows[n].nbytes for n in gone)

    def drop_computed_by(self, version: str) -> tuple[int, int]:
        """Remove the keys and values that a version of a model's code has computed: see `Contents.computed_by`. What
        conversations are stays. Returns files and bytes.

        Raises:
            ConfigError: there are none, or they could not be removed.
        """
        found = self.contents()
        gone = found.chunks_of(version)
        with self._telling(), self._manifest.removal():
            remove_rows(self._manifest, found, gone)
        self._unlink(gone)
        return len(gone), sum(found.rows[n].nbytes for n in gone)

    def repair(self) -> int:
        """Forget every chunk that is not what was written, with what continues it; of every such conversation what
        follows the damage; and what stores have set aside of these. Returns how many. What cannot be read now stays.

        Raises:
            ConfigError: the folder cannot be read or written.
        """
        found = self.contents()
        rows = [x.number for x in found.damage if x.number is not None]
        bad = [x for x in (compare(found.path, row) for row in found.rows.values()) if x is not None and x.lasting]
        below = with_below(found, [x.number for x in bad if x.number is not None])
        with self._telling(), self._manifest.removal():
            remove_rows(self._manifest, found, [*rows, *below])
            ConversationRows(self._manifest).drop_damaged()
        self._unlink([*rows, *below])
        return len(below) + len(found.damage)

    def _strays(self, found: Contents) -> tuple[int, int]:
        """Remove files that no row names."""
        with self._telling():
            numbers, rest = self._folder.files()
        damaged = {x.number for x in found.damage}
        rest += [self._folder.file(n) for n in numbers if n not in found.rows and n not in damaged]
        nbytes = 0
        for file in rest:
            with contextlib.suppress(OSError):
                size = os.lstat(file).st_size
                os.unlink(file)
                nbytes += size
        return len(rest), nbytes

    def _unlink(self, numbers: Iterable[int]) -> None:
        """Remove files of chunks that have no row any more; one that stays goes when the folder is opened."""
        for number in numbers:
            with contextlib.suppress(OSError):
                os.unlink(self._folder.file(number))

    # Merge

    def compact(self, largest: int = LARGEST) -> Compaction:
        """Merge chunks that continue each other, and that nobody else continues, and give back what the database does
        not use.

        Chunks with copies of states are left as they are: what is at their ends is there once. So is a chunk whose end
        was left for another continuation: both are kept.

        Args:
            largest: bytes of a merged file, at the most.

        Raises:
            ConfigError: the folder cannot be read or written. What was saved is there.
        """
        found = self.contents()
        before, files = self._nbytes(found), len(found.rows)
        self._merged, self._problem = 0, ""
        with self._telling():
            numbers, _ = self._folder.files()
        damaged = [x.number for x in found.damage if x.number is not None and x.number < _MOST]
        self._next = max([0, *numbers, *found.rows, *damaged]) + 1
        # From the ends: what continues a run gets other numbers, and is the less the more of it is merged.
        for run in reversed(_runs(found)):
            for group in self._groups(found, run, largest):
                try:
                    self._replace(found, group)
                except (Damaged, OSError, MemoryError) as error:
                    self._problem = f"{error}: {_NOT_MERGED}"
        if self._became:  # where it is cut short before this, stores read what conversations are instead
            with self._telling(), self._manifest.transaction():
                ConversationRows(self._manifest).change_ranks(lambda said: renumbered(said, self._now))
        try:
            self._manifest.vacuum()
        except (OSError, sqlite3.Error, MemoryError) as error:
            self._problem = self._problem or f"{error}: the database has not given back what it does not use"
        return Compaction(files, self._merged, before, self._nbytes(found), self._problem)

    def _groups(self, found: Contents, run: Sequence[int], largest: int) -> Iterator[list[int]]:
        """The chunks of a run that come to one file each, from its end."""
        group, nbytes, tokens = list[int](), 0, 0
        for number in reversed(run):
            row = found.rows[number]
            mergeable = self._mergeable(row)
            if not mergeable or nbytes + row.nbytes > largest or tokens + len(row.ids) > LONGEST // 2:
                if len(group) > 1:
                    yield group
                group, nbytes, tokens = [], 0, 0
            if mergeable:
                group, nbytes, tokens = [number, *group], nbytes + row.nbytes, tokens + len(row.ids)
        if len(group) > 1:
            yield group

    def _mergeable(self, row: Row) -> bool:
        """Whether a chunk is keys and values only."""
        try:
            tensors, said = read_tensors(self._folder.file(row.number), row.nbytes, row.checksum)
        except (Damaged, OSError, MemoryError) as error:
            self._problem = f"{error}: {_NOT_MERGED}"
            return False
        return not said and all(name.startswith(("k.", "v.")) for name in tensors)

    def _replace(self, found: Contents, group: Sequence[int]) -> None:
        """Put one chunk in the place of several. What continues them gets new rows, whose digests are of the new one,
        and new numbers, for parents come first; its files get second names until the rows are committed."""
        rows = [found.rows[n] for n in group]
        parts = [read_tensors(self._folder.file(x.number), x.nbytes, x.checksum)[0] for x in rows]
        if any(_kind(part) != _kind(parts[0]) for part in parts):
            return
        tensors = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        below = list(found.children.get(group[-1], ()))
        for number in below:
            below += found.children.get(number, ())
        made, new = list[Path](), dict[int, Row]()
        try:
            number = self._take(made)
            nbytes, sums = write_tensors(self._folder.file(number), tensors, "")
            first, ids = rows[0], b"".join(x.ids for x in rows)
            new[group[-1]] = Row.of(number, first.key, _above(found.rows, first.parent), first.start, ids, nbytes, sums)
            for old in below:
                row, number = found.rows[old], self._take(made)
                assert row.parent is not None
                os.link(self._folder.file(old), self._folder.file(number))
                above = new[row.parent].number, new[row.parent].digest
                new[old] = Row.of(number, row.key, above, row.start, row.ids, row.nbytes, row.checksum)
            sync_names(self._folder.path)
        except BaseException:
            for file in made:
                with contextlib.suppress(OSError):
                    os.unlink(file)
            raise
        gone = [*group, *below]
        used = {old: found.used[old] for old in new}
        used[group[-1]] = max(found.used[n] for n in group)
        # A commit that fails may have been done: all files stay, and those without rows go when the folder is opened.
        with self._telling(), self._manifest.transaction():
            self._manifest.remove(gone)
            for old, row in new.items():
                self._manifest.add(row, used[old])
        self._became |= {n: (found.rows[n].digest, new[group[-1]]) for n in group}
        self._became |= {n: (found.rows[n].digest, new[n]) for n in below}
        self._unlink(gone)
        _renumber(found, group, new, used)
        self._merged += len(group)

    def _now(self, number: int, digest: str) -> tuple[int, str]:
        """What a chunk of this number and digest is part of, which may have been replaced several times."""
        while number in self._became and self._became[number][0].hex() == digest:
            row = self._became[number][1]
            number, digest = row.number, row.digest.hex()
        return number, digest

    def _take(self, made: list[Path]) -> int:
        """A number that no chunk has had."""
        number, self._next = self._next, self._next + 1
        made.append(self._folder.file(number))
        return number

    def _nbytes(self, found: Contents) -> int:
        sizes = 0
        for name in (MANIFEST, f"{MANIFEST}-wal"):
            with contextlib.suppress(OSError):
                sizes += os.stat(self._folder.path / name).st_size
        return sizes + found.nbytes

    # Life

    def close(self) -> None:
        """Let stores open the folder. Idempotent."""
        self._manifest.close()
        self._folder.close()

    def __enter__(self) -> Upkeep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{self._folder.path} cannot be changed: {error}. Make sure that there is room and that it may be "
                "written. What was saved is there."
            ) from error


def remove_rows(manifest: Manifest, found: Contents, gone: Iterable[int]) -> None:
    """Remove rows of chunks. When their parents were used, the manifest may have from these only: it is noted."""
    numbers = set(gone)
    parents = {row.parent for n in numbers if (row := found.rows.get(n)) is not None and row.parent is not None}
    manifest.remove(numbers)
    manifest.use({n: found.used[n] for n in parents - numbers})


def with_below(found: Contents, numbers: Iterable[int]) -> list[int]:
    """Chunks, and all that continue them."""
    gone = list(numbers)
    for number in gone:
        gone += found.children.get(number, ())
    return list(dict.fromkeys(gone))


def unreferred(found: Contents) -> list[int]:
    """The chunks that no conversation refers to."""
    needed = set[int]().union(*found.referred().values())
    return [n for n in found.rows if n not in needed]


def _runs(found: Contents) -> list[list[int]]:
    """Chunks of which each is continued at its end, by the next one only; runs of two and more, what begins first
    first."""
    runs = list[list[int]]()
    at: dict[int, list[int]] = {}
    for number, row in found.rows.items():
        run = at.pop(row.parent, None) if row.parent is not None else None
        only = row.parent is not None and len(found.children[row.parent]) == 1
        if run is not None and only and stop_of(found.rows[run[-1]]) == row.start:
            run.append(number)
        else:
            runs.append(run := [number])
        at[number] = run
    return [run for run in runs if len(run) > 1]


def _kind(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """What tensors that follow each other agree in."""
    return {name: (x.dtype, x.shape[:1], x.shape[2:]) for name, x in tensors.items()}


def _above(rows: dict[int, Row], parent: int | None) -> tuple[int, bytes] | None:
    return None if parent is None else (parent, rows[parent].digest)


def _renumber(found: Contents, group: Sequence[int], new: dict[int, Row], used: dict[int, int]) -> None:
    """Let contents say what the rows say now."""
    first = found.rows[group[0]]
    children = {new[n].number: [new[x].number for x in found.children.get(n, ())] for n in new}
    for number in [*group, *new]:
        found.rows.pop(number, None)
        found.used.pop(number, None)
        found.children.pop(number, None)
    for old, row in new.items():
        found.rows[row.number], found.used[row.number] = row, used[old]
    found.children |= {number: below for number, below in children.items() if below}
    if first.parent is not None:
        siblings = found.children[first.parent]
        siblings[siblings.index(group[0])] = new[group[-1]].number
