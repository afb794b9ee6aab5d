"""S3-FIFO: a small queue that most new blocks leave soon, and a main queue (Yang et al., SOSP 2023)."""

from __future__ import annotations

from kvtier.eviction.policies.arc import Ghosts
from kvtier.eviction.policy import EvictionPolicy, Key, LeafHeap, Node, prefer


class S3FIFO(EvictionPolicy):
    """Blocks are inserted into a small queue; those that were used again by the time they come up move to the main
    queue, as do those that come back soon after their eviction. A block of the main queue that was used stays in turn.

    Args:
        share: of the capacity that the small queue is given.
        threshold: uses from which a block moves to the main queue: 2 in the paper.
    """

    #: A counter goes no higher: two bits.
    MOST = 3

    def __init__(self, share: float = 0.1, threshold: int = 2) -> None:
        self.share, self.threshold = share, threshold
        self._small, self._main = LeafHeap(), LeafHeap()
        self._small_size = 0
        # By key, the place in the main queue of each block that is there; and the uses since it was examined.
        self._place: dict[Key, int] = {}
        self._count: dict[Key, int] = {}
        self._ghosts = Ghosts()
        self._turn = 0

    def insert(self, node: Node, parent: Node | None) -> None:
        """See the base class."""
        if self._ghosts.take(node.key):
            self._to_main(node)
        else:
            self._small_size += node.size

    def reuse(self, node: Node) -> None:
        """See the base class."""
        self._count[node.key] = min(self._count.get(node.key, 0) + 1, self.MOST)

    def enter(self, node: Node) -> None:
        """See the base class."""
        place = self._place.get(node.key)
        if place is None:
            self._small.push(node, node.inserted)
        else:
            self._main.push(node, place)

    def remove(self, node: Node, *, evicted: bool) -> None:
        """See the base class."""
        self._count.pop(node.key, None)
        if self._place.pop(node.key, None) is not None:
            return
        self._small_size -= node.size
        if evicted:
            self._ghosts.add(node.key, node.size)
            self._ghosts.trim((1 - self.share) * self.capacity)

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        while True:
            small, main = self._small.first(), self._main.first()
            full = self._small_size > self.share * self.capacity
            node = prefer(small, main) if full else prefer(main, small)
            if node is None:
                return None
            uses = self._count.get(node.key, 0)
            if node is small:
                if uses < self.threshold:
                    return node
                self._small.pop()
                self._small_size -= node.size
                self._count.pop(node.key, None)
                self._to_main(node)
            else:
                if not uses:
                    return node
                self._main.pop()
                self._count[node.key] = uses - 1
                self._to_main(node)
            self._main.push(node, self._place[node.key])

    def _to_main(self, node: Node) -> None:
        self._turn += 1
        self._place[node.key] = self._turn
