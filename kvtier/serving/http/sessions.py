"""`Sessions`: the conversations of a store that clients of a server go on with, and when each was used last."""

from __future__ import annotations

import itertools
import logging
import math
import time
import urllib.parse

from kvtier.conversation.conversation import Conversation
from kvtier.conversation.given.arguments import check_name
from kvtier.conversation.names import OtherSaltError
from kvtier.conversation.store import ConversationStore
from kvtier.errors import BudgetError, ClosedError, ConfigError, KVTierError
from kvtier.serving.http.requests.refusals import Refusal

_LOG = logging.getLogger("kvtier.serving")

#: Of the names of conversations in the store that are sessions of a server.
SESSIONS = "serve/"
#: Seconds after which a disk that could not be read is tried again.
_RETRY = 5


class Sessions:
    """Sessions that are known: those that the store has, too. One whose request waits or runs is not forgotten, but for
    another salt. One thread at a time.

    Args:
        store: that they are conversations of.
        ttl: seconds after which one that was not used is forgotten.
        most: that are known; beyond them, that which was not used for longest is forgotten.
    """

    def __init__(self, store: ConversationStore, ttl: float = math.inf, most: int = 10_000) -> None:
        self._store = store
        self._ttl = ttl
        self._most = most
        self._now = time.monotonic
        # Requests of each that have not ended.
        self._running: dict[str, int] = {}
        tier, there, now = store.disk_tier, time.time(), self._now()
        saved = {} if tier is None else tier.disk.used()
        used = {x: now - max(0.0, there - saved.get(x, there)) for x in store.names if x.startswith(SESSIONS)}
        self._used = dict(sorted(used.items(), key=lambda item: item[1]))  # those used last are at the end
        self._make_room()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, tenant: str, session: str, salt: str | None) -> Conversation:
        """The conversation of a session.

        Raises:
            ConfigError: no conversation can have its name.
            Refusal: what is saved of it cannot be read, or not changed, now.
        """
        # One name each, whatever characters a tenant's has.
        name = f"{SESSIONS}{urllib.parse.quote(tenant, safe=' ')}/{session}"
        check_name(name)
        try:
            return self._opened(name, salt)
        except (ConfigError, BudgetError, OSError) as error:  # of the disk, which says where the folder is, or of a pin
            _LOG.error("A session cannot be opened.", exc_info=error)
            text = "What the server keeps of this session cannot be read now: try again later."
            raise Refusal(503, text, code="session_unavailable", retry_after=_RETRY) from error

    def _opened(self, name: str, salt: str | None) -> Conversation:
        try:
            chat = self._store.open(name, salt=salt)
        except OtherSaltError:  # what was saved under the other one is not found any more: it begins from nothing
            self._forget(name)
            chat = self._store.open(name, salt=salt)
        if chat.ttl != self._ttl:
            chat.ttl = self._ttl
        return chat

    def use(self, name: str) -> None:
        """A request of a session is taken: until it has `ended`, the session is used."""
        self._running[name] = self._running.get(name, 0) + 1
        self._touch(name)

    def ended(self, name: str) -> None:
        """A request of a session has ended."""
        left = self._running.pop(name, 1) - 1
        if left:
            self._running[name] = left
        if name in self._used:
            self._touch(name)

    def _touch(self, name: str) -> None:
        """A session is used now; that which was not for longest makes room."""
        self._used.pop(name, None)
        self._used[name] = self._now()
        self._make_room()

    def refused(self, name: str) -> None:
        """The request for which a session was opened is not taken: it begins none."""
        if name not in self._used:
            self._forget(name)

    def forget_unused(self) -> None:
        """Forget sessions that were not used for as long as they live."""
        now = self._now()
        for name, used in list(self._used.items()):
            if now - used > self._ttl and name not in self._running:
                self._forget(name)

    def _make_room(self) -> None:
        more = len(self._used) - self._most
        if more > 0:
            for name in [*itertools.islice((x for x in self._used if x not in self._running), more)]:
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Nobody's request fails where the disk does: what is not forgotten is found at the next start."""
        self._used.pop(name, None)
        try:
            self._store.forget(name)
        except ClosedError:
            raise
        except (KVTierError, OSError) as error:
            _LOG.error("Session %r is not forgotten.", name, exc_info=error)
