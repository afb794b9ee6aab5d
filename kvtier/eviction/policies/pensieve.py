"""Pensieve's order: conversations by size x idle time, the trailing half of one at a time (section 4.3)."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.eviction.policy import EvictionPolicy, Key, LeafHeap, Node, lowest_priority


class Pensieve(EvictionPolicy):
    """The conversation of the highest score gives up its trailing half; then the next one is chosen.

    The score is the conversation's size times the time since it was last used, divided by what it costs to get its
    last block back. A conversation's size is counted in blocks, those that it shares included.

    A scan of the oldest leaf of each depth finds the highest score: of conversations of one size, that is the one that
    is idle for longest. A scan is made once for each half.

    Args:
        cost: what it costs to get a block back, by its depth: `Node.depth`, from 1. Any unit, above 0. None: the same
            for all, which is the paper's score. A block that is computed again costs more the later it is in its
            sequence: attention grows with the context.
    """

    def __init__(self, cost: Callable[[int], float] | None = None) -> None:
        self._cost = cost
        self._weights: dict[int, float] = {}
        self._by_depth: dict[int, LeafHeap] = {}
        # The conversation that gives up its half: the last answer, what comes before it, once the answer is evicted,
        # and the depth down to which all goes.
        self._proposed: Node | None = None
        self._expected: Key | None = None
        self._next: Node | None = None
        self._floor = 0

    def score(self, node: Node, now: float) -> float:
        """Of a conversation, by its last block: blocks x seconds, over the cost."""
        return self._weight(node.depth) * (now - node.time)

    def _weight(self, depth: int) -> float:
        found = self._weights.get(depth)
        if found is None:
            found = self._weights[depth] = depth / self._cost(depth) if self._cost else float(depth)
        return found

    def enter(self, node: Node) -> None:
        """See the base class."""
        heap = self._by_depth.get(node.depth)
        if heap is None:
            heap = self._by_depth[node.depth] = LeafHeap()
        heap.push(node, node.used)
        following = self._next
        if following is not None and (node is following or node.priority < following.priority):
            self._next = None
        proposed, self._proposed = self._proposed, None
        if proposed is not None and node.key == self._expected and node.depth > self._floor:
            # What comes before another priority's block is compared with all leaves.
            self._next = node if node.priority == proposed.priority else None
        self._expected = None

    def remove(self, node: Node, *, evicted: bool) -> None:
        """See the base class."""
        goes_on = evicted and node is self._proposed
        self._expected = node.parent if goes_on else None
        if not goes_on:
            self._proposed = None
        if node is self._next:
            self._next = None

    def insert(self, node: Node, parent: Node | None) -> None:
        """See the base class."""
        self._proposed = self._expected = None

    def reuse(self, node: Node) -> None:
        """See the base class."""
        self._proposed = self._expected = None
        if node is self._next:
            self._next = None

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        following = self._next
        if following is not None and following.stamp:
            self._proposed, self._expected = following, None
            return following
        self._proposed = self._expected = self._next = None
        heads = lowest_priority(self._heads())
        if not heads:
            return None
        best = max(heads, key=lambda node: (self.score(node, now), -node.used))
        self._proposed, self._floor = best, best.depth // 2
        return best

    def _heads(self) -> list[Node | None]:
        empty = []
        heads: list[Node | None] = []
        for depth, heap in self._by_depth.items():
            node = heap.first()
            heads.append(node)
            if node is None:
                empty.append(depth)
        for depth in empty:
            del self._by_depth[depth]
        return heads
