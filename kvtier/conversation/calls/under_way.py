"""`UnderWay`: which calls of a store are under way. It is closed within none of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from kvtier.errors import ClosedError, ConcurrentUseError
from kvtier.forks import heed
from kvtier.frames import is_running
from kvtier.memory.tiered import TieredMemory


class UnderWay:
    """Counts the calls of a store, until no more may begin.

    Args:
        memory: of the store, whose lock is taken.

    Attributes:
        closed: no more calls begin.
    """

    def __init__(self, memory: TieredMemory) -> None:
        self.closed = False
        self._memory = memory
        self._calls: dict[object, tuple[int, FrameType]] = {}  # the thread of each, and its frame
        heed(self)

    def forked(self) -> None:
        """As of `Inherited`: calls of threads that are not here go on in the parent only."""
        mine = threading.get_ident()
        self._calls = {call: each for call, each in self._calls.items() if each[0] == mine}

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Within, a call of this thread is under way.

        Raises:
            ClosedError: no more begin.
        """
        call = object()
        try:
            with self._memory.lock, self._memory.change:
                self.check_open()
                self._calls[call] = threading.get_ident(), sys._getframe(2)  # behind this one and that of `with`
            yield
        finally:
            with self._memory.lock, self._memory.change:
                self._calls.pop(call, None)

    def check_open(self) -> None:
        """Raise `ClosedError` if no more calls begin."""
        if self.closed:
            raise ClosedError("This ConversationStore was closed. Make a new one.")

    @property
    def any(self) -> bool:
        """Whether another thread is in a call, or this one in one that was not interrupted."""
        me = threading.get_ident()
        return any(thread != me or is_running(call) for thread, call in list(self._calls.values()))

    def close(self) -> None:
        """Let no more begin.

        Raises:
            ConcurrentUseError: one is under way.
        """
        with self._memory.lock, self._memory.change:
            if self.any:
                raise ConcurrentUseError(
                    "Another thread is generating with this ConversationStore, or saves a turn, or this one is, "
                    "and a streamer or a stopping criterion closes it. Wait for its end."
                )
            self.closed = True
