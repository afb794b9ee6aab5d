"""`Order`: which of the saved chunks go first. What has expired does, then by priority what was used longest ago. What
is pinned does not go. Of a sequence the end goes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvtier.conversation.disk.chunks import Chunk, Chunks
from kvtier.eviction.rank import Rank

#: Of what does not go, of what has expired, and of what nobody has ranked.
PINNED, EXPIRED, OTHERS = math.inf, -math.inf, 0.0


class Ordered(Protocol):
    """See `Chunk`."""

    number: int

    @property
    def below(self) -> Collection[Ordered]:
        """What continues it."""


C = TypeVar("C", bound=Ordered)


@dataclass(slots=True)
class Ranked:
    """A conversation with a rank of its own.

    Attributes:
        salt: of its calls.
        ids: of its history, packed.
        rank: of what is saved of them.
        used: when it went on last, seconds of a clock that may be set back.
    """

    salt: object
    ids: bytes
    rank: Rank
    used: float

    def level(self, now: float) -> float:
        """Where its chunks are in the order."""
        if self.rank.pinned:
            return PINNED
        self.used = min(self.used, now)
        return EXPIRED if self.used + self.rank.ttl <= now else self.rank.priority


def levels(ranked: Iterable[Ranked], chunks: Iterable[Iterable[int]], now: float) -> dict[int, float]:
    """The level of each chunk that a conversation with a rank refers to: of several conversations the highest.

    Args:
        chunks: of each of these, the numbers.
    """
    found: dict[int, float] = {}
    for each, numbers in zip(ranked, chunks, strict=True):
        level = each.level(now)
        for number in numbers:
            found[number] = max(level, found.get(number, EXPIRED))
    return found


def going(chunks: Callable[[], Iterable[C]], level_of: Mapping[int, float]) -> Iterator[C]:
    """Chunks in the order in which they go. One goes before what it continues, whatever their levels are.

    Args:
        chunks: all of them, in the order of their use, what continues a chunk before it.
        level_of: by number, where that is not `OTHERS`.
    """
    gone = set[int]()
    for level in sorted({OTHERS, *level_of.values()} - {PINNED}):
        for chunk in chunks():
            number = chunk.number
            if level_of.get(number, OTHERS) > level or number in gone:
                continue
            if level_of and any(x.number not in gone for x in chunk.below):
                continue
            gone.add(number)
            yield chunk


class Order:
    """Which chunks of a folder go first, as conversations are ranked. Decides, and removes nothing.

    Args:
        chunks: of the folder.

    Attributes:
        others: numbers of chunks that nobody here looks for, those that are gone included: they are the first to go.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.others = set[int]()
        self._chunks = chunks
        self._ranked: dict[str, Ranked] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a conversation has a rank of its own."""
        return name in self._ranked

    @property
    def pinned(self) -> list[str]:
        """The conversations that are pinned."""
        return [name for name, x in self._ranked.items() if x.rank.pinned]

    def rank(self, name: str, ranked: Ranked | None) -> None:
        """A conversation has this rank now; None: the one of all others."""
        if ranked is None:
            self._ranked.pop(name, None)
        else:
            self._ranked[name] = ranked

    def first(self, left: int, most: int, keep: Chunk | None, clock: Callable[[], float]) -> tuple[list[Chunk], int]:
        """The chunks that go first, of `left` bytes until no more than `most` are left, and how many are; the chain of
        `keep` stays."""
        gone = list[Chunk]()
        level_of = self._levels(clock) | dict.fromkeys(self.others, EXPIRED)
        if keep is not None and level_of:
            level_of |= dict.fromkeys([x.number for x in keep.chain()], PINNED)
        for chunk in going(lambda: self._chunks, level_of):
            if left <= most:
                break
            gone.append(chunk)
            left -= chunk.kept
        return gone, left

    def expired(self, clock: Callable[[], float]) -> list[Chunk]:
        """What has not been used for its time to live, but for what others continue."""
        level_of, gone = self._levels(clock), list[Chunk]()
        if EXPIRED in level_of.values():
            for chunk in going(lambda: self._chunks, level_of):
                if level_of.get(chunk.number) != EXPIRED:
                    break
                gone.append(chunk)
        return gone

    def _levels(self, clock: Callable[[], float]) -> dict[int, float]:
        ranked = list(self._ranked.values())
        return levels(ranked, self._chunks.under([(x.salt, x.ids) for x in ranked]), clock()) if ranked else {}
