"""Every policy once more, as plainly as it can be said: lists, and a scan of all blocks for each victim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Kept:
    """A block."""

    key: object
    parent: object
    depth: int
    size: int
    order: int
    used: int
    time: float
    priority: int = 0
    expires: float = math.inf
    uses: int = 0
    holds: int = 0


@dataclass
class Model:
    """The least recently used leaf first; subclasses order otherwise."""

    capacity: int
    blocks: dict = field(default_factory=dict)
    serial: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        pass

    # Events

    def insert(self, key, parent, now, size=1, priority=0, expires=math.inf) -> None:
        self.serial += 1
        depth = 1 + (self.blocks[parent].depth if parent is not None else 0)
        self.blocks[key] = Kept(key, parent, depth, size, self.serial, self.serial, now, priority, expires)
        self.inserted(self.blocks[key])

    def reuse(self, key, now) -> None:
        self.serial += 1
        block = self.blocks[key]
        block.used, block.time, block.uses = self.serial, now, block.uses + 1
        self.reused(block)

    def remove(self, key, evicted=False) -> None:
        block = self.blocks.pop(key)
        self.removed(block, evicted)

    def inserted(self, block) -> None:
        pass

    def reused(self, block) -> None:
        pass

    def removed(self, block, evicted) -> None:
        pass

    # Questions

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks.values())

    def leaves(self) -> list[Kept]:
        continued = {block.parent for block in self.blocks.values()}
        return [block for block in self.blocks.values() if block.key not in continued and not block.holds]

    def victim(self, now):
        expired = [block for block in self.leaves() if block.expires <= now]
        if expired:
            return min(expired, key=lambda block: block.expires).key
        least = min((block.priority for block in self.leaves()), default=0)
        among = [block for block in self.leaves() if block.priority == least]
        return self.choose(among, now).key if among else None

    def choose(self, leaves, now):
        return min(leaves, key=lambda block: block.used)


class LFUModel(Model):
    def choose(self, leaves, now):
        return min(leaves, key=lambda block: (block.uses, block.used))


class SecondUseModel(Model):
    def choose(self, leaves, now):
        again = sum(block.size for block in self.blocks.values() if block.uses)
        outgrown = again > 0.8 * self.capacity
        return min(leaves, key=lambda block: ((block.uses == 0) == outgrown, block.used))


class ARCModel(Model):
    """The paper's four lists."""

    def begin(self) -> None:
        self.t1, self.t2 = set(), set()
        self.b1, self.b2 = [], []  # (key, size), the oldest first
        self.target = 0.0

    def inserted(self, block) -> None:
        key, size1, size2 = block.key, sum(s for _, s in self.b1), sum(s for _, s in self.b2)
        if key in [k for k, _ in self.b1]:
            self.b1 = [(k, s) for k, s in self.b1 if k != key]
            self.target = min(self.target + block.size * max(size2 / size1, 1), self.capacity)
            self.t2.add(key)
        elif key in [k for k, _ in self.b2]:
            self.b2 = [(k, s) for k, s in self.b2 if k != key]
            self.target = max(self.target - block.size * max(size1 / size2, 1), 0)
            self.t2.add(key)
        else:
            self.t1.add(key)

    def reused(self, block) -> None:
        self.t1.discard(block.key)
        self.t2.add(block.key)

    def removed(self, block, evicted) -> None:
        first = block.key in self.t1
        self.t1.discard(block.key)
        self.t2.discard(block.key)
        if not evicted:
            return
        (self.b1 if first else self.b2).append((block.key, block.size))
        one = sum(self.blocks[k].size for k in self.t1)
        two = sum(self.blocks[k].size for k in self.t2)
        while self.b1 and one + sum(s for _, s in self.b1) > self.capacity:
            del self.b1[0]
        while self.b2 and one + two + sum(s for _, s in self.b1 + self.b2) > 2 * self.capacity:
            del self.b2[0]

    def choose(self, leaves, now):
        from_t1 = sum(self.blocks[k].size for k in self.t1) > self.target
        return min(leaves, key=lambda block: ((block.key in self.t1) != from_t1, block.used))


class S3FIFOModel(Model):
    """Two queues and a list of ghosts."""

    def begin(self) -> None:
        self.small, self.main = [], []
        self.ghosts = []
        self.count = {}

    def inserted(self, block) -> None:
        self.count[block.key] = 0
        if block.key in [k for k, _ in self.ghosts]:
            self.ghosts = [(k, s) for k, s in self.ghosts if k != block.key]
            self.main.append(block.key)
        else:
            self.small.append(block.key)

    def reused(self, block) -> None:
        self.count[block.key] = min(self.count[block.key] + 1, 3)

    def removed(self, block, evicted) -> None:
        if block.key in self.main:
            self.main.remove(block.key)
            return
        self.small.remove(block.key)
        if evicted:
            self.ghosts = [(k, s) for k, s in self.ghosts if k != block.key] + [(block.key, block.size)]
            while sum(s for _, s in self.ghosts) > 0.9 * self.capacity:
                del self.ghosts[0]

    def choose(self, leaves, now):
        keys = {block.key for block in leaves}
        while True:
            full = sum(self.blocks[k].size for k in self.small) > 0.1 * self.capacity
            small = next((k for k in self.small if k in keys), None)
            main = next((k for k in self.main if k in keys), None)
            if small is not None and (full or main is None):
                if self.count[small] < 2:
                    return self.blocks[small]
                self.small.remove(small)
                self.count[small] = 0
                self.main.append(small)
            else:
                if not self.count[main]:
                    return self.blocks[main]
                self.count[main] -= 1
                self.main.remove(main)
                self.main.append(main)


MODELS = {
    "lru": Model,
    "lfu": LFUModel,
    "second-use": SecondUseModel,
    "arc": ARCModel,
    "s3-fifo": S3FIFOModel,
}


class PensieveModel(Model):
    """The highest score of all leaves; then what that one continues, down to half of its depth, unless it is used."""

    def begin(self) -> None:
        self.asked = self.following = None
        self.floor = 0
        self.cost = lambda depth: 1.0

    def score(self, block, now):
        return block.depth / self.cost(block.depth) * (now - block.time)

    def reused(self, block) -> None:
        if block is self.following:
            self.following = None

    def removed(self, block, evicted) -> None:
        if block is self.following:
            self.following = None
        parent = self.blocks.get(block.parent)
        if evicted and block is self.asked and parent in self.leaves() and parent.depth > self.floor:
            self.following = parent

    def choose(self, leaves, now):
        if self.following is not None and self.following in leaves:
            self.asked = self.following
        else:
            self.following = None
            self.asked = max(leaves, key=lambda block: (self.score(block, now), -block.used))
            self.floor = self.asked.depth // 2
        return self.asked
