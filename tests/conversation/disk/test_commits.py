"""A database that is older than what stores have written is refused, whatever of a folder is of another moment, and
nothing in it is changed. A folder that is whole is never refused, however a process, or the machine, has ended."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import disk_of, load, save, states_of
from families import tiny_model
from test_store import GREEDY, ones, some_ids, store_of

from kvtier import ConfigError
from kvtier.cli.main import main
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import LOG, MANIFEST, WRITTEN
from kvtier.conversation.disk.tools.contents import verify
from kvtier.conversation.disk.tools.copying import copy_folder
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank

WALKS = int(os.environ.get("KVTIER_TEST_WALKS", "4"))
PARTS = ("", LOG, WRITTEN)


def ids_of(name: str, turns: int) -> list[int]:
    return [ord(name) % 7] * 20 + [n % 5 for n in range(turns) for _ in range(4)]


def say(disk: Disk, name: str, turns: int) -> None:
    """A conversation has so many turns now."""
    assert save(disk, ids_of(name, turns))
    assert disk.save_conversation(name, {"ids": ids_of(name, turns), "messages": [], "salt": None}), disk.problem


def said(disk: Disk) -> dict[str, list[int]]:
    """What all conversations say; keys and values are there, too."""
    found = {name: state["ids"] for name, state in states_of(disk).items()}
    assert all(load(disk, ids) == len(ids) for ids in found.values())
    return found


def checkpoint(disk: Disk) -> None:
    """The log is moved to the database, and begins again with the next commit."""
    disk._manifest.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def files(folder: Path) -> dict[str, bytes]:
    """All that is there, but for what SQLite makes of the log for those who read."""
    names = [x for x in folder.iterdir() if not x.name.endswith("-shm")]
    return {x.name: x.read_bytes() for x in names if x.stat().st_size}


def copied(folder: Path, to: Path) -> Path:
    """As `cp -r` does."""
    return shutil.copytree(folder, to)


def counts(folder: Path) -> tuple[int, int]:
    """What the file next to the database says."""
    said = (folder / (MANIFEST + WRITTEN)).read_bytes()
    assert int(said[22:30], 16) == zlib.crc32(said[:21])
    return int(said[:10]), int(said[11:21])


@contextlib.contextmanager
def in_use(folder: Path, *, later: bool) -> Iterator[Disk]:
    """A folder with conversations; `later`: in a process that has found some of them there."""
    disk = disk_of(folder)
    for name in "ab":
        say(disk, name, 1)
    if later:
        disk.close()
        disk = disk_of(folder)
    yield disk
    disk.close()


def restored(folder: Path, part: str, data: bytes | None) -> None:
    """A file of the database is this; None: it is not there."""
    file = folder / (MANIFEST + part)
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)


def part_of(folder: Path, part: str) -> bytes:
    file = folder / (MANIFEST + part)
    return file.read_bytes() if file.exists() else b""


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    "how", ["no log", "half a log", "an empty log", "an older log", "an older database", "an older database, no log"]
)
def test_a_folder_that_was_copied_without_its_last_commits_is_refused_and_left_as_it_is(
    how: str, later: bool, tmp_path: Path
) -> None:
    with in_use(tmp_path / "store", later=later) as disk:
        before = {part: part_of(disk.path, part) for part in PARTS}
        if how.startswith("an older database"):
            say(disk, "d", 1)
            checkpoint(disk)
        for name in "abc":
            say(disk, name, 2)
        whole, folder = said(disk), copied(disk.path, tmp_path / "copy")
    there = {part: part_of(folder, part) for part in PARTS}
    if how == "half a log":
        restored(folder, LOG, there[LOG][: len(there[LOG]) // 2])
    elif how == "an empty log":
        restored(folder, LOG, b"")
    elif how == "an older log":
        restored(folder, LOG, before[LOG])
    elif how == "an older database":
        restored(folder, "", before[""])
    else:
        restored(folder, LOG, None)
        if "database" in how:
            restored(folder, "", before[""])
    found = files(folder)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is not whole: .* remove manifest\.sqlite-"):
            disk_of(folder)
        assert files(folder) == found, "it says that nothing was changed"
    for part in ("", LOG):
        restored(folder, part, there[part])
    disk = disk_of(folder)
    assert said(disk) == whole
    assert (disk.damaged, disk.problem) == (0, "")
    disk.close()


def test_a_folder_whose_database_is_gone_is_refused_and_its_log_stays(tmp_path: Path) -> None:
    """Whoever has it elsewhere may put it there."""
    with in_use(tmp_path / "store", later=False) as disk:
        folder, whole = copied(disk.path, tmp_path / "copy"), said(disk)
    data = part_of(folder, "")
    restored(folder, "", None)
    found = files(folder)
    with pytest.raises(ConfigError, match="has 0 of at least"):
        disk_of(folder)
    assert files(folder) == found
    restored(folder, "", data)
    disk = disk_of(folder)
    assert said(disk) == whole
    disk.close()


def test_who_removes_what_the_error_names_goes_on_with_what_is_there(tmp_path: Path) -> None:
    with in_use(tmp_path / "store", later=True) as disk:
        before = part_of(disk.path, "")
        say(disk, "a", 2)
        older = part_of(disk.path, LOG)
        say(disk, "a", 3)
        checkpoint(disk)
        say(disk, "c", 1)
        base = copied(disk.path, tmp_path / "copy")
    lacking = {"no log": [WRITTEN], "older log": [LOG, WRITTEN], "older database": [LOG, WRITTEN]}
    for how, names in lacking.items():
        folder = copied(base, tmp_path / how)
        restored(folder, LOG, {"no log": None, "older log": older}.get(how, part_of(base, LOG)))
        if how == "older database":
            restored(folder, "", before)
        with pytest.raises(ConfigError) as refused:
            disk_of(folder)
        told = re.findall(r"manifest\.sqlite-\w+", str(refused.value).rpartition("remove ")[2])
        assert told == [MANIFEST + x for x in names]
        for name in told:
            (folder / name).unlink()
        for _ in range(2):
            disk = disk_of(folder)
            turns = {name: len(ids) for name, ids in said(disk).items()}
            assert turns == ({"a": 24, "b": 24} if how == "older database" else {"a": 32, "b": 24})
            assert len(list(folder.glob("*.safetensors"))) == disk.chunks, "what no row names is removed"
            disk.close()


def test_an_older_log_next_to_a_database_that_has_all_is_removed_without_loss(tmp_path: Path) -> None:
    with in_use(tmp_path / "store", later=False) as disk:
        older = part_of(disk.path, LOG)
        say(disk, "c", 1)
        checkpoint(disk)
        folder, whole = copied(disk.path, tmp_path / "copy"), said(disk)
    restored(folder, LOG, older)
    for written in (part_of(folder, WRITTEN), None):  # also where the file next to it is not there
        restored(folder, WRITTEN, written)
        with pytest.raises(ConfigError, match=r"To go on with all of them, remove manifest\.sqlite-wal\.$"):
            disk_of(folder)
    restored(folder, LOG, None)
    disk = disk_of(folder)
    assert said(disk) == whole
    disk.close()


def test_a_store_is_refused_and_tools_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = tiny_model("llama"), tmp_path / "copy"
    with store_of(model, directory=tmp_path / "store"):
        pass  # the database is there
    with store_of(model, directory=tmp_path / "store") as store:
        for name in "abc":
            store.open(name).generate(**ones(some_ids(20, seed=ord(name))), **GREEDY)
        store.flush()
        copied(tmp_path / "store", folder)
    assert verify(folder)[2] == []
    (folder / (MANIFEST + LOG)).unlink()
    (folder / (MANIFEST + "-shm")).unlink(missing_ok=True)
    there = files(folder)
    for act in (lambda: store_of(model, directory=folder), lambda: Upkeep(folder)):
        with pytest.raises(ConfigError, match="is not whole"):
            act()
    assert main(["store", "verify", str(folder)]) == 1
    assert "the database: " in capsys.readouterr().out
    assert main(["store", "verify", str(folder), "--repair"]) == 2
    assert "remove manifest.sqlite-written" in capsys.readouterr().err
    assert main(["store", "copy", str(folder), str(tmp_path / "another")]) == 1
    assert files(folder) == there
    (damage,) = copy_folder(folder, tmp_path / "third").damage
    assert "is not whole" in damage.why
    disk_of_model = store_of(model, directory=tmp_path / "third")
    assert disk_of_model.names == []
    disk_of_model.close()


# Nobody is refused for nothing


def test_a_folder_of_before_is_taken_as_it_is_and_counts_from_then_on(tmp_path: Path) -> None:
    with in_use(tmp_path / "store", later=False) as disk:
        folder, whole = copied(disk.path, tmp_path / "copy"), said(disk)
    (folder / (MANIFEST + WRITTEN)).unlink()
    with contextlib.closing(sqlite3.connect(folder / MANIFEST)) as db:
        db.execute("PRAGMA user_version = 0")
    disk = disk_of(folder)
    assert said(disk) == whole
    assert counts(folder) == (0, 0)
    say(disk, "c", 1)
    lacking = copied(folder, tmp_path / "lacking")
    disk.close()
    assert counts(folder) >= (2, 0)
    (lacking / (MANIFEST + LOG)).unlink()
    with pytest.raises(ConfigError, match="has 0 of at least 2 commits"):
        disk_of(lacking)


@pytest.mark.parametrize("rest", [b"", b"\0" * 31, b"0000000099 00000", b"0000000099 0000000099 00000000\n"])
def test_what_the_end_of_the_machine_leaves_next_to_the_database_refuses_nothing(rest: bytes, tmp_path: Path) -> None:
    with in_use(tmp_path / "store", later=True) as disk:
        folder, whole = copied(disk.path, tmp_path / "copy"), said(disk)
    restored(folder, WRITTEN, rest)
    disk = disk_of(folder)
    assert said(disk) == whole
    disk.close()
    assert counts(folder) == counts(tmp_path / "store")


def test_what_cannot_be_written_next_to_the_database_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    disk = disk_of(store)
    say(disk, "a", 1)
    before = counts(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        say(disk, "a", 2)
    assert counts(store) == before
    copied(store, copy)
    say(disk, "a", 3)
    disk.close()
    for each in (copy, store):
        disk = disk_of(each)
        assert said(disk) == {"a": ids_of("a", 2 if each == copy else 3)}
        disk.close()
    (store / (MANIFEST + WRITTEN)).unlink()
    (store / (MANIFEST + WRITTEN)).mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        disk_of(store)


def test_what_changes_nothing_is_no_commit(tmp_path: Path) -> None:
    """Nobody waits for a disk then."""
    disk = disk_of(tmp_path)
    say(disk, "a", 1)
    disk.rank("a", None, packed(ids_of("a", 1)), Rank(pinned=True), 1.0)
    disk.note_ranks(["a"])
    before, log = counts(tmp_path), part_of(tmp_path, LOG)
    say(disk, "a", 1)
    disk.note_ranks(["a"])
    disk.drop_conversation("nobody")
    assert (counts(tmp_path), part_of(tmp_path, LOG)) == (before, log)
    disk.close()


@pytest.mark.parametrize("seed", range(WALKS))
def test_parts_of_any_moments_are_whole_or_refused(seed: int, tmp_path: Path) -> None:
    """What is of one moment is never refused. Where the file that counts is the newest, as in a folder that is copied
    in the order of names, or whose other files are restored, what is taken is what was there then or later."""
    rng, disk = random.Random(seed), disk_of(tmp_path / "store")
    moments, turns, taken, refused = list[tuple[dict[str, bytes], dict[str, list[int]]]](), dict[str, int](), 0, 0
    for step in range(40):
        what = rng.random()
        name = rng.choice("abcdef")
        if what < 0.65:
            turns[name] = turns.get(name, 0) + 1
            say(disk, name, turns[name])
        elif what < 0.75 and turns:
            turns.pop(gone := rng.choice(sorted(turns)))
            disk.drop_conversation(gone)
        elif what < 0.85:
            checkpoint(disk)
        elif what < 0.93:
            disk._manifest.db.execute("PRAGMA wal_checkpoint(RESTART)")
        else:
            disk.close()
            disk = disk_of(tmp_path / "store")
        parts = {part: part_of(disk.path, part) for part in PARTS}
        moments.append((parts, {n: ids_of(n, count) for n, count in turns.items()}))
        if step % 4:
            continue
        for mixed in (False, True, True):
            picked = [rng.randrange(len(moments)) for _ in PARTS[1:]] if mixed else [len(moments) - 1] * 2
            picked.append(max(picked))
            folder = copied(disk.path, tmp_path / f"{step} {picked}")
            (folder / (MANIFEST + "-shm")).unlink(missing_ok=True)
            for part, at in zip(PARTS, picked, strict=True):
                restored(folder, part, moments[at][0][part])
            # Of other moments, and the same all the same.
            newest = moments[picked[2]][0]
            same = all(newest[part] == moments[at][0][part] for part, at in zip(PARTS, picked, strict=True))
            other = None
            with contextlib.suppress(ConfigError) if mixed and not same else contextlib.nullcontext():
                other = disk_of(folder)
            if other is None:
                refused += 1
            else:
                found = {n: state["ids"] for n, state in states_of(other).items()}
                later = [x for _, x in moments[picked[2] :]]
                assert found in later, "older than what was written"
                taken += 1
                other.close()
            shutil.rmtree(folder)
    disk.close()
    assert taken > 10
    assert refused


@pytest.mark.parametrize("begins", [False, True], ids=["goes on", "begins again"])
def test_a_process_that_is_killed_between_a_commit_and_its_note_leaves_a_folder_that_is_whole(
    begins: bool, tmp_path: Path
) -> None:
    folder, turns = tmp_path / "store", 0
    for kill in range(12):
        child = os.fork()
        if not child:
            try:
                turns_until_killed(folder, turns, kill, begins)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        told, base = counts(folder)
        disk = disk_of(copied(folder, tmp_path / f"{kill}"))  # the log stays for the next process
        assert disk._manifest.db.execute("PRAGMA user_version").fetchone()[0] == told + 1
        assert base <= told
        assert (disk.damaged, disk.problem) == (0, "")
        turns += kill + 1
        assert states_of(disk) == {"a": {"ids": ids_of("a", turns)}}
        disk.close()


def turns_until_killed(folder: Path, turns: int, kill: int, begins: bool) -> None:
    disk, pwrite, left = disk_of(folder), os.pwrite, [kill]

    def killed(*args: Any) -> int:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return pwrite(*args)

    os.pwrite = killed
    while True:
        if begins:
            checkpoint(disk)
        turns += 1
        disk.save_conversation("a", {"ids": ids_of("a", turns)})
