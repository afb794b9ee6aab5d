"""The end of a process: what is done then. A thread that Python ends within torch's code aborts the process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

#: Seconds from the first interrupt on in which others are the same one: somebody presses Ctrl-C again and again.
_SAME = 5.0

#: The thread in which the process ends.
_ending: int | None = None


def process_ends() -> bool:
    """Whether the process ends: a thread that is begun now would not be waited for."""
    return _ending is not None


def ends_elsewhere() -> bool:
    """Whether it ends, in another thread than this one: Python is about to end this one."""
    return _ending not in (None, threading.get_ident())


def runs(thread: threading.Thread | None) -> bool:
    """Whether a thread does. One whose `join` was interrupted says that it does not: Python 3.11 takes it for ended."""
    return any(each is thread for each in threading.enumerate())  # its number may be another one's by now


def join(thread: threading.Thread | None) -> None:
    """Return when it has ended, also where another call of this was interrupted."""
    if thread is not None and runs(thread):
        thread.join()
        while runs(thread):
            time.sleep(0.005)


def retry_on_interrupt(end: Callable[[], None]) -> Callable[[], None]:
    """For `atexit`, which only prints what is raised: an interrupt begins it again. One that comes much later than the
    first is heeded.

    Args:
        end: may be called again, wherever it was cut short.
    """

    @functools.wraps(end)
    def retrying() -> None:
        global _ending
        first = None
        while True:
            try:
                _ending = threading.get_ident()
                return end()
            except Exception:
                raise
            except BaseException:  # of Ctrl-C, or of a handler of another signal
                now = time.monotonic()
                first = now if first is None else first
                if now - first > _SAME:
                    raise

    return retrying
