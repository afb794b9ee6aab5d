"""Processes that are forked while threads of their parent hold locks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


def in_fork(act: Callable[[], object]) -> None:
    """Do something in a process that is forked now. What hangs there ends by a signal."""
    child = os.fork()
    if not child:
        ends_with(act)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def ends_with(act: Callable[[], object]) -> NoReturn:
    """Do something in this process, which was forked, and end it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    try:
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextlib.contextmanager
def held_by_a_thread(lock: Any) -> Iterator[None]:
    """Another thread has a lock meanwhile."""
    held, ends = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert ends.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        ends.set()
        thread.join()
