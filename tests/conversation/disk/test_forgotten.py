"""What was said in a conversation that was forgotten is in no file of its folder, however SQLite was built."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import disk_of
from families import tiny_model
from test_store import GREEDY, fresh, ones, some_ids, store_of
from test_upkeep import grown, save
from test_upkeep import read as read_all

from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.rows import manifest
from kvtier.conversation.disk.tools.contents import Contents, contents
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import common, packed
from kvtier.errors import ConfigError

WORD = b"SWORDFISH"


@pytest.fixture(autouse=True)
def built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite as many build it: what is removed is not overwritten unless it is told to."""
    connect = sqlite3.connect

    def connected(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.execute("PRAGMA secure_delete=OFF")
        return db

    monkeypatch.setattr(manifest.sqlite3, "connect", connected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def telling(folder: Path) -> list[str]:
    """The files of a folder that say the word."""
    return sorted(x.name for x in folder.iterdir() if WORD in x.read_bytes())


def state(turns: int, of: str) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{of} {n} " * 400} for n in range(turns)]
    return {"ids": list(range(turns * 300)), "messages": said}


def test_the_database_and_its_log_say_nothing_of_it(folder: Path) -> None:
    disk = disk_of(folder)
    for turns in range(1, 30):  # what a turn writes takes the place of what is removed
        disk.save_conversation("a", state(turns, WORD.decode()))
        disk.save_conversation("b", state(turns, "others"))
    assert telling(folder)
    disk.drop_conversation("a")
    disk.clear_log()
    assert telling(folder) == []
    assert disk.conversation("b") == state(29, "others")
    disk.close()
    assert telling(folder) == []


def test_what_another_process_reads_meanwhile_is_removed_later(folder: Path) -> None:
    disk = disk_of(folder)
    disk.save_conversation("a", state(9, WORD.decode()))
    reader = manifest.Manifest(folder / "manifest.sqlite", None, read_only=True)
    with reader.reading():
        assert reader.about()
        disk.drop_conversation("a")
        disk.clear_log()  # waits for nobody
        assert telling(folder)
    disk.clear_log()
    assert telling(folder) == []
    reader.close()
    disk.close()


def test_a_folder_that_is_put_in_order_says_nothing_of_it(folder: Path) -> None:
    disk = disk_of(folder)
    disk.save_conversation("a", state(9, WORD.decode()))
    disk.save_conversation("b", state(9, "others"))
    disk.close()
    with Upkeep(folder) as upkeep:
        upkeep.drop_conversation("a")
    assert telling(folder) == []


def test_a_store_that_is_open_forgets_for_good_and_who_asks_does_not_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by, clear_log = list[str](), Disk.clear_log

    def noted(self: Disk) -> None:
        by.append(threading.current_thread().name)
        clear_log(self)

    monkeypatch.setattr(Disk, "clear_log", noted)
    with store_of(tiny_model("llama"), directory=folder) as store:
        for name, said in (("a", WORD.decode()), ("b", "others")):
            chat = store.open(name)
            chat.messages = state(9, said)["messages"]
            store.conversations.changed(chat)
        del chat
        assert telling(folder)
        store.forget("a")
        store.flush()
        assert telling(folder) == []
        assert set(by) == {"kvtier-turns"}
        assert store.names == ["b"]


def sequence(found: Contents, number: int) -> bytes:
    """The tokens of a chunk, and all before it."""
    row, before = found.rows[number], b""
    if row.parent is not None:
        before = sequence(found, row.parent)[: row.start * 8]
    return before + row.ids


@pytest.mark.parametrize("seed", range(8))
def test_what_others_do_not_begin_with_is_erased_and_no_more(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    histories = {name: ids for name, ids in grown(folder, rng, 30).items() if ids}
    for name in rng.sample(sorted(histories), min(4, len(histories))):
        ids = packed(histories.pop(name))
        start = max([0, *(common(ids, packed(x)) for x in histories.values())])
        before = contents(folder)
        disk = disk_of(folder)
        disk.drop_conversation(name)
        disk.erase(None, ids, start)
        disk.check_integrity()
        disk.close()
        left = contents(folder)
        for number, row in before.rows.items():
            alike = common(sequence(before, number), ids)
            # What holds tokens of others is one file with what follows these.
            assert (number in left.rows) == (row.start < start or alike <= start), (number, row.start, alike, start)
        assert {int(x.stem) for x in folder.glob("*.safetensors")} == left.rows.keys()
    with contextlib.closing(disk_of(folder)) as disk:
        assert [read_all(disk, ids) for ids in histories.values()] == [len(ids) for ids in histories.values()]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_store_erases_what_one_conversation_has_alone_for_good(name: str, folder: Path) -> None:
    model, system = tiny_model(name), some_ids(24)
    prompts = {x: torch.cat([system, some_ids(30, seed=n + 1)], 1) for n, x in enumerate("ab")}
    secret = packed(prompts["a"][0, 24:].tolist())

    def tells() -> bool:
        return any(secret in x.read_bytes() for x in folder.iterdir())

    with store_of(model, directory=folder) as store:
        store.generate(**ones(system), max_new_tokens=1)
        ends = {x: store.open(x).generate(**ones(ids), **GREEDY) for x, ids in prompts.items()}
        store.flush()
        assert tells()
        store.forget("a", erase=True)
        store.forget("none", erase=True)
        store.check_integrity()
        assert not tells()
        store.generate(**ones(prompts["a"]), **GREEDY)
        assert store.reuse[0].cached <= 24
        store.clear()
    with store_of(model, directory=folder) as store:
        ids = torch.cat([ends["b"], some_ids(5, seed=5)], 1)
        assert torch.equal(store.open("b").generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded >= 54


def test_what_waits_to_be_saved_or_is_kept_is_not_saved_behind_it(folder: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=folder) as store:
        store._disk_tier._archive.background = False  # nothing is saved before it is asked for
        store.open("a").generate(**ones(some_ids(30)), **GREEDY)
        store.forget("a", erase=True)
    assert contents(folder).rows == {}


def test_a_conversation_that_is_the_beginning_of_another_has_nothing_alone(folder: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=folder) as store:
        ids = store.open("a").generate(**ones(some_ids(30)), **GREEDY)
        store.open("b").generate(**ones(torch.cat([ids, some_ids(5, seed=2)], 1)), **GREEDY)
        store.flush()
        before = contents(folder).rows
        store.forget("a", erase=True)
        assert contents(folder).rows == before
        assert store.names == ["b"]


def test_what_cannot_be_erased_now_is_told_and_its_name_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model("llama"), some_ids(30)

    def fails(*args: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with store_of(model, directory=folder) as store:
        store.open("a").generate(**ones(prompt), **GREEDY)
        store.flush()
        for cannot, doubt in ((manifest.Manifest.remove, False), (manifest.Manifest.rows, True)):
            with monkeypatch.context() as patch:
                patch.setattr(manifest.Manifest, cannot.__name__, fails)
                store._disk_tier.disk._chunks.in_doubt = doubt
                with pytest.raises(ConfigError, match="is not removed: disk I/O error"):
                    store.forget("a", erase=True)
            assert store.names == ["a"]
        store.forget("a", erase=True)
        assert store.names == []
    assert contents(folder).rows == {}


@pytest.mark.parametrize("erase", [False, True])
def test_what_was_set_aside_of_one_that_is_damaged_goes_with_its_name(erase: bool, folder: Path) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=folder) as store:
        chat = store.open("a")
        chat.messages = state(9, WORD.decode())["messages"]
        store.conversations.changed(chat)
    with contextlib.closing(sqlite3.connect(folder / "manifest.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE conversations SET digest = x'00'")
    with store_of(model, directory=folder) as store:
        if not erase:
            assert store.find("a") is None
        store.forget("a", erase=erase)
        store.flush()
        assert telling(folder) == []


def test_who_looks_for_something_waits_for_no_file_that_is_erased(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(disk_of(folder)) as disk:
        save(disk, [1] * 20)
        save(disk, [1] * 20 + [2] * 20)
        unlink, waited = os.unlink, list[bool]()

        def noted(file: Any) -> None:
            waited.append(disk._lock._is_owned())
            unlink(file)

        monkeypatch.setattr(os, "unlink", noted)
        disk.erase(None, packed([1] * 20), 0)
        assert waited == [False, False]
        assert disk.chunks == 0


def test_what_a_fork_begins_with_stays_in_memory() -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("a")
        ids = chat.generate(**ones(some_ids(30)), **GREEDY)
        fork = chat.fork("b")
        fork.set_rank(pinned=True)
        chat.generate(**ones(torch.cat([ids, some_ids(20, seed=2)], 1)), **GREEDY)
        store.forget("a", erase=True)
        store.check_integrity()
        assert {len(x.ids) // 8 for x in store._kept.entries.values()} == {ids.shape[1]}
        fork.generate(**ones(torch.cat([ids, some_ids(5, seed=3)], 1)), **GREEDY)
        assert store.reuse[0].cached >= ids.shape[1] - 1


def test_who_is_interrupted_as_it_erases_may_do_it_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupts(*args: Any) -> None:
        raise KeyboardInterrupt

    with store_of(tiny_model("llama"), directory=folder) as store:
        store.open("a").generate(**ones(some_ids(30)), **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "erase", interrupts)
            with pytest.raises(KeyboardInterrupt):
                store.forget("a", erase=True)
        store.forget("a", erase=True)
    assert contents(folder).rows == {}
