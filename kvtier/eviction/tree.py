"""`PrefixTree`: which blocks one tier keeps, which of them may be evicted, and how much room they take.

Blocks of sequences that begin alike are one path, as in a radix tree. A block is useless without those before it, so
that only leaves are evicted: the trailing end of a conversation first (Pensieve, section 4.3). The tree tells a policy
of every event and asks it for the next victim; it decides nothing itself, and moves no bytes.

    tree = PrefixTree(LRU(), capacity=budget)
    tree.insert("a", None, now, size=4096)
    tree.insert("b", "a", now, size=4096)
    tree.evict(now)                         # "b", then "a"

A lower tier has a tree of its own, in which a block may be there without its parent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kvtier.errors import ConfigError
from kvtier.eviction.policy import EvictionPolicy, Key, LeafHeap, Node


class PrefixTree:
    """The kept blocks of one tier. Every operation takes O(1), those that make or take a leaf O(log leaves), amortised.

    Args:
        policy: orders the leaves. It serves this tree alone.
        capacity: what the blocks' sizes may add up to, in the same unit. `insert` refuses what does not fit: whoever
            inserts evicts before.
        block_size: of a whole block, for the policy; a smaller one may be inserted too.

    Attributes:
        used: what the sizes add up to.
        leaves: how many blocks may be evicted.

    Raises:
        ConfigError: a capacity below 1.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, *, block_size: int = 1) -> None:
        self.policy = policy
        policy.block_size = block_size
        self.used = self.leaves = 0
        self._nodes: dict[Key, Node] = {}
        # Kept blocks that continue a block, which need not be kept itself.
        self._children: dict[Key, int] = {}
        self._expiring = LeafHeap()
        self._serial = self._stamp = 0
        self.resize(capacity)

    # What is there

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Key]:
        return iter(self._nodes)

    def node(self, key: Key) -> Node:
        """A kept block, to read.

        Raises:
            KeyError: it is not kept.
        """
        return self._nodes[key]

    @property
    def free(self) -> int:
        """What more fits."""
        return self.capacity - self.used

    def resize(self, capacity: int) -> None:
        """Change the capacity. Nothing is evicted: `free` is below 0 until whoever asked has evicted enough.

        Raises:
            ConfigError: a capacity below 1.
        """
        if capacity < 1:
            raise ConfigError(f"a tier of capacity {capacity} keeps no block: give it at least the size of one block.")
        self.capacity = capacity
        self.policy.resize(capacity)

    # Events

    def insert(
        self,
        key: Key,
        parent: Key | None,
        now: float,
        *,
        size: int = 1,
        depth: int | None = None,
        priority: int = 0,
        expires: float = math.inf,
        held: bool = False,
    ) -> Node:
        """Keep a block from now on.

        Args:
            key, parent: of the block, and of what it continues: None for the first block of a sequence.
            now: seconds, of any clock that does not run back.
            size: in the unit of the capacity.
            depth: blocks of its sequence up to its end; None: one more than its parent, which is kept then.
            priority, expires: see `Node`.
            held: as after `hold`.

        Raises:
            ValueError: it is kept already, does not fit, or its depth is not known.
        """
        nodes = self._nodes
        above = nodes.get(parent) if parent is not None else None
        if key in nodes:
            raise ValueError(f"block {key!r} is kept already: report its use with reuse().")
        if size < 1 or self.used + size > self.capacity:
            raise ValueError(f"a block of size {size} does not fit: {self.free} of {self.capacity} is free.")
        if depth is None:
            if parent is not None and above is None:
                raise ValueError(f"the parent of block {key!r} is not kept: its depth has to be given.")
            depth = 1 if above is None else above.depth + 1
        self._serial += 1
        node = Node(key, parent, depth, size, self._serial, now)
        node.priority, node.expires, node.users = priority, expires, int(held)
        nodes[key] = node
        self.used += size
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if above is not None and above.stamp:
                self._leave(above)
        self.policy.insert(node, above)
        self._refresh(node)
        return node

    def reuse(self, key: Key, now: float) -> None:
        """A kept block is used again. The blocks of a path are reported from its beginning.

        Raises:
            KeyError: it is not kept.
        """
        node = self._nodes[key]
        self._serial += 1
        node.used, node.time = self._serial, now
        node.uses += 1
        self.policy.reuse(node)
        if node.stamp:
            self._leave(node)
            self._refresh(node)

    def remove(self, key: Key) -> None:
        """A block is gone for other reasons than eviction.

        Raises:
            KeyError: it is not kept.
            ValueError: a kept block continues it, or it is in use.
        """
        node = self._nodes[key]
        if node.users or key in self._children:
            raise ValueError(f"block {key!r} cannot go: a kept block continues it, or it is in use.")
        self._remove(node, evicted=False)

    def thin(self, stays: Callable[[Key], bool]) -> None:
        """Remove all blocks but those that stay, in the middle of paths too: what continued one that is gone continues
        the one before that. The policy keeps what it knows of all others.

        Raises:
            ValueError: a block that would go is in use or pinned.
        """
        nodes = sorted(self._nodes.values(), key=lambda node: node.depth)
        staying = {node.key for node in nodes if stays(node.key)}
        for node in nodes:
            if node.key not in staying and (node.users or node.pins):
                raise ValueError(f"block {node.key!r} cannot go: it is in use or pinned.")
        # A block's parent comes before it here, so that the parent's own place is already the new one.
        for node in nodes:
            above = self._nodes.get(node.parent) if node.parent is not None else None
            if above is None:
                continue
            if above.key in staying:
                node.depth = above.depth + 1
            else:
                node.parent, node.depth = above.parent, above.depth
        self._children = {}
        for node in nodes:
            if node.stamp:
                self._leave(node)
            if node.key in staying:
                if node.parent is not None:
                    self._children[node.parent] = self._children.get(node.parent, 0) + 1
            else:
                del self._nodes[node.key]
                self.used -= node.size
                self.policy.remove(node, evicted=False)
        # All leaves are new ones: policies may order them by their depth.
        for node in self._nodes.values():
            self._refresh(node)

    # What may not be evicted

    def hold(self, key: Key) -> None:
        """The path that ends with this block is in use, until as many calls of `release`."""
        node = self._nodes[key]
        node.users += 1
        if node.stamp:
            self._leave(node)

    def release(self, key: Key) -> None:
        """The opposite of `hold`.

        Raises:
            ValueError: nobody holds it.
        """
        node = self._nodes[key]
        if not node.users:
            raise ValueError(f"block {key!r} is not held.")
        node.users -= 1
        self._refresh(node)

    def pin(self, key: Key) -> None:
        """Keep the path that ends with this block, until as many calls of `unpin`."""
        node = self._nodes[key]
        node.pins += 1
        if node.stamp:
            self._leave(node)

    def unpin(self, key: Key) -> None:
        """The opposite of `pin`.

        Raises:
            ValueError: it is not pinned.
        """
        node = self._nodes[key]
        if not node.pins:
            raise ValueError(f"block {key!r} is not pinned.")
        node.pins -= 1
        self._refresh(node)

    def rank(self, key: Key, *, priority: int | None = None, expires: float | None = None) -> None:
        """Change a block's priority or the end of its time to live. What is None stays."""
        node = self._nodes[key]
        if priority is not None:
            node.priority = priority
        if expires is not None:
            node.expires = expires
        if node.stamp:
            self._leave(node)
            self._refresh(node)

    # Eviction

    def victim(self, now: float) -> Node | None:
        """The block to evict next: a leaf whose time to live has ended, else the policy's choice; None: no leaf."""
        node = self._expiring.first()
        if node is not None and node.expires <= now:
            return node
        return self.policy.victim(now) if self.leaves else None

    def evict(self, now: float) -> Key | None:
        """Evict one block, and say which; None if there is no leaf."""
        node = self.victim(now)
        if node is None:
            return None
        self._remove(node, evicted=True)
        return node.key

    def make_room(self, size: int, now: float) -> list[Key] | None:
        """Evict until a block of this size fits. Returns what went, in order; None if it cannot fit.

        Where it cannot fit, what may be evicted is gone all the same.
        """
        gone = []
        while self.used + size > self.capacity:
            key = self.evict(now)
            if key is None:
                return None
            gone.append(key)
        return gone

    def expire(self, now: float) -> list[Key]:
        """Evict every leaf whose time to live has ended, and say which."""
        gone = []
        while (node := self._expiring.first()) is not None and node.expires <= now:
            self._remove(node, evicted=True)
            gone.append(node.key)
        return gone

    def _remove(self, node: Node, *, evicted: bool) -> None:
        if node.stamp:
            self._leave(node)
        del self._nodes[node.key]
        self.used -= node.size
        self.policy.remove(node, evicted=evicted)
        parent = node.parent
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._nodes.get(parent)
        if above is not None:
            self._refresh(above)

    def _refresh(self, node: Node) -> None:
        """Make a block a leaf, if it is one."""
        if node.stamp or node.users or node.pins or node.key in self._children:
            return
        self._stamp += 1
        node.stamp = self._stamp
        self.leaves += 1
        if node.expires < math.inf:
            # By expiry alone: the time to live ends whatever the priority is.
            self._expiring.push(node, node.expires, priority=0)
        self.policy.enter(node)

    def _leave(self, node: Node) -> None:
        node.stamp = 0
        self.leaves -= 1

    def check_integrity(self) -> None:
        """Count everything again.

        Raises:
            AssertionError: what is counted does not agree with the blocks.
        """
        children: dict[Key, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        assert children == self._children, "children"
        assert self.used == sum(node.size for node in self._nodes.values()), "used"
        leaves = [n for n in self._nodes.values() if not (n.users or n.pins or n.key in children)]
        assert all(n.stamp for n in leaves), "a leaf has no stamp"
        assert len(leaves) == self.leaves == sum(n.stamp > 0 for n in self._nodes.values()), "leaves"
