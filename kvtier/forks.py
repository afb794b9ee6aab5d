"""Forks: what an object does first in a process that is forked from the one that made it."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """What a forked process has of its parent."""

    def forked(self) -> None:
        """This process was forked. Of its parent's threads it has only the one that forked it: nobody gives back what
        another one held. May come again, in a process that is forked from this one. Raises nothing."""


_heeding: weakref.WeakSet[Inherited] = weakref.WeakSet()


def heed(each: Inherited) -> None:
    """Have `each.forked()` called in every process that is forked from now on, before its fork returns."""
    _register()
    _heeding.add(each)


@functools.cache
def _register() -> None:
    """With the first object: nothing is registered at import."""
    os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for each in list(_heeding):
        each.forked()
