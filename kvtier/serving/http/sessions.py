"""`Sessions`: the conversations of a store that clients of a server go on with, and when each was used last."""

from __future__ import annotations

import math
import time
import urllib.parse

from kvtier.conversation.names import OtherSaltError
from kvtier.conversation.store import ConversationStore

#: Of the names of conversations in the store that are sessions of a server.
SESSIONS = "serve/"


class Sessions:
    """Sessions that are known: those that the store has, too. One thread at a time.

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
        tier, there, now = store.disk_tier, time.time(), self._now()
        saved = {} if tier is None else tier.disk.used()
        used = {x: now - max(0.0, there - saved.get(x, there)) for x in store.names if x.startswith(SESSIONS)}
        self._used = dict(sorted(used.items(), key=lambda item: item[1]))  # those used last are at the end
        self._make_room()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, tenant: str, session: str, salt: str | None) -> str:
        """The conversation of a session, by name."""
        # One name each, whatever characters a tenant's has.
        name = f"{SESSIONS}{urllib.parse.quote(tenant, safe=' ')}/{session}"
        try:
            chat = self._store.open(name, salt=salt)
        except OtherSaltError:  # what was saved under the other one is not found any more: it begins from nothing
            self._forget(name)
            chat = self._store.open(name, salt=salt)
        if chat.ttl != self._ttl:
            chat.ttl = self._ttl
        return name

    def use(self, name: str) -> None:
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
            if now - used > self._ttl:
                self._forget(name)

    def _make_room(self) -> None:
        while len(self._used) > self._most:
            self._forget(next(iter(self._used)))

    def _forget(self, name: str) -> None:
        self._used.pop(name, None)
        self._store.forget(name)
