"""`Waiting`: sequences that are to be saved, until a thread has the time to."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

from kvtier.conversation.states import States, nbytes
from kvtier.forks import heed

#: Bytes of all that waits, and how many sequences, at the most.
MOST_BYTES, MOST = 2**28, 1024


@dataclass(frozen=True, eq=False)
class Saved:
    """A sequence to be saved.

    Attributes:
        key: see `Disk`.
        ids: of all its tokens, packed.
        states: at its end, for a model that keeps states.
        place: its key in the store.
    """

    key: str
    ids: bytes
    states: States | None
    place: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory while it waits."""
        return len(self.ids) + (0 if self.states is None else nbytes(self.states))

    def continues(self, other: Saved) -> bool:
        """Whether it begins with all tokens of another one."""
        return self.key == other.key and self.ids.startswith(other.ids)


class Waiting:
    """A bounded queue. Nobody who puts something there waits: where a disk is slower than what is to be saved, what has
    waited longest is given up, and the newest stays, whatever it takes.

    A sequence takes the place of those that it continues, for with it they are saved; but one with states only of an
    equal one, for at the end of the other its own are not. Where there is no room for both, that one goes first.

    Any threads may use it, and a finalizer may call `end` in any of them at any time: so its lock is re-entrant. In a
    process that is forked nothing waits: the parent saves what it has put there.

    Args:
        most_bytes, most: of what waits.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most: int = MOST) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._ended = False
        self._clear()
        heed(self)

    def _clear(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._saved: list[Saved] = []
        self._nbytes = 0
        self._busy = False

    def forked(self) -> None:
        """As of `Inherited`: the thread that saves is not here, and would be waited for without end."""
        self._clear()

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._saved

    def put(self, saved: Saved) -> int:
        """Add a sequence. How many others were given up for it."""
        with self._changed:
            older = [x for x in self._saved if saved.continues(x)]
            at = len(self._saved)
            for old in older:
                if old.states is None or len(old.ids) == len(saved.ids):
                    at = min(at, self._remove(old))
            self._saved.insert(at, saved)
            self._nbytes += saved.nbytes
            older = [x for x in older if x in self._saved]
            given_up = 0
            while len(self._saved) > 1 and (self._nbytes > self._most_bytes or len(self._saved) > self._most):
                self._remove(older.pop(0) if older else next(x for x in self._saved if x is not saved))
                given_up += 1
            self._changed.notify_all()
            return given_up

    def _remove(self, saved: Saved) -> int:
        at = self._saved.index(saved)
        del self._saved[at]
        self._nbytes -= saved.nbytes
        return at

    def get(self) -> Saved | None:
        """What has waited longest, once there is something; then call `done`. None: it has ended, and nothing waits."""
        with self._changed:
            while not self._saved and not self._ended:
                self._changed.wait()
            if not self._saved:
                return None
            saved = self._saved[0]
            self._remove(saved)
            self._busy = True
            return saved

    def done(self) -> None:
        """What `get` gave is saved, or cannot be."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def join(self) -> None:
        """Return when nothing waits and nothing is being saved."""
        with self._changed:
            self._changed.wait_for(lambda: not self._saved and not self._busy)

    def end(self) -> None:
        """Nobody puts anything there any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
