"""`Change`: what is cut short in the middle is known to be, and repaired before anybody relies on it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Protocol


class Repairable(Protocol):
    """What is changed under a lock.

    Attributes:
        interrupted: a change was cut short.
        has_garbage: whether `collect` has anything to do.
    """

    interrupted: bool

    @property
    def has_garbage(self) -> bool: ...

    def collect(self) -> None:
        """Repair what was cut short."""


class Change:
    """A context manager around a change, or a look at what others change, within the lock: `with x.lock, x.change:`.

    An interrupt may come between any two lines. So the lock is one of C, which is held or not whatever comes, and a
    change is marked before it begins: who is listed as inside and comes again was cut short. Each thread has a mark of
    its own, for who waits in the midst of a change lets go of the lock.
    """

    __slots__ = ("_changed", "_inside")

    def __init__(self, changed: Repairable) -> None:
        self._changed = changed
        self._inside: dict[int, None] = {}

    def __enter__(self) -> None:
        changed, me = self._changed, threading.get_ident()
        if me in self._inside:
            changed.interrupted = True
        self._inside[me] = None  # first: what follows may be cut short too
        if changed.has_garbage:
            changed.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._changed.interrupted = True
        self._inside.pop(threading.get_ident(), None)
