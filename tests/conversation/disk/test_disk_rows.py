"""A folder of saved sequences against a list of them; damage to any of its files; who may have it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from disks import OF, content, disk_of, load, save, states_of
from settled import handles, only, settled

from kvtier import ConfigError, StoreInUseError
from kvtier.conversation.disk import reading as reading_module
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files.files import SEGMENT, Damaged, checksum, read_tensors, write_tensors
from kvtier.conversation.disk.files.folder import MANIFEST, WRITTEN, Folder
from kvtier.conversation.disk.files.reserve import RESERVE
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.rows.manifest import VERSION
from kvtier.conversation.disk.rows.pieces import digest
from kvtier.conversation.disk.tools.contents import contents
from kvtier.conversation.disk.tools.upkeep import Upkeep
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank

WALKS = max(2, int(os.environ.get("KVTIER_TEST_TURNS", "96")) // 64)
FLIPS = int(os.environ.get("KVTIER_TEST_FLIPS", "12")) * 10


def beginning(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Saved:
    """Every sequence that is on the disk, in a list: what is found is the longest common beginning with any of them."""

    def __init__(self) -> None:
        self.of: list[tuple[str, list[int]]] = []

    def longest(self, key: str, ids: list[int]) -> int:
        return max((beginning(x, ids) for k, x in self.of if k == key), default=0)


@pytest.mark.parametrize("seed", range(WALKS))
@pytest.mark.parametrize("budget", [None, 25_000])
def test_what_is_found_and_read_is_what_a_list_of_all_sequences_has(
    budget: int | None, seed: int, tmp_path: Path
) -> None:
    rng, saved = random.Random(seed), Saved()
    disk = disk_of(tmp_path, budget)
    known: list[list[int]] = [[1]]
    gone = False
    for _ in range(200):
        what, key = rng.random(), rng.choice("aab")
        ids = list(rng.choice(known))
        ids = ids[: rng.randint(1, len(ids))] if rng.random() < 0.4 else ids
        ids += [rng.randrange(3) for _ in range(rng.randint(0, 30))]
        if what < 0.5:
            known.append(ids)
            before = disk.room.nbytes
            assert save(disk, ids, key), disk.problem
            gone |= disk.room.nbytes < before
            saved.of.append((key, ids))
        elif what < 0.9:
            there = load(disk, ids, key)
            assert there == saved.longest(key, ids) or (budget and there < saved.longest(key, ids))
        elif what < 0.95:
            disk.close()
            disk = disk_of(tmp_path, budget)
        else:
            _, chunk = disk.find(key, packed(ids))
            if chunk is not None and rng.random() < 0.3:
                disk.forget(chunk)
                # What is left of each sequence is what is found of it.
                saved.of = [(k, x[: disk.find(k, packed(x))[0]]) for k, x in saved.of]
        disk.check_integrity()
        files = {x.name: x.stat().st_size for x in tmp_path.glob("*.safetensors*")}
        assert files == {f"{x.number:012}.safetensors": x.nbytes for x in disk._chunks}
        assert disk.room.nbytes <= (budget or disk.room.nbytes)
    assert (disk.damaged, disk.problem) == (0, "")
    assert gone or not budget, "nothing had to make room"
    for key, ids in saved.of:
        load(disk, ids, key)
    disk.close()


def test_what_was_used_longest_ago_goes_first_whatever_the_clock_and_the_numbers_say(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for n in range(6):
        assert save(disk, [n] * 40)
    for _ in range(50):
        assert load(disk, [0] * 40)
    room = disk.room.nbytes
    disk.close()
    disk = disk_of(tmp_path, room + 700)
    assert save(disk, [6] * 40)
    assert [load(disk, [n] * 40) for n in range(7)] == [40, 0, 40, 40, 40, 40, 40], "the order is forgotten when closed"
    # What is used after the folder was opened again is no older than what was used before.
    for n in (0, 3, 4, 5, 2):
        assert load(disk, [n] * 40)
    disk.close()
    disk = disk_of(tmp_path, room + 700)
    assert list(disk._chunks.numbers) == [7, 1, 4, 5, 6, 3]
    assert load(disk, [6] * 40)
    disk.close()
    disk = disk_of(tmp_path, room + 700)
    assert list(disk._chunks.numbers) == [1, 4, 5, 6, 3, 7]
    # One that is new is no older than one that was used often.
    assert save(disk, [7] * 40)
    assert load(disk, [7] * 40)
    disk.close()
    db = sqlite3.connect(tmp_path / MANIFEST)
    db.execute("UPDATE chunks SET used = CASE number % 3 WHEN 0 THEN 9223372036854775807 WHEN 1 THEN -5 ELSE 'x' END")
    db.commit()
    db.close()
    disk = disk_of(tmp_path, room + 700)
    for n in range(10, 20):
        assert save(disk, [n] * 40)
        assert load(disk, [n] * 40)
    disk.check_integrity()
    disk.close()


def test_what_is_found_has_the_last_of_the_tokens_though_others_go_on_before_its_end(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for n in range(1, 5):
        assert save(disk, [0] * 10 * n + [n] * 10)  # from the middle of the one before on
    for tokens, number in ((1, 1), (10, 1), (11, 2), (20, 2), (25, 3), (35, 4)):
        length, chunk = disk.find("k", packed([0] * tokens + [9]))
        assert chunk is not None
        assert (length, chunk.number) == (tokens, number)
    disk.close()


def test_a_row_whose_file_is_gone_is_forgotten_when_the_folder_is_opened(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for ids in ([1] * 20, [1] * 30, [1] * 45, [2] * 20):
        assert save(disk, ids)
    disk.close()
    (tmp_path / "000000000002.safetensors").unlink()
    disk = disk_of(tmp_path)
    assert (disk.chunks, disk.damaged) == (2, 2)
    assert sorted(x.name[:12] for x in tmp_path.glob("*.safetensors")) == ["000000000001", "000000000004"]
    assert load(disk, [1] * 45) == 20
    disk.close()


def test_what_made_room_while_it_was_read_was_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, [1] * 20)
    assert save(disk, [1] * 30)

    def gone(*args: Any) -> Any:
        _, chunk = disk.find("k", packed([1] * 30))
        if chunk is not None:
            disk.forget(chunk)
        return read_tensors(*args)

    monkeypatch.setattr(reading_module, "read_tensors", gone)
    assert load(disk, [1] * 30) == 20
    assert (disk.damaged, disk.problem) == (0, "")
    disk.close()


def test_what_cannot_fit_makes_nothing_go(tmp_path: Path) -> None:
    disk = disk_of(tmp_path, 20_000)
    for n in range(4):
        assert save(disk, [n] * 40)
    assert not save(disk, [9] * 5000)
    assert "disk budget" in disk.problem
    assert [load(disk, [n] * 40) for n in range(4)] == [40] * 4
    disk.close()


def test_what_many_share_is_in_the_files_once(tmp_path: Path) -> None:
    disk, prompt = disk_of(tmp_path), [5] * 2000
    assert save(disk, prompt)
    once = sum(x.stat().st_size for x in tmp_path.glob("*.safetensors"))
    for n in range(300):
        assert save(disk, [*prompt, n % 5, n])
    each = (sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")) - once) / 300
    assert each < 500, "two tokens, and a header"
    disk.close()
    disk = disk_of(tmp_path)
    assert load(disk, [*prompt, 3, 298]) == 2002
    disk.close()


def test_a_save_that_needs_no_room_does_not_order_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, levels = list[object](), Order._levels
    monkeypatch.setattr(Order, "_levels", lambda order, *of: looked.append(of) or levels(order, *of))
    disk = disk_of(tmp_path, 20_000)
    for n in range(3):
        assert save(disk, [n] * 40)
        disk.rank(f"{n}", None, packed([n] * 40), Rank(priority=n), 0.0)
    assert not looked
    for n in range(3, 12):
        assert save(disk, [n] * 40)
    assert looked, "nothing had to make room"
    disk.close()


def test_what_conversations_are_is_within_the_budget_and_keys_and_values_give_way(tmp_path: Path) -> None:
    """Text cannot be computed again, so that it is saved in any case."""
    budget, problems, went = 2**19, list[str](), 0
    disk = disk_of(tmp_path, budget)
    text = {"messages": [{"role": "user", "content": "x" * 50_000}]}
    for n in range(14):
        assert disk.room.nbytes + disk.room.rest <= budget or disk.problem
        before = disk.chunks
        disk.save_conversation(f"{n}", text)
        went += disk.chunks < before
        save(disk, [n] * 100)
        disk.check_integrity()
        assert disk.room.rest + disk.room.nbytes <= budget or not disk.chunks
        problems.append(disk.problem)
    assert went, "nothing had to give way"
    assert not any(problems[:9])
    assert "what conversations are" in problems[-1]
    assert all(disk.conversation(f"{n}") == text for n in range(14))
    assert 14 * 48_000 <= disk.room.rest < 14 * 50_000 * 1.1
    # What is forgotten leaves room again, and is given back to the file system.
    for n in range(13):
        disk.drop_conversation(f"{n}")
    disk.problem = ""
    assert save(disk, [99] * 100), disk.problem
    assert load(disk, [99] * 100) == 100
    disk.close()
    assert (tmp_path / MANIFEST).stat().st_size < 250_000
    disk = disk_of(tmp_path, budget)
    assert 40_000 < disk.room.rest < 60_000
    disk.close()


def test_a_folder_whose_manifest_gives_nothing_back_does_so_when_it_is_compacted(tmp_path: Path) -> None:
    """Before, SQLite kept pages that were free."""
    disk_of(tmp_path).close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("PRAGMA auto_vacuum=NONE")
        db.commit()
        db.execute("VACUUM")
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    db.close()
    disk = disk_of(tmp_path, 2**19)
    disk.save_conversation("a", {"messages": ["x" * 300_000]})
    assert disk.room.rest > 290_000
    disk.drop_conversation("a")
    assert disk.room.rest == 0, "pages that are free count"
    disk.close()
    assert "PRAGMA temp_store=MEMORY" in compacted(tmp_path), "text is written to another folder"
    assert (tmp_path / MANIFEST).stat().st_size < 100_000
    disk = disk_of(tmp_path)
    disk.save_conversation("a", {"messages": ["x" * 300_000]})
    disk.drop_conversation("a")
    disk.close()
    assert (tmp_path / MANIFEST).stat().st_size < 100_000


def compacted(folder: Path) -> list[str]:
    """Compact a folder. What SQLite is told."""
    said = list[str]()
    with Upkeep(folder) as upkeep:
        upkeep._manifest.db.set_trace_callback(said.append)
        assert not upkeep.compact().problem
    return said


def test_compacting_copies_no_text_and_gives_back_what_is_free(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for name in "abc":
        disk.save_conversation(name, {"messages": [name * 30_000]})
    disk.drop_conversation("a")
    disk.close()
    before = (tmp_path / MANIFEST).stat().st_size
    said = compacted(tmp_path)
    assert "VACUUM" not in said, "all text is copied through SQLite's folder for temporary files"
    assert (tmp_path / MANIFEST).stat().st_size < before - 25_000
    disk = disk_of(tmp_path)
    assert set(states_of(disk)) == {"b", "c"}
    disk.close()


# Damage


def test_damage_to_any_file_is_found_or_harmless(tmp_path: Path) -> None:
    source = tmp_path / "source"
    disk, rng = disk_of(source), random.Random(int(os.environ.get("KVTIER_TEST_SEED", "1")))
    chats = [[n] * 40 + [1, 2] * 10 for n in range(4)]
    for ids in [x[:n] for n in (20, 45, 60) for x in chats] + [chats[0][:30] + [9] * 20]:
        assert save(disk, ids)
    for n in range(5):
        disk.save_conversation(f"{n}", {"ids": [n] * 9, "text": "x" * 50})
    states = states_of(disk)
    # The log is there too, as if the process had been killed.
    shutil.copytree(source, tmp_path / "log")
    disk.close()
    refused = found = 0
    for n in range(FLIPS):
        origin = source if n % 2 else tmp_path / "log"
        folder = shutil.copytree(origin, tmp_path / "damaged")
        file = rng.choice([x for x in sorted(folder.iterdir()) if x.stat().st_size])
        if n % 3 == 0:
            file = folder / MANIFEST
        data = bytearray(file.read_bytes())
        how = rng.random()
        if how < 0.6:
            data[rng.randrange(min(len(data), rng.choice((200, 10**9))))] ^= 1 << rng.randrange(8)
        elif how < 0.7:
            at = rng.randrange(len(data))
            data[at : at + rng.randint(1, 4096)] = rng.randbytes(rng.randint(1, 4096))
        elif how < 0.8:
            at = rng.randrange(len(data)) // 512 * 512
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        else:
            data = data[: rng.randrange(len(data))]
        file.write_bytes(bytes(data))
        try:
            disk = disk_of(folder)
        except ConfigError:
            refused += 1
        else:
            for name, state in states_of(disk).items():
                whole, length = states[name], len(state["ids"])
                assert whole | {"ids": whole["ids"][:length]} == state, "a conversation that nobody had"
                assert length == len(whole["ids"]) or disk.damaged, "cut, and nobody is told"
            for ids in chats:
                load(disk, ids)
            new = [*chats[0], 7, 7]
            assert not save(disk, new) or load(disk, new) == len(new) or disk.damaged
            found += disk.damaged > 0
            disk.check_integrity()
            disk.close()
        shutil.rmtree(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "KiB"
    assert refused
    assert found
    print(f"{FLIPS} damaged folders: {refused} refused, {found} with something that was found, the others whole")


@pytest.mark.parametrize("claimed", [2**20, 2**40, 2**62])
def test_what_a_row_or_a_header_claims_is_not_allocated(claimed: int, tmp_path: Path) -> None:
    file = tmp_path / "000000000001.safetensors"
    nbytes, _ = write_tensors(file, {"k.0": content([1] * 9)}, "")
    data = bytearray(file.read_bytes())
    with pytest.raises(Damaged, match="size"):
        read_tensors(file, claimed, b"")
    data[:8] = claimed.to_bytes(8, "little")
    file.write_bytes(bytes(data))
    with pytest.raises(Damaged, match="header"):
        read_tensors(file, nbytes, checksum(torch.frombuffer(data, dtype=torch.uint8)))
    data[:8] = (len(data) - 8 - content([1] * 9).nbytes).to_bytes(8, "little")
    at = data.index(b'"shape":[1,9,4]')
    data[at : at + 15] = b'"shape":[9,9,9]'
    file.write_bytes(bytes(data))
    with pytest.raises(Damaged, match="within"):
        read_tensors(file, nbytes, checksum(torch.frombuffer(data, dtype=torch.uint8)))


@pytest.mark.parametrize("change", ["ids", "key", "parent", "start", "nbytes", "checksum", "digest"])
def test_a_row_that_says_anything_else_is_not_used(change: str, tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for ids in ([1] * 20, [1] * 30, [1] * 45, [2] * 20):
        assert save(disk, ids)
    disk.close()
    new = {"ids": b"\1" * 120, "key": "j", "parent": 1, "start": 19, "nbytes": 10**15, "checksum": b"1", "digest": b"2"}
    db = sqlite3.connect(tmp_path / MANIFEST)
    db.execute(f"UPDATE chunks SET {change} = ? WHERE number = 3", (new[change],))
    db.commit()
    db.close()
    disk = disk_of(tmp_path)
    assert (disk.damaged, disk.chunks) == (1, 3)
    assert (load(disk, [1] * 45), load(disk, [2] * 20)) == (30, 20)
    assert disk.room.nbytes < 10**6
    disk.close()


@pytest.mark.parametrize("nbytes", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 7])
def test_every_segment_of_a_file_has_its_checksum(nbytes: int, tmp_path: Path) -> None:
    file, rng = tmp_path / "x.safetensors", random.Random(0)
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    size, sums = write_tensors(file, {"k.0": x, "v.0": x[:3].to(torch.float64)}, "é")
    found, said = read_tensors(file, size, sums)
    assert said == "é"
    assert torch.equal(found["k.0"], x)
    assert torch.equal(found["v.0"], x[:3].to(torch.float64))
    with file.open("r+b") as stream:
        for at in [0, size - 1, *(rng.randrange(size) for _ in range(4))]:
            byte = os.pread(stream.fileno(), 1, at)
            os.pwrite(stream.fileno(), bytes([byte[0] ^ 16]), at)
            with pytest.raises(Damaged):
                read_tensors(file, size, sums)
            os.pwrite(stream.fileno(), byte, at)
    assert torch.equal(read_tensors(file, size, sums)[0]["k.0"], x)


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """Other programs read them, and files that safetensors has written are read."""
    tensors = {
        "k.10": torch.randn(2, 5, 4, dtype=torch.bfloat16)[:, 1:4],
        "v.2": torch.randint(0, 9, (3, 1), dtype=torch.int64),
        "s.0.a": torch.randn(7).to(torch.float8_e4m3fn),
        "s.0.b": torch.tensor([True, False, True]),
        "s.1": torch.zeros(0, 4),
        "s.2": torch.tensor(2.5, dtype=torch.float64),
    }
    nbytes, _ = write_tensors(tmp_path / "x", tensors, 'said "so"')
    data = (tmp_path / "x").read_bytes()
    assert len(data) == nbytes
    found = safetensors.torch.load(data)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape
        assert bytes(found[name].reshape(-1).view(torch.uint8).numpy()) == bytes(
            x.reshape(-1).view(torch.uint8).numpy()
        )
    with safetensors.safe_open(tmp_path / "x", "pt") as opened:
        assert opened.metadata() == {"said": 'said "so"'}
    theirs = safetensors.torch.save({name: x.contiguous() for name, x in tensors.items()}, {"said": 'said "so"'})
    assert data == theirs or len(data) == len(theirs), "of another size than the budget is for"
    with pytest.raises(ValueError, match="not saved"):
        write_tensors(tmp_path / "y", {"k.0": torch.zeros(2, dtype=torch.complex128)}, "")
    assert not (tmp_path / "y").exists()


# Who may have it


@pytest.mark.parametrize("what", ["model", "config", "weights"])
def test_what_is_of_another_model_is_refused_and_says_what_differs(what: str, tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, [1] * 9)
    disk.close()
    with pytest.raises(ConfigError, match=f"another {what}") as refused:
        Disk(tmp_path, None, OF | {what: "other"})
    assert "damaged" not in str(refused.value)
    assert "kvtier store show" not in str(refused.value), "there are no conversations"
    disk = disk_of(tmp_path)
    assert load(disk, [1] * 9) == 9, "what is refused is left as it is"
    disk.save_conversation("alice", {"ids": [1]})
    disk.close()
    with pytest.raises(ConfigError, match="kvtier store show"):
        Disk(tmp_path, None, OF | {what: "other"})


def test_a_folder_of_a_newer_version_is_refused_and_nobody_is_told_to_remove_it(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    disk.save_conversation("alice", {"ids": [1]})
    disk.close()
    for version, match in ((f"{VERSION + 1}", "newer kvtier.*Nothing is lost: update kvtier"), ("2", "'2' there")):
        with contextlib.closing(sqlite3.connect(tmp_path / MANIFEST)) as db, db:
            db.execute("UPDATE about SET value = ? WHERE name = 'version'", (version,))
        for fails in (lambda: disk_of(tmp_path), lambda: contents(tmp_path), lambda: Upkeep(tmp_path)):
            with pytest.raises(ConfigError, match=match) as refused:
                fails()
            assert ("remove" in str(refused.value)) == (version == "2")


@pytest.mark.parametrize("value", ["NULL", "x'ff'"])
@pytest.mark.parametrize("column", ["name", "value"])
def test_what_is_no_text_of_a_folder_is_of_no_model(column: str, value: str, tmp_path: Path) -> None:
    """As damage leaves it: the name of one row is nobody's, and its value is not this model's."""
    disk_of(tmp_path).close()
    for name in ("version", "model", "weights"):
        folder = shutil.copytree(tmp_path, tmp_path / name)
        with contextlib.closing(sqlite3.connect(folder / MANIFEST)) as db, db:
            db.execute(f"UPDATE about SET {column} = {value} WHERE name = ?", (name,))
        with pytest.raises(ConfigError, match=f"was saved with another {name}"):
            disk_of(folder)


def test_the_owner_alone_may_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        disk = disk_of(tmp_path / "a" / "store")
        assert save(disk, [1] * 9)
        disk.save_conversation("x", {})
        files = list((tmp_path / "a" / "store").iterdir())
        assert {x.name for x in files} >= {"lock", *(MANIFEST + x for x in ("", "-wal", "-shm", WRITTEN))}
        assert all(stat.S_IMODE(x.stat().st_mode) == 0o600 for x in files)
        assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700
        disk.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["lock", *(MANIFEST + x for x in ("", "-wal", "-shm", WRITTEN))])
def test_a_link_in_the_folder_is_refused_and_not_followed(name: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    disk_of(folder).close()
    elsewhere.write_bytes(b"mine")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError):
        disk_of(folder)
    assert elsewhere.read_bytes() == b"mine"


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST + "-wal", MANIFEST + WRITTEN, "lock"])
def test_a_folder_that_was_copied_by_hard_links_is_refused_and_costs_the_first_nothing(
    name: str, tmp_path: Path
) -> None:
    disk = disk_of(tmp_path / "store")
    assert save(disk, [1] * 9)
    (tmp_path / "copy").mkdir()
    os.link(tmp_path / "store" / name, tmp_path / "copy" / name)
    assert save(disk, [2] * 9)
    if name == MANIFEST:
        disk.close()
    with pytest.raises(ConfigError, match="a hard link"):
        disk_of(tmp_path / "copy")
    disk.close()
    shutil.rmtree(tmp_path / "copy")
    disk = disk_of(tmp_path / "store")
    assert (load(disk, [1] * 9), load(disk, [2] * 9), disk.damaged) == (9, 9, 0)
    disk.close()


def test_the_folder_itself_may_be_a_link_and_is_one_folder_by_any_name(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    disk = disk_of(tmp_path / "link")
    assert save(disk, [1] * 9)
    with pytest.raises(StoreInUseError):
        disk_of(tmp_path / "store")
    disk.close()
    disk = disk_of(tmp_path / "store")
    assert load(disk, [1] * 9) == 9
    disk.close()


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "1.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    for name in ("000000000007.safetensors", "000000000008.safetensors.new"):
        (tmp_path / name).write_bytes(b"left by a process that was killed")
    disk_of(tmp_path).close()
    assert sorted(x.name for x in tmp_path.glob("*.*")) == [
        "1.safetensors",
        MANIFEST,
        RESERVE,
        MANIFEST + WRITTEN,
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "notes.txt",
    ]


@pytest.mark.parametrize("directory", ["a\0b", "x" * 300, 7])
def test_a_path_that_is_none_is_a_clear_error(directory: object, tmp_path: Path) -> None:
    given = tmp_path / directory if isinstance(directory, str) else directory
    with pytest.raises(ConfigError, match="directory="):
        Disk(given, None, OF)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_link", [False, True])
def test_a_path_that_is_too_long_for_sqlite_is_refused_and_says_so(by_link: bool, tmp_path: Path) -> None:
    def of(length: int) -> Path:
        folder = tmp_path.resolve()
        while (left := length - len(str(folder / MANIFEST))) > 0:
            folder /= "x" * (left - 1 if left < 200 else 100)
        assert len(str(folder / MANIFEST)) == length
        return folder

    disk_of(of(504)).close()
    given = of(505)
    if by_link:
        given.mkdir(parents=True)
        given = tmp_path / "link"
        given.symlink_to(of(505))
    with pytest.raises(ConfigError, match=r"^[^:]*cannot be used: SQLite opens.* 504 bytes.*shorter one\.$"):
        disk_of(given)
    assert by_link or not given.exists()


def test_a_folder_is_found_from_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    disk = disk_of(Path("store"))
    monkeypatch.chdir("/")
    assert save(disk, [1] * 9)
    assert load(disk, [1] * 9) == 9
    disk.close()
    assert (tmp_path / "store").is_dir()


@pytest.mark.parametrize("ends", [False, True], ids=["child lives", "child ends"])
@pytest.mark.parametrize("closed_by", ["close", "drop"])
def test_a_process_that_was_forked_neither_ends_nor_keeps_the_lock(closed_by: str, ends: bool, tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        if ends:
            disk._folder.close()  # as the end of the child would
        os.read(hear, 1)
        os._exit(0)
    try:
        with pytest.raises(StoreInUseError):
            disk_of(tmp_path)
        assert save(disk, [1] * 9)
        if closed_by == "close":
            disk.close()
        del disk
        gc.collect()
        disk_of(tmp_path).close()
    finally:
        os.close(tell)
        os.close(hear)
        os.waitpid(child, 0)


def test_the_lock_of_a_process_that_is_killed_ends_though_what_it_has_forked_lives(tmp_path: Path) -> None:
    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        disk = disk_of(tmp_path)
        if not os.fork():
            os.write(tell, b"%d" % os.getpid())
        time.sleep(60)
        disk.close()
        os._exit(0)
    lives = int(os.read(hear, 20))
    try:
        with pytest.raises(StoreInUseError):
            disk_of(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        disk_of(tmp_path).close()
    finally:
        os.kill(lives, signal.SIGKILL)
        os.close(hear)
        os.close(tell)


def in_fork(act: Callable[[], object]) -> None:
    """Do something in a process that is forked now, and compare that it raises nothing."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_was_forked_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    """It counts as its parent does, so that both give a file the same number."""
    disk = disk_of(tmp_path)
    assert save(disk, [1] * 20)
    disk.save_conversation("a", {"ids": [1]})
    disk.save_conversation("b", {"ids": [1]})
    disk.drop_conversation("b")

    def act() -> None:
        assert load(disk, [1] * 20) == 20
        assert not save(disk, [2] * 25)
        assert "forked" in disk.problem
        for what in (
            lambda: disk.save_conversation("a", {"ids": [1, 2]}),
            lambda: disk.drop_conversation("a"),
            lambda: disk.save_prices("m", {}),
        ):
            what()
        for read in (disk.names, lambda: disk.conversation("a")):
            with pytest.raises(ConfigError, match="forked"):
                read()
        disk.forget(disk.find("k", packed([1] * 20))[1])  # type: ignore[arg-type]
        disk.close()

    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.read(hear, 1)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    # The parent writes the file that would be the child's next one.
    assert save(disk, [3] * 30)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(hear)
    os.close(tell)
    with pytest.raises(StoreInUseError):
        disk_of(tmp_path)
    assert (load(disk, [1] * 20), load(disk, [3] * 30), disk.damaged) == (20, 30, 0)
    assert states_of(disk) == {"a": {"ids": [1]}}
    assert save(disk, [4] * 30)
    disk.close()
    disk = disk_of(tmp_path)
    assert (load(disk, [1] * 20), load(disk, [3] * 30), load(disk, [4] * 30), disk.damaged) == (20, 30, 30, 0)
    disk.close()


def test_a_process_that_was_forked_leaves_the_log_of_others_when_it_ends(tmp_path: Path) -> None:
    """Its connection outlives that of its parent, and SQLite would take the log for its own."""
    disk = disk_of(tmp_path)
    hear, tell = os.pipe()
    child = os.fork()
    if not child:
        os.read(hear, 1)
        del disk
        gc.collect()
        os._exit(0)
    disk.close()

    def killed() -> None:
        assert save(disk_of(tmp_path), [1] * 20)

    in_fork(killed)
    assert (tmp_path / f"{MANIFEST}-wal").stat().st_size
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(hear)
    os.close(tell)
    disk = disk_of(tmp_path)
    assert load(disk, [1] * 20) == 20
    disk.close()


def test_threads_that_save_load_and_forget_at_once_find_what_is_right(tmp_path: Path) -> None:
    disk, wrong = disk_of(tmp_path, 60_000), list[BaseException]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(120):
                ids = [rng.randrange(3)] * 20 + [rng.randrange(3) for _ in range(rng.randint(0, 40))]
                if rng.random() < 0.6:
                    save(disk, ids)
                load(disk, ids)
                if rng.random() < 0.05:
                    _, chunk = disk.find("k", packed(ids))
                    if chunk is not None:
                        disk.forget(chunk)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert disk.damaged == 0, "what made room meanwhile was not damaged"
    disk.check_integrity()
    disk.close()


# Names of conversations


NAMES = [
    "..",
    "/etc/passwd",
    "a/../b",
    "C:\\con",
    "\0",
    "\ud800",
    "é",
    "e\u0301",
    "\u202e",
    "'; DROP TABLE chunks",
    "x" * 10**6,
]


def test_conversations_have_any_name_and_each_its_own_state(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for n, name in enumerate(NAMES):
        disk.save_conversation(name, {"ids": [n], "messages": [{"role": "user", "content": name[:10]}]})
    disk.close()
    disk = disk_of(tmp_path)
    found = states_of(disk)
    assert {name: state["ids"] for name, state in found.items()} == {name: [n] for n, name in enumerate(NAMES)}
    assert [found[x]["messages"][0]["content"] for x in NAMES] == [x[:10] for x in NAMES]
    for name in NAMES[::2]:
        disk.drop_conversation(name)
    assert list(states_of(disk)) == NAMES[1::2]
    assert (disk.problem, disk.damaged) == ("", 0)
    disk.close()
    assert {x.name for x in tmp_path.iterdir()} == {"lock", MANIFEST, MANIFEST + WRITTEN, RESERVE}


def test_a_conversation_that_cannot_be_saved_says_so_and_stays_what_it_was(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    disk.save_conversation("c", {"ids": [1]})
    disk.save_conversation("c", {"ids": [1, 2], "messages": [{"image": b"bytes"}]})
    assert "conversation 'c' was not saved" in disk.problem
    assert states_of(disk) == {"c": {"ids": [1]}}
    disk.close()


DAMAGE = {
    "state": "UPDATE conversations SET state = replace(state, '100', '900') WHERE name = CAST('b' AS BLOB)",
    "message": "UPDATE pieces SET text = replace(text, '100', '900') WHERE name = CAST('b' AS BLOB)",
    "no text": "UPDATE pieces SET text = 7 WHERE name = CAST('b' AS BLOB) AND field = 'ids'",
    "no string": "UPDATE pieces SET text = CAST(x'FF' AS TEXT) WHERE name = CAST('b' AS BLOB) AND field = 'ids'",
    "first piece": "DELETE FROM pieces WHERE name = CAST('b' AS BLOB) AND field = 'ids' AND start = 0",
    "last piece": "DELETE FROM pieces WHERE name = CAST('b' AS BLOB) AND field = 'ids' AND start > 0",
    "one more": "INSERT INTO pieces VALUES (CAST('b' AS BLOB), 'ids', 9000, 9001, '[1]')",
    "another's": "UPDATE pieces SET text = '[3, 4]' WHERE name = CAST('b' AS BLOB) AND field = 'ids' AND start > 0",
}


#: What is left of it: of each list what precedes the damage.
LEFT: dict[str, dict[str, Any] | None] = {
    "state": None,
    "message": {"messages": []},
    "no text": {"ids": []},
    "no string": {"ids": []},
    "first piece": {"ids": []},
    "last piece": {"ids": [1] * 1000},
    "one more": {},
    "another's": {"ids": [1] * 1000},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_conversation_that_was_damaged_what_precedes_the_damage_is_left(damage: str, tmp_path: Path) -> None:
    said: dict[str, Any] = {"salt": "100", "ids": [1] * 1000, "messages": [{"role": "user", "content": "Pay 100."}]}
    disk = disk_of(tmp_path)
    for name in "abcd":
        disk.save_conversation(name, said)
        disk.save_conversation(name, said | {"ids": [1] * 1000 + [2, 3]})
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        assert db.execute(DAMAGE[damage]).rowcount
        db.execute("UPDATE conversations SET name = CAST('e' AS BLOB) WHERE name = CAST('c' AS BLOB)")
    db.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.text_factory = bytes  # also what is no Unicode
        was = db.execute("SELECT field, start, stop, text FROM pieces WHERE name = CAST('b' AS BLOB)").fetchall()
    db.close()
    repaired = shutil.copytree(tmp_path, tmp_path / "repaired")
    disk, change = disk_of(tmp_path), LEFT[damage]
    left = None if change is None else said | {"ids": [1] * 1000 + [2, 3]} | change
    assert states_of(disk).get("b") == left
    assert list(states_of(disk)) == ["a", "d"] + ["b"] * (left is not None)
    assert "kept aside" in disk.problem
    assert disk.damaged >= 2
    # What is saved in its place is whole again.
    disk.save_conversation("b", said)
    assert disk.conversation("b") == said
    disk.close()
    # As it was found: whoever needs a text can read it there.
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.text_factory = bytes
        assert db.execute("SELECT field, start, stop, text FROM aside WHERE field NOT NULL").fetchall() == was
    db.close()
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.repair() == 2  # "e", and what was kept aside
        assert not upkeep.contents().damage
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        assert {x for (x,) in db.execute("SELECT name FROM pieces")} == {b"a", b"b", b"d"}
        assert not db.execute("SELECT * FROM aside").fetchall()
    db.close()
    with Upkeep(repaired) as upkeep:
        assert upkeep.repair() == 2
        assert upkeep.contents().conversations.get("b") == left


def test_a_conversation_whose_name_is_damaged_is_not_overwritten(tmp_path: Path) -> None:
    """Whether it has a rank is damage that is made good; a state of another name is kept aside."""
    disk = disk_of(tmp_path)
    for name in "ab":
        disk.save_conversation(name, {"ids": [1]})
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("UPDATE conversations SET ranked = 7 WHERE name = CAST('a' AS BLOB)")
        db.execute("UPDATE conversations SET name = CAST('c' AS BLOB) WHERE name = CAST('b' AS BLOB)")
    db.close()
    disk = disk_of(tmp_path)
    assert disk.names() == {"a": None}
    assert disk.conversation("a") == {"ids": [1]}
    disk.save_conversation("a", {"ids": [1, 2]})
    disk.save_conversation("c", {"ids": [3]})
    assert states_of(disk) == {"a": {"ids": [1, 2]}, "c": {"ids": [3]}}
    assert disk._conversations.aside() == 1
    disk.drop_conversation("c")
    assert disk._conversations.aside() == 0, "what is forgotten is kept"
    disk.close()


def test_a_conversation_is_read_though_the_index_of_names_is_of_an_earlier_moment(tmp_path: Path) -> None:
    """As where somebody has put a folder together from a database and a log of two copies."""

    def index() -> tuple[int, bytes]:
        with contextlib.closing(sqlite3.connect(tmp_path / MANIFEST)) as db:
            select = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_conversations_1'"
            (page,), (size,) = db.execute(select).fetchone(), db.execute("PRAGMA page_size").fetchone()
        at = (page - 1) * size
        return at, (tmp_path / MANIFEST).read_bytes()[at : at + size]

    said = {"a": {"ids": [1]}, "b": {"ids": [2, 3]}}
    for name, state in said.items():
        at, before = (0, b"") if name == "a" else index()
        disk = disk_of(tmp_path)
        disk.save_conversation(name, state)
        disk.close()
    with (tmp_path / MANIFEST).open("r+b") as file:
        file.seek(at)
        file.write(before)
    disk = disk_of(tmp_path)
    assert (states_of(disk), disk.damaged, disk.problem) == (said, 0, "")
    said["b"] = {"ids": [2, 3, 4]}
    assert disk.save_conversation("b", said["b"])
    assert list(disk._conversations.all()) == list(said.items()), "a name is there once"
    disk.close()


def test_damage_to_a_history_that_was_saved_at_once_costs_what_follows(tmp_path: Path) -> None:
    """One that was forked, say."""
    messages = [{"role": "user", "content": f"{n} " + "x" * 3000} for n in range(200)]
    disk = disk_of(tmp_path)
    disk.save_conversation("a", {"ids": [1, 2], "messages": messages, "salt": None})
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        assert db.execute("UPDATE pieces SET text = replace(text, '199 x', '198 x') WHERE start >= 100").rowcount
    db.close()
    disk = disk_of(tmp_path)
    found = disk.conversation("a")
    assert found is not None
    assert 100 < len(found["messages"]) < 200
    assert found == {"ids": [1, 2], "messages": messages[: len(found["messages"])], "salt": None}
    disk.close()


def test_a_chat_whose_last_messages_are_lost_ends_with_a_turn(tmp_path: Path) -> None:
    messages: list[dict[str, str]] = []
    ends, ids = [], list[int]()
    disk = disk_of(tmp_path)
    for turn in range(6):
        messages += [{"role": role, "content": f"{turn}" * 40_000} for role in ("user", "assistant")]
        ids += [turn] * 10
        ends.append([len(messages), len(ids)])
        disk.save_conversation("a", {"ids": ids, "messages": messages, "ends": ends, "salt": None})
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        damage = "UPDATE pieces SET text = replace(text, '3333', '3334') WHERE field = 'messages' AND start >= 6"
        assert db.execute(damage).rowcount
    db.close()
    disk = disk_of(tmp_path)
    left = {"ids": ids[:30], "messages": messages[:6], "ends": ends[:3], "salt": None}
    assert disk.conversation("a") == left
    assert "what precedes the damage is left" in disk.problem
    assert disk.conversation("a") == left, "it is damaged still"
    assert disk.damaged == 1
    disk.close()


def test_a_save_writes_as_much_of_the_manifest_however_long_its_chain_is(tmp_path: Path) -> None:
    """The chunks of the history are used with each turn, and the manifest hears of the end only."""
    disk, log, ids = disk_of(tmp_path), tmp_path / f"{MANIFEST}-wal", list[int]()
    written: dict[int, int] = {}
    for turn in range(121):
        ids += [turn] * 8
        load(disk, ids[:-8])
        if turn in (20, 120):
            disk._manifest.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert save(disk, ids)
        if turn in (20, 120):
            written[turn] = log.stat().st_size
    assert written[120] <= written[20] <= 20_000, written
    disk.close()


@pytest.mark.parametrize("seed", range(WALKS))
def test_the_order_of_use_is_the_same_in_a_folder_that_is_opened_again(seed: int, tmp_path: Path) -> None:
    """Also where the end of a chain, which the manifest had its use from, made room or was removed."""
    rng, disk, known = random.Random(seed), disk_of(tmp_path, 60_000), [[0]]
    for turn in range(120):
        ids = [*rng.choice(known[-9:]), *[turn % 50] * 8]
        known.append(ids)
        assert save(disk, ids)
        if rng.random() < 0.4:
            load(disk, rng.choice(known))
        found = disk.find("k", packed(rng.choice(known)))[1]
        if found is not None and rng.random() < 0.2:
            disk.forget(found)
        if rng.random() < 0.2:
            order = list(disk._chunks.numbers)
            disk.close()
            disk = disk_of(tmp_path, 60_000)
            assert list(disk._chunks.numbers) == order
            disk.check_integrity()
    disk.close()


def test_upkeep_keeps_the_order_of_use(tmp_path: Path) -> None:
    disk, key = disk_of(tmp_path), "('x', None)"
    assert save(disk, [1] * 20, key)
    assert save(disk, [2] * 20, key)
    assert save(disk, [1] * 19 + [3] * 30, key)
    for name, ids in {"a": [1] * 20, "b": [2] * 20}.items():
        disk.save_conversation(name, {"ids": ids, "salt": None})
    disk.close()
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.collect()[0] == 1
    disk = disk_of(tmp_path)
    assert list(disk._chunks.numbers) == [2, 1], "the chunk that is left was used with what is removed"
    disk.close()


def test_a_folder_of_before_there_were_pieces_is_taken_as_it_is(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, [1, 2, 3])
    disk.close()
    name, state = b"old", json.dumps({"ids": [1, 2, 3], "messages": [], "salt": None})
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("DROP TABLE pieces")
        db.execute("UPDATE about SET value = '3' WHERE name = 'version'")
        row = (name, 0, digest(name, "0"), state, digest(name, state))
        db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", row)
    db.close()
    assert contents(tmp_path).conversations == {"old": json.loads(state)}
    disk = disk_of(tmp_path)
    assert (states_of(disk), load(disk, [1, 2, 3])) == ({"old": json.loads(state)}, 3)
    disk.save_conversation("old", {"ids": [1, 2, 3, 4]})
    disk.close()
    disk = disk_of(tmp_path)
    assert states_of(disk) == {"old": {"ids": [1, 2, 3, 4]}}
    disk.close()
    assert contents(tmp_path).about["version"] == str(VERSION)


def test_folders_that_are_opened_and_closed_leave_nothing(tmp_path: Path) -> None:
    count = 4 * WALKS
    for n in range(count):
        if n == count // 2:
            before, threads = handles(), threading.enumerate()
        disk = disk_of(tmp_path / f"{n % 3}")
        save(disk, [n % 5] * 9)
        if n % 2:
            disk.close()
        else:
            del disk
            gc.collect()
    assert only(threads)
    assert settled(lambda: handles() <= before)


# Names of conversations, numbers of files


def test_a_file_that_could_not_be_removed_keeps_its_number_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a chunk would get the same one, and its file would be removed in place of that one."""
    disk_of(tmp_path).close()
    stray, unlink = tmp_path / "000000000001.safetensors", os.unlink
    stray.write_bytes(bytes(1000))

    def failing(file: Any, **options: Any) -> None:
        if Path(file) == stray:
            raise OSError(5, "Input/output error")
        unlink(file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        disk = disk_of(tmp_path, 10**6)
        assert disk.room.nbytes == 1000
        assert "not removed" in disk.problem
    assert save(disk, [1, 2, 3])
    assert save(disk, [4, 5, 6])  # makes room, and removes what could not be removed
    assert not stray.exists()
    assert (load(disk, [1, 2, 3]), load(disk, [4, 5, 6]), disk.damaged) == (3, 3, 0)
    disk.check_integrity()
    disk.close()


def test_a_damaged_number_beyond_all_others_costs_its_row_only(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    assert save(disk, [1, 2, 3])
    for turn in range(3):
        assert save(disk, [1, 2, 3, *range(4, 6 + turn)])
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        others = "key, parent, start, ids, nbytes, checksum, digest, used FROM chunks WHERE number = 1"
        db.execute(f"INSERT INTO chunks SELECT ?, {others}", (2**63 - 1,))
    db.close()
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.compact().problem == ""
    disk = disk_of(tmp_path)
    assert disk.damaged == 1
    assert load(disk, [1, 2, 3, 4, 5, 6, 7]) == 7
    assert save(disk, [7, 7, 7]), disk.problem
    disk.close()


def test_a_text_that_is_damaged_costs_its_row_only(tmp_path: Path) -> None:
    """Also where it is no Unicode any more, which SQLite's driver refuses to read."""
    disk = disk_of(tmp_path)
    assert save(disk, [1, 2, 3])
    assert save(disk, [4, 5, 6])
    for name in "ab":
        disk.save_conversation(name, {"ids": [1, 2, 3]})
    disk.close()
    with sqlite3.connect(tmp_path / MANIFEST) as db:
        db.execute("UPDATE chunks SET key = CAST(x'FF' AS TEXT) WHERE number = 1")
        db.execute("UPDATE conversations SET state = CAST(x'7BFF' AS TEXT) WHERE name = CAST('a' AS BLOB)")
    db.close()
    assert [x.number for x in contents(tmp_path).damage] == [1, None]
    disk = disk_of(tmp_path)
    assert disk.damaged == 1
    assert (load(disk, [1, 2, 3]), load(disk, [4, 5, 6])) == (0, 3)
    assert disk.conversation("a") is None
    assert [x.why[-10:] for x in contents(tmp_path).damage] == ["kept aside"]
    assert disk.conversation("b") == {"ids": [1, 2, 3]}
    disk.close()
    with Upkeep(tmp_path) as upkeep:
        assert upkeep.repair() == 1
    assert not contents(tmp_path).damage


def test_what_is_known_of_a_conversation_is_not_written_again(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    for name in "ab":
        disk.save_conversation(name, {"ids": [1]})
    changes = disk._manifest.db.total_changes
    disk.save_conversation("a", {"ids": [1]})
    assert disk._manifest.db.total_changes == changes
    disk.save_conversation("a", {"ids": [1, 2]})
    disk.rank("a", None, packed([1, 2]), Rank(priority=2), 0.0)
    disk.save_conversation("a", {"ids": [1, 2]})
    assert {name: bool(rank) for name, rank in disk.names().items()} == {"a": True, "b": False}, (
        "in the order of their making"
    )
    assert list(disk.names()) == ["a", "b"]
    assert disk.conversation("a") == {"ids": [1, 2]}
    disk.close()


@pytest.mark.parametrize("call", ["unlink", "stat"])
def test_files_that_cannot_be_removed_count(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where, for a moment, the folder cannot be seen to be the one that was opened."""
    disk = disk_of(tmp_path, 25_000)
    chats = [[n] * 200 for n in range(5)]
    assert save(disk, chats[0])
    assert save(disk, chats[1])

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        if call == "unlink":
            patch.setattr(os, "unlink", failing)
        else:
            patch.setattr(Folder, "there", lambda folder: False)
            patch.setattr(Disk, "_refused", lambda *_: "")
        for ids in chats[2:]:
            assert not save(disk, ids)
            assert "no room" in disk.problem or "leaves" in disk.problem
            disk.check_integrity()
            assert sum(x.stat().st_size for x in tmp_path.glob("*.safetensors")) <= 25_000
    assert save(disk, chats[2]), disk.problem
    assert load(disk, chats[2]) == 200
    disk.check_integrity()
    disk.close()
