"""The bytes of a folder: the budget holds whatever comes between, and nobody waits for files that are written or go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disks import disk_of, load, save
from families import tiny_model
from test_store import GREEDY, fresh, ones, some_ids, store_of

from kvtier.conversation.disk import writing
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.files import reserve
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank

OLD, NEW = [1] * 400, [2] * 400


def hangs(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> tuple[threading.Event, threading.Event]:
    """A call that does not return, where it is for a chunk's file: it has begun, and it may end."""
    begun, ends, call = threading.Event(), threading.Event(), getattr(module, name)

    def hanging(file: Any, *args: Any, **options: Any) -> Any:
        if str(file).endswith(".safetensors"):
            begun.set()
            assert ends.wait(180)
        return call(file, *args, **options)

    monkeypatch.setattr(module, name, hanging)
    return begun, ends


def full(folder: Path, more: int = 0) -> Disk:
    """A folder with room for `OLD` or `NEW`, and so many bytes more; it has `OLD`."""
    disk = disk_of(folder)
    assert save(disk, OLD)
    budget = disk.room.nbytes + disk.room.rest + 4000 + more
    disk.close()
    return disk_of(folder, budget)


def all_return(calls: list[Callable[[], Any]]) -> None:
    """None of these waits for what hangs. (The bound is generous: what hangs does not end.)"""
    pool = ThreadPoolExecutor(1)
    try:
        for call in calls:
            pool.submit(call).result(100)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("more", [-1, 0])
def test_the_reserve_is_within_the_budget_that_it_is_a_part_of(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 100_000
    monkeypatch.setattr(reserve, "SIZE", 30_000)
    monkeypatch.setattr(reserve, "LEAST", 25_000)
    monkeypatch.setattr(reserve, "SHARE", 4)
    disk_of(tmp_path).close()
    assert (tmp_path / reserve.RESERVE).exists()
    disk = disk_of(tmp_path, budget + more)
    assert (tmp_path / reserve.RESERVE).exists() == (more == 0)
    for n in range(200):
        assert save(disk, [n] * 20)
    assert disk.chunks < 200
    reserved = sum(x.stat().st_size for x in tmp_path.glob(reserve.RESERVE))
    assert budget - 3000 < reserved + disk.room.nbytes + disk.room.rest <= budget
    disk.close()


def test_a_folder_that_is_full_makes_room_for_the_reserve_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, file = 100_000, tmp_path / reserve.RESERVE
    for name in ("SIZE", "LEAST"):
        monkeypatch.setattr(reserve, name, 25_000)
    monkeypatch.setattr(reserve, "SHARE", 5)
    disk = disk_of(tmp_path, budget)
    for n in range(100):
        assert save(disk, [n] * 20)
    disk.close()
    assert not file.exists()
    monkeypatch.setattr(reserve, "SHARE", 4)
    disk = disk_of(tmp_path, budget)
    for n in range(100, 110):
        assert (25_000 if file.exists() else 0) + disk.room.nbytes + disk.room.rest <= budget
        assert save(disk, [n] * 20)
    assert file.exists()
    disk.close()


def test_a_reserve_that_a_reader_has_given_up_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kvtier store ls` does on a full disk, of a folder that a store has open."""
    folder, file = tmp_path / "one", tmp_path / "one" / reserve.RESERVE
    disk = disk_of(folder)
    for name in "ab":
        assert disk.save_conversation(name, {"ids": [1]})
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096))
            assert reserve.Reserve(folder).settle()
        assert not file.exists()
        if name == "b":
            folder.rename(tmp_path / "other")
            folder.mkdir()
        disk.drop_conversation(name)
        assert file.exists() == (name == "a"), "nothing is written to a folder that is another one"
    disk.close()


@pytest.mark.parametrize("what", ["unlink", "write_tensors"])
def test_nobody_waits_for_a_file_that_goes_or_is_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = full(tmp_path)
    begun, ends = hangs(monkeypatch, os if what == "unlink" else writing, what)
    saving = threading.Thread(target=save, args=(disk, NEW))
    saving.start()
    try:
        assert begun.wait(120)
        all_return(
            [
                lambda: disk.find("k", packed(OLD)),
                lambda: disk.save_conversation("forked", {"ids": [1, 2]}),
                lambda: disk.conversation("forked"),
                lambda: disk.rank("forked", None, packed([1, 2]), Rank(priority=1), 0.0),
                lambda: disk.drop_conversation("forked"),
                lambda: disk.names(),
            ]
        )
        if what == "unlink":
            assert disk.room.nbytes > 4000, "a file that is there counts"
    finally:
        ends.set()
        saving.join()
    assert (load(disk, NEW), load(disk, OLD)) == (400, 0), disk.problem
    disk.check_integrity()
    disk.close()


@pytest.mark.parametrize("more", [0, 20_000])
def test_what_grows_while_a_file_is_written_is_within_the_budget_with_it(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = full(tmp_path, more), writing.write_tensors
    messages = [{"role": "user", "content": "x" * 15_000}]

    def grows(*args: Any) -> Any:
        found = write(*args)
        assert disk.save_conversation("long", {"messages": messages})
        return found

    monkeypatch.setattr(writing, "write_tensors", grows)
    assert save(disk, NEW) == (more > 0)
    assert disk.room.nbytes + disk.room.rest <= (disk.room.budget or 0)
    assert disk.conversation("long") == {"messages": messages}
    assert more or "grown meanwhile, and a sequence was not saved" in disk.problem
    assert {int(x.name[:12]) for x in tmp_path.glob("*.safetensors")} == set(disk._chunks.numbers)
    disk.check_integrity()
    disk.close()


def test_conversations_are_opened_forked_rewound_and_parked_while_their_keys_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), some_ids(30)
    with store_of(model, directory=tmp_path) as store:
        chat = store.open("alice")
        begun, ends = hangs(monkeypatch, writing, "write_tensors")
        out = chat.generate(**ones(ids), **GREEDY)
        try:
            assert begun.wait(120)
            all_return(
                [
                    lambda: chat.fork("bob"),
                    lambda: chat.rewind(tokens=3),
                    lambda: chat.set_rank(priority=2),
                    lambda: chat.park(),
                    lambda: chat.wake(wait=True),
                    lambda: store.open("bob").close(),
                    lambda: store.open("carol").generate(**ones(out), **GREEDY),
                ]
            )
        finally:
            ends.set()
        assert store.names == ["alice", "carol"]
    with store_of(model, directory=tmp_path) as store:
        chat = store.open("alice")
        assert chat.ids == out[0, :-3].tolist()
        inputs = ones(out[:, :-3])
        assert fresh(model, inputs).equal(chat.generate(**inputs, **GREEDY))


def test_a_folder_that_is_opened_with_a_smaller_budget_is_within_it(tmp_path: Path) -> None:
    model, prompts = tiny_model("llama"), {name: some_ids(200, seed=i) for i, name in enumerate("abcd")}
    with store_of(model, directory=tmp_path) as store:
        for name, ids in prompts.items():
            store.open(name, pinned=name == "a", priority=1 if name == "b" else 0).generate(**ones(ids), **GREEDY)
        store.flush()
        assert store._disk_tier is not None
        each, rest = store._disk_tier.disk.room.nbytes // 4, store._disk_tier.disk.room.rest

    def left(budget: int) -> tuple[list[str], str]:
        with store_of(model, directory=tmp_path, disk_budget=budget) as store:
            assert store._disk_tier is not None
            disk = store._disk_tier.disk
            found = [name for name, ids in prompts.items() if next(disk._chunks.under([(None, ids_of(ids))]))]
            assert disk.room.nbytes + disk.room.rest <= budget or disk.problem
            sizes = sum(x.stat().st_size for x in tmp_path.glob("*.safetensors"))
            assert sizes <= disk.room.nbytes
            disk.check_integrity()
            return found, disk.problem

    assert left(rest + 3 * each + each // 2) == (["a", "b", "d"], "")
    assert left(rest + 2 * each + each // 2) == (["a", "b"], "")
    found, problem = left(rest + each // 2)
    assert found == ["a"], "what is pinned stays"
    assert "'a' pinned" in problem
    assert left(1)[0] == ["a"]


def ids_of(ids: torch.Tensor) -> bytes:
    return packed(ids[0].tolist())
