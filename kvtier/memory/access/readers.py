"""Attention calls that read slots outside the memory's lock, and what holds the slots until they have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtier.memory.access.lock import Lock, Waiting
from kvtier.memory.storage.pool import Fence
from kvtier.transfer.engine import Event

#: Seconds for which a thread that was cut short waits for the lock, to wake those that wait for it.
_LOCK_SECONDS = 1.0


class Reading:
    """One attention call: between `Readers.begin` and `Readers.end` its thread reads what it found under the lock."""

    __slots__ = ("ended", "over", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = False
        self.ended: Event | None = None  # behind the kernels that it launched


class Readers:
    """The attention calls under way in all threads. The caller holds the lock.

    A call takes a snapshot of addresses under the lock, reads without it, and never waits for memory in between: so
    whoever waits for it with `wait` is not waited for.

    Args:
        lock: of the memory.
        resumed: called by a thread that has let go of the lock and has it again: others may have used the devices.
    """

    def __init__(self, lock: Lock, resumed: Callable[[], None] = lambda: None) -> None:
        self._resumed = resumed
        self._active: list[Reading] = []
        self._paused = set[int]()  # threads
        self._lock = lock
        self._ended = Waiting(lock)

    def forked(self, lock: Lock) -> None:
        """This process was forked, and this is the lock: no other thread reads, or waits, here."""
        mine = threading.get_ident()
        for reading in self._active:
            reading.over = reading.over or reading.thread != mine
        self._active = [reading for reading in self._active if not reading.over]
        self._paused.clear()
        self._lock, self._ended = lock, Waiting(lock)

    def begin(self) -> Reading:
        """A call of this thread begins to read."""
        reading = Reading()
        self._active.append(reading)
        return reading

    def end(self, reading: Reading, event: Event | None = None) -> None:
        """It has ended, or launched its kernels, which `event` is behind."""
        reading.ended = event
        reading.over = True
        if reading in self._active:
            self._active.remove(reading)
        self._ended.notify_all()

    def cut_short(self) -> None:
        """Whatever this thread was reading, it does not any more. The caller does not hold the lock."""
        me = threading.get_ident()
        for reading in list(self._active):
            if reading.thread == me:
                reading.over = True
        try:
            # What cut this thread short may have come while it took the lock.
            if self._lock.acquire(timeout=_LOCK_SECONDS):
                self._active = [reading for reading in self._active if not reading.over]
                self._ended.notify_all()
        finally:
            try:  # noqa: SIM105 - the first call: see `kvtier.memory.access.lock`
                self._lock.release()
            except RuntimeError:
                pass  # another thread's

    def fence(self, event: Event | None = None) -> Fence | None:
        """What holds slots that become free now: calls of other threads, and the last reader on the compute stream.

        Args:
            event: the last attention that may read the slots; None: nothing runs behind the CPU's back.
        """
        me = threading.get_ident()
        others = [reading for reading in self._active if reading.thread != me and not reading.over]
        return ReadFence(others, event) if others else event

    def mine(self) -> bool:
        """Whether a call of this thread is under way. Without the lock."""
        me = threading.get_ident()
        return any(reading.thread == me and not reading.over for reading in list(self._active))

    def others(self) -> bool:
        """Whether a call of another thread is under way."""
        me = threading.get_ident()
        return any(reading.thread != me and not reading.over for reading in self._active)

    def wait(self) -> bool:
        """Let go of the lock until some call of another thread has ended. False if there is none."""
        if not self.others():
            return False
        self._ended.wait()
        self._resumed()
        return True

    def pause(self) -> None:
        """Let go of the lock until a call has ended, or `resume`."""
        me = threading.get_ident()
        self._paused.add(me)
        try:
            self._ended.wait()
        finally:
            self._paused.discard(me)
        self._resumed()

    def is_paused(self, thread: threading.Thread | None) -> bool:
        """Whether a thread is in `pause`: it ends nothing that others wait for."""
        return thread is not None and thread.ident in self._paused

    def resume(self) -> None:
        """Wake those that wait."""
        self._ended.notify_all()


class ReadFence:
    """Holds slots until some attention calls of other threads have ended."""

    __slots__ = ("_event", "_readings")

    def __init__(self, readings: Sequence[Reading], event: Event | None) -> None:
        self._readings = readings
        self._event = event

    @property
    def event(self) -> Event | None:
        """As of `Fence`."""
        left = self._left() if self._over else []
        return left[0] if len(left) == 1 else None

    def passed(self) -> bool:
        """As of `Fence`."""
        return self._over and not self._left()

    def settle(self) -> None:
        """As of `Fence`."""
        for event in self._left():
            event.settle()

    @property
    def _over(self) -> bool:
        return all(reading.over for reading in self._readings)

    def _left(self) -> list[Event]:
        """What is still to come: the event, and the kernels that the calls have launched."""
        events = (self._event, *(reading.ended for reading in self._readings))
        return [event for event in events if event is not None and not event.passed()]


class Fences:
    """Holds slots until several fences have passed."""

    __slots__ = ("_fences",)

    def __init__(self, *fences: Fence) -> None:
        self._fences = fences

    @property
    def event(self) -> None:
        """As of `Fence`: only once all have passed."""
        return None

    def passed(self) -> bool:
        """As of `Fence`."""
        return all(fence.passed() for fence in self._fences)

    def settle(self) -> None:
        """As of `Fence`."""
        for fence in self._fences:
            fence.settle()
