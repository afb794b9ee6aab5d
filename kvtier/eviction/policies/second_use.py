"""Second use: blocks never asked for again go before all others: segmented LRU (Karedla et al., 1994)."""

from __future__ import annotations

from kvtier.eviction.policy import EvictionPolicy, LeafHeap, Node, prefer


class SecondUse(EvictionPolicy):
    """Two segments, each in the order of LRU: blocks never used again since they were inserted, and all others.

    The first is evicted, unless the second has outgrown its share.

    Args:
        share: of the capacity that blocks used again are given at most, before they are evicted too.
    """

    def __init__(self, share: float = 0.8) -> None:
        self.share = share
        self._once, self._again = LeafHeap(), LeafHeap()
        self._again_size = 0

    def reuse(self, node: Node) -> None:
        """See the base class."""
        if node.uses == 1:
            self._again_size += node.size

    def enter(self, node: Node) -> None:
        """See the base class."""
        (self._again if node.uses else self._once).push(node, node.used)

    def remove(self, node: Node, *, evicted: bool) -> None:
        """See the base class."""
        if node.uses:
            self._again_size -= node.size

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        once, again = self._once.first(), self._again.first()
        if self._again_size > self.share * self.capacity:
            return prefer(again, once)
        return prefer(once, again)
