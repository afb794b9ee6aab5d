"""One tier under a trace: how many blocks of the prompts are found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.eviction.policy import EvictionPolicy
from kvtier.eviction.replay.traces import Request
from kvtier.eviction.tree import PrefixTree


@dataclass(slots=True)
class Hits:
    """What a replay found.

    Attributes:
        blocks: of all prompts.
        hits: of these, blocks that were kept when the request came, and all those before them too.
        evicted: blocks.
        refused: blocks that had to be left out: what was in use filled the tier.
    """

    blocks: int = 0
    hits: int = 0
    evicted: int = 0
    refused: int = 0

    @property
    def rate(self) -> float:
        """Hits of all blocks."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay(requests: Iterable[Request], policy: EvictionPolicy, blocks: int) -> Hits:
    """Replay a trace on one tier of so many blocks, one request after the other.

    A prompt's blocks that are kept are used again; all others are computed, and kept from then on. While a request
    runs, none of its blocks is evicted.
    """
    tree, found = PrefixTree(policy, blocks), Hits()
    for request in requests:
        replay_one(tree, request, found)
    return found


def replay_one(tree: PrefixTree, request: Request, found: Hits) -> None:
    """One request; `found` is added to."""
    now, keys = request.time, request.keys
    found.blocks += len(keys)
    hits = 0
    for key in keys:
        if key not in tree:
            break
        tree.reuse(key, now)
        hits += 1
    found.hits += hits
    last = keys[hits - 1] if hits else None
    if last is not None:
        tree.hold(last)
    for i in range(hits, len(keys)):
        gone = tree.make_room(1, now)
        if gone is None:
            found.refused += len(keys) - i
            break
        found.evicted += len(gone)
        # What comes before it holds it no longer: this one does.
        tree.insert(keys[i], last, now, held=True)
        if last is not None:
            tree.release(last)
        last = keys[i]
    if last is not None:
        tree.release(last)
