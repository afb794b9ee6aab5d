"""The memory's lock: who holds it is known, so that an interrupt neither frees what another thread holds, nor leaves it
held by nobody.

It is an `RLock` of C, for that knows its owner; nobody takes it twice. An interrupt may come behind every call, and
nowhere else (CPython looks for signals where a call has returned): so `with lock:` takes it and gives it back whatever
comes, and what follows is written such that the first call of a `finally` repairs what was cut short.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Protocol, cast


class Lock(Protocol):
    """What `threading.RLock` makes."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(self, *error: Any) -> None: ...

    def _is_owned(self) -> bool: ...

    def _release_save(self) -> Any: ...

    def _acquire_restore(self, state: Any) -> None: ...


def new_lock() -> Lock:
    """A lock that nobody holds."""
    return cast(Lock, threading.RLock())


def held_twice(lock: Lock) -> bool:
    """Whether this thread has taken a lock that it held already, as a policy or a signal handler may."""
    count = re.search(r"count=(\d+)", repr(lock))  # Python 3.11 has no other way
    return count is not None and int(count[1]) > 1


class Waiting:
    """Lets threads let go of a lock until they are woken.

    As `threading.Condition`, whose `wait` may end without the lock: an interrupt comes while it takes the lock again,
    and whoever called believes to hold it.

    Args:
        lock: that whoever calls holds.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiters: list[threading.Lock] = []

    def wait(self) -> None:
        """Let go of the lock until `notify_all`. Whatever comes, this thread holds it again."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        lock, state = self._lock, (1, threading.get_ident())
        try:
            lock._release_save()
            waiter.acquire()
        finally:
            lock._acquire_restore(state)  # in C, and no signal is looked for

    def notify_all(self) -> None:
        """Wake all that wait."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
