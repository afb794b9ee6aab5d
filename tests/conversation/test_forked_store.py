"""A process that is forked closes its copy of a store, whatever threads of its parent are at."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import disk_of, states_of
from families import build_model, tiny_model
from forked import ends_with, held_by_a_thread, in_fork
from test_store import GREEDY, fresh, ones, some_ids, store_of

from kvtier import BudgetError, ConfigError, TieredKVCache
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.disk.tools.contents import contents
from kvtier.conversation.saved.archive import Archive


@pytest.mark.parametrize("which", ["of conversations", "of the waker", "of the memory"])
def test_a_lock_that_a_thread_of_the_parent_has_hinders_nobody(which: str, tmp_path: Path) -> None:
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        store.generate(**ones(some_ids(20)), **GREEDY)
        locks: dict[str, Any] = {
            "of conversations": store.conversations.lock,
            "of the waker": store._waker._lock,
            "of the memory": store.memory.lock,
        }

        def act() -> None:
            store.open("a").wake(wait=True)
            store.check_integrity()
            store.close()

        with held_by_a_thread(locks[which]):
            in_fork(act)
        store.check_integrity()


def test_a_turn_that_the_parent_saves_hinders_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends, save, parent = threading.Event(), threading.Event(), Disk.save_conversation, os.getpid()

    def hanging(self: Disk, *args: Any) -> bool:
        begun.set()
        assert os.getpid() != parent or ends.wait(60)
        return save(self, *args)

    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        monkeypatch.setattr(Disk, "save_conversation", hanging)
        store.open("a").went_on([1, 2])
        assert begun.wait(60)

        def act() -> None:
            store.open("b").went_on([1, 2])
            store.forget("a")
            store.close()

        try:
            in_fork(act)
        finally:
            ends.set()
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        assert store.names == ["a"]


def test_a_wake_of_the_parent_has_ended_in_the_child_and_nobody_waits_for_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    with store_of(model, directory=tmp_path) as store:
        store.open("a").generate(**ones(some_ids(40)), **GREEDY)
    begun, ends, load = threading.Event(), threading.Event(), Archive.load

    def hanging(self: Archive, *args: Any, **options: Any) -> Any:
        begun.set()
        assert ends.wait(60)
        return load(self, *args, **options)

    monkeypatch.setattr(Archive, "load", hanging)
    with store_of(model, directory=tmp_path, host_budget="40KiB") as store:
        wakes = [store.open("a").wake() for _ in range(2)]
        assert begun.wait(60)

        def act() -> None:
            for wake in wakes:
                assert wake.wait(60)
                assert "forked" in wake.why
            with (
                TieredKVCache(model.config, memory=store.memory, block_size=8, max_tokens=1000) as cache,
                pytest.raises(BudgetError),
            ):
                model(**ones(some_ids(1)), past_key_values=cache)
            store.close()

        try:
            in_fork(act)
        finally:
            ends.set()
        for wake in wakes:
            assert wake.wait(60)
        assert [wake.why for wake in wakes] == ["", ""]


@pytest.mark.parametrize("where", ["in a forward", "between two"])
def test_a_call_of_the_parent_does_not_keep_the_child_from_closing(where: str, tmp_path: Path) -> None:
    model, begun, ends, parent = build_model("llama", "sdpa"), threading.Event(), threading.Event(), os.getpid()
    found = list[torch.Tensor]()

    def waits(*_: Any, **__: Any) -> bool:
        if threading.current_thread() is thread:
            begun.set()
            assert os.getpid() != parent or ends.wait(60)
        return False

    with store_of(model, directory=tmp_path) as store:
        store.generate(**ones(some_ids(20)), **GREEDY)
        options: dict[str, Any] = {} if where == "in a forward" else {"stopping_criteria": [waits]}
        if not options:
            model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: waits() or None)
        thread = threading.Thread(
            target=lambda: found.append(store.generate(**ones(some_ids(30)), **GREEDY, **options))
        )
        thread.start()
        try:
            assert begun.wait(60)
            in_fork(store.close)
        finally:
            ends.set()
            thread.join(60)
        assert torch.equal(found[0], fresh(model, ones(some_ids(30))))
        store.check_integrity()


@pytest.mark.parametrize("within", [False, True], ids=["between two saves", "within one"])
def test_what_was_open_at_a_fork_is_refused_in_the_child_when_the_parent_has_closed_it(
    within: bool, tmp_path: Path
) -> None:
    """SQLite would take the parent's locks for its own: whoever reads the folder meanwhile would cut the index of the
    log, which ends a process that has it mapped; and a save that went on at the fork would never end."""
    disk, (hear, tell) = disk_of(tmp_path), os.pipe()
    assert disk.save_conversation("a", {"ids": [1]})
    with disk._manifest.transaction() if within else contextlib.nullcontext():
        child = os.fork()
        if not child:

            def opens() -> None:
                os.read(hear, 1)
                for act in (lambda: disk_of(tmp_path), lambda: contents(tmp_path)):
                    with pytest.raises(ConfigError, match="was open in the process that this one was forked from"):
                        act()
                disk_of(tmp_path / "elsewhere").close()

            ends_with(opens)
    disk.close()

    def goes_on() -> None:
        disk = disk_of(tmp_path)
        assert states_of(disk) == {"a": {"ids": [1]}}
        assert disk.save_conversation("b", {"ids": [2]})
        disk.close()

    in_fork(goes_on)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for handle in (hear, tell):
        os.close(handle)
    assert list(contents(tmp_path).conversations) == ["a", "b"]
