"""`Tail`: the end of a history that is loaded while what precedes it is computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvtier.memory.tiered import TieredMemory


class Bring(Protocol):
    """Loads and keeps tokens. Asks before each file whether to go on. Returns how many, and why there are none."""

    def __call__(self, *, go_on: Callable[[], bool]) -> tuple[int, str]: ...


class Tail:
    """A load in a thread of its own, from now on. What it claims is given up to whoever would be refused without that:
    it ends behind the file that is being read, and what was read is kept as long as nobody needs the room.

    Args:
        memory: that it loads into.
        start: the first token that it loads.
        bring: loads.

    Raises:
        RuntimeError: the system has no thread to give.
    """

    def __init__(self, memory: TieredMemory, start: int, bring: Bring) -> None:
        self.start = start
        self._memory = memory
        self._wanted = True
        self._thread: threading.Thread | None = None
        with memory.lock:
            memory.yielding.append(self._give_way)
        # At the end of the process it is waited for. A thread that Python ends within torch's code would abort it.
        pool = ThreadPoolExecutor(1, "kvtier-loading")
        try:
            self._future = pool.submit(self._bring, bring)
        except RuntimeError:
            self._leave()
            raise
        finally:
            pool.shutdown(wait=False)

    def wait(self) -> tuple[int, str]:
        """Tokens that were loaded, and why there are none, once it has ended. Raises what the load raises."""
        return self._future.result()

    def end(self) -> None:
        """Return when nothing is loaded any more. What was read is kept. Idempotent."""
        self._wanted = False
        with contextlib.suppress(Exception):  # nobody wants it any more
            self._future.result()

    def _bring(self, bring: Bring) -> tuple[int, str]:
        self._thread = threading.current_thread()
        try:
            return bring(go_on=lambda: self._wanted)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._memory.lock:
            self._memory.yielding.remove(self._give_way)
            self._memory.readers.resume()  # whoever waits for what it claimed

    def _give_way(self) -> bool:
        if threading.current_thread() is self._thread:
            return False
        self._wanted = False
        return True
