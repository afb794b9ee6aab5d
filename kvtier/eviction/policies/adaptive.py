"""`Adaptive`, the default: of several policies, the one that would have hit most often lately.

No fixed policy is the best one for every load and size. So each of them runs in a *shadow*: a prefix tree of keys
alone, whose capacity is the real one scaled down, and which sees a sample of the real one's events. What is sampled is
chosen by a hash of the key, as in SHARDS (Waldspurger et al., FAST 2015): a block is always sampled or never. Among
sampled blocks, the nearest one before a block takes the place of its parent, so that a shadow has paths too, evicts
leaves, and hits prefixes. Every conversation is thinned out alike, where a sample of whole conversations would depend
on which ones it has. How many blocks the real cache will hold is not known before: when a shadow holds twice as many as
it should, half of the keys are sampled no longer, and leave the shadows, which keep all else that they have learned.

The real blocks are ordered by all policies at once: each hears every event, which costs it an entry for each leaf, and
whichever leads is asked. To follow another one is to ask another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from kvtier.errors import ConfigError
from kvtier.eviction.policy import EvictionPolicy, Key, Node
from kvtier.eviction.tree import PrefixTree

#: Blocks that a shadow holds about, and less than twice as many, once the real cache holds more: the noise of a sample
#: falls with their root.
SHADOW_BLOCKS = 1024
#: A candidate has to promise so much more than the one that is followed.
HYSTERESIS = 0.02
#: Uses of sampled blocks, in multiples of what a shadow holds, after which a hit counts half.
HALF_LIFE = 32.0
#: Looks at the scores in a half-life.
_PARTS = 32
_BITS = 32


def hashed(key: Key) -> int:
    """32 bits of a key, evenly spread, and the same in every process for integers, strings and bytes."""
    if isinstance(key, int):
        # Of successive numbers too: the multiplication and shifts of splitmix64.
        x = (key + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return x >> 32
    data = key if isinstance(key, bytes) else repr(key).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


class Shadow:
    """What a policy would have done with a sample of the events.

    Attributes:
        score: its hits, of which the older count less.
    """

    __slots__ = ("score", "tree")

    def __init__(self, policy: EvictionPolicy, capacity: int, block_size: int) -> None:
        self.tree = PrefixTree(policy, capacity, block_size=block_size)
        self.score = 0.0

    def use(self, node: Node, above: Key | None) -> bool:
        """A block of the real cache is used or inserted. Returns whether it was a hit here."""
        tree, key = self.tree, node.key
        if key in tree:
            tree.reuse(key, node.time)
            return True
        if above is not None and above not in tree:
            # What comes before it did not fit.
            return False
        if above is not None:
            tree.hold(above)
        if tree.make_room(node.size, node.time) is not None:
            tree.insert(key, above, node.time, size=node.size, priority=node.priority, expires=node.expires)
        if above is not None:
            tree.release(above)
        return False

    def remove(self, key: Key) -> None:
        """A block of the real cache is gone for other reasons than eviction: nobody can ask for it. It stays where this
        policy still has what continues it."""
        if key in self.tree and self.tree.node(key).stamp:
            self.tree.remove(key)


class Adaptive(EvictionPolicy):
    """Follows whichever candidate's shadow hits most.

    Args:
        candidates: what makes each policy, by name; the first one is followed at the beginning. Two objects are made of
            each: one for the shadow.
        shadow_blocks: blocks that a shadow holds about. A smaller cache is sampled whole.
        hysteresis: by what part another candidate has to hit more often.
        half_life: after how many sampled uses a hit counts half, in multiples of what a shadow holds.

    Attributes:
        leader: the name of the candidate that is followed.
        switches: how often that changed.
        rate: the part of the keys that is sampled.

    Raises:
        ConfigError: no candidate.
    """

    def __init__(
        self,
        candidates: Mapping[str, Callable[[], EvictionPolicy]],
        *,
        shadow_blocks: int = SHADOW_BLOCKS,
        hysteresis: float = HYSTERESIS,
        half_life: float = HALF_LIFE,
    ) -> None:
        if not candidates:
            raise ConfigError("Adaptive follows one of several policies: give it at least one.")
        self._make = dict(candidates)
        self._real = {name: make() for name, make in self._make.items()}
        self._shadows: dict[str, Shadow] = {}
        self._shadow_blocks, self._hysteresis, self._half_life = shadow_blocks, hysteresis, half_life
        self.leader = next(iter(self._make))
        self._asked = self._real[self.leader]
        # Of each block that was sampled when it was inserted, the one before it that was.
        self._above: dict[Key, Key | None] = {}
        self.switches = 0
        self.rate = 1.0
        self._limit = 1 << _BITS
        self._size = 1
        self._uses = self._period = 0

    def resize(self, capacity: int) -> None:
        """See the base class."""
        super().resize(capacity)
        for policy in self._real.values():
            policy.block_size = self.block_size
            policy.resize(capacity)
        self._scale()

    def scores(self) -> dict[str, float]:
        """Of each candidate, its hits in the sample; the older a hit is, the less it counts."""
        return {name: shadow.score for name, shadow in self._shadows.items()}

    # Events

    def insert(self, node: Node, parent: Node | None) -> None:
        """See the base class."""
        for policy in self._real.values():
            policy.insert(node, parent)
        if not self._shadows:
            self._begin(node)
        node.anchor = self._sampled(parent.anchor) if parent is not None else None
        if hashed(node.key) < self._limit:
            above = self._above[node.key] = node.anchor
            node.anchor = node.key
            self._use(node, above)

    def reuse(self, node: Node) -> None:
        """See the base class."""
        for policy in self._real.values():
            policy.reuse(node)
        if node.anchor == node.key and hashed(node.key) < self._limit:
            self._use(node, self._sampled(self._above[node.key]))

    def enter(self, node: Node) -> None:
        """See the base class."""
        for policy in self._real.values():
            policy.enter(node)

    def remove(self, node: Node, *, evicted: bool) -> None:
        """See the base class."""
        for policy in self._real.values():
            policy.remove(node, evicted=evicted)
        self._above.pop(node.key, None)
        if not evicted:
            for shadow in self._shadows.values():
                shadow.remove(node.key)

    def victim(self, now: float) -> Node | None:
        """See the base class."""
        return self._asked.victim(now)

    # Shadows

    def _begin(self, node: Node) -> None:
        """Make the shadows. The size of a whole block says about how many the capacity holds. The first block may be
        the end of a short sequence, far smaller than those that come."""
        self._size = max(node.size, self.block_size)
        self._sample(min(self._shadow_blocks * self._size / self.capacity, 1.0))
        self._shadows = {name: Shadow(make(), 1, self.block_size) for name, make in self._make.items()}
        self._scale()

    def _sample(self, rate: float) -> None:
        self.rate = rate
        self._limit = round(rate * (1 << _BITS))

    def _scale(self) -> None:
        """Give the shadows their part of the capacity."""
        capacity = max(round(self.capacity * self.rate), 1)
        for shadow in self._shadows.values():
            shadow.tree.resize(capacity)
        self._period = max(round(capacity / self._size * self._half_life / _PARTS), 1)

    def _sampled(self, key: Key | None) -> Key | None:
        """The last block that is sampled now, of one that was sampled once and those before it."""
        while key is not None and hashed(key) >= self._limit:
            key = self._above.get(key)
        return key

    def _thin(self) -> None:
        """Sample half of the keys from now on. What the shadows know of these stays: made again, they would have to
        learn for as long as at the beginning. A hit stands for two where it stood for one: older ones count half."""
        self._sample(self.rate / 2)
        for shadow in self._shadows.values():
            shadow.tree.thin(lambda key: hashed(key) < self._limit)
            shadow.score /= 2
        self._scale()

    def _use(self, node: Node, above: Key | None) -> None:
        for shadow in self._shadows.values():
            if shadow.use(node, above):
                shadow.score += 1.0
        while any(len(shadow.tree) >= 2 * self._shadow_blocks for shadow in self._shadows.values()):
            self._thin()
        self._uses += 1
        if self._uses >= self._period:
            self._uses = 0
            self._follow()

    def _follow(self) -> None:
        """Change the leader, if another candidate promises enough, and let all hits count less."""
        shadows = self._shadows
        best = max(shadows, key=lambda name: shadows[name].score)
        if shadows[best].score > shadows[self.leader].score * (1 + self._hysteresis):
            self.leader, self._asked = best, self._real[best]
            self.switches += 1
        for shadow in shadows.values():
            shadow.score *= 0.5 ** (1 / _PARTS)
