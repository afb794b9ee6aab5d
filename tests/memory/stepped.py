"""Threads that take turns: one runs at a time, and who goes on is drawn where the memory's lock is taken or given back.

All that threads share changes under that lock, and what they read without it they read between two turns: so these are
all the orders that threads can come in, and a seed repeats one. Whoever waits for others gives its turn away; if all
do, that is a deadlock, and an error.

A thread that should hold the lock and does not loses a place to lose its turn at: no order would show it. So
`check_lock` asks everywhere that the lock is held.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier.attention.partition import Partition
from kvtier.attention.reader import LayerReader
from kvtier.cpu.append import TokenWriter
from kvtier.forward.schedule import Schedule
from kvtier.memory.access.readers import Readers
from kvtier.memory.admission import Admission
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import Move
from kvtier.memory.recovery import Recovery
from kvtier.memory.storage.buffers import IoBuffers, Workspace
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.eviction import Eviction
from kvtier.memory.tiers.fetching import Fetching
from kvtier.memory.tiers.host import HostTier
from kvtier.memory.tiers.room import Room
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable
from kvtier.transfer.doubles import FailingTransfers, HeldTransfers
from kvtier.transfer.engine import InlineTransfers, Transfer


class Deadlock(AssertionError):
    """All threads wait for each other."""


class Turns:
    """Lets one thread at a time run.

    Args:
        seed: of the order.
        chance: that another thread goes on where one could.

    Attributes:
        lock: in the place of a memory's.
        switches: turns that were given away.
    """

    def __init__(self, seed: int, chance: float = 0.3) -> None:
        self.random = random.Random(seed)
        self.chance = chance
        self.lock = SteppedLock(self)
        self.switches = 0
        self._gates: dict[int, threading.Semaphore] = {}  # by thread
        self._ready: list[int] = []
        self._waiting: list[int] = []
        self._errors: list[BaseException] = []
        self._over = threading.Semaphore(0)

    def install(self, memory: TieredMemory) -> None:
        """Let an unused memory take turns."""
        assert memory._host is None
        memory.lock = memory.recovery.lock = self.lock  # type: ignore[assignment]
        memory.readers._lock = self.lock  # type: ignore[assignment]
        memory.readers._ended = SteppedCondition(self)  # type: ignore[assignment]

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run some jobs, each in a thread of its own. Raises what the first of them that fails raises."""
        arrived = threading.Barrier(len(jobs) + 1)

        def work(job: Callable[[], None]) -> None:
            me = threading.get_ident()
            self._gates[me] = threading.Semaphore(0)
            self._ready.append(me)
            arrived.wait()
            self._gates[me].acquire()
            try:
                job()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._ready.remove(me)
                self._hand_on()

        threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        arrived.wait()
        self._ready.sort(key=[thread.ident for thread in threads].index)  # whoever was first to come
        self._hand_on()
        self._over.acquire()
        for thread in threads:
            thread.join(60)
        if self._errors:
            raise self._errors[0]

    def maybe_switch(self) -> None:
        """Here another thread may go on."""
        me = threading.get_ident()
        if me not in self._gates:
            return
        if self._errors:
            raise SystemExit  # another thread has failed: all end
        if len(self._ready) > 1 and self.random.random() < self.chance:
            self._switch(me)

    def block(self) -> None:
        """This thread waits until `wake`."""
        me = threading.get_ident()
        assert me in self._gates, "a thread that takes no turns waits for others"
        self._ready.remove(me)
        self._waiting.append(me)
        if not self._ready:
            self._waiting.remove(me)
            self._ready.append(me)
            raise Deadlock("all threads wait for each other")
        self._switch(me)

    def wake(self) -> None:
        """All that wait may go on."""
        self._ready += self._waiting
        self._waiting.clear()

    def _switch(self, me: int) -> None:
        other = self.random.choice([x for x in self._ready if x != me] or [me])
        if other != me:
            self.switches += 1
            self._gates[other].release()
            self._gates[me].acquire()

    def _hand_on(self) -> None:
        if not self._ready and self._waiting:
            self._errors.append(Deadlock("all threads wait for one that has ended"))
            self.wake()
        if self._ready:
            self._gates[self.random.choice(self._ready)].release()
        else:
            self._over.release()


class SteppedLock:
    """In the place of the memory's lock: nobody ever waits for it, for nobody who holds it loses its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.holder = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        if self.holder:
            assert not blocking or timeout >= 0, "a thread waits for a lock that it holds itself"
            return False
        if blocking:
            self._turns.maybe_switch()
        assert not self.holder, "a thread has lost its turn with the lock in hand"
        self.holder = threading.get_ident()
        return True

    def release(self) -> None:
        """Give it back."""
        if not self._is_owned():
            raise RuntimeError("the lock of another thread")
        self.holder = 0
        self._turns.maybe_switch()

    def _is_owned(self) -> bool:
        return self.holder == threading.get_ident()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return bool(self.holder)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class SteppedCondition:
    """In the place of `Waiting` for that lock."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def wait(self) -> None:
        """Let go of the lock until `notify_all`."""
        lock = self._turns.lock
        assert lock.holder == threading.get_ident(), "waiting without the lock"
        lock.holder = 0
        try:
            self._turns.block()
        finally:
            lock.holder = threading.get_ident()

    def notify_all(self) -> None:
        """Wake all that wait."""
        self._turns.wake()


#: Whose caller holds the memory's lock.
LOCKED: dict[type, tuple[str, ...]] = {
    TieredMemory: (
        [
            "on",
            "block_set",
            "drop_set",
            "workspace",
            "io_buffers",
            "admit",
            "leave",
            "trim",
            "_tiers",
            "_sum",
            "_drain",
            "check_open",
        ]
    ),
    Recovery: ("collect", "find_abandoned", "_repair"),
    Admission: ("admit", "resize"),
    DeviceTier: ("block_set", "drop_set", "fence", "obtainable", "poll", "settle", "close"),
    Eviction: ("write_back", "evict", "evict_from", "evict_run", "leave", "cancel"),
    Room: ("keep_free", "make_room", "take", "_reclaim"),
    Fetching: ("fetch", "promote", "_pack"),
    ComputeDevice: ("allocate", "copy_of", "bring", "seal", "free"),
    HostTier: ["pool", "take", "grow", "make_room", "release_idle", "poll"],
    BlockPool: ["grow", "retire", "take", "give", "claim", "poll", "reset", "_release", "close"],
    Budget: ("reserve", "release"),
    Workspace: ("take", "shrink", "release", "release_idle"),
    IoBuffers: ("take", "release", "release_idle"),
    Readers: ("begin", "end", "fence", "others", "wait"),
    Move: ("settle",),
    BlockTable: ("resolve", "fork", "head", "crop", "clear", "defragment"),
    LayerKV: (
        "runs",
        "park",
        "follow",
        "parked_runs",
        "group",
        "append_token",
        "append",
        "crop",
        "pick_rows",
        "clear",
        "check_integrity",
    ),
    LayerReader: ("partition", "begin", "_places", "_next", "fetch_ahead", "expect", "forget", "retire"),
    Partition: ("__init__",),
    Schedule: ("state", "begin", "after"),
    InlineTransfers: ("submit", "drain", "mark"),
    HeldTransfers: ("submit", "drain", "poll", "mark"),
    FailingTransfers: ("submit",),
    Transfer: ("wait", "synchronize", "settle"),
    TokenWriter: ("repeat",),
}  # type: ignore[assignment]
LOCKED_FUNCTIONS = ("allocate", "seal", "reopen", "write_back", "fetch", "arrive", "evict", "drop_copy", "move", "free")


def subclasses(owner: type) -> Iterator[type]:
    """All classes below one."""
    for each in owner.__subclasses__():
        yield each
        yield from subclasses(each)


def check_lock(patch: pytest.MonkeyPatch, turns: Turns) -> None:
    """Raise where somebody changes or reads what threads share without holding the lock of `turns`."""

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            assert turns.lock.holder == threading.get_ident(), f"{function.__qualname__} without the memory's lock"
            return function(*args, **options)

        return call

    for owner, names in LOCKED.items():
        for each in (owner, *subclasses(owner)):  # those of tests have their own, which may not call the one above
            for name in names:
                if each is owner or name in each.__dict__:
                    patch.setattr(each, name, checked(getattr(each, name)))
    for name in LOCKED_FUNCTIONS:
        patch.setattr(residency, name, checked(getattr(residency, name)))
