"""A copy of a folder is whole, whatever a store does with the folder meanwhile, and whenever the copying ends."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_disk_faults
import torch
from disks import states_of
from families import tiny_model
from test_disk_faults import failing
from test_store import GREEDY, fresh, ones, some_ids, store_of
from test_upkeep import KEY, check, disk_of, read, save

from kvtier import ConfigError
from kvtier.cli.main import main
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.tools import copying
from kvtier.conversation.disk.tools.contents import contents, verify
from kvtier.conversation.disk.tools.copying import copy_folder
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import packed

KILLS = int(os.environ.get("KVTIER_TEST_KILLS", "2"))
WHO = "abcdef"


def say(disk: Disk, name: str, ids: list[int]) -> None:
    """A turn of a conversation is saved."""
    save(disk, ids)
    assert disk.save_conversation(name, {"ids": ids, "messages": [], "salt": None}), disk.problem


def three(folder: Path) -> dict[str, list[int]]:
    """A folder with conversations of several turns."""
    histories = dict[str, list[int]]()
    with disk_of(folder) as disk:
        for name in "abc":
            for turn in range(4):
                histories[name] = [*histories.get(name, ()), *[ord(name) % 5] * 4, turn]
                say(disk, name, histories[name])
    return histories


def before_the_first_file(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Something is done once, between a manifest and the first file."""
    todo, copy_file = [act], copying.copy_file

    def call(*args: Any) -> None:
        if todo:
            todo.pop()()
        copy_file(*args)

    monkeypatch.setattr(copying, "copy_file", call)


def test_a_copy_is_whole_while_turns_are_saved_and_files_removed_and_merged(tmp_path: Path) -> None:
    folder, rng, saved, ends = tmp_path / "store", random.Random(0), dict[str, list[int]](), threading.Event()
    forgotten, failed = list[str](), list[BaseException]()
    saved |= three(folder)

    def turns() -> None:
        with disk_of(folder) as disk:
            for _ in range(40):
                name = rng.choice(WHO)
                if rng.random() < 0.1 and name in saved:
                    forgotten.append(name)
                    del saved[name]
                    disk.drop_conversation(name)
                    continue
                ids = [*saved.get(name, [ord(name)]), *(rng.randrange(5) for _ in range(rng.randint(1, 6)))]
                say(disk, name, ids)
                saved[name] = ids
                if rng.random() < 0.1:
                    disk.forget(rng.choice([*disk._chunks]))

    def write() -> None:
        try:
            while not ends.is_set():
                turns()
                with Upkeep(folder) as upkeep:
                    rng.choice([upkeep.compact, upkeep.collect])()
        except BaseException as error:  # also one that says that the copying has the folder
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for n in range(4 * KILLS):
            forgotten.clear()
            before = {name: list(ids) for name, ids in saved.copy().items()}
            copy_folder(folder, copy := tmp_path / f"{n}")
            gone = set(forgotten)
            assert verify(copy)[2] == []
            with disk_of(copy) as disk:
                disk.check_integrity()
                found = {name: state["ids"] for name, state in states_of(disk).items()}
                for name, ids in before.items():
                    assert name in gone or found[name][: len(ids)] == ids
                for ids in found.values():
                    read(disk, ids)
                    save(disk, [*ids, 1, 2])
                    assert read(disk, [*ids, 1, 2]) == len(ids) + 2
                assert disk.damaged == 0
            shutil.rmtree(copy)
    finally:
        ends.set()
        thread.join()
    assert not failed
    assert verify(folder)[2] == []


@pytest.mark.parametrize("verb", ["forget", "merge", "renumber"])
def test_what_happens_between_a_manifest_and_its_files_costs_nothing(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    histories = three(folder)

    def act() -> None:
        if verb == "merge":
            with Upkeep(folder) as upkeep:
                upkeep.compact()
            return
        with disk_of(folder) as disk:
            _, end = disk.find(KEY, packed(histories["c"]))
            assert end is not None
            assert end.parent is not None
            disk.forget(end.parent if verb == "forget" else end)
        with disk_of(folder) as disk:  # the first number that is free is taken
            histories["c"] = histories["c"][:-1] + [3] * 3
            say(disk, "c", histories["c"])

    before_the_first_file(monkeypatch, act)
    copied = copy_folder(folder, copy)
    assert (copied.left_out, copied.damage) == (0, [])
    assert verify(copy)[2] == []
    assert contents(copy).rows == contents(folder).rows
    assert len(list(copy.glob("*.safetensors"))) == copied.files == len(contents(folder).rows)
    check(copy, histories)


def test_what_is_removed_faster_than_it_is_copied_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    histories = three(folder)

    def act() -> None:
        with disk_of(folder) as disk:
            disk.forget(next(x for x in disk._chunks if x.number == 2))

    monkeypatch.setattr(copying, "_MOST", 1)
    before_the_first_file(monkeypatch, act)
    copied = copy_folder(folder, copy)
    assert (copied.left_out, copied.files, copied.damage) == (3, 9, [])
    assert verify(copy)[2] == []
    with disk_of(copy) as disk:
        assert {name: state["ids"] for name, state in states_of(disk).items()} == histories
        assert [read(disk, ids) for ids in histories.values()] == [5, 20, 20]
        assert disk.damaged == 0


def test_what_is_damaged_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    histories = three(folder)
    data = bytearray((folder / f"{6:012}.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / f"{6:012}.safetensors").write_bytes(data)
    assert main(["store", "copy", str(folder), str(copy)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("3 conversations and 9 files copied, ")
    assert "3 files left out" in said.err
    assert "1 damaged" in said.err
    assert {x.name for x in copy.iterdir() if x.suffix != ".safetensors"} == {copying.MANIFEST}
    assert verify(copy)[2] == []
    with disk_of(copy) as disk:
        assert [read(disk, ids) for ids in histories.values()] == [20, 5, 20]


@pytest.mark.parametrize("done", [False, True])
def test_whatever_call_fails_there_is_no_copy_or_a_whole_one(done: bool, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    histories = three(folder)
    was = {x.name: x.read_bytes() for x in folder.iterdir()}
    failed = 0
    for at in range(0, 1000, 5 if KILLS < 10 else 1):
        (at_ := tmp_path / "to").mkdir()
        with failing(at, errno.ENOSPC, done) as left:
            try:
                copy_folder(folder, at_ / "copy")
            except ConfigError:
                failed += 1
        if left[0] < 0 and not (at_ / "copy").exists():
            assert list(at_.iterdir()) == []
        else:
            check(at_ / "copy", histories)
        shutil.rmtree(at_)
        if left[0] >= 0:
            break
    assert failed > 5
    assert {x.name: x.read_bytes() for x in folder.iterdir() if x.name in was} == was


def test_whenever_the_copying_ends_nothing_opens_as_a_store_but_a_whole_copy(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    histories = three(folder)
    for at in range(0, 1000, 5 if KILLS < 10 else 1):
        (at_ := tmp_path / "to").mkdir()
        child = os.fork()
        if child == 0:  # nothing of this process is told that it ends
            left = [at]

            def ending(function: Any) -> Any:
                def call(*args: Any, **options: Any) -> Any:
                    left[0] -= 1  # noqa: B023
                    if left[0] < 0:  # noqa: B023
                        os._exit(1)
                    return function(*args, **options)

                return call

            for name in (*test_disk_faults.CALLS, "rename", "rmdir"):
                setattr(os, name, ending(getattr(os, name)))
            try:
                copy_folder(folder, at_ / "copy")
                os._exit(0)
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended in (0, 1)
        for each in at_.iterdir():
            if each.name == "copy":
                check(each, histories)
            elif not (each / copying.MANIFEST).exists():
                with pytest.raises(ConfigError, match="not a folder of saved sequences"):
                    contents(each)
            else:  # all that is left to be done is to rename it
                check(each, histories)
        shutil.rmtree(at_)
        if ended == 0:
            break
    assert at > 20
    check(folder, histories)


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupts() -> None:
        raise KeyboardInterrupt

    three(tmp_path / "store")
    before_the_first_file(monkeypatch, interrupts)
    with pytest.raises(KeyboardInterrupt):
        copy_folder(tmp_path / "store", tmp_path / "copy")
    assert [x.name for x in tmp_path.iterdir()] == ["store"]


def test_a_copy_is_for_its_owner_and_of_no_file_of_others(tmp_path: Path) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    histories = three(folder)
    (folder / "server.secret").write_bytes(b"s" * 32)
    (folder / "notes").write_text("of others")
    copy.mkdir(mode=0o755)
    assert main(["store", "copy", str(folder), str(copy)]) == 0
    names = {x.name for x in copy.iterdir()}
    assert names == {"manifest.sqlite", "server.secret", *(f"{n:012}.safetensors" for n in range(1, 13))}
    assert (copy / "server.secret").read_bytes() == b"s" * 32
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    assert {stat.S_IMODE(x.stat().st_mode) for x in copy.iterdir()} == {0o600}
    assert {x.stat().st_nlink for x in copy.iterdir()} == {1}, "what is damaged in one is whole in the other"
    check(copy, histories)


def test_what_cannot_be_copied_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    three(folder)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("of others")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("of others")
    before = sorted(tmp_path.rglob("*"))
    for to in ("store", "store/copy", "store/a/b", "link", "link/copy", "file", "file/copy", "full"):
        with pytest.raises(ConfigError) as refused:
            copy_folder(folder, tmp_path / to)
        assert str(refused.value).count("Give ") == 1
    with pytest.raises(ConfigError, match="not a folder of saved sequences"):
        copy_folder(tmp_path / "full", tmp_path / "copy")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_wrong_with_a_manifest_is_told_in_sentences(tmp_path: Path) -> None:
    (tmp_path / "manifest.sqlite").write_bytes(b"of others" * 500)
    with pytest.raises(ConfigError, match="is no manifest") as refused:
        copy_folder(tmp_path, tmp_path.parent / "copy")
    assert ".." not in str(refused.value)


@pytest.mark.parametrize("log", ["", "-wal", "-shm"])
def test_a_folder_on_a_disk_that_nobody_can_write_to_is_read_as_it_is(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite locks even what it only reads, which is a write."""
    three(tmp_path)
    whole, names, connect = contents(tmp_path), list[str](), sqlite3.connect

    def connected(name: str, **options: Any) -> sqlite3.Connection:
        names.append(name)
        return connect(name, **options)

    monkeypatch.setattr(sqlite3, "connect", connected)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    for end in ("-wal", "-shm"):  # of who has read it
        (tmp_path / f"manifest.sqlite{end}").unlink(missing_ok=True)
    if log:  # another process has it open, by another mount
        (tmp_path / f"manifest.sqlite{log}").touch()
    found = contents(tmp_path)
    assert found.rows == whole.rows
    assert found.conversations == whole.conversations
    # What changes meanwhile would be read in part, and what is only in the log not at all.
    assert ["immutable=1" in name for name in names] == [not log]


def test_what_was_removed_is_not_in_a_copy(tmp_path: Path) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    with disk_of(folder) as disk:
        for name in ("a", "b"):
            disk.save_conversation(name, {"messages": [{"role": "user", "content": f"SWORDFISH {name}" * 500}]})
        disk.drop_conversation("a")
        copy_folder(folder, copy)
    data = (copy / "manifest.sqlite").read_bytes()
    assert b"SWORDFISH a" not in data
    assert b"SWORDFISH b" in data


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_goes_on_from_a_copy_of_a_store_that_is_open(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name), some_ids(40)
    with store_of(model, directory=tmp_path / "store") as store:
        chat = store.open("a")
        ids = chat.generate(**ones(ids), **GREEDY)
        store.flush()
        copy_folder(tmp_path / "store", tmp_path / "copy")
        chat.generate(**ones(torch.cat([ids, some_ids(3)], 1)), **GREEDY)
        store.forget("a")
    ids = torch.cat([ids, some_ids(5, seed=1)], 1)
    with store_of(model, directory=tmp_path / "copy") as store:
        chat = store.find("a")
        assert chat is not None
        assert torch.equal(chat.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded
        assert store.stats.damaged == 0


def test_an_empty_folder_is_there_still_where_a_copy_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, "no space")

    three(tmp_path / "store")
    (tmp_path / "copy").mkdir()
    before_the_first_file(monkeypatch, fails)
    with pytest.raises(ConfigError, match="no space"):
        copy_folder(tmp_path / "store", tmp_path / "copy")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["copy", "store"]
    assert not list((tmp_path / "copy").iterdir())


def test_what_is_kept_aside_is_copied_and_is_no_damage(tmp_path: Path) -> None:
    with disk_of(tmp_path / "store") as disk:
        disk.save_conversation("a", {"ids": [1]})
        disk._manifest.db.execute("UPDATE conversations SET digest = x'00'")
        assert disk.conversation("a") is None
    assert main(["store", "copy", str(tmp_path / "store"), str(tmp_path / "copy")]) == 0
    with disk_of(tmp_path / "copy") as disk:
        assert disk._conversations.aside() == 1
