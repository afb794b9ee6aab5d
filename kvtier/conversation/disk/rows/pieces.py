"""Lists of a conversation, saved in pieces: ids, messages and ends grow at their end, and a turn writes what it adds.

What was saved is kept next to the conversation (`Written`), so that a save reads, serialises and digests nothing of the
history again: it compares the lists with that, in memory.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: What of a conversation grows with each turn.
GROWING = ("ids", "messages", "ends")
#: Characters from which a piece is final. A shorter one is written again with what is added behind it, unless that is
#: much less: so their number stays small.
_FINAL = 2**16
#: Characters of a piece, about, where much is saved at once.
_LARGE = 2**18


class Piece(NamedTuple):
    """Items of a list that are one row.

    Attributes:
        start, stop: which items.
        size: characters of their JSON.
        digest: of the row's text, in hexadecimal.
        exact: whether it says all that equals these items: whole numbers and strings. In Python 1, 1.0 and True are
            equal, so that other items are compared as JSON.
    """

    start: int
    stop: int
    size: int
    digest: str
    exact: bool


class Listed:
    """What is saved of a list.

    Attributes:
        pieces: that it is saved in, in order.
        items: what these say; a copy, of which nobody else has a part that can be changed.
    """

    __slots__ = ("items", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.items: list[Any] = []

    def add(self, name: bytes, field: str, text: str, items: list[Any]) -> None:
        """These items are saved behind those before, as this text."""
        kinds, start = set(map(type, items)), len(self.items)
        self.items += items if kinds <= {int} else copy.deepcopy(items)
        sums = digest(name, field + text).hex()
        self.pieces.append(Piece(start, len(self.items), len(text), sums, _is_exact(kinds, items)))

    def cut(self, values: list[Any]) -> None:
        """Leave out what a list does not say, and what follows that."""
        mine = values[: len(self.items)]
        if mine == self.items and all(x.exact for x in self.pieces):
            if mine and type(mine[0]) is int:
                self.items = mine  # the numbers are held once, by both
            return
        alike = list(itertools.takewhile(lambda x: self._is_said(x, mine), self.pieces))
        self.pieces = alike
        del self.items[alike[-1].stop if alike else 0 :]

    def _is_said(self, piece: Piece, values: list[Any]) -> bool:
        mine, saved = (x[piece.start : piece.stop] for x in (values, self.items))
        return mine == saved and (piece.exact or json.dumps(mine) == json.dumps(saved))

    def pop(self) -> Piece:
        """Leave out the last piece."""
        last = self.pieces.pop()
        del self.items[last.start :]
        return last


@dataclass(slots=True)
class Written:
    """What is saved of a conversation, as far as this process has written or read it.

    Attributes:
        digest: of the conversation's row; None: nothing is known.
        lists: each of its lists.
        was_saved: whether it was saved once: then something of it is on the disk, also where a later save has failed.
    """

    digest: bytes | None = None
    lists: dict[str, Listed] = field(default_factory=dict)
    was_saved: bool = False


def digest(name: bytes, text: str) -> bytes:
    """Of something that is saved under a name."""
    return hashlib.blake2b(repr((name, text)).encode(), digest_size=16).digest()


def save_list(db: sqlite3.Connection, name: bytes, field: str, values: list[Any], known: Listed | None) -> Listed:
    """Save a list in place of what was saved of it. What is saved of it then.

    Args:
        known: what was saved of it, which is not valid any more. None: nothing is known, and it is read.

    Raises:
        sqlite3.Error: it was not saved. TypeError, ValueError, RecursionError: JSON does not take it.
    """
    if known is not None and [(x.start, x.stop) for x in known.pieces] == _spans(db, name, field):
        known.cut(values)
    else:
        known = _read(db, name, field, values)
    at = len(known.items)
    added = len(json.dumps(values[at:])) if at < len(values) else 0
    while added and known.pieces and known.pieces[-1].size < min(2 * added, _FINAL):
        last = known.pop()
        at, added = last.start, added + last.size
    db.execute("DELETE FROM pieces WHERE name = ? AND field = ? AND start >= ?", (name, field, at))
    # What damage to a piece costs is all that follows, so that one that is very long is parted.
    each = -(-(len(values) - at) // (added // _LARGE + 1))
    while at < len(values):
        items = values[at : at + each]
        text = json.dumps(items)
        known.add(name, field, text, items)
        db.execute("INSERT INTO pieces VALUES (?, ?, ?, ?, ?)", (name, field, at, at + len(items), text))
        at += len(items)
    return known


def read_list(
    db: sqlite3.Connection, name: bytes, field: str, digests: list[str] | None, whole: str | None
) -> tuple[list[Any], Listed, bool, bool]:
    """A list, up to the first piece that is damaged.

    Args:
        digests: of its pieces, as they were written.
        whole: of all of them, where folders of before have no other.

    Returns:
        Its items, the same as what is saved, whether that is all that was written, and whether something is damaged.

    Raises:
        sqlite3.Error, ValueError, RecursionError: the database is damaged.
    """
    texts = [text for _, _, text in _rows(db, name, field)]
    sums = [digest(name, field + text).hex() for text in texts]
    if digests is None:  # nobody knows what of it is whole
        digests = sums if digest(name, field + "".join(texts)).hex() == whole else ["damaged"]
    alike = len(list(itertools.takewhile(lambda x: x[0] == x[1], zip(sums, digests, strict=False))))
    found, listed = list[Any](), Listed()
    for text in texts[:alike]:
        items = json.loads(text)
        listed.add(name, field, text, items)
        found += items
    return found, listed, alike == len(digests), sums != digests


def _read(db: sqlite3.Connection, name: bytes, field: str, values: list[Any]) -> Listed:
    """A list as it is saved, up to the first piece that is not what the list says."""
    found = Listed()
    for start, stop, text in _rows(db, name, field):
        items = values[start:stop]
        if start != len(found.items) or not start < stop <= len(values) or json.dumps(items) != text:
            break
        found.add(name, field, text, items)
    return found


def _rows(db: sqlite3.Connection, name: bytes, field: str) -> list[tuple[int, int, str]]:
    """What is saved of a list, up to the first row that nobody has written."""
    select = "SELECT start, stop, text FROM pieces WHERE name = ? AND field = ? ORDER BY start"
    found = db.execute(select, (name, field)).fetchall()
    return list(itertools.takewhile(lambda x: tuple(map(type, x)) == (int, int, str), found))


def _spans(db: sqlite3.Connection, name: bytes, field: str) -> list[tuple[int, int]]:
    """Where the pieces of a list begin and end. What they say is not read."""
    return db.execute(
        "SELECT start, stop FROM pieces WHERE name = ? AND field = ? ORDER BY start", (name, field)
    ).fetchall()


def _is_exact(kinds: set[type], items: list[Any]) -> bool:
    """See `Piece`."""
    if kinds == {dict}:
        return all(type(key) is type(value) is str for x in items for key, value in x.items())
    if kinds <= {list, tuple}:
        return all(type(value) is int for x in items for value in x)
    return kinds <= {int}
