"""`Ranked`: a conversation with a rank of its own, and the chunks at which its saved history ends: so that nobody reads
a history to know which chunks are its own."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvtier.conversation.disk.chunks import Chunk, Chunks
from kvtier.eviction.rank import Rank

#: Of what does not go, of what has expired, and of what nobody has ranked.
PINNED, EXPIRED, OTHERS = math.inf, -math.inf, 0.0


@dataclass(slots=True)
class Ranked:
    """A conversation with a rank of its own.

    Attributes:
        rank: of what is saved of its history.
        used: when it went on last, seconds of a clock that may be set back.
        tips: the last chunks of what is saved of its history: all that they continue is its own, too. It has one, or
            one for each key of its salt and each copy of states that is in no chain of another one.
        noted: whether its row in the manifest has this rank, and is of this history; None: perhaps, for what noted it
            was cut short.
    """

    rank: Rank
    used: float
    tips: tuple[Chunk, ...] = ()
    noted: bool | None = False

    def level(self, now: float) -> float:
        """Where its chunks are in the order."""
        if self.rank.pinned:
            return PINNED
        self.used = min(self.used, now)
        return EXPIRED if self.used + self.rank.ttl <= now else self.rank.priority

    def said(self, tips: Sequence[Chunk]) -> str:
        """What a row says of it where these are its tips. A number may be another chunk's once the folder is opened
        again: the digest tells that, and covers all tokens of the chain."""
        return json.dumps(
            {
                "pinned": self.rank.pinned,
                "priority": self.rank.priority,
                "ttl": None if self.rank.ttl == math.inf else self.rank.ttl,
                "used": self.used,
                "tips": [[x.number, x.digest.hex()] for x in tips],
            }
        )

    @classmethod
    def of(cls, said: str, chunks: Chunks) -> Ranked | None:
        """What a row says; None: some tip is not there, and where the history ends now is not known."""
        try:
            found = json.loads(said)
            ttl = math.inf if found["ttl"] is None else float(found["ttl"])
            rank, used = Rank(found["pinned"], found["priority"], ttl), float(found["used"])
            tips = [(chunks.get(number), bytes.fromhex(digest)) for number, digest in found["tips"]]
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        there = tuple(chunk for chunk, digest in tips if chunk is not None and chunk.digest == digest)
        return cls(rank, used, there, noted=True) if len(there) == len(tips) else None


def renumbered(said: str, now: Callable[[int, str], tuple[int, str]]) -> str:
    """What a row says where chunks have other numbers and digests, see `Ranked.said`. What nobody has written stays.

    Args:
        now: of a chunk, by its number and digest.
    """
    try:
        found = json.loads(said)
        tips = dict.fromkeys(now(number, digest) for number, digest in found["tips"])
    except (ValueError, TypeError, KeyError):
        return said
    return json.dumps(found | {"tips": list(tips)})


@contextlib.contextmanager
def noting(some: Collection[Ranked | None]) -> Iterator[None]:
    """Around a transaction that notes ranks. One that is cut short, or fails, may have been done."""
    for ranked in some:
        if ranked is not None:
            ranked.noted = None
    yield
    for ranked in some:
        if ranked is not None:
            ranked.noted = True
