"""The memory's lock: whatever comes, and wherever, the thread that believes to hold it does, and no other."""

from __future__ import annotations

import dis
import functools
import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_interrupts import PACKAGE, Line

from kvtier import ConcurrentUseError, Policy, TieredKVCache, TieredMemory
from kvtier.memory.access.lock import Waiting, held_twice, new_lock
from kvtier.memory.access.readers import Readers
from kvtier.planning.step import StepPlan, StepState


@functools.cache
def behind_calls(code: Any) -> frozenset[int]:
    """Where an interrupt of CPython comes in this code: behind a call."""
    found, before = set(), None
    for each in dis.get_instructions(code):
        if before is not None and before.opname.startswith("CALL"):
            found.add(each.offset)
        before = each
    return frozenset(found)


class BehindCall(Line):
    """Raises an interrupt behind the `at`-th call that the package makes while this is the tracer."""

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """Trace one event."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.where is None and frame.f_lasti in behind_calls(frame.f_code):
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise self.kind
        return self


def everywhere(act: Callable[[BehindCall], None]) -> int:
    """Do something with an interrupt behind each of its calls in turn. Returns how many there are."""
    at = 0
    while True:
        tracer = BehindCall(at)
        act(tracer)
        if tracer.where is None:
            return at
        at += 1


def free(lock: Any) -> bool:
    """Whether nobody holds it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(lock.acquire(timeout=5) and (lock.release() or True)))
    thread.start()
    thread.join()
    return bool(found[0])


def test_a_wait_that_is_cut_short_ends_with_the_lock() -> None:
    def act(tracer: BehindCall) -> None:
        lock = new_lock()
        waiting = Waiting(lock)
        with lock:
            waker = threading.Thread(target=wake, args=(lock, waiting))
            waker.start()
            with tracer.traced():
                waiting.wait()
            assert lock._is_owned()
        waker.join()
        assert free(lock)

    def wake(lock: Any, waiting: Waiting) -> None:
        with lock:
            waiting.notify_all()

    assert everywhere(act) >= 5


def test_an_interrupt_while_the_lock_is_taken_again_waits_for_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs in the background ignores it
    try:
        interrupted_while_it_is_taken_again()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_while_it_is_taken_again() -> None:
    lock, held = new_lock(), threading.Event()
    waiting, seen = Waiting(lock), []

    def holds() -> None:
        with lock:
            waiting.notify_all()
            held.set()
            time.sleep(0.05)  # the other thread is taking the lock again by now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            time.sleep(0.05)
            seen.append(lock._is_owned())

    thread = threading.Thread(target=holds)
    try:
        with lock:
            thread.start()
            try:
                waiting.wait()
                time.sleep(120)  # where it comes
            finally:
                seen.append(lock._is_owned())
        pytest.fail("no interrupt came")
    except KeyboardInterrupt:
        assert held.is_set()
    thread.join()
    assert seen == [True, True], "who was interrupted has let go of a lock that another thread holds"
    assert free(lock)


@pytest.mark.parametrize("busy", [False, True])
def test_a_cache_that_is_dropped_while_an_interrupt_comes_leaves_the_lock_free(busy: bool) -> None:
    def act(tracer: BehindCall) -> None:
        memory, done = TieredMemory(device_budget=2**20, host_budget=2**20), []
        holder = threading.Thread(target=hold, args=(memory,))
        if busy:
            holder.start()
            ready.acquire()
        with tracer.traced():
            memory.recovery.abandon(lambda: done.append(1))
        assert not memory.lock._is_owned()
        if busy:
            over.release()
            holder.join()
        assert free(memory.lock)
        memory.drain()
        memory.close()

    ready, over = threading.Semaphore(0), threading.Semaphore(0)

    def hold(memory: TieredMemory) -> None:
        with memory.lock:
            ready.release()
            over.acquire()

    assert everywhere(act) >= 3


def test_a_reader_that_is_cut_short_leaves_the_lock_free() -> None:
    def act(tracer: BehindCall) -> None:
        lock = new_lock()
        readers = Readers(lock)
        with lock:
            readers.begin()
        with tracer.traced():
            readers.cut_short()
        assert not lock._is_owned()
        assert free(lock)

    assert everywhere(act) >= 3


def test_what_a_dropped_cache_held_is_kept_while_its_thread_reads() -> None:
    memory, done = TieredMemory(device_budget=2**20, host_budget=2**20), []
    with memory.lock:
        reading = memory.readers.begin()
    memory.recovery.interrupted = True
    memory.recovery.abandon(lambda: done.append(1))
    assert not done, "the memory was repaired under a read"
    assert memory.recovery.interrupted
    with memory.lock:
        memory.mend()
        assert memory.recovery.interrupted, "nor may the thread itself repair it"
        memory.readers.end(reading)
        memory.mend()
    assert done == [1]
    assert not memory.recovery.interrupted
    memory.close()


def test_a_change_begins_when_all_that_nobody_has_is_given_up() -> None:
    memory, done = TieredMemory(device_budget=2**20, host_budget=2**20), []
    with memory.lock:
        memory.recovery.abandon(lambda: done.append(1))  # as garbage is found in the midst of something else
    assert not done
    with memory.lock, memory.change:
        assert done == [1]
    memory.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_cache_whose_end_was_cut_short_is_found(interrupted: bool) -> None:
    memory = TieredMemory(device_budget=2**12, host_budget=2**20)
    kept, lost = (TieredKVCache(memory=memory, block_size=4) for _ in range(2))
    x = torch.randn(1, 1, 60, 4)
    for cache in (kept, lost):
        cache.update(x, -x, 0)
    lost._forward._finalizer.detach()  # as an interrupt at its first line leaves it
    del lost, cache
    gc.collect()
    before = memory.stats.device.used_blocks + memory.stats.host.used_blocks
    if interrupted:
        memory.recovery.interrupted = True
        kept.update(x[:, :, :1], x[:, :, :1], 0)
        assert memory.stats.device.used_blocks + memory.stats.host.used_blocks <= before // 2 + 1
    memory.check_integrity()
    assert torch.equal(kept.layers[0].keys.dense()[:, :, :60], x)
    kept.close()
    memory.close()


class Asks(Policy):
    """A policy that looks at the memory that asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: TieredMemory | None = None
        self.seen = 0

    def plan(self, state: StepState) -> StepPlan:
        """See `Policy.plan`."""
        if self.memory is not None:
            self.seen += "caches" in repr(self.memory)
            self.memory.stats  # noqa: B018 - it is asked for
        return super().plan(state)


def test_a_policy_may_look_at_the_memory_that_asks_it() -> None:
    policy = Asks()
    memory = TieredMemory(device_budget=2**10, host_budget=2**20, policy=policy)
    policy.memory = memory
    with TieredKVCache(memory=memory, block_size=4) as cache:
        x = torch.randn(1, 1, 60, 4)
        for part in (x[:, :, :59], x[:, :, 59:]):
            keys, values = cache.update(part, -part, 0)
            F.scaled_dot_product_attention(part, keys, values)
        memory.check_integrity()
    assert policy.seen
    memory.close()


def test_a_change_in_the_middle_of_a_change_is_refused_and_the_first_one_goes_on() -> None:
    memory = TieredMemory(device_budget=2**12, host_budget=2**20)
    with memory.lock, memory.change:
        with pytest.raises(ConcurrentUseError, match="in the middle of a change"):
            memory.drain()
        assert held_twice(memory.lock) is False
        assert not memory.recovery.interrupted
    memory.drain()
    memory.close()
