"""Conversations that nobody holds: what stays of them, and what they take."""

from __future__ import annotations

import gc
import shutil
import sqlite3
import sys
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
from families import tiny_model
from test_conversation import within
from test_store import GREEDY, Tokenizer, ones, some_ids, store_of

from kvtier import ClosedError, ConcurrentUseError, ConfigError, ConversationStore
from kvtier.conversation import names
from kvtier.conversation.conversation import Conversation
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.conversation.names import MOST_IDLE, OtherSaltError


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def others(store: ConversationStore, count: int = 2 * MOST_IDLE) -> None:
    """This number of conversations is opened and dropped, so that those before are put away."""
    for n in range(count):
        store.open(f"other {n}")
    store.open("last")


@pytest.mark.parametrize("saved", [False, True])
def test_ids_that_are_opened_and_dropped_take_nothing(saved: bool, tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), **({"directory": tmp_path} if saved else {})) as store:
        for n in range(100):
            store.open(f"before {n}")
        before = objects()
        tracemalloc.start()
        taken, _ = tracemalloc.get_traced_memory()
        for n in range(10_000):
            store.open(f"a conversation {n}")
        after, (now, _) = objects(), tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 500, "objects are kept of each"
        assert now - taken < 10 * 10_000, "more than ten bytes for each"
        assert len(store.names) <= MOST_IDLE + 1
        store.check_integrity()


def test_of_what_is_saved_a_name_stays_in_memory(tmp_path: Path) -> None:
    """Of a hundred tokens, too, that are saved with each."""
    count, ids = 1000, list(range(1000, 1100))
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store._disk_tier is not None
        store._disk_tier.disk._manifest.db.execute("PRAGMA synchronous=OFF")
        others(store)
        before = objects()
        tracemalloc.start()
        taken, _ = tracemalloc.get_traced_memory()
        for n in range(count):
            store.open(f"{n}").went_on([*ids, 5000 + n])
        store.flush()
        after, (now, _) = objects(), tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 20 * MOST_IDLE < count
        assert now - taken < 300 * count
        assert [store.open(f"{n}").ids[-1] for n in range(0, count, 99)] == list(range(5000, 5000 + count, 99))
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert [store.open(f"{n}").ids[-1] for n in range(0, count, 99)] == list(range(5000, 5000 + count, 99))


@pytest.mark.parametrize("saved", [False, True])
def test_what_a_closed_store_cannot_forget_is_an_error(saved: bool, tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), **({"directory": tmp_path} if saved else {})) as store:
        chat, unsaved = store.open("a"), store.open("b", salt=(1, 2))
        for each in chat, unsaved:
            each.went_on([1, 2])
    unsaved.close()
    if not saved:
        chat.close()
        return
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"'a' is saved in .* `forget`"):
            chat.close()
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == ["a"]
        store.forget("a")
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == []


@pytest.mark.parametrize("saved", [False, True])
def test_whoever_holds_a_conversation_has_the_one_that_others_open(saved: bool, tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), **({"directory": tmp_path} if saved else {})) as store:
        blank, chat, met = store.open("blank"), store.open("a"), list[ConcurrentUseError]()
        chat.generate(**ones(some_ids(20)), **GREEDY)
        del chat
        others(store, 3)  # it was held by nobody for a while
        chat = store.open("a")
        others(store)
        gc.collect()
        assert store.open("a") is chat
        assert store.open("blank") is blank
        assert {"a", "blank"} <= set(store.names)
        with pytest.raises(ConfigError, match="already"):
            store.open("blank", new=True)
        with pytest.raises(OtherSaltError):
            store.open("blank", salt="x")

        def meets() -> None:
            try:
                store.open("b").generate(**ones(some_ids(9)), **GREEDY)
            except ConcurrentUseError as error:
                met.append(error)

        store.open("b").generate(**ones(some_ids(9)), **within(meets))  # who generates holds it
        assert len(met) == 1


def test_without_a_folder_what_was_said_stays_though_nobody_holds_it() -> None:
    model, tokenizer = tiny_model("llama"), Tokenizer()
    with store_of(model) as store:
        chat = store.open("a", salt="x", priority=3)
        answer = chat.send("Who?", tokenizer=tokenizer, **GREEDY)
        ids, messages, was = list(chat.ids), list(chat.messages), weakref.ref(chat)
        store.open("ranked", pinned=True)
        store.open("changed").messages.append({"role": "user", "content": "by its user"})
        del chat
        others(store)
        gc.collect()
        assert was() is None, "the store holds it"
        with pytest.raises(OtherSaltError):
            store.open("a")
        again = store.open("a", salt="x")
        assert (again.ids, again.messages, again.priority) == (ids, messages, 3)
        assert again.regenerate(tokenizer=tokenizer, **GREEDY) == answer
        assert store.open("ranked").pinned
        assert [x["content"] for x in store.open("changed").messages] == ["by its user"]
        store.forget("a")
        assert "a" not in store.names
        assert store.open("a").ids == []
        store.check_integrity()


def test_ids_of_what_stays_in_memory_and_nobody_holds_take_eight_bytes_each() -> None:
    count, ids = 4 * MOST_IDLE, list(range(100_000, 101_000))
    with store_of(tiny_model("llama")) as store:
        tracemalloc.start()
        taken, _ = tracemalloc.get_traced_memory()
        for n in range(count):
            store.open(f"{n}").went_on([*map(int, map(str, ids)), n])
        others(store)
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert now - taken < 14 * len(ids) * count
        for n in range(count):
            chat = store.open(f"{n}")
            assert chat.ids == [*ids, n]
            chat.ids.append(5)
            del chat
            others(store, 1)
            assert store.open(f"{n}").ids == [*ids, n, 5]
        store.check_integrity()


@pytest.mark.parametrize("ids", [[1.5], ["a"], [1 << 80], (1, 2)])
def test_what_are_no_token_ids_stay_what_they_are(ids: Any) -> None:
    with store_of(tiny_model("llama")) as store:
        store.open("a").ids = ids
        others(store)
        others(store)
        assert store.open("a").ids == ids
        store.open("a").ids = [*ids, *ids]
        assert store.open("a", pinned=True).ids == [*ids, *ids], "nothing is kept of these"


def test_what_a_user_has_changed_is_saved_though_nobody_holds_it(tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a").went_on([1, 2, 3])
        store.flush()
        store.open("a").ids = [4, 5]
        store.open("b").messages = [{"role": "user", "content": "Hello."}]
        others(store)
        assert store.conversations._known["a"] is None, "it is in memory"
        assert store.open("a").ids == [4, 5]
        store.open("a").ids.append(6)
        store.open("blank")
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.open("a").ids == [4, 5, 6]
        assert store.open("b").messages == [{"role": "user", "content": "Hello."}]


def test_messages_without_a_role_are_read_as_they_were_saved(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "a"}, {"content": "b"}, "c", {"role": "assistant"}]
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a").messages = list(messages)
    for _ in range(2):  # the second time, what the first one has saved
        with store_of(tiny_model("llama"), directory=tmp_path) as store:
            assert store.open("a").messages == messages
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        chat = store.open("a")
        with pytest.raises(ConfigError, match="'c' is among the messages"):
            chat.send("d", tokenizer=Tokenizer(), **GREEDY)
        chat.rewind(turns=1)
        assert chat.messages == []


def test_what_was_read_and_has_not_changed_is_not_written(tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        chat = store.open("a")
        chat.ids, chat.ends = [1, 2, 3], {2: 3}
        chat.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        chat = store.open("a")
        assert chat.ends == {2: 3}
        assert store._disk_tier is not None
        database = store._disk_tier.disk._manifest.db
        before = database.total_changes
        store.flush()
        assert database.total_changes == before


def test_a_conversation_that_the_disk_did_not_take_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store._disk_tier is not None
        database = store._disk_tier.disk._manifest.db
        database.set_progress_handler(lambda: 1, 1)  # whatever is asked, it is interrupted
        store.open("a").ids = [1, 2]
        others(store)
        assert "'a' was not saved" in store.stats.problem
        assert store.open("a").ids == [1, 2]
        database.set_progress_handler(None, 1)
        others(store)
        assert store.conversations._known["a"] is None
        assert store.open("a").ids == [1, 2]
        tuple_ = store.open("t", salt=("a", 1))
        tuple_.ids = [7]
        del tuple_
        others(store)
        assert store.open("t", salt=("a", 1)).ids == [7], "no later process could open it, this one can"


def test_one_that_is_opened_for_each_turn_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    read, conversation = list[str](), Disk.conversation
    monkeypatch.setattr(
        Disk, "conversation", lambda disk, name, *more: (read.append(name), conversation(disk, name, *more))[1]
    )
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a").went_on([1])
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        for n in range(3 * MOST_IDLE):
            store.open("a").went_on([1, n])
            store.open(f"other {n}")
        assert read == ["a"]


def test_a_conversation_that_is_opened_while_it_is_put_away_is_the_one_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens it then goes on with it, and nobody takes it for the one that was saved."""
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store._disk_tier is not None
        disk, opened = store._disk_tier.disk, list[Conversation]()
        save = disk.save_conversation

        def saves(name: str, *more: Any) -> bool:
            found = save(name, *more)
            if name == "a" and not opened:
                thread = threading.Thread(target=lambda: opened.append(store.conversations.find("a")))  # type: ignore[arg-type]
                thread.start()
                thread.join(120)
            return found

        store.open("a").ids = [1, 2]
        monkeypatch.setattr(disk, "save_conversation", saves)
        others(store)
        (chat,) = opened
        assert store.open("a") is chat
        chat.went_on([1, 2, 3])
        del chat
        opened.clear()
        monkeypatch.undo()
        others(store)
        assert store.open("a").ids == [1, 2, 3]


def test_one_that_was_put_away_since_it_was_looked_for_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one would be saved in its place."""
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a").went_on([1, 2])
        others(store)
        find, late = store.conversations.find, ["a"]
        monkeypatch.setattr(
            store.conversations, "find", lambda name: None if name in late and late.pop() else find(name)
        )
        assert store.open("a").ids == [1, 2]
        assert not late


def test_threads_that_open_and_drop_one_conversation_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MOST_IDLE", 0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    wrong = list[object]()
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store._disk_tier is not None
        store._disk_tier.disk._manifest.db.execute("PRAGMA synchronous=OFF")
        store.open("a").went_on([1, 2])
        begin = threading.Barrier(4)

        def opens() -> None:
            begin.wait()
            for n in range(60):
                chat = store.open("a")
                if chat.ids[:2] != [1, 2] or store.open("a") is not chat:
                    wrong.append((n, chat))

        threads = [threading.Thread(target=opens) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert not wrong
        assert store.open("a").ids == [1, 2]


def test_a_store_that_is_dropped_ends_though_it_had_conversations() -> None:
    store = store_of(tiny_model("llama"))
    store.open("a").went_on([1, 2])
    store.open("b")
    was = weakref.ref(store)
    del store
    gc.collect()
    assert was() is None


def test_what_nobody_can_compute_again_is_saved_before_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        chat = store.open("a")
        chat.generate(**ones(some_ids(9)), **GREEDY)
        store.flush()
        chat.messages.append({"role": "user", "content": "as its user has put it"})
        assert store._disk_tier is not None
        flush, saved = store._disk_tier.flush, list[Any]()

        def flushed() -> None:
            assert store.conversations._disk is not None
            saved.append((store.conversations._disk.conversation("a") or {}).get("messages"))
            flush()

        monkeypatch.setattr(store._disk_tier, "flush", flushed)
        store.flush()
        assert saved == [chat.messages]


def test_a_pinned_conversation_that_is_damaged_when_it_is_read_again_pins_nothing(tmp_path: Path) -> None:
    """Nobody could unpin it."""
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.open("a", pinned=True).generate(**ones(some_ids(20)), **GREEDY)
        others(store)
        assert store.conversations._known["a"] is None
        assert any(x.sequence.pinned for x in store.kept.entries.values())
        assert store._disk_tier is not None
        store._disk_tier.disk._manifest.db.execute("UPDATE conversations SET digest = x'00' WHERE name = ?", (b"a",))
        assert store.find("a") is None
        assert not any(x.sequence.pinned for x in store.kept.entries.values())
        store.check_integrity()


def test_one_that_was_saved_and_is_blank_now_is_lost_where_the_disk_does_not_take_that(tmp_path: Path) -> None:
    """What it said before is there again in a later process."""
    store = store_of(tiny_model("llama"), directory=tmp_path)
    store.open("a").went_on([1, 2, 3])
    store.flush()
    assert store._disk_tier is not None
    database = store._disk_tier.disk._manifest.db
    database.set_progress_handler(lambda: 1, 1)  # whatever is asked, it is interrupted
    store.open("a").rewind(tokens=3)
    others(store)
    assert "a" in store.names
    assert store.open("a").ids == []
    with pytest.warns(RuntimeWarning, match="is lost with this store: 'a'. "):
        store.close()


def test_a_store_that_closes_names_the_conversations_that_are_forgotten_and_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there again in a later process."""

    def fails(*args: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    store = store_of(tiny_model("llama"), directory=tmp_path)
    for name in "abc":
        store.open(name).went_on([1, 2, 3])
    store.flush()
    store.forget("c")
    with monkeypatch.context() as patch:
        patch.setattr(ConversationRows, "drop", fails)
        store.forget("a")
        assert store.names == ["b"]
        with pytest.warns(
            RuntimeWarning, match="were forgotten, and what they said is in .* still: 'a'. .*full"
        ) as found:
            store.close()
        assert len(found) == 1
        store.close()
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == ["a", "b"]
        store.forget("a")
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == ["b"]


def test_a_store_that_closes_names_nothing_that_went_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def fails(*args: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    store = store_of(tiny_model("llama"), directory=tmp_path / "chats")
    store.open("a").went_on([1, 2, 3])
    store.flush()
    monkeypatch.setattr(ConversationRows, "drop", fails)
    store.forget("a")
    shutil.rmtree(tmp_path / "chats")
    store.close()
    assert not [x for x in recwarn if "were forgotten" in str(x.message)]
