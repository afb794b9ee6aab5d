"""`Change`: what is cut short in the middle is known to be, and repaired before anybody relies on it."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Protocol, TypeVar

from kvtier.errors import ConcurrentUseError, KVTierError
from kvtier.memory.access.lock import held_twice

R = TypeVar("R")
#: The folders of kvtier, and of Python's own modules.
_OURS = os.path.join(str(Path(__file__).absolute().parents[2]), "")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
#: Where packages are, which may be within the latter.
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
#: The packages that changes call.
_CALLED = ("torch", "transformers", "triton")


def ask(function: Callable[..., R], *arguments: Any) -> R:
    """Call what a user gave, in the middle of a change. The change expects an error of it, and undoes itself then."""
    return function(*arguments)


def asked(answers: Iterator[R]) -> Iterator[R]:
    """Answers that what a user gave may make one by one, each of them asked for as by `ask`."""
    end = object()
    while (answer := ask(next, answers, end)) is not end:
        yield answer


def undone(error: BaseException) -> bool:
    """Whether a change that ends with this has undone itself, as it does where an error is expected.

    Nothing is known after what may come between any two lines: an interrupt, too deep a stack, an error that a signal
    handler raises (a timeout by `signal.alarm`, say) or that another thread sets. The same holds if one of those came
    first, and this one while the change was being undone; and where an invariant does not hold.

    Args:
        error: where it is caught.
    """
    if not isinstance(error, Exception) or isinstance(error, RecursionError | AssertionError):
        return False
    first = error.__context__
    if first is not None and _is_ours(first.__traceback__) and not undone(first):
        return False
    if isinstance(error, KVTierError):
        return True
    trace, code = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is ask.__code__:
            return True
        trace = trace.tb_next
    known = type(error).__module__.partition(".")[0] in ("builtins", *_CALLED)
    return known and (code is None or _is_called(code))


def _is_ours(trace: TracebackType | None) -> bool:
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS)


def _is_called(code: CodeType) -> bool:
    """Whether a change calls this, or is it: an error that is raised in a signal handler is raised in other code."""
    name = code.co_filename
    called = [os.path.dirname(sys.modules[x].__file__ or x) for x in _CALLED if x in sys.modules]
    if name.startswith((_OURS, "<frozen ", *[os.path.join(x, "") for x in called])):
        return True
    return name.startswith(_PYTHON) and not any(folder in name for folder in _PACKAGES)


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

    Args:
        changed: what is changed.
        begins: called first, within the lock.
    """

    __slots__ = ("_begins", "_changed", "_inside")

    def __init__(self, changed: Repairable, begins: Callable[[], None] | None = None) -> None:
        self._changed = changed
        self._begins = begins
        self._inside: dict[int, None] = {}

    def forked(self) -> bool:
        """This process was forked. Whether another thread, which is not here, was inside."""
        others = self._inside.keys() - {threading.get_ident()}
        for thread in others:
            del self._inside[thread]
        return bool(others)

    def __enter__(self) -> None:
        changed, me = self._changed, threading.get_ident()
        if self._begins is not None:
            self._begins()
        if me in self._inside:
            lock = getattr(changed, "lock", None)
            if lock is not None and held_twice(lock):
                raise ConcurrentUseError(
                    "What a memory asks in the middle of a change, a policy, say, or an interrupt's handler, asked it "
                    "for another. `stats` can be asked for at any time."
                )
            changed.interrupted = True
        self._inside[me] = None  # first: what follows may be cut short too
        if changed.has_garbage:
            changed.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not undone(error):
            self._changed.interrupted = True
        self._inside.pop(threading.get_ident(), None)
