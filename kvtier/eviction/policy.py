"""`EvictionPolicy`: which of the blocks that may be evicted goes first. It hears of events, and only orders.

A new policy is one file: a subclass that overrides `victim`, and whatever events it learns from.

    class FirstInFirstOut(EvictionPolicy):
        def __init__(self):
            self._leaves = LeafHeap()

        def enter(self, node):
            self._leaves.push(node, node.inserted)

        def victim(self, now):
            return self._leaves.first()

Blocks that may be evicted are *leaves*: no kept block continues them, nobody uses them, nothing pins them. Only leaves
are ordered: a conversation has one of them however long it is, so that neither a use of it nor its end costs work for
each of its blocks, and no order can put a block before those that continue it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable

Key = Hashable


class Node:
    """One kept block. `PrefixTree` writes all of it, policies read it.

    Attributes:
        key, parent: of the block, and of the block that it continues; parent is None for the first one.
        depth: blocks of its sequence up to its end: 1 for the first one.
        size: in the unit of the tree's capacity, usually bytes.
        inserted, used: serial numbers of its insertion, and of its last use or insertion.
        time: of its last use or insertion, seconds.
        uses: how often it was used again since it was inserted.
        priority: blocks of a higher priority are evicted only where there are none of a lower one.
        expires: when its time to live ends, seconds; from then on it is evicted before all others.
        users: how many use it at this moment.
        pins: how many keep it from being evicted.
        stamp: names the time for which it has been a leaf; 0 while it is none.
        anchor: `Adaptive`'s: the key of the last one that was sampled, of this block and those before it, when this
            block was inserted.
    """

    __slots__ = (
        "anchor",
        "depth",
        "expires",
        "inserted",
        "key",
        "parent",
        "pins",
        "priority",
        "size",
        "stamp",
        "time",
        "used",
        "users",
        "uses",
    )

    def __init__(self, key: Key, parent: Key | None, depth: int, size: int, serial: int, time: float) -> None:
        self.key, self.parent, self.depth, self.size = key, parent, depth, size
        self.inserted = self.used = serial
        self.time = time
        self.uses = self.priority = self.users = self.pins = self.stamp = 0
        self.expires = math.inf
        self.anchor: Key | None = None

    def __repr__(self) -> str:
        return f"Node({self.key!r}, parent={self.parent!r}, depth={self.depth}, uses={self.uses})"


class EvictionPolicy:
    """The order in which blocks are evicted. One object serves one tree. `copy.deepcopy` copies it: where an interrupt
    has cut a change short, a copy of how it was at the beginning takes its place.

    The tree calls these; all but `victim` are allowed to do nothing. Insertion and re-use are two events: blocks that a
    prefill has just computed were not asked for again.
    """

    #: What the tree holds at most, in the unit of the blocks' sizes.
    capacity: int = 0
    #: Of a whole block, in that unit. A sequence may end with a smaller one.
    block_size: int = 1

    def resize(self, capacity: int) -> None:
        """The tree begins with this capacity, or changes to it."""
        self.capacity = capacity

    def insert(self, node: Node, parent: Node | None) -> None:
        """A block is kept from now on. `parent` is what it continues, if that is kept in this tree."""

    def reuse(self, node: Node) -> None:
        """A kept block is used again. `node.uses` counts that already."""

    def enter(self, node: Node) -> None:
        """A block becomes a leaf, or is one of other rank than before. `node.stamp` is new."""

    def remove(self, node: Node, *, evicted: bool) -> None:
        """A block is gone: `evicted`, as this policy or the end of its time to live had it, or for other reasons."""

    def victim(self, now: float) -> Node | None:
        """The leaf to evict next, of those of the lowest priority; None if there is no leaf. Nothing is evicted yet."""
        raise NotImplementedError


class LeafHeap:
    """Leaves by rank, the lowest first; blocks of lower priority before all others.

    A leaf that changes or is gone stays in the heap until it comes up: its stamp says that the entry is out of date. A
    heap of which more than half is out of date is made again, so that all operations are O(log n), amortised.
    """

    __slots__ = ("_heap", "_limit")

    #: Entries below which nothing is made again.
    SMALL = 256

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int, Node]] = []
        self._limit = self.SMALL

    def push(self, node: Node, rank: float, then: int = 0, *, priority: int | None = None) -> None:
        """Add a leaf; of equal ranks the one with the lower `then` comes first. `priority` replaces the leaf's own."""
        heap = self._heap
        heapq.heappush(heap, (node.priority if priority is None else priority, rank, then, node.stamp, node))
        if len(heap) > self._limit:
            heap[:] = [entry for entry in heap if entry[3] == entry[4].stamp]
            heapq.heapify(heap)
            self._limit = max(2 * len(heap), self.SMALL)

    def first(self) -> Node | None:
        """The leaf of the lowest rank, which stays."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[3] == entry[4].stamp:
                return entry[4]
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Take the first one out: it is pushed elsewhere."""
        heapq.heappop(self._heap)

    @property
    def rank(self) -> float:
        """Of the first one, which there is."""
        return self._heap[0][1]

    def __len__(self) -> int:
        return len(self._heap)


def prefer(first: Node | None, second: Node | None) -> Node | None:
    """The first of two candidates, unless there is none or it has the higher priority."""
    if first is None or (second is not None and second.priority < first.priority):
        return second
    return first


def lowest_priority(nodes: Iterable[Node | None]) -> list[Node]:
    """Of these candidates, those of the lowest priority."""
    there = [node for node in nodes if node is not None]
    least = min((node.priority for node in there), default=0)
    return [node for node in there if node.priority == least]
