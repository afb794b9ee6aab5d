"""Which chunks have the rank of a conversation when something comes later than it should, or twice."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import OF, content, held_writes, save
from families import tiny_model
from test_ranked import KEYS, PIN, SALT, killed, of_layout_5, opened, owned, saves
from test_store import GREEDY, grown, ones, some_ids, store_of

from kvtier.conversation.disk.chunks import Chunks
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.keys import end_of
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.disk.rows.manifest import Manifest
from kvtier.conversation.index import packed
from kvtier.conversation.names import MOST_IDLE, Conversations
from kvtier.eviction.rank import Rank

A, B = list(range(1, 11)), list(range(1, 7))


def going(disk: Disk) -> list[int]:
    """The chunks that may go to make room."""
    return [x.number for x in disk._order.first(10**9, 0, None, disk.clock)[0]]


def test_a_time_to_live_ends_though_the_clock_was_set_back_before_some_openings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e6]
    monkeypatch.setattr(Disk, "clock", staticmethod(lambda: now[0]))
    disk, _ = opened(tmp_path)
    saves(disk, "a", A, Rank(ttl=50.0), now[0])
    saves(disk, "b", B, PIN, now[0])
    assert save(disk, A, KEYS[0])
    disk.close()
    for now[0], gone in (1000.0, 0), (1049.0, 0), (1050.0, 1):
        disk, unread = opened(tmp_path)
        assert (unread, disk.problem) == ([], "")
        disk.drop_conversation("b")
        assert disk.expire() == gone
        killed(disk)


def test_a_history_within_a_longer_one_waits_for_the_states_at_its_end(tmp_path: Path) -> None:
    """Its own chunk has no tokens."""

    def write(ids: list[int]) -> None:
        start, parent = disk.find(KEYS[0], packed(ids))
        more = {"k.0": content(ids, start), "s.0.x": torch.zeros(1)}
        assert disk.write(KEYS[0], packed(ids), start, parent, more, "states"), disk.problem

    disk = Disk(tmp_path, None, OF, stateful=True)
    write(A)
    saves(disk, "b", B, PIN)
    saves(disk, "a", A, Rank(priority=1))
    assert disk._order._waiting.keys() == {"b"}, "all of the other one is saved"
    disk.check_integrity()
    write(B)
    assert not disk._order._waiting
    disk.check_integrity()
    assert owned(disk, "b") == {1, 2}
    killed(disk)
    disk, unread = opened(tmp_path)
    assert (unread, owned(disk, "b"), going(disk)) == ([], {1, 2}, [])
    disk.close()


def test_what_another_version_has_computed_is_nothing_that_a_history_has(tmp_path: Path) -> None:
    def of(version: int) -> tuple[Disk, str]:
        prefix = f"(('transformers {version}', "
        return Disk(tmp_path, None, OF, prefix), f"{prefix}){end_of(SALT)}"

    disk, key = of(4)
    saves(disk, "a", A, PIN)
    assert save(disk, A, key)
    disk.close()
    disk, key = of(5)
    assert disk.rank_saved(disk.names()) == []
    saves(disk, "a", A, PIN)  # as it was answered again
    assert disk._order._waiting.keys() == {"a"}
    assert save(disk, A, key)
    disk.check_integrity()
    assert going(disk) == [1]
    killed(disk)
    disk, _ = of(5)
    assert disk.rank_saved(disk.names()) == []
    assert going(disk) == [1]
    disk.close()


@pytest.mark.parametrize("how", [KeyboardInterrupt, sqlite3.OperationalError])
def test_a_row_that_was_perhaps_saved_is_read_again(
    how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, _ = opened(tmp_path)
    saves(disk, "a", B, PIN)
    assert save(disk, B, KEYS[0])
    really = ConversationRows.save

    def cut(*args: Any) -> None:
        really(*args)
        raise how

    with monkeypatch.context() as patch:
        patch.setattr(ConversationRows, "save", cut)
        with pytest.raises((how, AssertionError)):
            saves(disk, "a", A, PIN)
    assert save(disk, A, KEYS[0])
    assert owned(disk, "a") == {1, 2}
    killed(disk)
    disk, unread = opened(tmp_path)
    assert unread == ["a"] or owned(disk, "a") == {1, 2}
    disk.close()


def test_where_nobody_waits_a_chunk_that_is_saved_looks_at_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, _ = opened(tmp_path)
    monkeypatch.setattr(Chunks, "_keys", lambda *of: pytest.fail("all keys are looked at"))
    assert save(disk, A, KEYS[0])
    disk._chunks.in_doubt = True
    assert save(disk, B, KEYS[1])
    disk.close()


def test_a_conversation_that_cannot_be_read_once_keeps_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = tiny_model("llama"), ConversationRows.read
    with store_of(model, directory=tmp_path) as store:
        for name in "01":
            store.open(name, priority=1).ids = [1, 2]
    of_layout_5(tmp_path)

    def fails(rows: ConversationRows, name: str, *more: Any) -> Any:
        if name == "0":
            raise sqlite3.DatabaseError("once")
        return read(rows, name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(ConversationRows, "read", fails)
        with store_of(model, directory=tmp_path) as store:
            assert store.names == ["1"]
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        ranked = store._disk_tier.disk._order.get("0")
        assert ranked is not None, "its row says that it has no rank"
        assert ranked.rank.priority == 1


def test_ranks_of_a_folder_of_before_are_saved_in_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, model, init, asked = 2 * MOST_IDLE, tiny_model("llama"), Manifest.__init__, list[str]()
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        store._disk_tier.disk._manifest.db.execute("PRAGMA synchronous=OFF")
        for n in range(count):
            store.open(f"{n}", priority=1).ids = [n, 1, 2]

    def traced(manifest: Manifest, *args: Any, **options: Any) -> None:
        init(manifest, *args, **options)
        manifest.db.set_trace_callback(asked.append)

    def opens() -> int:
        del asked[:]
        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "__init__", traced)
            with store_of(model, directory=tmp_path) as store:
                found = asked.count("COMMIT")
                assert all(x is None for x in store.conversations._known.values()), "they are in memory"
                assert store.open("3").priority == 1
        return found

    of_layout_5(tmp_path)
    assert opens() <= 2
    assert opens() == 0


def test_what_a_turn_that_was_cut_short_has_saved_has_its_rank_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt comes before anybody waits for it, and the disk is slow."""
    model = tiny_model("llama")

    def cut(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with store_of(model, directory=tmp_path) as store:
        chat = store.open("a", pinned=True)
        out = chat.generate(**ones(some_ids(20)), **GREEDY)
        store.flush()
        with monkeypatch.context() as patch:
            goes_on = held_writes(patch)
            patch.setattr(Conversations, "changed", cut)
            with pytest.raises(KeyboardInterrupt):
                chat.generate(**ones(grown(out)), **GREEDY)
        ids = chat.ids
        threading.Timer(0.2, goes_on.set).start()
    with store_of(model, directory=tmp_path) as store:
        assert store._disk_tier is not None
        disk = store._disk_tier.disk
        assert disk.conversation("a")["ids"] == ids  # type: ignore[index]
        assert disk.chunks == 2
        assert owned(disk, "a") == {1, 2}


def test_an_interrupt_while_sequences_are_saved_loses_no_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: Any) -> None:
        raise KeyboardInterrupt

    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a").ids = [1, 2]
        assert store._disk_tier is not None
        with monkeypatch.context() as patch:
            patch.setattr(store._disk_tier, "flush", cut)
            with pytest.raises(KeyboardInterrupt):
                store.flush()
        state = store._disk_tier.disk.conversation("a")
        assert state is not None
        assert state["ids"] == [1, 2]


@pytest.mark.parametrize(("name", "stateful"), [("llama", False), ("qwen3_next", True)])
def test_a_folder_knows_whether_its_model_has_states(name: str, stateful: bool, tmp_path: Path) -> None:
    with store_of(tiny_model(name), directory=tmp_path) as store:
        assert store._disk_tier is not None
        assert store._disk_tier.disk._order._stateful == stateful
