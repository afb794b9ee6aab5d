"""Least recently used."""

from __future__ import annotations

from kvtier.eviction.policy import EvictionPolicy, LeafHeap, Node


class LRU(EvictionPolicy):
    """The block that was used longest ago goes first."""

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def enter(self, node: Node) -> None:
        """See the base class."""
        self._leaves.push(node, node.used)

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        return self._leaves.first()
