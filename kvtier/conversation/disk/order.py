"""Which of the saved chunks go first: what has expired, then by priority what was used longest ago; what is pinned does
not go. Of a sequence the end first."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

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


def levels(ranked: Iterable[Ranked], chunks_of: Callable[[Ranked], Iterable[int]], now: float) -> dict[int, float]:
    """The level of each chunk that a conversation with a rank refers to: of several conversations the highest."""
    found: dict[int, float] = {}
    for each in ranked:
        level = each.level(now)
        for number in chunks_of(each):
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
