"""What holds a slot that is freed while other threads read: their calls, then what these have launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.memory.access.lock import new_lock
from kvtier.memory.access.readers import Readers, Reading


class Work:
    """An event behind work of a device."""

    def __init__(self) -> None:
        self.done = False

    def passed(self) -> bool:
        return self.done

    def settle(self) -> None:
        self.done = True


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call in a thread of its own returns."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def readers() -> Readers:
    return Readers(new_lock())


def begun(readers: Readers) -> Reading:
    with readers._lock:
        return readers.begin()


def ended(readers: Readers, reading: Reading, work: Work | None) -> None:
    with readers._lock:
        readers.end(reading, work)  # type: ignore[arg-type]


def test_a_slot_is_held_until_what_a_call_launched_after_it_was_freed_has_ended(readers: Readers) -> None:
    before, launched = Work(), Work()
    reading = elsewhere(lambda: begun(readers))
    fence = readers.fence(before)  # type: ignore[arg-type]
    assert fence is not None
    before.done = True
    assert not fence.passed(), "the call still reads"
    assert fence.event is None, "nothing can be ordered behind work that is not launched yet"
    elsewhere(lambda: ended(readers, reading, launched))
    assert not fence.passed(), "its kernels still read"
    assert fence.event is launched
    launched.done = True
    assert fence.passed()


def test_a_fence_is_settled_with_all_that_it_waits_for(readers: Readers) -> None:
    before, launched = Work(), Work()
    reading = elsewhere(lambda: begun(readers))
    fence = readers.fence(before)  # type: ignore[arg-type]
    elsewhere(lambda: ended(readers, reading, launched))
    assert fence is not None
    assert fence.event is None, "two events are no one event"
    fence.settle()
    assert fence.passed()
    assert before.done
    assert launched.done


def test_the_own_calls_of_a_thread_hold_nothing_from_it(readers: Readers) -> None:
    begun(readers)
    assert readers.fence(None) is None
    assert not readers.others()


def test_a_call_that_is_cut_short_does_not_keep_others_waiting(readers: Readers) -> None:
    fences = []

    def cut() -> None:
        begun(readers)
        elsewhere(lambda: fences.append(readers.fence(None)))
        readers.cut_short()

    elsewhere(cut)
    assert not readers.others()
    with readers._lock:
        assert not readers.wait()
    assert fences[0].passed()


@pytest.mark.parametrize("way", ["wait", "pause"])
def test_who_has_let_go_of_the_lock_is_told_when_it_has_it_again(way: str) -> None:
    """Others may have used the devices meanwhile, on streams of their own."""
    lock, told = new_lock(), list[bool]()
    readers = Readers(lock, lambda: told.append(lock._is_owned()))
    reading = elsewhere(lambda: begun(readers))
    timer = threading.Timer(0.05, lambda: ended(readers, reading, None))
    with lock:
        timer.start()
        getattr(readers, way)()
        assert told == [True]
    timer.join()
