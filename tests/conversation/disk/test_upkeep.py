"""A folder that is put in order holds for every conversation what it held before, whenever that fails or ends."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import test_disk_faults
import torch
from disks import content, states_of
from disks import disk_of as open_disk
from families import tiny_model
from test_disk_faults import failing
from test_store import GREEDY, fresh, ones, some_ids, store_of

from kvtier import ConfigError, StoreInUseError
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.folder import MANIFEST
from kvtier.conversation.disk.rows import manifest
from kvtier.conversation.disk.tools.contents import contents, verify
from kvtier.conversation.disk.tools.upkeep import Upkeep, unreferred
from kvtier.conversation.index import packed

KILLS = int(os.environ.get("KVTIER_TEST_KILLS", "2"))
WALKS = KILLS * 4
KEY = "((None,), None)"


def disk_of(folder: Path) -> closing[Disk]:
    return closing(open_disk(folder))


def save(disk: Disk, ids: list[int], said: str = "") -> None:
    """Save what of a sequence is not saved yet."""
    start, parent = disk.find(KEY, packed(ids))
    if start < len(ids):
        part = content(ids, start)
        disk.write(KEY, packed(ids), start, parent, {"k.0": part, "v.0": -part.to(torch.int64)}, said)


def read(disk: Disk, ids: list[int]) -> int:
    """Tokens of a sequence that are saved, compared."""
    length, chunk = disk.find(KEY, packed(ids))
    if chunk is None:
        return 0
    parts, until = [], 0
    for start, stop, tensors, _ in disk.read(chunk, length):
        parts.append(tensors["k.0"][:, : stop - start].clone())
        until = stop
    assert not until or torch.equal(torch.cat(parts, 1), content(ids[:until]))
    return until


def grown(folder: Path, rng: random.Random, turns: int = 14) -> dict[str, list[int]]:
    """A folder with conversations that go on, branch at their ends or within, and are closed. Those that are open."""
    histories: dict[str, list[int]] = {"0": []}
    with disk_of(folder) as disk:
        for n in range(1, turns):
            name = rng.choice(list(histories))
            if rng.random() < 0.3:
                cut = rng.choice([len(histories[name]), rng.randint(0, len(histories[name]))])
                histories[name := str(n)] = histories[rng.choice(list(histories))][:cut]
            histories[name] = histories[name] + [rng.randrange(5) for _ in range(rng.randint(1, 6))]
            save(disk, histories[name])
        for name in [x for x in histories if rng.random() < 0.2]:
            del histories[name]
        for name, ids in histories.items():
            disk.save_conversation(name, {"ids": [*ids, 7], "messages": [], "salt": None})
    return histories


def check(folder: Path, histories: dict[str, list[int]]) -> None:
    with disk_of(folder) as disk:
        disk.check_integrity()
        assert disk.damaged == 0
        for name, ids in histories.items():
            assert read(disk, ids) == len(ids), name
        assert set(states_of(disk)) == set(histories)


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_folder_that_is_put_in_order_has_what_every_conversation_had(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    histories = grown(tmp_path, rng, 30)
    for verb in rng.choices(["compact", "collect", "little", "forget", "more"], k=6):
        with Upkeep(tmp_path) as upkeep:
            if verb == "collect":
                before = contents(tmp_path)
                gone = unreferred(before)
                assert upkeep.collect() == (len(gone), sum(before.rows[n].nbytes for n in gone))
                assert unreferred(upkeep.contents()) == []
            elif verb in ("compact", "little"):
                done = upkeep.compact(*([1500] if verb == "little" else []))
                assert not done.problem
                assert done.left <= done.nbytes
            elif verb == "forget" and histories:
                name = rng.choice(list(histories))
                upkeep.drop_conversation(name)
                del histories[name]
        check(tmp_path, histories)
        if verb == "more" and histories:
            name = rng.choice(list(histories))
            histories[name] = histories[name] + [rng.randrange(5) for _ in range(4)]
            with disk_of(tmp_path) as disk:
                save(disk, histories[name])
                disk.save_conversation(name, {"ids": histories[name], "messages": [], "salt": None})
        assert verify(tmp_path)[2] == []


def test_what_nobody_else_continues_is_one_file_then(tmp_path: Path) -> None:
    system, ends = [1] * 10, {}
    with disk_of(tmp_path) as disk:
        save(disk, system)
        for who in (2, 3):
            ids = list(system)
            for n in range(8):
                ids = [*ids, who, n % 5]
                save(disk, ids)
            ends[str(who)] = ids
            disk.save_conversation(str(who), {"ids": ids, "messages": [], "salt": None})
        assert disk.chunks == 17
    with Upkeep(tmp_path) as upkeep:
        done = upkeep.compact()
        assert (done.files, done.merged) == (17, 16)
    assert len(contents(tmp_path).rows) == len(list(tmp_path.glob("*.safetensors"))) == 3
    check(tmp_path, ends)
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.compact().merged == 0


def test_a_merged_file_is_not_larger_than_is_asked_for(tmp_path: Path) -> None:
    ids = list[int]()
    with disk_of(tmp_path) as disk:
        for n in range(20):
            ids = [*ids, n % 5]
            save(disk, ids)
        disk.save_conversation("a", {"ids": ids, "messages": [], "salt": None})
        each = disk.room.nbytes // 20
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.compact(largest=each * 4).merged
    assert all(row.nbytes <= each * 4 for row in contents(tmp_path).rows.values())
    check(tmp_path, {"a": ids})


def test_chunks_with_states_stay_as_they_are(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3], said="states")
        save(disk, [1, 2, 3, 4], said="states")
        save(disk, [1, 2, 3, 4, 0])
        save(disk, [1, 2, 3, 4, 0, 1])
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.compact().merged == 2
    assert len(contents(tmp_path).rows) == 3


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("verb", ["compact", "collect", "repair"])
def test_whatever_call_fails_nothing_that_a_conversation_has_is_lost(
    verb: str, done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_disk_faults, "CALLS", (*test_disk_faults.CALLS, "link"))
    monkeypatch.setattr(test_disk_faults, "DONE", (*test_disk_faults.DONE, "link"))
    histories = grown(tmp_path / "a", random.Random(3), 12)
    for at in range(0, 1000, 4 if KILLS < 10 else 1):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "a", folder)
        with (
            failing(at, errno.EIO, done) as left,
            contextlib.suppress(ConfigError, StoreInUseError),
            Upkeep(folder) as upkeep,
        ):
            getattr(upkeep, verb)()
        check(folder, histories)
        shutil.rmtree(folder)
        if left[0] >= 0:
            break
    assert at > 20


@pytest.mark.parametrize("verb", ["compact", "collect", "repair"])
def test_whenever_the_process_ends_nothing_that_a_conversation_has_is_lost(verb: str, tmp_path: Path) -> None:
    histories = grown(tmp_path / "a", random.Random(3), 12)
    for at in range(0, 1000, 4 if KILLS < 10 else 1):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "a", folder)
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

            for name in (*test_disk_faults.CALLS, "link"):
                setattr(os, name, ending(getattr(os, name)))
            try:
                with Upkeep(folder) as upkeep:
                    getattr(upkeep, verb)()
                os._exit(0)
            finally:
                os._exit(2)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check(folder, histories)
        with Upkeep(folder) as upkeep:
            upkeep.compact()
        check(folder, histories)
        shutil.rmtree(folder)
        assert ended in (0, 1)
        if ended == 0:
            break
    assert at > 20


@pytest.mark.parametrize("seed", range(WALKS))
def test_damage_anywhere_is_found_and_what_is_left_after_repair_is_right(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    histories = grown(tmp_path, rng)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert verify(tmp_path)[2] == []
    bad = set()
    for file in rng.sample(files, min(2, len(files))):
        data = bytearray(file.read_bytes())
        match rng.randrange(4):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += b"\0"
            case _:
                data = bytearray(rng.randbytes(len(data)))
        file.unlink()
        if rng.random() < 0.8:
            file.write_bytes(data)
        bad.add(int(file.stem))
    assert {x.number for x in verify(tmp_path)[2]} == bad
    before = contents(tmp_path)
    below = [n for n in before.rows if bad & set(before.chain(n))]
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.repair() == len(below)
    assert verify(tmp_path)[2] == []
    with disk_of(tmp_path) as disk:
        disk.check_integrity()
        assert disk.damaged == 0
        for ids in histories.values():
            read(disk, ids)


def test_a_conversation_refers_to_what_has_its_salt_and_its_tokens(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        for salt in (None, "a", 1, "1"):
            key = repr(((None,), salt))
            disk.write(key, packed([1, 2, 3]), 0, None, {"k.0": content([1, 2, 3])}, "")
        for name, salt in (("none", None), ("one", 1), ("text", "1"), ("other", "b")):
            disk.save_conversation(name, {"ids": [1, 2, 9], "messages": [], "salt": salt})
    found = contents(tmp_path)
    assert {name: sorted(x) for name, x in found.referred().items()} == {
        "none": [1],
        "one": [3],
        "text": [4],
        "other": [],
    }
    assert unreferred(found) == [2]


def test_nobody_puts_a_folder_in_order_that_is_open_and_anybody_may_read_it(tmp_path: Path) -> None:
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3])
        with pytest.raises(StoreInUseError):
            Upkeep(tmp_path)
        assert len(contents(tmp_path).rows) == 1
        assert verify(tmp_path) == (1, disk.room.nbytes - 512 - 24, [])
        save(disk, [1, 2, 3, 4])
        assert len(contents(tmp_path).rows) == 2


def test_a_database_that_another_process_has_locked_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is stopped while it opens or closes the folder."""
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3])
    monkeypatch.setattr(manifest, "_WAIT", 0.1)
    with closing(sqlite3.connect(tmp_path / MANIFEST, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN IMMEDIATE")
        for use in (contents, verify, Upkeep, open_disk):
            with pytest.raises(ConfigError, match=r"another process has it locked.* Nothing is lost") as refused:
                use(tmp_path)
            assert "move it away" not in str(refused.value)
    assert len(contents(tmp_path).rows) == 1


def test_reading_and_putting_in_order_make_no_folder(tmp_path: Path) -> None:
    for each in (tmp_path / "none", tmp_path):
        for use in (contents, verify, Upkeep):
            with pytest.raises(ConfigError, match="not a folder of saved sequences"):
                use(each)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_process_that_was_killed_as_it_made_it_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    for use in (contents, verify, Upkeep):
        with pytest.raises(ConfigError, match="holds no saved sequences"):
            use(tmp_path)
    with disk_of(tmp_path) as disk:
        save(disk, [1, 2, 3])
    assert len(contents(tmp_path).rows) == 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_has_the_tokens_of_a_new_cache_after_merging(name: str, tmp_path: Path) -> None:
    model, ids = tiny_model(name), some_ids(40)
    with store_of(model, directory=tmp_path) as store:
        chat = store.open("a")
        for n in range(4):
            ids = torch.cat([chat.generate(**ones(ids), **GREEDY), some_ids(3, seed=n + 1)], 1)
            store.flush()
        length = len(chat.ids)
    with Upkeep(tmp_path) as upkeep:
        merged = upkeep.compact().merged
        assert (merged == 4) == (name == "llama")
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded == length - 1
        assert store.stats.damaged == 0
