"""`Waker`: brings what is kept of a conversation nearer, before a turn that is known to come."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from kvtier.conversation.index import WIDTH, common
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.ends import join, process_ends, retry_on_interrupt
from kvtier.errors import CorruptionError
from kvtier.forks import heed
from kvtier.memory.tiered import TieredMemory

#: Bytes that are promoted between two looks at what running calls do.
PIECE = 8 << 20
#: Seconds until it is looked again whether a wake is in nobody's way.
_PAUSE = 0.002
#: Seconds without room, or behind the copies of others, after which a wake ends.
STALLED = 30.0
_NO_ROOM = "no room on the device besides what open caches use"


class Wake:
    """A wake under way.

    Attributes:
        loaded: tokens that were read from the disk.
        promoted: bytes that were brought from the host to the device.
        why: why not all was brought nearer that is kept; "": it was, or is being.
    """

    def __init__(
        self, key: Hashable, ids: bytes, timeout: float | None = None, others: Sequence[Hashable] = ()
    ) -> None:
        self.loaded = self.promoted = 0
        self.why = ""
        self._key, self._ids = key, ids
        #: All under which these tokens may be kept.
        self._keys = (key, *others)
        #: Those that are not loaded yet. Changed by who wakes.
        self._to_load = list(self._keys)
        #: A turn waits for what is being loaded, and for nothing else. Changed under the memory's lock.
        self._hurried = False
        self._timeout = timeout
        self._progress = began = time.monotonic()
        self._deadline = math.inf if timeout is None else began + timeout
        self._waits_for = ""
        self._cancelled = False
        self._was_loaded, self._ended = threading.Event(), threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended: all is where it should be, or `why` says why not."""
        return self._ended.is_set()

    @property
    def _salt(self) -> Hashable:
        """Of the calls that it is for."""
        return self._key[-1] if isinstance(self._key, tuple) else None

    @property
    def reads(self) -> bool:
        """Whether it reads from the disk still, or is about to."""
        return not (self._was_loaded.is_set() or self._ended.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Return when it has ended, or after so many seconds. Whether it has."""
        return self._ended.wait(timeout)

    def cancel(self) -> None:
        """Let it end soon. What has come stays."""
        self._end_soon("cancelled")

    def expire(self) -> None:
        """The same, for its time is over."""
        reason = f": {self._waits_for}" if self._waits_for else ""
        self._end_soon(f"{self._timeout} seconds have passed{reason}")

    def _end_soon(self, why: str) -> None:
        if not self.done and not self._cancelled:
            self.why = self.why or why
            self._cancelled = True

    def forked(self) -> None:
        """As of `Inherited`: it goes on in the parent only, a thread of which may have been at these events."""
        self._end_soon("this process was forked from the one that wakes")
        self._was_loaded, self._ended = threading.Event(), threading.Event()
        self._was_loaded.set()
        self._ended.set()

    def _goes_on(self, waits: bool = False) -> bool:
        """Whether it does; it waits, or it has made some progress."""
        now = time.monotonic()
        if not waits:
            self._progress, self._waits_for = now, ""
        if now >= self._deadline:
            self.expire()
        elif now - self._progress >= STALLED:
            self._end_soon(self._waits_for)
        return not self._cancelled

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        return f"Wake({state}, loaded={self.loaded}, promoted={self.promoted}, why={self.why!r})"


class Waker:
    """Loads from the disk, and then promotes to the device, one conversation after the other, in a thread of its own.

    It is in no call's way: it takes no room on the device from blocks that a cache uses, promotes nothing while copies
    of others are under way, and gives up what it claims to whoever is refused without that.

    Args:
        memory, kept, disk_tier: of the store.
        stateful: whether states of layers are kept under a key.
        keeper: the store, which stays as long as a step of this takes.

    Attributes:
        background: whether a thread makes the steps. Without one, whoever calls `step` or `stop` does: a test says
            when.
        problem: why something was not woken last.
    """

    background = True

    def __init__(
        self,
        memory: TieredMemory,
        kept: Kept,
        disk_tier: DiskTier | None,
        stateful: Callable[[Hashable], bool],
        keeper: weakref.ref[object],
    ) -> None:
        self.problem = ""
        self._memory = memory
        self._kept = kept
        self._disk_tier = disk_tier
        self._stateful = stateful
        self._keeper = keeper
        self._lock = threading.Lock()
        self._queue: deque[Wake] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None
        # That reads from the disk now. Changed under the memory's lock.
        self._loading: Wake | None = None
        weak = weakref.WeakMethod(self._concede)

        def concede() -> bool:
            method = weak()
            return method is not None and method()

        memory.conceding.append(concede)
        self._finalizer = weakref.finalize(self, memory.conceding.remove, concede)
        self._finalizer.atexit = False
        _wakers.add(self)
        heed(self)

    def forked(self) -> None:
        """As of `Inherited`: the thread that wakes is not here."""
        self._lock, self._thread, self._loading = threading.Lock(), None, None
        while self._queue:
            self._queue.pop().forked()

    def submit(self, key: Hashable, ids: bytes, timeout: float | None = None, others: Sequence[Hashable] = ()) -> Wake:
        """Bring what is kept of these tokens nearer, under a key and others, soon, in so many seconds."""
        wake = Wake(key, ids, timeout, others)
        if self._disk_tier is None and not any(device.slabs is not None for device in self._memory.devices):
            self._end(wake)
            return wake
        with self._lock:
            if self._closed or process_ends():
                wake.why = "the store was closed" if self._closed else "the process ends"
                self._end(wake)
                return wake
            self._queue.append(wake)
            if self.background and (self._thread is None or not self._thread.is_alive()):
                # Listed first: what is interrupted here leaves no thread that nobody knows.
                self._thread = threading.Thread(
                    target=_work, args=(weakref.ref(self),), name="kvtier-waking", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # the turn does without
                    self._queue.remove(wake)
                    self.problem = wake.why = f"{error}: a conversation was not woken"
                    self._end(wake)
        return wake

    def turn(self, key: Hashable, ids: bytes) -> None:
        """A turn begins: what wakes its conversation ends. What is being read for it is waited for, for the turn would
        have to read it again."""
        if not self._queue:
            return
        with self._lock:
            mine = [x for x in self._queue if key in x._keys and 2 * common(x._ids, ids) * WIDTH >= len(x._ids)]
        for wake in mine:
            with self._memory.lock, self._memory.change:
                # What is loaded under another key is of no use to it.
                loading = self._loading is wake and wake._to_load[0] == key
                wake._hurried = wake._hurried or loading
            if loading:
                wake._was_loaded.wait()
            wake.cancel()

    def erased(self, salt: Hashable, ids: bytes, start: int) -> None:
        """What follows the first `start` tokens of a sequence is about to be removed, under every key of a salt: what
        wakes it ends. Returns when none of it is being read, for what was read would be kept."""
        with self._lock:
            mine = [x for x in self._queue if x._salt == salt and common(x._ids, ids) > start]
        for wake in mine:
            wake.cancel()
            with self._memory.lock, self._memory.change:
                loading = self._loading is wake
            if loading:
                wake._ended.wait()

    def stop(self) -> None:
        """Cancel every wake, and return when none is under way."""
        with self._lock:
            thread = self._thread
            for wake in self._queue:
                wake.cancel()
        while not self.background and self.step() is not None:
            pass
        if thread is not threading.current_thread():
            join(thread)

    def close(self) -> None:
        """The same, for good: what is submitted from now on ends at once."""
        with self._lock:
            self._closed = True
        self.stop()
        self._finalizer()

    # In the thread, if there is one

    def step(self) -> float | None:
        """Do some of what there is to do. Returns the seconds until it goes on; None: there is nothing to do."""
        keeper = self._keeper()
        with self._lock:
            if keeper is None or not self._queue:
                self._thread = None
                while self._queue:
                    self._end(self._queue[0])
                    self._queue.popleft()  # last: a process that is forked meanwhile finds it
                return None
            wake = self._queue[0]
        pause: float | None = None
        try:
            if wake._goes_on(waits=wake._waits_for != ""):
                pause = self._bring(wake)
                if pause is not None and not wake._goes_on(waits=pause > 0):
                    pause = None
        except Exception as error:  # nobody waits for it: the turn does what is not done
            self.problem = wake.why = str(error)
            if isinstance(error, CorruptionError):
                with self._memory.lock, self._memory.change:
                    self._kept.drop_corrupt(())
        if pause is None:
            with self._lock:
                self._end(wake)
                self._queue.popleft()  # last: a process that is forked meanwhile finds it
        return pause or 0.0

    def _bring(self, wake: Wake) -> float | None:
        """A step of one wake. Returns as `step`."""
        if not wake._was_loaded.is_set():
            if self._disk_tier is not None:
                if not self._load(self._disk_tier, wake, wake._to_load[0]):
                    return _PAUSE
                del wake._to_load[0]  # also what was given up: it is not read again and again
            if self._disk_tier is None or wake._hurried or not wake._to_load:
                wake._was_loaded.set()
            return 0.0
        with self._memory.lock, self._memory.change:
            if any(device.copying for device in self._memory.devices):
                wake._waits_for = "copies of others are under way"
                return _PAUSE
            pieces = [each for key in wake._keys for each in self._kept.pieces(key, wake._ids)]
            sequences = [entry.sequence for _, entry in pieces]
            came = self._kept.parked.promote(sequences, PIECE)
            wake.promoted += came
            # Where others' blocks are being copied to make room, there is some then.
            if came or any(device.copying for device in self._memory.devices):
                return 0.0
            if self._kept.parked.on_host(sequences):
                wake.why = wake.why or _NO_ROOM
            return None

    def _load(self, disk_tier: DiskTier, wake: Wake, key: Hashable) -> bool:
        """Load what is saved under a key. False: there is no room for it yet."""
        stateful = self._stateful(key)
        nbytes = disk_tier.bytes_to_load(key, wake._ids, stateful=stateful)
        with self._memory.lock, self._memory.change:
            if nbytes and not self._kept.parked.has_room(nbytes):
                wake._waits_for = _NO_ROOM
                return False
            self._loading = wake
        try:
            loaded, why = disk_tier.load(key, wake._ids, stateful=stateful, go_on=wake._goes_on)
            wake.loaded += loaded
            wake.why = wake.why or why
        finally:
            with self._memory.lock, self._memory.change:
                self._loading = None
                self._memory.readers.resume()  # whoever waits for what it claimed
        return True

    def _concede(self) -> bool:
        """Somebody was refused: a load that is under way ends, and what it claims is free. Whether one is. One that
        was refused itself waits for others to concede, and would be waited for in turn."""
        loading, thread = self._loading, self._thread
        if loading is None or threading.current_thread() is thread or self._memory.readers.is_paused(thread):
            return False
        loading.cancel()
        return True

    @staticmethod
    def _end(wake: Wake) -> None:
        wake._was_loaded.set()
        wake._ended.set()


_wakers: weakref.WeakSet[Waker] = weakref.WeakSet()


@atexit.register
@retry_on_interrupt
def _stop() -> None:
    """The process ends and a store was not closed. A thread that Python ends within torch's code would abort it."""
    for waker in list(_wakers):
        waker.stop()


def _work(ref: weakref.ref[Waker]) -> None:
    """Do what there is to do; whoever drops the waker meanwhile ends it."""
    while True:
        waker = ref()
        pause = None if waker is None else waker.step()
        del waker
        if pause is None:
            return
        if pause:
            time.sleep(pause)
