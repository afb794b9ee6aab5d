"""The offline bound: what an order that knows the future would hit (Belady 1966), among leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtier.eviction.policy import EvictionPolicy, Key, LeafHeap, Node
from kvtier.eviction.replay.one_tier import Hits, replay_one
from kvtier.eviction.replay.traces import Request
from kvtier.eviction.tree import PrefixTree


class Belady(EvictionPolicy):
    """The leaf whose next use is farthest goes first.

    A block is used whenever one that continues it is, so that its next use is never later than theirs: an order by next
    use evicts leaves only, without being told to.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._leaves = LeafHeap()
        # By block, the requests that use it, the last one first.
        self._uses: dict[Key, list[int]] = {}
        for i in range(len(requests) - 1, -1, -1):
            for key in requests[i].keys:
                self._uses.setdefault(key, []).append(i)
        #: The request under way.
        self.index = 0

    def enter(self, node: Node) -> None:
        """See the base class."""
        uses = self._uses[node.key]
        while uses and uses[-1] <= self.index:
            uses.pop()
        self._leaves.push(node, -uses[-1] if uses else -math.inf)

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        return self._leaves.first()


def best_possible(requests: Sequence[Request], blocks: int) -> Hits:
    """Replay a trace as `one_tier.replay` does, in the order that knows it."""
    policy = Belady(requests)
    tree, found = PrefixTree(policy, blocks), Hits()
    for i, request in enumerate(requests):
        policy.index = i
        replay_one(tree, request, found)
    return found
