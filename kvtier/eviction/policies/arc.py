"""ARC: the division between blocks used once and blocks used again adapts (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict

from kvtier.eviction.policy import EvictionPolicy, Key, LeafHeap, Node, prefer


class Ghosts:
    """Keys and sizes of blocks that were evicted, the oldest forgotten first.

    Attributes:
        size: what they add up to.
    """

    __slots__ = ("_sizes", "size")

    def __init__(self) -> None:
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self.size = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def add(self, key: Key, size: int) -> None:
        """The latest one."""
        self.take(key)
        self._sizes[key] = size
        self.size += size

    def take(self, key: Key) -> bool:
        """Forget it. Returns whether it was there."""
        size = self._sizes.pop(key, 0)
        self.size -= size
        return size > 0

    def trim(self, size: float) -> None:
        """Forget the oldest until no more than this is left."""
        while self._sizes and self.size > size:
            self.size -= self._sizes.popitem(last=False)[1]

    def __len__(self) -> int:
        return len(self._sizes)


class ARC(EvictionPolicy):
    """Two lists in the order of LRU, of blocks used once (T1) and used again (T2), and the keys that each has evicted
    (B1, B2). A block that comes back soon after its eviction says which list was too short.

    Sizes stand where the paper counts pages: blocks need not be alike.
    """

    def __init__(self) -> None:
        self._once, self._again = LeafHeap(), LeafHeap()
        # Blocks of T2 that were inserted there: they came back after their eviction.
        self._returned: set[Key] = set()
        self._once_size = self._again_size = 0
        self._b1, self._b2 = Ghosts(), Ghosts()
        self._target = 0.0

    def _in_t2(self, node: Node) -> bool:
        return node.uses > 0 or node.key in self._returned

    def resize(self, capacity: int) -> None:
        """See the base class. The division between the lists stays."""
        if self.capacity:
            self._target *= capacity / self.capacity
        super().resize(capacity)

    def insert(self, node: Node, parent: Node | None) -> None:
        """See the base class."""
        b1, b2 = self._b1, self._b2
        before = b1.size, b2.size
        returned = True
        if b1.take(node.key):
            grown = self._target + node.size * max(before[1] / before[0], 1.0)
            self._target = min(grown, float(self.capacity))
        elif b2.take(node.key):
            self._target = max(self._target - node.size * max(before[0] / before[1], 1.0), 0.0)
        else:
            returned = False
        if returned:
            self._returned.add(node.key)
            self._again_size += node.size
        else:
            self._once_size += node.size

    def reuse(self, node: Node) -> None:
        """See the base class."""
        if node.uses == 1 and node.key not in self._returned:
            self._once_size -= node.size
            self._again_size += node.size

    def enter(self, node: Node) -> None:
        """See the base class."""
        (self._again if self._in_t2(node) else self._once).push(node, node.used)

    def remove(self, node: Node, *, evicted: bool) -> None:
        """See the base class."""
        again = self._in_t2(node)
        self._returned.discard(node.key)
        if again:
            self._again_size -= node.size
        else:
            self._once_size -= node.size
        if not evicted:
            return
        (self._b2 if again else self._b1).add(node.key, node.size)
        # The paper's bounds: T1 and B1 together as large as the cache, all four twice as large.
        self._b1.trim(max(self.capacity - self._once_size, 0))
        self._b2.trim(max(2 * self.capacity - self._once_size - self._again_size - self._b1.size, 0))

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        once, again = self._once.first(), self._again.first()
        if self._once_size > self._target:
            return prefer(once, again)
        return prefer(again, once)
