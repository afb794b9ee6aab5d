"""What was woken is there when its turn begins, whatever else goes on meanwhile, and calls do not notice."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_model
from test_ranks import crowd, turn
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier import BudgetError, ConfigError, TieredKVCache, TieredMemory
from kvtier.conversation.index import packed
from kvtier.conversation.saved import wake as waking
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.conversation.saved.tail import Tail
from kvtier.conversation.saved.wake import Wake, Waker
from kvtier.hf.models.identity import dependence
from kvtier.memory.blocks.block import State
from kvtier.tables.parked.sequences import ParkedSequences

DEVICE = 60_000


def on_device(store: Any, ids: list[int]) -> tuple[int, int]:
    """Blocks of a sequence that are on the device, and all."""
    store.memory.lock.acquire()
    try:
        [key] = {x.key for x in store._kept.entries.values()}
        _, entry = store._kept.find(key, packed(ids))
        runs = [run for table in entry.sequence.tables.values() for run in table.resolve()]
        return sum(x.count for x in runs if x.state is not State.HOST), sum(x.count for x in runs)
    finally:
        store.memory.lock.release()


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def saved(name: str, folder: Path, count: int = 1) -> None:
    """Save conversations of 46 tokens."""
    with store_of(tiny_model(name), directory=folder) as store:
        for i in range(count):
            turn(store.open(str(i)), some_ids(40, seed=i))


@pytest.mark.parametrize("device_budget", [None, DEVICE], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_what_is_on_the_disk_is_cached_when_the_turn_comes(
    name: str, device_budget: int | None, tmp_path: Path
) -> None:
    saved(name, tmp_path)
    with store_of(tiny_model(name), directory=tmp_path, device_budget=device_budget) as store:
        chat = store.open("0")
        wake = chat.wake(wait=True)
        assert wake.done
        assert wake.loaded == 45
        assert chat.wake(wait=True).loaded == 0, "it is there"
        turn(chat, grown(torch.tensor([chat.ids])))
        assert chat.reuse is not None
        assert (chat.reuse.cached, chat.reuse.loaded) == (45, 0)
        assert store.stats.problem == ""
        store.check_integrity()


def test_a_parked_conversation_is_promoted_as_far_as_there_is_room() -> None:
    with store_of(tiny_model("llama"), device_budget=DEVICE) as store:
        chats = [store.open(str(i)) for i in range(3)]
        for i, chat in enumerate(chats):
            turn(chat, some_ids(40, seed=i))
            chat.park()
            assert on_device(store, chat.ids)[0] == 0
        for chat in chats:
            wake = chat.wake(wait=True)
            here, blocks = on_device(store, chat.ids)
            assert here == blocks, "what is woken last is wanted first"
            assert wake.promoted == blocks * 1536
            store.check_integrity()
        assert on_device(store, chats[0].ids)[0] < blocks, "all three do not fit"
        for chat in chats:
            turn(chat, grown(torch.tensor([chat.ids])))
            assert chat.reuse is not None
            assert chat.reuse.cached == 45


def test_what_caches_use_stays_on_the_device(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved("llama", tmp_path)
    memory = TieredMemory(device_budget=DEVICE, host_budget="1MiB")
    with store_of(model, memory=memory, host_budget=None, directory=tmp_path) as store:
        chat = store.open("1")
        turn(chat, some_ids(40, seed=5))
        chat.park()
        with TieredKVCache(model.config, memory=memory, block_size=8) as cache:
            inputs = ones(some_ids(60, seed=3))
            model.generate(**inputs, past_key_values=cache, **(GREEDY | {"max_new_tokens": 60}))
            evicted = cache.stats.evictions
            assert evicted, "it has more than fits"
            chat.wake(wait=True)
            loads = store.open("0").wake()
            until(lambda: loads._waits_for)
            assert not loads.done, "it waits for room on the device"
            assert cache.stats.evictions == evicted
        assert loads.wait(120)
        assert loads.loaded == 45
        store.check_integrity()
    memory.close()


@pytest.mark.parametrize("how", ["timeout", "waited for", "stalled"])
def test_a_wake_that_gets_no_room_ends_and_says_why(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    saved("llama", tmp_path)
    memory = TieredMemory(device_budget=DEVICE, host_budget="1MiB")
    with store_of(model, memory=memory, host_budget=None, directory=tmp_path) as store:
        with TieredKVCache(model.config, memory=memory, block_size=8) as cache:
            model.generate(**ones(some_ids(60)), past_key_values=cache, **(GREEDY | {"max_new_tokens": 60}))
            now = [0.0]
            monkeypatch.setattr(waking, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
            timeout = None if how == "stalled" else 0.2
            wake = store.open("0").wake(wait=how == "waited for", timeout=timeout)
            if how != "waited for":
                ends = timeout or waking.STALLED
                until(lambda: wake._waits_for)
                now[0] = 0.9 * ends
                assert not wake.wait(0.05)
                now[0] = ends
            assert wake.wait(120)
            assert wake.loaded == 0
            why = "no room on the device besides what open caches use"
            if timeout:
                why = f"0.2 seconds have passed: {why}"
            # Who waits may be done before it was seen what there is to wait for.
            assert wake.why in ((why, "0.2 seconds have passed") if how == "waited for" else (why,))
        again = store.open("0").wake(wait=True, timeout=120)
        assert (again.loaded, again.why) == (45, "")
    memory.close()


def test_a_wake_that_waits_in_line_is_not_out_of_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Waker, "background", False)
    monkeypatch.setattr("kvtier.conversation.saved.wake.STALLED", 0.05)
    saved("llama", tmp_path, 2)
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        wakes = [store.open(str(i)).wake() for i in range(2)]
        time.sleep(0.1)
        while store._waker.step() is not None:
            pass
        assert [(x.loaded, x.why) for x in wakes] == [(45, ""), (45, "")]


def test_what_does_not_fit_on_the_device_is_said_to_be_elsewhere() -> None:
    with store_of(tiny_model("llama"), device_budget=30_000) as store:
        chat = store.open("a")
        turn(chat, some_ids(60))
        chat.park()
        wake = chat.wake(wait=True)
        here, blocks = on_device(store, chat.ids)
        assert 0 < here < blocks
        assert wake.why.startswith("no room on the device")


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "soon", float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with store_of(tiny_model("llama")) as store, pytest.raises(ConfigError, match="timeout"):
        store.open("a").wake(timeout=timeout)


def test_who_is_refused_gets_what_a_wake_has_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    saved("llama", tmp_path)
    at, load = threading.Event(), Archive.load

    def slow(self: Archive, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        at.set()
        time.sleep(0.2)  # all is claimed still
        return found

    with store_of(model, directory=tmp_path, host_budget="40KiB") as store:
        inputs = ones(some_ids(50, seed=9))
        monkeypatch.setattr(Archive, "load", slow)
        wake = store.open("0").wake()
        assert at.wait(120)
        assert torch.equal(store.generate(**inputs, **GREEDY), fresh(model, inputs))
        assert wake.wait(120)
        store.check_integrity()
        # As a cache of the user's own.
        store.clear()
        at.clear()
        wake = store.open("0").wake()
        assert at.wait(120)
        with TieredKVCache(model.config, memory=store.memory, block_size=8) as cache:
            out = model.generate(**inputs, past_key_values=cache, **GREEDY)
        assert torch.equal(out, fresh(model, inputs))
        assert wake.wait(120)
        store.check_integrity()


@pytest.mark.parametrize("tails", [0, 1, 2])
def test_loads_that_are_refused_do_not_wait_for_each_other(
    tails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of the user's own has the room, and nothing of what asks before it is refused can give any."""
    model, load, both, ended = tiny_model("llama"), Archive.load, threading.Barrier(2), list[str]()

    def at_once(self: Archive, *args: Any, **kwargs: Any) -> Any:
        both.wait(60)
        return load(self, *args, **kwargs)

    with TieredMemory(host_budget="72KiB") as memory, contextlib.ExitStack() as stack:
        stores = list[Any]()
        for i in range(2):
            saved("llama", tmp_path / f"{i}")
            stores.append(
                stack.enter_context(store_of(model, memory=memory, host_budget=None, directory=tmp_path / f"{i}"))
            )
        with TieredKVCache(model.config, memory=memory, block_size=8, max_tokens=120) as cache:
            model.generate(**ones(some_ids(60)), past_key_values=cache, **GREEDY)
            monkeypatch.setattr(Archive, "load", at_once)

            def loads(number: int) -> None:
                store, chat = stores[number], stores[number].open("0")
                if number >= tails:
                    wake = chat.wake(wait=True)
                    ended.append(wake.why)
                    return
                key, ids = (dependence.computed_as(model), None), packed(chat.ids[:-1])
                tail = Tail(memory, 0, functools.partial(store.disk_tier.load, key, ids, stateful=False))
                tail.begin()
                ended.append(tail.wait()[1])

            threads = [threading.Thread(target=loads, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join(60)
                assert len(ended) == 2
                # One is asked to end, and is refused, or ends before it asks for room.
                assert set(ended) <= {"no room for what is saved", "cancelled"}
            finally:
                cache.close()  # so that a test that fails ends
                with memory.lock:
                    memory.readers.resume()
        memory.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_turn_waits_for_what_is_being_read_for_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(name, tmp_path)
    at, loads, load = threading.Event(), [0], Archive.load

    def slow(self: Archive, *args: Any, **kwargs: Any) -> Any:
        loads[0] += 1
        at.set()
        time.sleep(0.1)
        return load(self, *args, **kwargs)

    monkeypatch.setattr(Archive, "load", slow)
    with store_of(tiny_model(name), directory=tmp_path) as store:
        chat = store.open("0")
        chat.wake()
        assert at.wait(120)
        turn(chat, grown(torch.tensor([chat.ids])))
        assert chat.reuse is not None
        assert chat.reuse.cached == 45
        assert loads[0] == 1


@pytest.mark.parametrize("second", ["no room", "nothing kept"])
def test_a_turn_waits_for_what_is_read_under_its_own_key_only(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine keeps of a model with windows is under another key, and is read behind it."""
    saved("gemma3", tmp_path)
    at, go_on, keys, load = threading.Event(), threading.Event(), list[Any](), DiskTier.load

    def slow(self: DiskTier, key: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        at.set()
        assert go_on.wait(120)
        return load(self, key, *args, **kwargs) if len(keys) == 1 else (0, "")

    def nbytes(self: DiskTier, key: Any, *args: Any, **kwargs: Any) -> int:
        return 1 << 50 if keys and key != keys[0] and second == "no room" else 1

    monkeypatch.setattr(DiskTier, "load", slow)
    monkeypatch.setattr(DiskTier, "bytes_to_load", nbytes)
    monkeypatch.setattr(ParkedSequences, "has_room", lambda self, nbytes: nbytes < 1 << 50)
    with store_of(tiny_model("gemma3"), directory=tmp_path) as store:
        chat = store.open("0")
        wake = chat.wake()
        assert at.wait(120)
        waits = threading.Thread(target=store._waker.turn, args=(wake._key, wake._ids))
        waits.start()
        until(lambda: wake._hurried)
        go_on.set()
        waits.join(60)
        assert not waits.is_alive(), "it waits for what it has no use for"
        assert wake.wait(60)
        assert keys == [wake._key]


def test_what_a_wake_could_not_keep_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("gemma3", tmp_path)
    keys = list[Any]()

    def given_up(self: DiskTier, key: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return 0, ""

    def nbytes(self: DiskTier, key: Any, *args: Any, **kwargs: Any) -> int:
        return 1 << 50 if keys and key != keys[0] else 1  # no room for the second

    monkeypatch.setattr(DiskTier, "load", given_up)
    monkeypatch.setattr(DiskTier, "bytes_to_load", nbytes)
    monkeypatch.setattr(ParkedSequences, "has_room", lambda self, nbytes: nbytes < 1 << 50)
    with store_of(tiny_model("gemma3"), directory=tmp_path) as store:
        wake = store.open("0").wake(timeout=1)
        assert wake.wait(60)
        assert keys == [wake._key]


@pytest.mark.parametrize("how", ["close", "drop", "weights"])
def test_a_store_ends_in_the_midst_of_a_wake(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    model = copy.deepcopy(tiny_model("llama"))
    saved("llama", tmp_path, 3)
    at, load = threading.Event(), Archive.load

    def slow(self: Archive, *args: Any, **kwargs: Any) -> Any:
        at.set()
        time.sleep(0.05)
        return load(self, *args, **kwargs)

    monkeypatch.setattr(Archive, "load", slow)
    memory = TieredMemory(device_budget=DEVICE, host_budget="1MiB")
    store = store_of(model, memory=memory, host_budget=None, directory=tmp_path)
    wakes = [store.open(str(i)).wake() for i in range(3)]
    assert at.wait(120)
    if how == "weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        ids = torch.tensor([store.open("0").ids])
        out = store.generate(**ones(ids), **GREEDY)
        assert torch.equal(out, fresh(model, ones(ids)))
        assert store.reuse[0].cached == 0
        for i in range(3):
            ids = torch.tensor([store.open(str(i)).ids])
            assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        store.check_integrity()
    if how == "drop":
        gone = weakref.ref(store)
        del store
        for wake in wakes:
            assert wake.wait(120)
        gc.collect()
        deadline = time.monotonic() + 120
        while (gone() is not None or memory.owners) and time.monotonic() < deadline:
            time.sleep(0.01)
            with memory.lock, memory.change:
                memory.recovery.collect()
        assert gone() is None
    else:
        store.close()
    for wake in wakes:
        assert wake.done
    assert not memory.conceding
    memory.close()
    assert not [x for x in threading.enumerate() if x.name == "kvtier-waking"]


@pytest.mark.parametrize("when", ["while", "after"])
def test_a_wake_that_races_the_end_of_its_store_leaves_nothing(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, wakes = tiny_model("llama"), some_ids(40), list[Wake]()
    with TieredMemory(host_budget="64MiB") as memory:
        options: dict[str, Any] = {"memory": memory, "host_budget": None, "directory": tmp_path}
        with store_of(model, **options) as store:
            store.generate(**ones(ids), **GREEDY)
        store = store_of(model, **options)
        key, row = (dependence.computed_as(model), None), packed(ids[0].tolist())

        def asks() -> None:
            wakes.append(store._waker.submit(key, row))
            assert wakes[0].wait(120)

        if when == "while":
            close = store.caches.close
            monkeypatch.setattr(store.caches, "close", lambda: (close(), store._kept.parked.close(), asks()))
        store.close()
        if when == "after":
            asks()
        assert (wakes[0].loaded, wakes[0].why) == (0, "the store was closed")
        memory.check_integrity()
        assert memory.stats.host.used_blocks == 0


def test_wakes_and_turns_of_many_threads_have_the_tokens_of_a_new_cache(tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved("llama", tmp_path, 4)
    options: dict[str, Any] = {"device_budget": DEVICE, "host_budget": "128KiB", "directory": tmp_path}
    wrong: list[str] = []
    with store_of(model, **options) as store:
        stop = threading.Event()

        def wakes() -> None:
            i = 0
            while not stop.is_set():
                i += 1
                wake = store.open(str(i % 4)).wake(wait=i % 3 == 0)
                if i % 5 == 0:
                    wake.cancel()
                time.sleep(0.001)

        def turns(number: int) -> None:
            for i in range(5):
                chat = store.open(str(2 * number + i % 2))
                ids = grown(torch.tensor([chat.ids]), 3) if len(chat.ids) < 60 else some_ids(20, seed=i)
                chat.priority = i
                try:
                    out = chat.generate(**ones(ids), **GREEDY)
                except BudgetError as error:
                    wrong.append(str(error))
                else:
                    if not torch.equal(out, fresh(model, ones(ids))):
                        wrong.append("other tokens")

        threads = [threading.Thread(target=turns, args=(i,)) for i in range(2)]
        waking = threading.Thread(target=wakes)
        for x in [waking, *threads]:
            x.start()
        for x in threads:
            x.join()
        stop.set()
        waking.join()
        store._waker.stop()
        store.check_integrity()
    assert wrong == []


def test_an_interrupt_in_a_call_leaves_wakes_and_later_calls_right(tmp_path: Path) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = tiny_model("llama")
    saved("llama", tmp_path, 2)

    class Interrupts(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    with store_of(model, device_budget=DEVICE, directory=tmp_path) as store:
        for _ in range(4):
            wakes = [store.open(str(i)).wake() for i in range(2)]
            with pytest.raises(KeyboardInterrupt):
                store.open("0").generate(
                    **ones(some_ids(30, seed=4)), **GREEDY, stopping_criteria=StoppingCriteriaList([Interrupts()])
                )
            for wake in wakes:
                assert wake.wait(120)
            chat = store.open("1")
            turn(chat, torch.tensor([[*chat.ids[:46], 5]]))
            assert chat.reuse is not None
            assert chat.reuse.cached >= 45
            store.clear()
        store.check_integrity()


@pytest.mark.parametrize("device_budget", [DEVICE, 20_000], ids=["room for all", "room for some"])
def test_what_is_behind_gaps_is_parked_and_woken_too(device_budget: int) -> None:
    model = tiny_model("llama")
    with store_of(model, device_budget=device_budget) as store:
        chat = store.open("a")

        def here() -> list[list[bool]]:
            with store.memory.lock:
                pieces = sorted(store._kept.parked.sequences, key=lambda x: x.start)
                tables = [[run for table in x.tables.values() for run in table.resolve()] for x in pieces]
            return [[run.state is not State.HOST for run in runs for _ in range(run.count)] for runs in tables]

        turn(chat, some_ids(84))
        chat.drop(16, 24)
        chat.drop(40, 48)
        chat.park()
        assert not any(map(any, here()))
        wake = chat.wake()
        assert wake.wait(120), "what is behind a gap and what is before it take each other's room"
        store.check_integrity()
        first, second, third = here()
        assert all(first), "the beginning is wanted first"
        if device_budget == DEVICE:
            assert all(second)
            assert all(third)
            assert wake.promoted == sum(map(len, here())) * 1536
        else:
            assert any(second)
            assert not all(third)
        out = turn(chat, grown(torch.tensor([chat.ids])))
        assert chat.reuse is not None
        assert chat.reuse.cached == 89 - 16
        assert out.shape[1] == len(chat.ids)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_the_thread_begins_leaves_one_thread_for_the_next_wake(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, interrupts = threading.Thread.start, [True]

    def interrupted(thread: threading.Thread) -> None:
        mine = thread.name == "kvtier-waking"
        if mine and when == "before" and interrupts and interrupts.pop():
            raise KeyboardInterrupt
        start(thread)
        if mine and interrupts and interrupts.pop():
            raise KeyboardInterrupt

    with store_of(tiny_model("llama"), device_budget=DEVICE) as store:
        chat = store.open("a")
        turn(chat, some_ids(40))
        chat.park()
        goes_on, bring = threading.Event(), store._waker._bring
        monkeypatch.setattr(store._waker, "_bring", lambda wake: bring(wake) if goes_on.is_set() else 0.01)
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.wake()
        wakes = [chat.wake() for _ in range(3)]
        assert [x.name for x in threading.enumerate()].count("kvtier-waking") == 1
        goes_on.set()
        assert all(wake.wait(120) for wake in wakes)
        assert on_device(store, chat.ids)[0] > 0
    assert "kvtier-waking" not in [x.name for x in threading.enumerate()]


def test_without_a_lower_and_a_higher_tier_a_wake_does_nothing() -> None:
    with store_of(tiny_model("llama")) as store:
        chat = store.open("a")
        assert chat.wake().done
        turn(chat, some_ids(30))
        assert chat.wake().done
        crowd(store, 1)
        assert not [x for x in threading.enumerate() if x.name == "kvtier-waking"]
    with store_of(tiny_model("llama"), device_budget=DEVICE) as store:
        assert store.open("a").wake(wait=True).promoted == 0, "nothing is kept of it"


def test_what_is_erased_while_it_is_read_ahead_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, has_read, goes_on = Archive.load, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        has_read.set()
        assert goes_on.wait(60)
        return found

    saved("llama", tmp_path)
    with store_of(tiny_model("llama"), directory=tmp_path) as store:
        monkeypatch.setattr(Archive, "load", slow)
        wake = store.open("0").wake()
        assert has_read.wait(60)
        erases = threading.Thread(target=functools.partial(store.forget, "0", erase=True))
        erases.start()
        while not wake._cancelled and erases.is_alive():
            time.sleep(0.001)
        goes_on.set()
        erases.join(60)
        assert not erases.is_alive()
        assert wake.wait(60)
        assert not store.kept.entries
        store.check_integrity()
