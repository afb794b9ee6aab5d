"""`PrefixIndex`: which of many token sequences begins as another one does, to the token. Plain Python, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Bytes of a token id.
WIDTH = array("q").itemsize


def packed(ids: Iterable[int]) -> bytes:
    """Token ids as bytes that are compared many at a time."""
    return array("q", ids).tobytes()


def unpacked(ids: bytes) -> list[int]:
    """Token ids of bytes."""
    return array("q", ids).tolist()


def common(a: bytes, b: bytes) -> int:
    """Leading tokens in which two sequences agree."""
    most = min(len(a), len(b)) // WIDTH
    if a[: most * WIDTH] == b[: most * WIDTH]:
        return most
    low, high = 0, most  # they agree in `low` tokens and not in `high`
    while high - low > 1:
        middle = (low + high) // 2
        if a[low * WIDTH : middle * WIDTH] == b[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


#: What most nodes have below them, or end there. Never written to.
_NOTHING: dict[Any, Any] = {}


class _Node(Generic[T]):
    """Sequences that begin alike: `ids` behind those of the node above."""

    __slots__ = ("above", "below", "ends", "ids")

    def __init__(self, ids: bytes, above: _Node[T] | None) -> None:
        self.ids = ids
        self.above = above
        self.below: dict[bytes, _Node[T]] = _NOTHING
        self.ends: dict[T, None] = _NOTHING

    def grow(self, head: bytes, node: _Node[T]) -> _Node[T]:
        """Put a node below this one."""
        if not self.below:
            self.below = {}
        self.below[head] = node
        return node

    def some(self) -> T:
        """An entry that ends here or below: the one that was added last of those that end first."""
        node = self
        while not node.ends:
            node = next(reversed(node.below.values()))
        return next(reversed(node.ends))


class _Root(_Node[T]):
    """The node above all of a key."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        super().__init__(b"", None)
        self.key = key


class PrefixIndex(Generic[T]):
    """A radix tree over token ids. Finding and adding take time in the length of what is found or added, whatever the
    number of entries.

    Sequences under different keys share nothing: a key says what else keys and values depend on (an adapter), or who
    may share them (a salt).
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Root[T]] = {}
        self._at: dict[T, _Node[T]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, entry: T) -> bool:
        return entry in self._at

    def all_keys(self) -> Iterator[Hashable]:
        """The keys under which there are entries."""
        return iter(self._roots)

    def add(self, key: Hashable, ids: bytes, entry: T) -> None:
        """Add an entry, or give it other ids."""
        if entry in self._at:
            self.remove(entry)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = _Root(key)
        self._add(root, ids, entry)

    def extend(self, other: T, back: int, ids: bytes, entry: T) -> None:
        """Add an entry that goes on, with these ids, so many tokens before the end of another one. That takes time in
        the length of both, however much is before them."""
        if entry in self._at:
            self.remove(entry)
        node, cut = self._at[other], back * WIDTH
        while cut and node.above is not None and cut >= len(node.ids):
            node, cut = node.above, cut - len(node.ids)
        if cut:
            assert node.above is not None
            node, ids = node.above, node.ids[:-cut] + ids
        self._add(node, ids, entry)

    def _add(self, node: _Node[T], ids: bytes, entry: T) -> None:
        """Add an entry whose ids begin with those that lead to a node, and go on with these."""
        at = 0
        while at < len(ids):
            head = ids[at : at + WIDTH]
            found = node.below.get(head)
            if found is None:
                node = node.grow(head, _Node(ids[at:], node))
                break
            alike = common(found.ids, ids[at : at + len(found.ids)]) * WIDTH
            if alike < len(found.ids):
                found = self._split(node, head, found, alike)
            node, at = found, at + alike
        if not node.ends:
            node.ends = {}
        node.ends[entry] = None
        self._at[entry] = node

    def remove(self, entry: T) -> None:
        """Remove an entry, if it is there."""
        node = self._at.pop(entry, None)
        if node is None:
            return
        del node.ends[entry]
        while node.above is not None and not node.ends and len(node.below) < 2:
            above = node.above
            if not node.below:
                del above.below[node.ids[:WIDTH]]
            else:  # what is below continues what was here
                (below,) = node.below.values()
                below.ids, below.above = node.ids + below.ids, above
                above.below[node.ids[:WIDTH]] = below
                return
            node = above
        if isinstance(node, _Root) and not node.below and not node.ends:
            del self._roots[node.key]

    def find(self, key: Hashable, ids: bytes) -> tuple[int, T | None]:
        """The longest beginning of a sequence that an entry begins with: tokens, and that entry; 0 and None: none."""
        node: _Node[T] | None = self._roots.get(key)
        at = 0
        if node is None:
            return 0, None
        while at < len(ids):
            found = node.below.get(ids[at : at + WIDTH])
            if found is None:
                break
            alike = common(found.ids, ids[at : at + len(found.ids)]) * WIDTH
            node, at = found, at + alike
            if alike < len(found.ids):
                break
        return (at // WIDTH, node.some()) if at else (0, None)

    def prefixes(self, key: Hashable, ids: bytes) -> Iterator[tuple[int, T]]:
        """The entries that a sequence begins with, the longest first: the tokens of each, and the entry."""
        node: _Node[T] | None = self._roots.get(key)
        at = 0
        found: list[tuple[int, T]] = []
        while node is not None:
            found += [(at // WIDTH, entry) for entry in node.ends]
            below = node.below.get(ids[at : at + WIDTH]) if at < len(ids) else None
            if below is None or ids[at : at + len(below.ids)] != below.ids:
                break
            node, at = below, at + len(below.ids)
        return reversed(found)

    def continuing(self, key: Hashable, ids: bytes) -> Iterator[T]:
        """The entries that begin with all of a sequence, in any order."""
        node: _Node[T] | None = self._roots.get(key)
        at = 0
        while node is not None and at < len(ids):
            node = node.below.get(ids[at : at + WIDTH])
            if node is not None and common(node.ids, ids[at:]) * WIDTH < min(len(node.ids), len(ids) - at):
                return
            at += 0 if node is None else len(node.ids)
        nodes = [] if node is None else [node]
        for each in nodes:
            nodes += each.below.values()
            yield from each.ends

    def _split(self, above: _Node[T], head: bytes, node: _Node[T], at: int) -> _Node[T]:
        """Put a node between two, where their ids part."""
        between: _Node[T] = _Node(node.ids[:at], above)
        between.grow(node.ids[at : at + WIDTH], node)
        above.below[head] = between
        node.ids, node.above = node.ids[at:], between
        return between
