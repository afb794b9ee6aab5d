"""An interrupt at any line of what is done with a folder: it has what its rows say, by the next use, and nothing that
is saved behind it is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from disks import disk_of, load, save, uncollected
from test_disk_faults import failing
from test_store_interrupts import Line_

from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import Folder
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank

#: Lines from one interrupt to the next, at the most; KVTIER_TEST_STEP=1 asks for all.
STEP = int(os.environ.get("KVTIER_TEST_STEP", "7"))
OLD, OLDER, OTHER, NEW = [1] * 40, [1] * 40 + [2] * 40, [3] * 40, [4] * 40
ALL: tuple[Sequence[int], ...] = (OLD, OLDER, OTHER, NEW)


def grow(disk: Disk) -> None:
    """What a conversation says takes the room of keys and values."""
    disk.save_conversation("long", {"messages": [{"role": "user", "content": "x" * 9000}]})


def damage(disk: Disk) -> None:
    """A file that is not what was written is forgotten, with what continues it."""
    chunk = disk.find("k", packed(OLD))[1]
    assert chunk is not None
    chunk = chunk.chain()[-1]
    disk._folder.file(chunk.number).write_bytes(b"x" * chunk.nbytes)
    load(disk, OLDER)


def expire(disk: Disk) -> None:
    """What nobody has used for its time goes."""
    disk.rank("a", "salt", packed(OLDER), Rank(ttl=1.0), 0.0)
    disk.expire()


ACTS: dict[str, Callable[[Disk], Any]] = {
    "text grows": grow,
    "a save": lambda disk: save(disk, NEW),
    "a load": lambda disk: load(disk, OTHER),
    "damage": damage,
    "expiry": expire,
}


def key(act: str) -> str:
    return "(('k',), 'salt')" if act == "expiry" else "k"


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Disk]:
    """A folder; nobody waits for the disk."""
    with contextlib.closing(disk_of(folder)) as disk:
        disk._manifest.db.execute("PRAGMA synchronous=OFF")
        yield disk


def cut_short(act: str, at: int, source: Path) -> bool:
    """Cut an act short at a line. Whether there is such a line."""
    folder = shutil.copytree(source, source.parent / "x")
    with opened(folder) as disk:
        disk.room.budget = disk.room.nbytes + 2000
        load(disk, OLDER, key(act))
        line = Line_(at, ("conversation/disk/",))
        with line.traced():
            ACTS[act](disk)
        assert not disk._lock._is_owned(), "the lock is held for ever"
        go_on(disk, key(act))
    check(folder, key(act), f"what was saved is lost behind {line.where}")
    shutil.rmtree(folder)
    return line.where is not None


def go_on(disk: Disk, key: str) -> None:
    """Every sequence goes on, and there is room for all."""
    disk.room.budget = None
    for ids in ALL:
        load(disk, ids, key)
        save(disk, [*ids, 5, 5], key)
        assert load(disk, [*ids, 5, 5], key) == len(ids) + 2
    disk.check_integrity()


def check(folder: Path, key: str, where: str) -> None:
    """All that has gone on is there, and nothing else."""
    with opened(folder) as disk:
        assert not disk.damaged, where
        assert [load(disk, [*ids, 5, 5], key) for ids in ALL] == [len(ids) + 2 for ids in ALL], where
        disk.check_integrity()
        files = {x.name for x in folder.glob("*.safetensors*")}
        assert files == {f"{x.number:012}.safetensors" for x in disk._chunks}


@pytest.mark.parametrize("act", ACTS)
def test_what_is_saved_behind_an_interrupt_is_there_later(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with opened(tmp_path / "source") as disk:
        assert all([save(disk, ids, key(act)) for ids in ALL[:3]])
    at, steps = 0, random.Random(3)
    while cut_short(act, at, tmp_path / "source"):
        at += steps.randint(1, STEP)
    assert at > 30


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("act", ACTS)
def test_what_is_saved_behind_a_call_that_failed_is_there_later(
    act: str, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with opened(tmp_path / "source") as disk:
        assert all([save(disk, ids, key(act)) for ids in ALL[:3]])
        begun = disk.room.nbytes
    for at in range(10**6):
        folder = shutil.copytree(tmp_path / "source", tmp_path / "x")
        with failing(10**6, errno.EIO, done=done) as left, opened(folder) as disk:
            disk.room.budget = begun + 2000
            left[0] = at
            ACTS[act](disk)
            ended, left[0] = left[0] >= 0, 10**6
            go_on(disk, key(act))
        check(folder, key(act), f"what was saved is lost behind call {at}")
        shutil.rmtree(folder)
        if ended:
            break
    assert at


def test_what_is_in_doubt_is_settled_by_each_file_and_by_rows_that_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of files may lack some while others are removed; a transaction may be open whose end was cut short."""
    with opened(tmp_path) as disk:
        assert all([save(disk, ids) for ids in ALL[:3]])
        first = min(x.number for x in disk._chunks)
        monkeypatch.setattr(Folder, "files", lambda folder: (set(), []))
        disk._manifest.db.execute("BEGIN")
        disk._manifest.remove([first])
        disk._chunks.in_doubt = True
        assert [load(disk, ids) for ids in ALL[:3]] == [40, 80, 40]
        assert not disk._manifest.db.in_transaction
        disk.check_integrity()


def test_nothing_in_doubt_is_settled_where_the_folder_is_another_one(tmp_path: Path) -> None:
    with opened(tmp_path / "one") as disk:
        assert save(disk, OLD)
        disk._chunks.in_doubt = True
        (tmp_path / "one").rename(tmp_path / "other")
        assert load(disk, OLD) == 0
        assert "removed, or replaced" in disk.problem
        (tmp_path / "other").rename(tmp_path / "one")
        assert load(disk, OLD) == 40


@pytest.mark.parametrize("budget", [None, 10**9])
def test_a_folder_that_is_dropped_as_it_was_opened_is_open_to_others_at_once(
    budget: int | None, tmp_path: Path
) -> None:
    """As by an interrupt before it has a name: nobody may close it, and nobody knows when garbage is collected."""
    with uncollected():
        for ids in ALL:
            disk_of(tmp_path, budget=budget)
            with contextlib.closing(disk_of(tmp_path, budget=budget)) as disk:
                save(disk, ids)
            disk = disk_of(tmp_path, budget=budget)
            load(disk, ids)
            del disk
    with contextlib.closing(disk_of(tmp_path)) as disk:
        assert disk.find("k", packed(NEW))[0] == len(NEW)
