"""`Retention`: which of the sequences that are kept gives up its end first, as an eviction policy says.

The ids of a sequence are cut into *blocks* of some hundred tokens, each named by a digest of all ids up to its end; a
last block may be shorter. Sequences that begin alike share the names of their first blocks, and so the nodes of the
policy's tree. The tree hears what is kept, used and gone; its victim is always the end of some sequence.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from kvtier.conversation.index import WIDTH
from kvtier.eviction.policy import EvictionPolicy
from kvtier.eviction.rank import Rank, highest
from kvtier.eviction.tree import PrefixTree

T = TypeVar("T", bound=Hashable)

#: Tokens of a block.
TOKENS = 256
#: The tree's capacity is what was kept when the memory was full last; it is changed when that differs by this share.
_CHANGE = 0.05


class _Path:
    """The blocks of a sequence.

    Attributes:
        names: of its blocks, in order.
        ends: tokens up to the end of each.
        held: whether a cache continues it.
    """

    __slots__ = ("ends", "held", "names")

    def __init__(self, names: list[bytes], ends: list[int]) -> None:
        self.names = names
        self.ends = ends
        self.held = False


class Retention(Generic[T]):
    """Orders sequences by an eviction policy. Plain Python; one thread at a time.

    Args:
        policy: of which this is the only user. It can be copied.
        capacity: tokens that may be kept, about; corrected once the memory is full.
        clock: seconds; None: `time.monotonic`, as it is then.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, clock: Callable[[], float] | None = None) -> None:
        self._new_policy = copy.deepcopy(policy)
        self._clock = time.monotonic if clock is None else clock
        self._was_full = False
        self._begin(policy, capacity)

    def _begin(self, policy: EvictionPolicy, capacity: int) -> None:
        self._tree = PrefixTree(policy, max(capacity, 1), block_size=TOKENS)
        self._paths: dict[T, _Path] = {}
        self._refs: dict[bytes, int] = {}
        # Sequences by their last block: those that end with a leaf are its only ones.
        self._ends: dict[bytes, dict[T, None]] = {}
        # Of blocks, the ranks that somebody gave them; of those, their blocks.
        self._ranks: dict[bytes, dict[Hashable, Rank]] = {}
        self._ranked: dict[Hashable, list[bytes]] = {}
        self._pinned: set[bytes] = set()

    def clear(self) -> None:
        """Nothing is kept, and a new policy has heard of nothing: a change was cut short, at any line."""
        self._begin(copy.deepcopy(self._new_policy), self._tree.capacity)

    # Events

    def keep(self, sequence: T, key: Hashable, ids: bytes) -> None:
        """A sequence is kept from now on; what of it is not kept yet is new."""
        assert sequence not in self._paths
        path = self._paths[sequence] = _Path(*_blocks(key, ids))
        starts = (0, *path.ends[:-1])
        new = sum(
            end - start
            for name, start, end in zip(path.names, starts, path.ends, strict=False)
            if name not in self._tree
        )
        if new > self._tree.free:
            # What the memory holds is not known before it was full. Once it was, what is kept is all that it holds: a
            # larger capacity would have the shadows of a policy keep what no policy could.
            self._tree.resize(self._tree.used + new if self._was_full else 2 * self._tree.capacity + new)
        before: bytes | None = None
        start, now = 0, self._clock()
        for name, end in zip(path.names, path.ends, strict=True):
            if name not in self._tree:
                self._tree.insert(name, before, now, size=end - start)
            self._refs[name] = self._refs.get(name, 0) + 1
            before, start = name, end
        if before is not None:
            self._ends.setdefault(before, {})[sequence] = None

    def use(self, sequences: Iterable[T], tokens: int) -> None:
        """A call continues the first tokens of sequences: their blocks are used again."""
        now = self._clock()
        names = dict.fromkeys(
            name
            for sequence in sequences
            if (path := self._paths.get(sequence)) is not None
            for name, end in zip(path.names, path.ends, strict=True)
            if end <= tokens
        )
        for name in names:
            self._tree.reuse(name, now)
            if name in self._ranks:
                self._apply(name)  # its time to live begins again

    def hold(self, sequence: T) -> None:
        """A cache continues a sequence: it goes last."""
        path = self._paths.get(sequence)
        if path is not None and not path.held:
            path.held = True
            if path.names:
                self._tree.hold(path.names[-1])

    def release(self, sequence: T) -> None:
        """No cache continues it any more; nothing, if it is not kept or not held."""
        path = self._paths.get(sequence)
        if path is not None and path.held:
            path.held = False
            if path.names:
                self._tree.release(path.names[-1])

    def shortened(self, sequence: T, tokens: int) -> None:
        """A sequence has its first tokens only; none: it is not kept any more."""
        path = self._paths.get(sequence)
        if path is None or (tokens and path.ends and path.ends[-1] <= tokens):
            return
        if path.names:
            last = path.names[-1]
            if path.held and last in self._tree:
                self._tree.release(last)
            self._ends[last].pop(sequence)
            if not self._ends[last]:
                del self._ends[last]
        while path.names and (not tokens or path.ends[-1] > tokens):
            name, _ = path.names.pop(), path.ends.pop()
            self._refs[name] -= 1
            if not self._refs[name]:
                del self._refs[name]
                for user in self._ranks.pop(name, ()):
                    self._ranked[user].remove(name)
                self._pinned.discard(name)
                if name in self._tree:  # else the policy has evicted it
                    self._tree.remove(name)
        if not tokens:
            del self._paths[sequence]
        elif path.names:
            self._ends.setdefault(path.names[-1], {})[sequence] = None
            if path.held:
                self._tree.hold(path.names[-1])

    # Ranks

    def rank(self, user: Hashable, sequence: T, tokens: int, rank: Rank) -> None:
        """The first tokens of a sequence have a rank, which replaces what this user has ranked before. Blocks that
        several have ranked have the highest of their ranks; a block is ranked where its first token is."""
        self.unrank(user)
        path = self._paths[sequence]
        count = sum(start < tokens for start in (0, *path.ends[:-1])) if path.names else 0
        self._ranked[user] = path.names[:count]
        for name in path.names[:count]:
            self._ranks.setdefault(name, {})[user] = rank
            self._apply(name)

    def unrank(self, user: Hashable) -> None:
        """What this user has ranked has the rank of all others."""
        for name in self._ranked.pop(user, ()):
            del self._ranks[name][user]
            if not self._ranks[name]:
                del self._ranks[name]
            self._apply(name)

    def _apply(self, name: bytes) -> None:
        if name not in self._tree:
            return  # it was evicted, and its sequences are about to be shortened
        rank, node = highest(self._ranks.get(name, {}).values()), self._tree.node(name)
        if rank.pinned and name not in self._pinned:
            self._pinned.add(name)
            self._tree.pin(name)
        elif not rank.pinned and name in self._pinned:
            self._pinned.remove(name)
            self._tree.unpin(name)
        expires = node.time + rank.ttl
        if (node.priority, node.expires) != (rank.priority, expires):
            self._tree.rank(name, priority=rank.priority, expires=expires)

    # Room

    def full(self) -> None:
        """The memory is full: what is kept now is what there is room for."""
        self._was_full = True
        now = max(self._tree.used, 1)
        if abs(now - self._tree.capacity) > _CHANGE * self._tree.capacity:
            self._tree.resize(now)

    def evict(self) -> list[tuple[T, int]]:
        """What goes next: sequences that end with one block, and the tokens that each keeps. Empty: nothing may go.

        The caller shortens them, and says so.
        """
        name = self._tree.evict(self._clock())
        if name is None:
            return []
        found = []
        for sequence in self._ends[name]:  # type: ignore[index]
            path = self._paths[sequence]
            found.append((sequence, path.ends[-2] if len(path.ends) > 1 else 0))
        return found

    # For tests

    def check_integrity(self, sequences: Iterable[T]) -> None:
        """Raise AssertionError unless the tree has the blocks of these sequences and no others."""
        self._tree.check_integrity()
        assert set(sequences) == set(self._paths), "another sequence"
        refs: dict[bytes, int] = {}
        for path in self._paths.values():
            for name in path.names:
                refs[name] = refs.get(name, 0) + 1
        assert refs == self._refs, "blocks are counted wrong"
        assert refs.keys() == set(self._tree), "the policy knows other blocks"
        ends = {(path.names[-1], sequence) for sequence, path in self._paths.items() if path.names}
        assert ends == {(name, sequence) for name, those in self._ends.items() for sequence in those}, "ends"
        ranked = {(name, user) for user, names in self._ranked.items() for name in names}
        assert ranked == {(name, user) for name, those in self._ranks.items() for user in those}, "ranks"
        for name in self._refs:
            node, rank = self._tree.node(name), highest(self._ranks.get(name, {}).values())
            assert (node.pins > 0, node.priority) == (rank.pinned, rank.priority), "a block of another rank"
            assert node.expires == node.time + rank.ttl, "another time to live"


def _blocks(key: Hashable, ids: bytes) -> tuple[list[bytes], list[int]]:
    """Names of the blocks of a sequence, and the tokens up to the end of each."""
    names, ends, width = list[bytes](), list[int](), TOKENS * WIDTH
    before = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        before = hashlib.blake2b(before + part, digest_size=16).digest()
        names.append(before)
        ends.append((start + len(part)) // WIDTH)
    return names, ends
