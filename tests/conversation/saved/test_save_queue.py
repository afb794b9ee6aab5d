"""What waits to be saved is bounded, whatever the disk does, and nobody waits for it but who asks to."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import OF
from families import tiny_model
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of

from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.index import packed
from kvtier.conversation.saved import waiting
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.soon import Soon
from kvtier.conversation.saved.waiting import Saved, Waiting
from kvtier.hf.models.devices import Devices


class Layer:
    """Stands for a layer with states."""

    def __init__(self, nbytes: int) -> None:
        self.state = torch.zeros(1, nbytes, dtype=torch.uint8)


def saved(ids: list[int], states: int = 0, key: str = "k") -> Saved:
    return Saved(key, packed(ids), {0: Layer(states)} if states else None, key)  # type: ignore[dict-item]


def drained(queue: Waiting) -> list[Saved]:
    found = []
    queue.end()
    while (x := queue.get()) is not None:
        found.append(x)
        queue.done()
    return found


def test_a_sequence_takes_the_place_of_what_it_continues() -> None:
    queue, first, other = Waiting(), saved([1, 2]), saved([7])
    longer, salted = saved([1, 2, 3]), saved([1, 2, 3, 4], key="other")
    for x in (first, other, longer, salted):
        assert queue.put(x) == 0
    assert drained(queue) == [longer, other, salted]


def test_states_of_a_shorter_sequence_stay_as_long_as_there_is_room() -> None:
    queue = Waiting(most_bytes=250)
    short, other, longer, longest = saved([1], 60), saved([9], 60), saved([1, 2], 60), saved([1, 2, 3], 60)
    assert [queue.put(x) for x in (other, short, longer)] == [0, 0, 0]
    again = saved([1, 2], 60)
    assert queue.put(again) == 0
    assert queue.put(longest) == 1, "one of those that it continues"
    assert drained(queue) == [other, again, longest]


def test_what_took_the_place_of_the_oldest_does_not_go_for_itself() -> None:
    queue, longer = Waiting(most_bytes=100), saved([1, 2, 3], 90)
    assert [queue.put(saved([1])), queue.put(saved([7])), queue.put(longer)] == [0, 0, 1]
    assert drained(queue) == [longer]


@pytest.mark.parametrize("states", [0, 500])
def test_what_waits_is_bounded_and_the_newest_stays(states: int) -> None:
    rng, queue = random.Random(0), Waiting(most_bytes=4000, most=20)
    given_up = 0
    for n in range(2000):
        x = saved([rng.randrange(3) for _ in range(rng.randint(1, 40))], states and rng.randint(1, states))
        given_up += queue.put(x)
        assert any(each is x for each in queue._saved)
        assert queue._nbytes == sum(each.nbytes for each in queue._saved) <= 4000, n
        assert len(queue._saved) <= 20
    assert given_up
    huge = saved([1] * 10_000)
    queue.put(huge)
    assert drained(queue) == [huge]
    assert queue._nbytes == 0


def test_a_disk_that_hangs_makes_no_call_wait_and_holds_a_bounded_number_of_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting.Waiting.__init__, "__defaults__", (10_000, 8))
    disk, hangs, here = Disk(tmp_path, None, OF), threading.Event(), list[str]()
    devices = Devices(torch.device("cpu"), {})
    archive, late = Archive(disk, lambda x: None, lambda: devices), list[int]()

    def save(x: Saved) -> None:
        if not hangs.wait(60):
            late.append(1)
        here.append(x.place)  # type: ignore[arg-type]

    monkeypatch.setattr(archive, "save", save)
    alive = weakref.WeakSet[Layer]()
    for n in range(200):
        x = saved([n], 1000, key=f"{n}")
        assert x.states is not None
        alive.add(x.states[0])  # type: ignore[arg-type]
        archive.submit(x)
        del x
    assert not late, "a call waited for the disk"
    gc.collect()
    assert len(alive) <= 10, "states of what is given up stay in memory"
    assert "too slow" in disk.problem
    hangs.set()
    archive.flush()
    assert here[-8:] == [f"{n}" for n in range(192, 200)]
    archive.close()
    gc.collect()
    assert not alive


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_turns_go_on_while_the_disk_hangs_and_the_last_one_is_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, hangs, write = tiny_model(name), some_ids(20), threading.Event(), Disk.write
    monkeypatch.setattr(waiting.Waiting.__init__, "__defaults__", (10**9, 2))

    def slow(self: Disk, *args: Any) -> Any:
        assert hangs.wait(180)
        return write(self, *args)

    monkeypatch.setattr(Disk, "write", slow)
    with store_of(model, directory=tmp_path) as store:
        for _ in range(5):
            out = store.generate(**ones(ids), **GREEDY)
            ids = grown(out)
        hangs.set()
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**ones(ids), **GREEDY), fresh(model, ones(ids)))
        assert store.reuse[0].loaded == ids.shape[1] - 5


def test_a_finalizer_may_end_it_at_any_moment() -> None:
    """A garbage collection may come while a thread is inside."""
    queue = Waiting()
    with queue._changed:
        queue.end()
    assert queue.get() is None


def test_join_waits_for_what_is_being_saved() -> None:
    queue, ended = Waiting(), threading.Event()
    queue.put(saved([1]))
    assert queue.get() is not None
    thread = threading.Thread(target=lambda: (queue.join(), ended.set()))
    thread.start()
    assert not ended.wait(0.1)
    queue.done()
    assert ended.wait(120)
    thread.join()


def test_the_order_of_what_nobody_continues_is_kept() -> None:
    queue, those = Waiting(), [saved([n]) for n in range(50)]
    for x in those:
        queue.put(x)
    assert all(a is b for a, b in itertools.zip_longest(drained(queue), those))


def test_what_has_given_up_its_end_before_it_was_saved_is_saved_as_far_as_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Archive, "background", False)
    model, inputs = tiny_model("llama"), ones(some_ids(60))
    with store_of(model, directory=tmp_path) as store:
        out = store.generate(**inputs, **GREEDY)
        store.drop(out[0].tolist(), 32, 60)
        store.flush()
        store.drop(out[0].tolist(), 16, 32)
        store.generate(**ones(out), **GREEDY)
        assert store.reuse[0].loaded == 16
        assert store.reuse[0].cached == 32, "half of it is in memory still"
        store.clear()
        store.flush()
        assert store.stats.problem == ""
    with store_of(model, directory=tmp_path) as store:
        assert torch.equal(store.generate(**inputs, **GREEDY), out)
        assert store.reuse[0].loaded == 32


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_the_thread_begins_leaves_one_thread_for_what_is_saved_next(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, interrupts, here = threading.Thread.start, [True], list[str]()

    def interrupted(thread: threading.Thread) -> None:
        if when == "before" and interrupts and interrupts.pop():
            raise KeyboardInterrupt
        start(thread)
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    archive = Archive(Disk(tmp_path, None, OF), lambda x: None, lambda: Devices(torch.device("cpu"), {}))
    monkeypatch.setattr(archive, "save", lambda x: here.append(x.place))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        archive.submit(saved([1]))
    for n in range(3):
        archive.submit(saved([n], key=f"{n}"))
    assert [x.name for x in threading.enumerate()].count("kvtier-saving") == 1
    archive.flush()
    assert here == ["0", "1", "2"]
    archive.close()
    assert "kvtier-saving" not in [x.name for x in threading.enumerate()]


def test_a_process_that_is_forked_waits_for_no_turn_that_its_parent_saves() -> None:
    soon, began, goes_on, saved = Soon(), threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        began.set()
        assert goes_on.wait(120)
        saved.append("slow")

    soon.put("a", slow)
    soon.put("b", lambda: saved.append("b"))
    assert began.wait(120)
    with soon._lock:  # as a thread has it that the child has not
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            soon.join()
            soon.put("c", lambda: saved.append("c"))
            soon.join()
            os._exit(saved != ["c"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    goes_on.set()
    soon.join()
    assert saved == ["slow", "b"]
