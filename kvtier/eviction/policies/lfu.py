"""Least frequently used."""

from __future__ import annotations

from kvtier.eviction.policy import EvictionPolicy, LeafHeap, Node


class LFU(EvictionPolicy):
    """The block used again least often since its insertion goes first; of equals the one used longest ago."""

    def __init__(self) -> None:
        self._leaves = LeafHeap()

    def enter(self, node: Node) -> None:
        """See the base class."""
        self._leaves.push(node, node.uses, node.used)

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        return self._leaves.first()
