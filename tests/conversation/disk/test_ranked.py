"""Ranks on the disk: which chunks are whose, without the token ids of anybody."""

from __future__ import annotations

import math
import random
import sqlite3
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disks import content, disk_of, save

from kvtier.conversation.disk.chunks import Chunks
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import MANIFEST
from kvtier.conversation.disk.keys import end_of
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import Row
from kvtier.conversation.disk.rows.pieces import digest
from kvtier.conversation.disk.tools.contents import contents
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import common, packed
from kvtier.eviction.rank import DEFAULT, Rank

SALT = "s"
KEYS = [f"((adapter {i}){end_of(SALT)}" for i in (1, 2)]
PIN = Rank(pinned=True)


def saves(disk: Disk, name: str, ids: Sequence[int], rank: Rank, used: float = 0.0, *, waits: bool = True) -> None:
    """A conversation went on, and is saved as `Conversations` does it."""
    disk.rank(name, SALT, packed(ids), rank, used, waits=waits)
    ttl = None if rank.ttl == math.inf else rank.ttl
    said = {"pinned": rank.pinned, "priority": rank.priority, "ttl": ttl, "used": used}
    assert disk.save_conversation(name, {"ids": list(ids), "salt": SALT} | said), disk.problem


def opened(folder: Path, budget: int | None = None) -> tuple[Disk, list[str]]:
    """A folder, with the ranks that its rows tell, and the conversations whose ranks these do not tell."""
    disk = disk_of(folder, budget)
    return disk, disk.rank_saved(disk.names())


def killed(disk: Disk) -> None:
    """The process ends: nothing more is written."""
    disk._manifest.close()
    disk._folder.close()


def owned(disk: Disk, name: str) -> set[int]:
    """The chunks that have the rank of a conversation."""
    ranked = disk._order.get(name)
    return set() if ranked is None else {x.number for tip in ranked.tips for x in tip.chain()}


def sequences(disk: Disk) -> dict[int, tuple[str, int, bytes]]:
    """Of each chunk the key, its first token, and the ids up to its end."""
    found: dict[int, tuple[str, int, bytes]] = {}
    for number, row, _ in disk._manifest.rows():
        assert row is not None
        before = b"" if row.parent is None else found[row.parent][2][: row.start * 8]
        found[number] = row.key, row.start, before + row.ids
    return found


def by_ids(disk: Disk, ids: Sequence[int]) -> set[int]:
    """The chunks that some of these tokens are in."""
    mine = packed(ids)
    return {
        number
        for number, (key, start, theirs) in sequences(disk).items()
        if key.endswith(end_of(SALT)) and common(mine, theirs) > start
    }


@dataclass
class Chat:
    """A conversation, as the walk knows it.

    Attributes:
        unseen: chunks that others have saved of its tokens, when it did not wait for any.
    """

    ids: list[int]
    rank: Rank
    used: float
    unseen: set[int] = field(default_factory=set)


class Walk:
    """Anything may happen to a folder, and after each step every chunk has the level that ids tell."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder, self.now = random.Random(seed), folder, 1000.0
        self.chats: dict[str, Chat] = {}
        self.queue: list[tuple[str, list[int]]] = []
        self.read = 0
        self.open()

    def open(self) -> None:
        before = {} if not self.chats else self.rows_before
        self.disk, unread = opened(self.folder)
        self.disk.clock = lambda: self.now  # type: ignore[method-assign,assignment]
        lost = before.keys() - sequences(self.disk).keys()
        for name in unread:
            assert lost & {
                n for n, (_, start, ids) in before.items() if common(ids, packed(self.chats[name].ids)) > start
            }
            self.went_on(name, waits=False, saved=False)
        self.disk.note_ranks(unread)
        self.read += len(unread)

    def went_on(self, name: str, *, waits: bool = True, saved: bool = True) -> None:
        chat = self.chats[name]
        if saved:
            saves(self.disk, name, chat.ids, chat.rank, chat.used, waits=waits)
        else:
            self.disk.rank(name, SALT, packed(chat.ids), chat.rank, chat.used, waits=waits)
        chat.unseen.clear()

    def write(self, key: str, ids: list[int]) -> None:
        """What a conversation has said is saved; it may have been forgotten, or rewound, since."""
        before, waiting = set(sequences(self.disk)), set(self.disk._order._waiting)
        save(self.disk, ids, key)
        new = sequences(self.disk).keys() - before
        for name, chat in self.chats.items():
            if name not in waiting:
                chat.unseen |= new & by_ids(self.disk, chat.ids)

    # Steps

    def turn(self) -> None:
        name = self.rng.choice("abcdef")
        if name not in self.chats or self.rng.random() < 0.2:  # a new one, or a fork
            ids = list(self.rng.choice([*(x.ids for x in self.chats.values()), []]))
            rank = Rank(self.rng.random() < 0.2, self.rng.randrange(-2, 3), self.rng.choice((5.0, 50.0, math.inf)))
            self.chats[name] = Chat(ids, rank, self.now)
        chat = self.chats[name]
        chat.ids = chat.ids + [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 9))]
        chat.used = self.now
        self.queue.append((self.rng.choice(KEYS), chat.ids))
        if self.rng.random() < 0.3:
            self.writer()
        self.went_on(name)

    def writer(self) -> None:
        while self.queue and self.rng.random() < 0.8:
            key, ids = self.queue.pop(self.rng.randrange(len(self.queue)))
            for at in sorted({self.rng.randrange(1, len(ids) + 1), len(ids)}):  # in several files
                self.write(key, ids[:at])

    def rewind(self) -> None:
        if self.chats:
            name = self.rng.choice(list(self.chats))
            self.chats[name].ids = self.chats[name].ids[: self.rng.randrange(len(self.chats[name].ids) + 1)]
            self.went_on(name)

    def ranks(self) -> None:
        if self.chats:
            name = self.rng.choice(list(self.chats))
            self.chats[name].rank = self.rng.choice((DEFAULT, PIN, Rank(priority=3), Rank(ttl=3.0)))
            self.went_on(name, waits=self.rng.random() < 0.5)

    def forget(self) -> None:
        if self.chats:
            name = self.rng.choice(list(self.chats))
            del self.chats[name]
            self.disk.drop_conversation(name)

    def expire(self) -> None:
        self.now += self.rng.choice((0.0, 2.0, 20.0))
        self.disk.expire()

    def room(self) -> None:
        self.disk.room.budget = max(self.disk.room.nbytes - self.rng.randrange(3000), 0) + self.disk.room.rest
        self.disk.room.begin(0, None, self.disk.clock)
        self.disk.room.sweep()
        self.disk.room.budget = None

    def damage(self) -> None:
        chunk = self.disk._chunks.get(self.rng.choice([*self.disk._chunks.numbers, 0]))
        if chunk is not None:
            self.disk.forget(chunk)

    def doubt(self) -> None:
        """A change was cut short."""
        self.disk._chunks.in_doubt = True
        self.disk.find("k", b"")

    def again(self) -> None:
        """The folder is opened again, by a process that nobody told what there is to save."""
        self.rows_before = sequences(self.disk)
        if self.chats and self.rng.random() < 0.2:  # killed between the two
            name = self.rng.choice(list(self.chats))
            self.disk.rank(name, SALT, packed([1, 2, 1, 1]), PIN, 0.0)
            killed(self.disk)
        elif self.rng.random() < 0.5:
            killed(self.disk)
        else:
            self.disk.close()
        if self.rows_before and self.rng.random() < 0.3:
            (self.folder / f"{self.rng.choice(list(self.rows_before)):012}.safetensors").unlink()
        self.open()

    def run(self, steps: int) -> None:
        acts = [self.turn] * 8 + [self.writer] * 5 + [self.rewind, self.ranks, self.forget, self.expire, self.room]
        acts += [self.damage, self.doubt, self.again]
        for _ in range(steps):
            self.rng.choice(acts)()
            self.check()
        self.disk.close()

    def check(self) -> None:
        self.disk.check_integrity()
        levels = dict[int, float]()
        for name, chat in self.chats.items():
            if chat.rank == DEFAULT:
                assert self.disk._order.get(name) is None
                continue
            mine = by_ids(self.disk, chat.ids) - chat.unseen
            assert owned(self.disk, name) == mine, name
            expires = chat.used + chat.rank.ttl <= self.now
            level = math.inf if chat.rank.pinned else -math.inf if expires else chat.rank.priority
            for number in mine:
                levels[number] = max(level, levels.get(number, -math.inf))
        assert self.disk._order._levels(self.disk.clock) == levels


@pytest.mark.parametrize("seed", range(6))
def test_every_chunk_has_the_level_that_token_ids_tell(seed: int, tmp_path: Path) -> None:
    Walk(tmp_path, seed).run(60)


def test_tips_are_of_all_chunks_that_tokens_are_in_where_several_have_copies_of_them() -> None:
    """As for models with states, of which each end has its own."""
    several = 0
    for seed in range(200):
        rng, chunks, said = random.Random(seed), Chunks(), dict[int, tuple[str, list[int]]]()
        for number in range(1, rng.randrange(2, 12)):
            parent = chunks.get(rng.choice([*chunks.numbers, 0]))
            key, before, start = rng.choice(KEYS), list[int](), 0
            if parent is not None:
                start = rng.randrange(parent.start + 1, parent.stop + 1)
                key, before = said[parent.number][0], said[parent.number][1][:start]
            own = [rng.randrange(2) for _ in range(rng.randrange(1, 5))]
            above = None if parent is None else (parent.number, parent.digest)
            chunks.add(Row.of(number, key, above, start, packed(own), 1, b""), parent)
            said[number] = key, before + own
        ids = packed([*rng.choice(list(said.values()))[1], 0, 1][: rng.randrange(1, 14)])
        mine = set[int]()
        for key in KEYS:
            length, longest = chunks.find(key, ids)
            if longest is not None:
                mine.update(x.number for x in longest.chain() if x.start < length)
            mine.update(x.number for end in chunks.ends(key, ids) for x in end.chain())
        [(tips, _)] = chunks.tips([(SALT, ids)])
        chains = [{x.number for x in tip.chain()} for tip in tips]
        assert set().union(*chains) == mine
        assert not any(tips[i].number in chain for i in range(len(tips)) for chain in chains[:i])
        several += len(tips) > 1
    assert several


def ranked_folder(folder: Path, count: int = 3, tokens: int = 40) -> None:
    disk = disk_of(folder)
    for n in range(count):
        ids = [n % 100, *range(1, tokens)]
        saves(disk, f"{n}", ids, Rank(priority=n + 1))
        assert save(disk, ids, KEYS[0])
    disk.close()


def test_opening_a_folder_reads_nothing_of_what_ranked_conversations_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked_folder(tmp_path)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("UPDATE conversations SET state = 'damaged'")
        db.execute("UPDATE pieces SET text = 'damaged'")
    db.close()
    disk = disk_of(tmp_path)
    statements = list[str]()
    disk._manifest.db.set_trace_callback(statements.append)
    assert disk.rank_saved(disk.names()) == []
    disk._manifest.db.set_trace_callback(None)
    assert statements == ["SELECT name, ranked, mark FROM conversations ORDER BY rowid"]
    assert disk.damaged == 0
    assert [owned(disk, f"{n}") for n in range(3)] == [{1}, {2}, {3}]
    assert disk._order._levels(disk.clock) == {1: 1, 2: 2, 3: 3}
    killed(disk)


def test_a_ranked_conversation_takes_as_much_memory_however_long_it_is(tmp_path: Path) -> None:
    ranked_folder(tmp_path, 20, 3000)
    disk = disk_of(tmp_path)
    names = disk.names()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    assert disk.rank_saved(names) == []
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20 * 700
    disk.close()


def test_ids_are_in_memory_until_what_was_said_is_saved(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    saves(disk, "a", [1] * 20, PIN)
    assert list(disk._order._waiting) == ["a"]
    assert save(disk, [1] * 9, KEYS[0])
    assert list(disk._order._waiting) == ["a"]
    assert save(disk, [1] * 25, KEYS[0]), "the end of another one's, which has the rest"
    assert not disk._order._waiting
    killed(disk)
    disk, unread = opened(tmp_path)
    assert (unread, owned(disk, "a")) == ([], {1, 2})
    disk.close()


def test_a_number_that_another_chunk_has_by_now_is_nobodys_tip(tmp_path: Path) -> None:
    ranked_folder(tmp_path, 1)
    (tmp_path / "000000000001.safetensors").unlink()
    disk = disk_of(tmp_path)
    assert disk._chunks.get(1) is None
    assert save(disk, [7] * 9, KEYS[0])
    assert disk._chunks.get(1) is not None
    assert disk.rank_saved(disk.names()) == ["0"]
    disk.close()


def of_layout_5(folder: Path) -> None:
    """A row says only whether there is a rank."""
    with sqlite3.connect(folder / MANIFEST) as db:
        db.execute("UPDATE about SET value = '5' WHERE name = 'version'")
        for (name,) in db.execute("SELECT name FROM conversations WHERE ranked <> 0").fetchall():
            db.execute("UPDATE conversations SET ranked = 1, mark = ? WHERE name = ?", (digest(name, "1"), name))
    db.close()


@pytest.mark.parametrize("cut", [False, True])
def test_a_folder_of_layout_5_is_read_once(cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked_folder(tmp_path)
    of_layout_5(tmp_path)
    assert list(contents(tmp_path).conversations) == ["0", "1", "2"]
    assert contents(tmp_path).about["version"] == "5", "what only reads has written"

    def ranks(disk: Disk, unread: list[str]) -> None:
        for name in unread:
            state = disk.conversation(name)
            assert state is not None
            disk.rank(name, SALT, packed(state["ids"]), Rank(priority=state["priority"]), 0.0)
        disk.note_ranks(unread)

    def fails(rows: ConversationRows, ranks: Any) -> None:
        rows._db.execute("BEGIN")
        rows._rank(list(ranks.items())[:2])
        raise KeyboardInterrupt

    disk, unread = opened(tmp_path)
    assert unread == ["0", "1", "2"]
    if cut:
        with monkeypatch.context() as patch:
            patch.setattr(ConversationRows, "rank", fails)
            with pytest.raises(KeyboardInterrupt):
                ranks(disk, unread)
        killed(disk)
        disk, unread = opened(tmp_path)
        assert unread == ["0", "1", "2"]
    ranks(disk, unread)
    chunk = disk._chunks.get(3)
    assert chunk is not None
    disk.forget(chunk)
    killed(disk)
    disk, unread = opened(tmp_path)
    assert unread == []
    assert [owned(disk, f"{n}") for n in range(3)] == [{1}, {2}, set()]
    assert disk._order._levels(disk.clock) == {1: 1, 2: 2}
    disk.close()


def test_a_rank_that_is_damaged_is_read_from_what_the_conversation_is(tmp_path: Path) -> None:
    ranked_folder(tmp_path)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        change = "UPDATE conversations SET ranked = replace(ranked, 'false', 'true') WHERE name = CAST('1' AS BLOB)"
        assert db.execute(change).rowcount == 1
    db.close()
    disk, unread = opened(tmp_path)
    assert (unread, disk.damaged) == (["1"], 0)
    disk.rank("1", SALT, packed([1, *range(1, 40)]), Rank(priority=2), 0.0)
    disk.note_ranks(unread)
    killed(disk)
    disk, unread = opened(tmp_path)
    assert (unread, owned(disk, "1")) == ([], {2})
    disk.close()


def test_what_is_left_of_a_damaged_conversation_is_read_for_its_rank(tmp_path: Path) -> None:
    """What its row said is of more than that."""
    ranked_folder(tmp_path, 1)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("UPDATE pieces SET text = 'damaged'")
    db.close()
    disk, unread = opened(tmp_path)
    assert unread == []
    assert disk.conversation("0") is not None
    chunk = disk._chunks.get(1)
    assert chunk is not None
    disk.forget(chunk)
    disk.close()
    disk, unread = opened(tmp_path)
    assert unread == ["0"]
    disk.close()


def test_a_conversation_of_which_nothing_is_left_keeps_no_chunk(tmp_path: Path) -> None:
    ranked_folder(tmp_path, 1)
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("UPDATE conversations SET state = 'damaged'")
    db.close()
    disk, _ = opened(tmp_path)
    assert owned(disk, "0") == {1}
    assert disk.conversation("0") is None
    assert disk._order._levels(disk.clock) == {}
    disk.close()


@pytest.mark.parametrize("cut", [False, True])
def test_who_compacts_a_folder_renumbers_what_ranks_refer_to(
    cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, disk, histories = random.Random(1), disk_of(tmp_path), dict[str, list[int]]()
    for turn in range(30):
        name = rng.choice("abcd")
        ids = histories.get(name) or list(rng.choice([*histories.values(), []]))
        histories[name] = ids + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        assert keep(disk, histories[name])
        if turn % 3:  # others are at a chunk in the middle
            saves(disk, name, histories[name], PIN)
        else:
            histories[name] = ids
            saves(disk, name, ids, PIN)
    disk.close()
    if cut:
        monkeypatch.setattr(ConversationRows, "change_ranks", lambda *of: None)
    with Upkeep(tmp_path) as upkeep:
        assert sum(upkeep.compact(largest).merged for largest in (1000, 10**6)) > 2
    disk, unread = opened(tmp_path)
    assert bool(unread) == cut
    for name in histories.keys() - set(unread):
        assert owned(disk, name) == by_ids(disk, histories[name])
    disk.close()


def keep(disk: Disk, ids: Sequence[int]) -> bool:
    """Save keys and values, which may be merged."""
    start, parent = disk.find(KEYS[0], packed(ids))
    if start < len(ids):
        part = content(ids, start)
        disk.write(KEYS[0], packed(ids), start, parent, {"k.0": part, "v.0": part}, "")
    return disk.find(KEYS[0], packed(ids))[0] == len(ids)
