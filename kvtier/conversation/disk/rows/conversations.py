"""`ConversationRows`: what conversations are, in the database of a folder. Each is a row, and pieces of its lists.

What is damaged is not used: of a conversation what precedes the damage is left, and what was saved is set aside, for it
cannot be computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.disk.rows.pieces import GROWING, Listed, Written, read_list, save_list
from kvtier.conversation.disk.rows.pieces import digest as digest_of
from kvtier.conversation.index import packed

# What is there already is not written again: nobody waits for a disk then. And it keeps its place in the order.
_SAVE_CONVERSATION = (
    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET ranked = excluded.ranked, "
    "mark = excluded.mark, state = excluded.state, digest = excluded.digest WHERE (ranked, mark, state, digest) "
    "IS NOT (excluded.ranked, excluded.mark, excluded.state, excluded.digest)"
)
#: Of a rank that the state tells. Folders of before have no other.
UNREAD = 1


class Noted(Protocol):
    """See `order.Tips`."""

    @property
    def said(self) -> str | int | None:
        """The rank, and where the history ends; `UNREAD`: the next opening reads what the conversation is; None: the
        row is not of it."""


class _Read(NamedTuple):
    """What is saved of a conversation.

    Attributes:
        state: what it is: of a list that is damaged, what precedes the damage.
        lists: what is saved of its lists.
        cut: the lists whose ends are lost.
        damaged: whether some piece is not what was written.
    """

    state: dict[str, Any]
    lists: dict[str, Listed]
    cut: set[str]
    damaged: bool


class ConversationRows:
    """The conversations of a folder. Not for several threads at once.

    Args:
        manifest: of the folder.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._db = manifest.db

    def save(self, name: str, state: Mapping[str, Any], rank: str = "", written: Written | None = None) -> None:
        """Save what a conversation is, in place of what it was, and its rank. Of the lists that grow at their end, what
        was added is written.

        Args:
            rank: see `Ranked.said`; "": that of all others.
            written: what is saved of it, and what is when this returns; without it, all that is saved is read.

        Raises:
            sqlite3.Error: it was not saved. TypeError, ValueError, RecursionError: JSON does not take it.
        """
        packed, written = _name(name), Written() if written is None else written
        # Until the end nobody knows what is saved: a commit that fails may have been done.
        was, written.digest = written.digest, None
        lists, written.lists = written.lists, {}
        with self._manifest.transaction():
            select = "SELECT name, ranked, mark, digest FROM conversations WHERE name = ?"
            *there, now = self._db.execute(select, (packed,)).fetchone() or (None, None)
            if there[0] is not None and not _marked(*there) and not self._is_of(packed):  # it is not listed
                self._set_aside(packed)
            known = lists if was is not None and was == now else {}
            digest, lists = self._write(packed, state, rank or 0, known)
        written.was_saved, written.digest, written.lists = True, digest, lists

    def _write(
        self, name: bytes, state: Mapping[str, Any], ranked: str | int, known: Mapping[str, Listed]
    ) -> tuple[bytes, dict[str, Listed]]:
        """Returns the digest of the state, and what is saved of the lists."""
        lists = {x: state[x] for x in GROWING if isinstance(state.get(x), list)}
        saved = {x: save_list(self._db, name, x, values, known.get(x)) for x, values in lists.items()}
        digests = {x: [piece.digest for piece in listed.pieces] for x, listed in saved.items()}
        text = json.dumps({x: value for x, value in state.items() if x not in lists} | {"digests": digests})
        row = (name, ranked, digest_of(name, f"{ranked}"), text, digest_of(name, text))
        self._db.execute(_SAVE_CONVERSATION, row)
        return row[-1], saved

    def note(self, moved: Mapping[str, Noted]) -> None:
        """Note where the saved history of conversations ends, if their rows are of these. Within a transaction, with
        what has changed that.

        Raises:
            sqlite3.Error: it was not noted.
        """
        self._rank((name, x.said) for name, x in moved.items() if x.said is not None)

    def rank(self, ranks: Mapping[str, str]) -> None:
        """Note the ranks of conversations whose rows do not have them, see `save`.

        Raises:
            sqlite3.Error: they were not noted.
        """
        with self._manifest.transaction():
            self._rank((name, rank or 0) for name, rank in ranks.items())

    def change_ranks(self, change: Callable[[str], str]) -> None:
        """Let every rank say what this makes of it, see `save`. Within a transaction.

        Raises:
            sqlite3.Error: they were not changed.
        """
        ranks = [(each[0], rank) for each in self.names() if each is not None and (rank := each[1])]
        self._rank((name, new) for name, rank in ranks if (new := change(rank)) != rank)

    def _rank(self, ranks: Iterable[tuple[str, str | int]]) -> None:
        values = [(ranked, digest_of(_name(name), f"{ranked}"), _name(name)) for name, ranked in ranks]
        # What is there already is not written again, as above.
        update = "UPDATE conversations SET ranked = ?1, mark = ?2 WHERE name = ?3 AND (ranked, mark) IS NOT (?1, ?2)"
        self._db.executemany(update, values)

    def _said(self, name: Any, state: Any, digest: Any) -> _Read | None:
        """What a row and its pieces say; None: the row is not what was written."""
        if type(name) is not bytes or type(state) is not str or digest_of(name, state) != digest:
            return None
        found: dict[str, Any] = json.loads(state)
        digests, wholes = found.pop("digests", {}), found.pop("pieces", {})
        read = _Read(found, {}, set(), False)
        for field in wholes | digests:
            items, listed, is_whole, is_damaged = read_list(
                self._db, name, field, digests.get(field), wholes.get(field)
            )
            found[field], read.lists[field] = items, listed
            if not is_whole:
                read.cut.add(field)
            read = read._replace(damaged=read.damaged or is_damaged)
        return read

    def _state(self, name: Any, state: Any, digest: Any, written: Written | None = None) -> dict[str, Any] | None:
        """What a row and its pieces say; None: that is not what was written."""
        read = self._said(name, state, digest)
        if read is None or read.damaged:
            return None
        if written is not None:
            written.digest, written.lists = digest, read.lists
        return read.state

    def mend(self, name: str) -> dict[str, Any] | None:
        """Set a conversation that is damaged aside, as it is, and save in its place what of it is whole: of each list
        what precedes the first piece that is damaged. What that is; None: nothing, or there is no such conversation.

        Raises:
            sqlite3.Error, ValueError, RecursionError: it was not set aside, and is what it was.
        """
        packed = _name(name)
        with self._manifest.transaction():
            select = "SELECT ranked, state, digest FROM conversations WHERE name = ?"
            for ranked, state, digest in self._db.execute(select, (packed,)).fetchall():
                left = self._left(packed, state, digest)
                self._set_aside(packed)
                for table in ("conversations", "pieces"):
                    self._db.execute(f"DELETE FROM {table} WHERE name = ?", (packed,))
                if left is not None:
                    self._write(packed, left, 0 if ranked == 0 else UNREAD, {})
                return left
        return None

    def _set_aside(self, name: bytes) -> None:
        (number,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM aside").fetchone()
        for source in ("NULL, NULL, NULL, state FROM conversations", "field, start, stop, text FROM pieces"):
            self._db.execute(f"INSERT INTO aside SELECT ?, name, {source} WHERE name = ?", (number, name))

    def _left(self, name: Any, state: Any, digest: Any) -> dict[str, Any] | None:
        """What is whole of a conversation; None: nothing."""
        read = self._said(name, state, digest)
        if read is None:
            return None
        return _whole_turns(read.state) if "messages" in read.cut else read.state

    def aside(self) -> int:
        """How many conversations were set aside.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'aside'").fetchone():
            return 0  # it is only read, and of before
        return int(self._db.execute("SELECT count(DISTINCT number) FROM aside").fetchone()[0])

    def drop(self, name: str) -> None:
        """Forget a conversation, and what was set aside of it.

        Raises:
            sqlite3.Error: it is there still.
        """
        with self._manifest.removal():
            for table in ("conversations", "pieces", "aside"):
                self._db.execute(f"DELETE FROM {table} WHERE name = ?", (_name(name),))
        self._manifest.give_back()

    def drop_damaged(self) -> None:
        """Forget what is not what was written of conversations, and what was set aside.

        Raises:
            sqlite3.Error: they are there still.
        """
        rows = self._db.execute("SELECT rowid, * FROM conversations").fetchall()
        for number, name, ranked, mark, state, digest in rows:
            if _marked(name, ranked, mark) and self._state(name, state, digest) is not None:
                continue
            left = self._left(name, state, digest)
            self._db.execute("DELETE FROM conversations WHERE rowid = ?", (number,))
            if left is not None:
                self._db.execute("DELETE FROM pieces WHERE name = ?", (name,))
                self._write(name, left, 0 if ranked == 0 else UNREAD, {})
        self._db.execute("DELETE FROM pieces WHERE name NOT IN (SELECT name FROM conversations)")
        self._db.execute("DELETE FROM aside")

    def names(self) -> Iterator[tuple[str, str | None] | None]:
        """Of all conversations, in the order of their making, and the rank of each, see `save`; None for one that is
        damaged. What they are is not read. Where the rank is damaged, or a folder of before says only that there is
        one, it is None: what the conversation is tells it.

        Raises:
            sqlite3.Error: the database is damaged.
        """
        for name, ranked, mark in self._db.execute("SELECT name, ranked, mark FROM conversations ORDER BY rowid"):
            marked = _marked(name, ranked, mark)
            if marked or self._is_of(name):
                rank = "" if ranked == 0 else ranked if type(ranked) is str else None
                yield name.decode("utf-8", "surrogatepass"), rank if marked else None
            else:
                yield None

    def used(self) -> Iterator[tuple[str, float]]:
        """When each conversation went on last, seconds of `time.time`, as far as that is known. No list is read.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        for name, state, digest in self._db.execute("SELECT name, state, digest FROM conversations"):
            if type(name) is bytes and type(state) is str and digest_of(name, state) == digest:
                used = json.loads(state).get("used")
                if isinstance(used, (int, float)):
                    yield name.decode("utf-8", "surrogatepass"), float(used)

    def _is_of(self, name: Any) -> bool:
        """Whether the state that a name has was written under it."""
        select = "SELECT state, digest FROM conversations WHERE name = ?"
        found = self._db.execute(select, (name,)).fetchone() if type(name) is bytes else None
        return found is not None and type(found[0]) is str and digest_of(name, found[0]) == found[1]

    def read(self, name: str, written: Written | None = None) -> dict[str, Any] | None:
        """The state of a conversation that is listed; None: it is not what was written.

        Args:
            written: what is saved of it, from now on.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        packed, select = _name(name), "SELECT state, digest FROM conversations WHERE name = ?"
        found = self._db.execute(select, (packed,)).fetchone()
        if found is None:
            # The names are listed without their index, and that is damaged, or of another moment: somebody has put
            # together a folder of parts.
            self._db.execute("REINDEX conversations")
            found = self._db.execute(select, (packed,)).fetchone()
        return None if found is None else self._state(packed, found[0], found[1], written)

    def all(self) -> Iterator[tuple[str, dict[str, Any]] | None]:
        """All that are saved: the name and the state of each; None for one that is damaged.

        Raises:
            sqlite3.Error, ValueError: the database is damaged.
        """
        for name, state, digest in self._db.execute("SELECT name, state, digest FROM conversations ORDER BY rowid"):
            found = self._state(name, state, digest)
            yield None if found is None else (name.decode("utf-8", "surrogatepass"), found)


def ids_of(state: dict[str, Any]) -> bytes:
    """The token ids of a conversation, packed; none, where they are no token ids."""
    ids = state.get("ids")
    if isinstance(ids, list) and all(type(x) is int and -(2**63) <= x < 2**63 for x in ids):
        return packed(ids)
    return b""


def _whole_turns(state: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose last messages are lost, up to the end of a turn: what is said next follows an answer."""
    messages, ends = state["messages"], dict(state.get("ends", ()))
    turns = [n for n in ends if n <= len(messages)]
    users = [i for i, x in enumerate(messages) if isinstance(x, dict) and x.get("role") == "user"]
    until = max(turns, default=users[-1] if users else 0)
    found = state | {"messages": messages[:until]}
    if "ends" in state:
        found["ends"] = [[n, tokens] for n, tokens in ends.items() if n <= until]
    if until in ends and "ids" in state:
        found["ids"] = state["ids"][: ends[until]]
    return found


def _marked(name: Any, ranked: Any, mark: Any) -> bool:
    """Whether a name, and the rank of its conversation, are what was written."""
    return type(name) is bytes and type(ranked) in (int, str) and digest_of(name, f"{ranked}") == mark


def _name(name: str) -> bytes:
    """Any string of Python's, also one that is no Unicode."""
    return name.encode("utf-8", "surrogatepass")
