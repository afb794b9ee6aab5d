"""`Tail`: the end of a history that is loaded while what precedes it is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kvtier.memory.tiered import TieredMemory


class Bring(Protocol):
    """Loads and keeps tokens. Asks before each file whether to go on. Returns how many, and why there are none."""

    def __call__(self, *, go_on: Callable[[], bool]) -> tuple[int, str]: ...


class Tail:
    """A load in a thread of its own. What it claims is given up to whoever would be refused without that: it ends
    behind the file that is being read, and what was read is kept as long as nobody needs the room.

    Args:
        memory: that it loads into.
        start: the first token that it loads.
        bring: loads.

    Attributes:
        background: whether a thread loads. Without one, all is loaded before anything is computed: a test says when.
    """

    background = True

    def __init__(self, memory: TieredMemory, start: int, bring: Bring) -> None:
        self.start = start
        self._memory = memory
        self._load = bring
        self._goes_on = True
        # That loads now. Changed under the memory's lock.
        self._thread: threading.Thread | None = None
        # At the end of the process it is waited for. A thread that Python ends within torch's code would abort it.
        self._pool = ThreadPoolExecutor(1, "kvtier-loading")
        self._future: Future[tuple[int, str]] | None = None

    def begin(self) -> None:
        """Begin to load, now."""
        with contextlib.suppress(RuntimeError):  # the system has no thread to give
            if self.background:
                self._future = self._pool.submit(self._bring)
        self._pool.shutdown(wait=False)
        if self._future is None:
            self._future = Future()
            self._future.set_result(self._bring())

    def wait(self) -> tuple[int, str]:
        """Tokens that were loaded, and why there are none, once it has ended. Raises what the load raises."""
        return (0, "") if self._future is None else self._future.result()

    def end(self) -> None:
        """Return when nothing is loaded any more. What was read is kept. Idempotent."""
        self._goes_on = False
        self._pool.shutdown(cancel_futures=True)

    def _bring(self) -> tuple[int, str]:
        with self._memory.lock, self._memory.change:
            self._thread = threading.current_thread()
            self._memory.conceding.append(self._concede)
        try:
            return self._load(go_on=lambda: self._goes_on)
        finally:
            with self._memory.lock, self._memory.change:
                self._thread = None
                self._memory.conceding.remove(self._concede)
                self._memory.readers.resume()  # whoever waits for what it claimed

    def _concede(self) -> bool:
        """Somebody was refused: see `TieredMemory.conceding`. A load that was refused itself waits for others to
        concede, and would be waited for in turn; and in a process that was forked there is none."""
        thread = self._thread
        if thread is threading.current_thread() or self._memory.readers.is_paused(thread):
            return False
        if thread is None or not thread.is_alive():
            return False
        self._goes_on = False
        return True
