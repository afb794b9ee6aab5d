"""`Rank`: what decides before any policy does which of two blocks goes first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """What the user says that something is worth.

    Attributes:
        pinned: it is not given up for others.
        priority: what has a higher one is given up after what has a lower one.
        ttl: seconds after its last use from which it is given up before all others, unless it is pinned.
    """

    pinned: bool = False
    priority: int = 0
    ttl: float = math.inf


#: Of what nobody has ranked.
DEFAULT = Rank()


def highest(ranks: Iterable[Rank]) -> Rank:
    """What is shared by these has the best of each; `DEFAULT`, where there is none."""
    ranks = list(ranks)
    if not ranks:
        return DEFAULT
    return Rank(any(x.pinned for x in ranks), max(x.priority for x in ranks), max(x.ttl for x in ranks))
