"""`Rank`: what a conversation is worth where memory or disk is full; `Ranks`: which kept tokens have which rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.conversation.index import WIDTH
from kvtier.conversation.retention import Retention
from kvtier.errors import ConfigError
from kvtier.eviction.rank import DEFAULT, Rank
from kvtier.tables.parked import ParkedSequence, ParkedSequences


def rank_of(pinned: object, priority: object, ttl: object) -> Rank:
    """A rank of these.

    Raises:
        ConfigError: one of them cannot be.
    """
    if type(pinned) is not bool:
        raise ConfigError(f"pinned={pinned!r}: give True or False.")
    if type(priority) is not int:
        raise ConfigError(f"priority={priority!r}: give an integer; 0 is that of all others.")
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0:
        raise ConfigError(f"ttl={ttl!r}: give seconds, more than 0; math.inf is no limit.")
    return Rank(pinned, priority, float(ttl))


def saved_rank(state: Mapping[str, Any]) -> Rank:
    """The rank that a conversation was saved with; the default, where that is none."""
    ttl = state.get("ttl")
    try:
        return rank_of(state.get("pinned", False), state.get("priority", 0), math.inf if ttl is None else ttl)
    except ConfigError:
        return DEFAULT


class Found(Protocol):
    """What has tokens; see `Entry`."""

    sequence: ParkedSequence


@dataclass(slots=True)
class _Ranked:
    """A conversation with a rank of its own.

    Attributes:
        key, ids: where its tokens are found.
        rank: of them.
        sequence, tokens: that has most of them now, and how many; None and 0: none has.
    """

    key: Hashable
    ids: bytes
    rank: Rank
    sequence: ParkedSequence | None = None
    tokens: int = 0


class Ranks:
    """Lets the sequences that are kept have the ranks of the conversations that they are the history of. The caller
    holds the memory's lock.

    What several conversations share has the highest of their ranks. A conversation's tokens may be the beginning of a
    sequence that goes on: then only they have its rank.

    Args:
        find: the longest beginning of a sequence that is kept: tokens, and what has them.
        parked, retention: what gives up room.
    """

    def __init__(
        self,
        find: Callable[[Hashable, bytes], tuple[int, Found | None]],
        parked: ParkedSequences,
        retention: Retention[ParkedSequence],
    ) -> None:
        self._find = find
        self._parked = parked
        self._retention = retention
        self._ranked: dict[str, _Ranked] = {}
        # Conversations by the sequence that has their tokens.
        self._on: dict[ParkedSequence, dict[str, None]] = {}
        self._stale: dict[str, None] = {}
        self._changed = False  # what is pinned

    @property
    def pinned(self) -> tuple[str, ...]:
        """The conversations that are pinned and have tokens here."""
        return tuple(name for name, x in self._ranked.items() if x.rank.pinned and x.tokens)

    def rank(self, name: str, key: Hashable, ids: bytes, rank: Rank) -> None:
        """A conversation has this history and this rank now.

        Raises:
            BudgetError: it is to be pinned, and what running calls were promised leaves no room for that. Nothing was
                changed.
        """
        before = self._ranked.get(name)
        self.follow(name, key, ids, rank)
        if rank.pinned and not (before is not None and before.rank.pinned):
            refused = self._parked.claim()
            if refused is not None:
                if before is None:
                    self.forget(name)
                else:
                    self.follow(name, before.key, before.ids, before.rank)
                raise refused

    def follow(self, name: str, key: Hashable, ids: bytes, rank: Rank | None = None) -> None:
        """The same, where the room was promised to the call that has computed these tokens. None: the rank stays."""
        before = self._ranked.get(name)
        if rank is None:
            rank = DEFAULT if before is None else before.rank
        if rank == DEFAULT:
            if before is not None:
                self.forget(name)
            return
        if before is not None:
            self._leave(name, before)
        self._ranked[name] = _Ranked(key, ids, rank)
        self._stale[name] = None
        self.refresh()

    def forget(self, name: str) -> None:
        """Its tokens have the rank of all others."""
        found = self._ranked.pop(name, None)
        if found is not None:
            self._leave(name, found)
            self._stale.pop(name, None)
            self._claim()

    # What happens to sequences

    def kept(self, key: Hashable, ids: bytes) -> None:
        """A sequence is kept from now on: conversations that it has more of than others have their tokens in it."""
        for name, found in self._ranked.items():
            end = (found.tokens + 1) * WIDTH  # with one more than are found now
            last = found.ids[end - WIDTH : end]
            if found.key == key and last == ids[end - WIDTH : end] != b"" and ids.startswith(found.ids[:end]):
                self._stale[name] = None
        self.refresh()

    def shortened(self, sequence: ParkedSequence) -> None:
        """A sequence has given up its end, or all of it: another one may have more of a conversation now."""
        self._stale.update(self._on.get(sequence, {}))

    def refresh(self) -> None:
        """Look where the tokens are of those whose sequences have changed."""
        if not self._stale:
            return
        stale, self._stale = self._stale, {}
        for name in stale:
            found = self._ranked[name]
            length, entry = self._find(found.key, found.ids)
            sequence = None if entry is None else entry.sequence
            tokens = 0 if sequence is None else min(length, sequence.length)
            self._leave(name, found)
            if sequence is not None and tokens:
                found.sequence, found.tokens = sequence, tokens
                self._on.setdefault(sequence, {})[name] = None
                self._retention.rank(name, sequence, tokens, found.rank)
                self._pin(sequence)
        self._claim()

    def _leave(self, name: str, found: _Ranked) -> None:
        """Its tokens are not looked for where they were."""
        sequence, found.sequence, found.tokens = found.sequence, None, 0
        if sequence is not None:
            self._retention.unrank(name)
            del self._on[sequence][name]
            if not self._on[sequence]:
                del self._on[sequence]
            self._pin(sequence)

    def _pin(self, sequence: ParkedSequence) -> None:
        those = (self._ranked[name] for name in self._on.get(sequence, ()) if name in self._ranked)
        tokens = max((x.tokens for x in those if x.rank.pinned), default=0)
        if tokens != sequence.pinned:
            self._parked.pin(sequence, tokens)
            self._changed = True

    def _claim(self) -> None:
        if self._changed:
            self._changed = False
            self._parked.relax()

    # For tests

    def check_integrity(self, sequences: Iterable[ParkedSequence]) -> None:
        """Raise AssertionError unless every conversation's tokens are where they are looked for."""
        self.refresh()
        for name, found in self._ranked.items():
            length, entry = self._find(found.key, found.ids)
            best = 0 if entry is None else min(length, entry.sequence.length)
            assert found.tokens == best, "another sequence has more of a conversation"
            assert (found.sequence is None) == (found.tokens == 0)
            if found.sequence is not None:
                assert name in self._on[found.sequence]
        listed = {name for those in self._on.values() for name in those}
        assert listed == {name for name, x in self._ranked.items() if x.sequence is not None}
        for sequence in sequences:
            those = [self._ranked[name] for name in self._on.get(sequence, ())]
            assert sequence.pinned == max((x.tokens for x in those if x.rank.pinned), default=0), "pinned wrong"
            assert sequence.pinned <= sequence.length
