"""What a folder of saved sequences holds, read without the model that it is of, and without changing it.

Another process may have the folder open meanwhile: SQLite's log lets readers see one moment of the database, and a file
is there before its row and goes after it. So a file that is missing is damage only where its row is still there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.conversation.disk.chunks import Chunks
from kvtier.conversation.disk.files.files import Damaged, read_tensors
from kvtier.conversation.disk.files.folder import MANIFEST, file_of
from kvtier.conversation.disk.files.reserve import Reserve
from kvtier.conversation.disk.keys import computed_by
from kvtier.conversation.disk.rows.conversations import ConversationRows, ids_of
from kvtier.conversation.disk.rows.manifest import Manifest, Row
from kvtier.conversation.index import WIDTH
from kvtier.errors import ConfigError

#: What is damaged where it lacks commits.
DATABASE = "the database"


@dataclass(frozen=True)
class Damage:
    """Something in a folder that is not what was written.

    Attributes:
        number: of a chunk; None: it is something else.
        why: in a sentence.
        lasting: whether it stays so; else it cannot be read now.
        what: it is that has no number.
    """

    number: int | None
    why: str
    lasting: bool = True
    what: str = "a conversation"


@dataclass
class Contents:
    """What a folder holds.

    Attributes:
        path: of the folder.
        about: the model that it is of, and the version of its layout.
        rows: the chunks that are what was written, by number, parents first.
        used: when each was used last, counted: a parent no earlier than what continues it.
        children: numbers of the chunks that continue one.
        conversations: the state of each, by name, in the order of their making.
        damage: rows that are not what was written, or that continue such a one, and what the database lacks. Files are
            compared by `verify`.
    """

    path: Path
    about: dict[str, str]
    rows: dict[int, Row] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    children: dict[int, list[int]] = field(default_factory=dict)
    conversations: dict[str, dict[str, Any]] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: Manifest) -> Contents:
        """What an open manifest says.

        Raises:
            ConfigError: it cannot be read.
        """
        rows = ConversationRows(manifest)
        try:
            with manifest.reading():
                found = cls(manifest.file.parent, manifest.about())
                for number, row, used in manifest.rows():
                    if row is None or not _fits(row, found.rows):
                        found.damage.append(Damage(number, "its row is not what was written, or continues one like it"))
                        continue
                    found.rows[number], found.used[number] = row, used
                    if row.parent is not None:
                        found.children.setdefault(row.parent, []).append(number)
                for number, row in reversed(found.rows.items()):
                    if row.parent is not None:
                        found.used[row.parent] = max(found.used[row.parent], found.used[number])
                for each in rows.all():
                    if each is None:
                        found.damage.append(Damage(None, "a conversation is not what was written"))
                    else:
                        found.conversations[each[0]] = each[1]
                for _ in range(rows.aside()):
                    found.damage.append(Damage(None, "a conversation was damaged, and what was saved is kept aside"))
        except (sqlite3.Error, ValueError, RecursionError) as error:
            raise ConfigError(f"{manifest.file} cannot be read: {error}.") from error
        if manifest.missing:
            found.damage.append(Damage(None, manifest.missing, what=DATABASE))
        return found

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(row.nbytes for row in self.rows.values())

    def computed_by(self) -> dict[str, list[int]]:
        """The chunks that each version of a model's code has computed."""
        found: dict[str, list[int]] = {}
        for number, row in self.rows.items():
            found.setdefault(computed_by(row.key), []).append(number)
        return found

    def chunks_of(self, version: str) -> list[int]:
        """The chunks that one of these has computed.

        Raises:
            ConfigError: there are none.
        """
        found = self.computed_by()
        if version not in found:
            raise ConfigError(
                f"{self.path} has no keys and values that were computed by {version!r}, but by {', '.join(found)}."
                if found
                else f"{self.path} has no keys and values."
            )
        return found[version]

    def chain(self, number: int) -> list[int]:
        """The chunks of a sequence, the first one first."""
        found = [number]
        while (above := self.rows[found[-1]].parent) is not None:
            found.append(above)
        return found[::-1]

    def referred(self) -> dict[str, set[int]]:
        """For each conversation the chunks that its tokens are in, at least one of them in each.

        Which adapters and which dtype of autocast a conversation is used with is not saved: chunks of any are counted,
        where the salt is its own.
        """
        chunks = Chunks()
        for row in self.rows.values():
            chunks.add(row, None if row.parent is None else chunks.get(row.parent))
        asked = [(state.get("salt"), ids_of(state)) for state in self.conversations.values()]
        return dict(zip(self.conversations, chunks.under(asked), strict=True))


def stop_of(row: Row) -> int:
    """The token behind the last one of a chunk."""
    return row.start + len(row.ids) // WIDTH


@contextlib.contextmanager
def opened(directory: str | Path) -> Iterator[Manifest]:
    """The manifest of a folder, to be read.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    path = Path(directory).absolute()
    check_there(path)
    try:
        manifest = Manifest(path / MANIFEST, None, read_only=True)
    except ConfigError:  # on a disk that is full, SQLite cannot make the index that it reads a log by
        if not Reserve(path).settle():
            raise
        manifest = Manifest(path / MANIFEST, None, read_only=True)
    try:
        yield manifest
    finally:
        manifest.close()


def check_there(path: Path) -> None:
    """Whether a store has been there: reading makes no folder.

    Raises:
        ConfigError: it has not.
    """
    try:
        if stat.S_ISREG(os.lstat(path / MANIFEST).st_mode):
            return
        why = f"{MANIFEST} there is not a regular file"
    except FileNotFoundError:
        why = f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{path} is not a folder of saved sequences: {why}. Give the directory of a store.")


def contents(directory: str | Path) -> Contents:
    """What a folder holds, now.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    with opened(directory) as manifest:
        return Contents.of(manifest)


def verify(directory: str | Path) -> tuple[int, int, list[Damage]]:
    """Read every file of a folder and compare every checksum.

    Returns:
        Files and bytes that were compared, and what is damaged or cannot be read now.

    Raises:
        ConfigError: there is no such folder, or its manifest cannot be read.
    """
    found = contents(directory)
    suspects = [row for row in found.rows.values() if compare(found.path, row) is not None]
    damage = list(found.damage)
    if suspects:  # a store that has the folder open may have removed them since
        now = contents(directory).rows
        again = [compare(found.path, row) for row in suspects if now.get(row.number) == row]
        damage += [x for x in again if x is not None]
    return len(found.rows), found.nbytes, damage


def compare(folder: Path, row: Row) -> Damage | None:
    """What is wrong with the file of a chunk; None: it is what was written."""
    try:
        tensors, _ = read_tensors(file_of(folder, row.number), row.nbytes, row.checksum)
    except Damaged as error:
        return Damage(row.number, str(error))
    except (OSError, MemoryError) as error:
        return Damage(row.number, f"it cannot be read now: {error}", lasting=False)
    tokens = len(row.ids) // WIDTH
    if any(x.dim() < 2 or x.shape[1] != tokens for name, x in tensors.items() if name.startswith(("k.", "v."))):
        return Damage(row.number, f"it does not hold {tokens} tokens")
    return None


def _fits(row: Row, rows: Mapping[int, Row]) -> bool:
    """Whether a row can be, given what it continues."""
    if len(row.ids) % WIDTH or row.nbytes < 0:
        return False
    if row.parent is None:
        return not row.start and bool(row.ids)
    above = rows.get(row.parent)
    return above is not None and above.start < row.start <= stop_of(above)
