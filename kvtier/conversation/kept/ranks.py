"""`Rank`: what a conversation is worth where memory or disk is full; `Ranks`: which kept tokens have which rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.conversation.index import WIDTH, PrefixIndex
from kvtier.conversation.kept.retention import Retention
from kvtier.errors import BudgetError, ConfigError
from kvtier.eviction.rank import DEFAULT, Rank
from kvtier.memory.tiered import TieredMemory
from kvtier.tables.parked.sequence import ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences


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
    try:
        return Rank(pinned, priority, float(ttl))
    except OverflowError:
        raise ConfigError("ttl is more seconds than a float holds: math.inf is no limit.") from None


def saved_rank(state: Mapping[str, Any]) -> Rank:
    """The rank that a conversation was saved with; the default, where that is none."""
    ttl = state.get("ttl")
    try:
        return rank_of(state.get("pinned", False), state.get("priority", 0), math.inf if ttl is None else ttl)
    except ConfigError:
        return DEFAULT


@dataclass(slots=True)
class _Ranked:
    """A conversation with a rank of its own.

    Attributes:
        key, ids: where its tokens are found, under all forms of the key.
        rank: of them.
        has: the sequences that have them now, and how many of its tokens each begins with.
    """

    key: Hashable
    ids: bytes
    rank: Rank
    has: dict[ParkedSequence, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """That are kept, of all sequences."""
        return sum(self.has.values())

    def frontier(self, has: Mapping[ParkedSequence, int]) -> bytes:
        """What is kept of its beginning under one form of its key, where these have its tokens, and the token behind
        that: whatever begins with these has more of it. Empty: all of it is kept."""
        mine = next((n for sequence, n in has.items() if not sequence.start), 0)
        return self.ids[: (mine + 1) * WIDTH] if mine * WIDTH < len(self.ids) else b""


class Ranks:
    """Lets the sequences that are kept have the ranks of the conversations that they are the history of. The caller
    holds the memory's lock.

    What several conversations share has the highest of their ranks. A conversation's tokens may be the beginning of a
    sequence that goes on: then only they have its rank.

    Args:
        find: what has the tokens of a sequence that are kept, see `Kept.pieces`, and how many each begins with.
        forms: the keys under which tokens of a key may be kept.
        parked, retention: what gives up room.
    """

    def __init__(
        self,
        find: Callable[[Hashable, bytes], Mapping[ParkedSequence, int]],
        forms: Callable[[Hashable], tuple[Hashable, ...]],
        parked: ParkedSequences,
        retention: Retention[ParkedSequence],
    ) -> None:
        self._find = find
        self._forms = forms
        self._parked = parked
        self._retention = retention
        self._ranked: dict[str, _Ranked] = {}
        # Conversations by the sequences that have their tokens.
        self._on: dict[ParkedSequence, dict[str, None]] = {}
        # Conversations, and forms of their keys, by their frontier, but for those that are stale.
        self._frontiers: PrefixIndex[tuple[str, Hashable]] = PrefixIndex()
        self._stale: dict[str, None] = {}
        self._changed = False  # what is pinned

    @property
    def pinned(self) -> tuple[str, ...]:
        """The conversations that are pinned and have tokens here."""
        return tuple(name for name, x in self._ranked.items() if x.rank.pinned and x.tokens)

    def rank(self, name: str, key: Hashable, ids: bytes, rank: Rank, *, concede: bool = True) -> None:
        """A conversation has this history and this rank now.

        Args:
            concede: as of `TieredMemory.admit`.

        Raises:
            BudgetError: it is to be pinned, and what running calls were promised leaves no room for that. Nothing was
                changed.
        """
        before = self._ranked.get(name)
        self.follow(name, key, ids, rank)
        if rank.pinned and not (before is not None and before.rank.pinned):
            refused = self._parked.claim(concede=concede)
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

    def clear(self) -> None:
        """A change was cut short, at any line: where tokens are, and what is pinned, is not known. `refresh` looks."""
        for sequence in list(self._parked.sequences):
            self._parked.pin(sequence, 0)
        for found in self._ranked.values():
            found.has = {}
        self._on = {}
        self._frontiers = PrefixIndex()
        self._stale = dict.fromkeys(self._ranked)
        self._changed = True

    def pinned_at(self, sequence: ParkedSequence) -> set[int]:
        """How many tokens of a sequence the conversations have that are pinned."""
        those = (self._ranked[name] for name in self._on.get(sequence, ()))
        return {x.has[sequence] for x in those if x.rank.pinned}

    # What happens to sequences

    def kept(self, key: Hashable, ids: bytes) -> None:
        """A sequence is kept from now on: conversations that it has more of than others have their tokens in it."""
        self._stale.update((name, None) for _, (name, _) in self._frontiers.prefixes(key, ids))
        self.refresh()

    def shortened(self, sequence: ParkedSequence) -> None:
        """A sequence has given up its end, a copy of its states, or all of it: another one may have more of a
        conversation now."""
        self._stale.update(self._on.get(sequence, {}))

    def refresh(self) -> None:
        """Look where the tokens are of those whose sequences have changed."""
        if not self._stale:
            return
        stale, self._stale = self._stale, {}
        for name in stale:
            found = self._ranked[name]
            self._leave(name, found)
            for key in self._forms(found.key):
                has = self._find(key, found.ids)
                for sequence, tokens in has.items():
                    found.has[sequence] = tokens
                    self._on.setdefault(sequence, {})[name] = None
                    self._retention.rank((name, sequence), sequence, tokens, found.rank)
                    self._pin(sequence)
                if frontier := found.frontier(has):
                    self._frontiers.add(key, frontier, (name, key))
        self._claim()

    def _leave(self, name: str, found: _Ranked) -> None:
        """Its tokens are not looked for where they were."""
        for key in self._forms(found.key):
            self._frontiers.remove((name, key))
        sequences, found.has = found.has, {}
        for sequence in sequences:
            self._retention.unrank((name, sequence))
            del self._on[sequence][name]
            if not self._on[sequence]:
                del self._on[sequence]
            self._pin(sequence)

    def _pin(self, sequence: ParkedSequence) -> None:
        tokens = max(self.pinned_at(sequence), default=0)
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
        for found in self._ranked.values():
            best = {x: n for key in self._forms(found.key) for x, n in self._find(key, found.ids).items()}
            now, then = (sorted((x.start, tokens) for x, tokens in has.items()) for has in (found.has, best))
            assert now == then, "another sequence has more of a conversation"
            assert all(found.has.values())
        every = [(name, x, key) for name, x in self._ranked.items() for key in self._forms(x.key)]
        ahead = {(name, key): x.frontier(self._find(key, x.ids)) for name, x, key in every}
        ahead = {where: ids for where, ids in ahead.items() if ids}
        assert len(self._frontiers) == len(ahead)
        for where, ids in ahead.items():
            longest = [n for n, x in self._frontiers.prefixes(where[1], ids) if x == where]
            assert longest == [len(ids) // WIDTH], "what has more of a conversation is not noticed"
        on = {(name, sequence) for sequence, those in self._on.items() for name in those}
        assert on == {(name, sequence) for name, x in self._ranked.items() for sequence in x.has}
        for sequence in sequences:
            mine = [self._ranked[name] for name in self._on.get(sequence, ())]
            assert sequence.pinned == max((x.has[sequence] for x in mine if x.rank.pinned), default=0), "pinned wrong"
            assert sequence.pinned <= sequence.length


@contextlib.contextmanager
def naming_who_is_pinned(memory: TieredMemory, ranks: Ranks) -> Iterator[None]:
    """Say of what is refused within which conversations are pinned: what is kept of these takes room, and stays."""
    try:
        yield
    except BudgetError as error:
        with memory.lock, memory.change:
            names = ranks.pinned
        if not names or error.pinned:
            raise
        some = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise BudgetError(
            f"{error} What is kept of conversations that are pinned stays, and is part of this: {some}.",
            tier=error.tier,
            needed=error.needed,
            budget=error.budget,
            pinned=names,
        ) from error
