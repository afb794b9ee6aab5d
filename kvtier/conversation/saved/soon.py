"""`Soon`: what is to be saved by a thread of its own, which ends when nothing is left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable

from kvtier.ends import process_ends
from kvtier.forks import heed

_LOG = logging.getLogger("kvtier.conversation")


class Soon:
    """Saves in the background, what was put there first first. Nobody who puts something there waits for a disk.

    What waits already is not put there twice: it is saved as it is by then. The process does not end before all is
    saved. In a process that is forked nothing waits: the parent saves what it has put there.

    Attributes:
        background: whether a thread saves. Without one, whoever calls `work` or `join` does: a test says when.
    """

    background = True

    def __init__(self) -> None:
        self.forked()
        heed(self)

    def forked(self) -> None:
        """As of `Inherited`: the thread that saves is not here, and may have had the lock."""
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._works = False

    def put(self, what: Hashable, save: Callable[[], None]) -> None:
        """Save something soon."""
        with self._lock:
            self._waiting.setdefault(what, save)
            if not self.background or (self._works and self._thread is not None and self._thread.is_alive()):
                return
            self._works, self._thread = True, None
            if not process_ends():
                # Python waits for its end before the process ends.
                self._thread = thread = threading.Thread(target=self._work, name="kvtier-turns", daemon=False)
                try:
                    thread.start()
                    return
                except RuntimeError:  # the system has none to give, or the process ends
                    self._thread = None
        self._work()

    def join(self) -> None:
        """Return when all that was put there is saved, or cannot be."""
        while not self.background and self.work():
            pass
        with self._lock:
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join()

    def work(self) -> bool:
        """Save what was put there first of what is not saved yet. Whether there was any."""
        with self._lock:
            what = next(iter(self._waiting), None)
            if what is None:
                self._works = False
                return False
            save = self._waiting.pop(what)  # first: what changes while it is saved is saved again
        try:
            save()
        except Exception as error:  # nobody waits for it
            _LOG.warning("What went on is not saved: %s", error)
        return True

    def _work(self) -> None:
        while self.work():
            pass
