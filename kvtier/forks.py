"""Forks: what an object does first in a process that is forked from the one that made it."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar


class Inherited(Protocol):
    """What a forked process has of its parent."""

    def forked(self) -> None:
        """This process was forked. Of its parent's threads it has only the one that forked it: nobody gives back what
        another one held. May come again, in a process that is forked from this one. Raises nothing."""


class Held(Protocol):
    """A lock."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


L = TypeVar("L", bound=Held)


def inherited(lock: L, new: Callable[[], L]) -> L:
    """In a process that was forked: the lock, if nobody held it, or this thread does and may take it again; else a new
    one, for a thread that is not here would give it back."""
    if not lock.acquire(blocking=False):
        return new()
    lock.release()
    return lock


_heeding: weakref.WeakSet[Inherited] = weakref.WeakSet()


def heed(each: Inherited) -> None:
    """Have `each.forked()` called in every process that is forked from now on, before its fork returns."""
    _register()
    _heeding.add(each)


@functools.cache
def _register() -> None:
    """With the first object: nothing is registered at import."""
    if hasattr(os, "register_at_fork"):  # else nobody forks
        os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for each in list(_heeding):
        each.forked()
