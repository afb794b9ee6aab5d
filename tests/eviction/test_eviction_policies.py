"""Every policy against a plain model of it, and what holds for all of them, on seeded random walks."""

from __future__ import annotations

import math
import os
import random

import pytest
from eviction_models import MODELS

from kvtier import ConfigError
from kvtier.eviction.policies.arc import ARC
from kvtier.eviction.policies.names import FIXED, POLICIES, policy_of
from kvtier.eviction.tree import PrefixTree

#: Events of one walk. KVTIER_TEST_OPERATIONS asks for more.
EVENTS = max(int(os.environ.get("KVTIER_TEST_OPERATIONS", "0")) // 10, 1500)
CAPACITY = 60


class Walk:
    """A seeded random walk of events on a tree, and on a model if there is one."""

    def __init__(self, tree: PrefixTree, model, seed: int) -> None:
        self.tree, self.model = tree, model
        self.draw = random.Random(seed)
        self.now = 0.0
        self.paths: list[tuple[str, ...]] = [self.path() for _ in range(25)]
        self.held: list[str] = []
        self.pinned: list[str] = []
        self.victims = 0

    def path(self) -> tuple[str, ...]:
        """Names of blocks, each with all that it continues: some begin alike."""
        names: list[str] = []
        for _ in range(self.draw.randint(1, 9)):
            names.append((names[-1] if names else "") + self.draw.choice("aab"))
        return tuple(names)

    def both(self, what: str, *args, **kwargs) -> None:
        getattr(self.tree, what)(*args, **kwargs)
        if self.model is not None:
            getattr(self.model, what)(*args, **kwargs)

    def lock(self, what: str, key: str) -> None:
        getattr(self.tree, what)(key)
        if self.model is not None:
            self.model.blocks[key].holds += 1 if what in ("hold", "pin") else -1

    def evict(self) -> str | None:
        """Of both, and the same one."""
        before = set(self.tree)
        parents = {self.tree.node(k).parent for k in before}
        expected = self.model.victim(self.now) if self.model is not None else None
        node = self.tree.victim(self.now)
        assert self.tree.victim(self.now) is node, "asking changes nothing"
        if node is not None:
            assert node.key not in parents, "a kept block continues the victim"
            assert node.key not in self.held
            assert node.key not in self.pinned
        key = self.tree.evict(self.now)
        assert key == (node.key if node else None)
        assert set(self.tree) == before - {key}
        if self.model is not None:
            assert key == expected
            if key is not None:
                self.model.remove(key, evicted=True)
        self.victims += key is not None
        return key

    def step(self) -> None:
        draw = self.draw
        self.now += draw.choice((0.0, 0.1, 1.0))
        what = draw.random()
        if what < 0.7:
            self.request(draw.choice(self.paths))
        elif what < 0.75:
            self.paths[draw.randrange(len(self.paths))] = self.path()
        elif what < 0.80 and len(self.tree):
            key = draw.choice(sorted(self.tree))
            locked, lock = draw.choice(((self.held, "hold"), (self.pinned, "pin")))
            if len(locked) < 3:
                locked.append(key)
                self.lock(lock, key)
        elif what < 0.9:
            locked, unlock = draw.choice(((self.held, "release"), (self.pinned, "unpin")))
            if locked:
                self.lock(unlock, locked.pop(draw.randrange(len(locked))))
        elif what < 0.93:
            self.evict()
        elif what < 0.96 and len(self.tree):
            key = draw.choice(sorted(self.tree))
            priority = draw.choice((0, 0, 1))
            self.tree.rank(key, priority=priority)
            if self.model is not None:
                self.model.blocks[key].priority = priority
        elif what < 0.98:
            free = [k for k in sorted(self.tree) if self.tree.node(k).stamp]
            if free:
                self.both("remove", draw.choice(free))
        else:
            gone = self.tree.expire(self.now)
            for key in gone:
                assert key not in self.tree
                if self.model is not None:
                    assert self.model.victim(self.now) == key
                    self.model.remove(key, evicted=True)

    def request(self, path: tuple[str, ...]) -> None:
        """Use what is kept, insert the rest."""
        for i, key in enumerate(path):
            if key in self.tree:
                self.both("reuse", key, self.now)
                continue
            size = self.draw.choice((1, 1, 1, 3))
            if i:
                self.lock("hold", path[i - 1])
            while self.tree.free < size and self.evict() is not None:
                pass
            fits = self.tree.free >= size
            if fits:
                expires = self.now + self.draw.uniform(1, 400) if self.draw.random() < 0.1 else math.inf
                priority = self.draw.choice((0, 0, 0, 1))
                parent = path[i - 1] if i else None
                self.both("insert", key, parent, self.now, size=size, priority=priority, expires=expires)
            if i:
                self.lock("release", path[i - 1])
            if not fits:
                return


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_evicts_what_its_model_does(name: str, seed: int) -> None:
    walk = Walk(PrefixTree(POLICIES[name](), CAPACITY), MODELS[name](CAPACITY), seed)
    for _ in range(EVENTS):
        walk.step()
        assert set(walk.tree) == set(walk.model.blocks)
    assert walk.victims > EVENTS / 4


@pytest.mark.parametrize("name", POLICIES)
def test_only_leaves_that_nobody_uses_go_and_counts_agree(name: str) -> None:
    walk = Walk(PrefixTree(POLICIES[name](), CAPACITY), None, seed=7)
    for i in range(EVENTS):
        walk.step()
        assert walk.tree.used <= CAPACITY
        if i % 20 == 0:
            walk.tree.check_integrity()
    assert walk.victims > EVENTS / 4
    while walk.held:
        walk.tree.release(walk.held.pop())
    while walk.pinned:
        walk.tree.unpin(walk.pinned.pop())
    gone = []
    while (key := walk.evict()) is not None:
        gone.append(key)
    assert len(gone) == len(set(gone))
    assert len(walk.tree) == walk.tree.used == walk.tree.leaves == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_of_a_higher_priority_goes_last_and_an_expired_one_first(name: str) -> None:
    tree = PrefixTree(POLICIES[name](), 10)
    for i in range(10):
        tree.insert(i, None, float(i), priority=int(i == 0), expires=30.0 if i == 9 else math.inf)
    assert tree.evict(30.0) == 9
    assert [tree.evict(31.0) for _ in range(9)][-1] == 0
    assert tree.evict(31.0) is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_tier_that_shrinks_says_how_much_has_to_go(name: str) -> None:
    tree = PrefixTree(POLICIES[name](), 100)
    for i in range(100):
        tree.insert(i, i - 1 if i % 10 else None, float(i))
    tree.resize(30)
    assert tree.free == -70
    assert len(tree.make_room(5, 200.0) or ()) == 75
    tree.check_integrity()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FIXED)
def test_a_thinned_tree_is_one_that_saw_the_other_blocks_alone(name: str, seed: int) -> None:
    """Its paths, depths and leaves, and the order in which all of it is evicted."""
    draw = random.Random(seed)
    whole, part = (PrefixTree(FIXED[name](), 1000) for _ in range(2))
    names: list[tuple[int, ...]] = []
    for now in range(400):
        key = (*(draw.choice([(), *names]) if names else ()), now)
        if len(key) > 12 or draw.random() < 0.4:
            key = draw.choice(names) if names else key
        if key in whole:
            whole.reuse(key, now)
        else:
            whole.insert(key, key[:-1] or None, now)
            names.append(key)
        if key[-1] % 3:
            continue
        if key in part:
            part.reuse(key, now)
        else:
            before = [key[:i] for i in range(1, len(key)) if not key[i - 1] % 3]
            part.insert(key, before[-1] if before else None, now)
    whole.thin(lambda key: not key[-1] % 3)
    whole.check_integrity()
    assert set(whole) == set(part)
    for key in part:
        assert (whole.node(key).parent, whole.node(key).depth) == (part.node(key).parent, part.node(key).depth)
    gone = [part.evict(1000) for _ in range(len(part))]
    assert [whole.evict(1000) for _ in range(len(whole))] == gone
    assert len(gone) > 50
    assert whole.used == whole.leaves == 0


def test_what_is_in_use_is_not_thinned_out() -> None:
    tree = PrefixTree(policy_of("lru"), 10)
    for key, parent in (("a", None), ("b", "a"), ("c", "b")):
        tree.insert(key, parent, 0)
    tree.pin("b")
    with pytest.raises(ValueError, match="'b' cannot go"):
        tree.thin(lambda key: key == "c")
    tree.thin(lambda key: key != "a")
    assert (tree.node("b").parent, tree.node("b").depth, tree.node("c").depth) == (None, 1, 2)
    tree.check_integrity()


def test_arc_divides_a_tier_of_another_size_alike() -> None:
    policy = ARC()
    tree = PrefixTree(policy, 100)

    def use(keys: range) -> None:
        for key in keys:
            if key in tree:
                tree.reuse(key, 0)
            else:
                tree.make_room(1, 0)
                tree.insert(key, None, 0)

    use(range(50))
    use(range(50))
    use(range(100, 200))
    use(range(100, 150))  # evicted of those used once: that list was too short
    use(range(300, 400))
    once = sum(not tree.node(key).uses and key >= 300 for key in tree)
    assert once == pytest.approx(50, abs=1)
    tree.resize(40)
    tree.make_room(1, 0)
    assert sum(key >= 300 for key in tree) == pytest.approx(20, abs=1)


def test_what_cannot_be_is_refused() -> None:
    tree = PrefixTree(policy_of("lru"), 3)
    tree.insert("a", None, 0.0)
    tree.insert("b", "a", 0.0)
    for wrong in (
        lambda: tree.insert("a", None, 1.0),
        lambda: tree.insert("d", "c", 1.0),
        lambda: tree.insert("c", "b", 1.0, size=2),
        lambda: tree.remove("a"),
        lambda: tree.release("a"),
        lambda: tree.unpin("a"),
    ):
        with pytest.raises(ValueError, match="block"):
            wrong()
    tree.hold("b")
    with pytest.raises(ValueError, match="in use"):
        tree.remove("b")
    assert tree.evict(1.0) is None
    tree.check_integrity()
    with pytest.raises(ConfigError, match="capacity 0"):
        PrefixTree(policy_of("lru"), 0)


def test_a_name_gives_a_policy_and_any_other_is_refused() -> None:
    for name, made in ((None, "Adaptive"), ("lru", "LRU"), ("pensieve", "Pensieve")):
        assert type(policy_of(name)).__name__ == made
    policy = policy_of("arc")
    assert policy_of(policy) is policy
    for wrong in ("belady", 3, type(policy)):
        with pytest.raises(ConfigError, match="'adaptive', 'lru'"):
            policy_of(wrong)  # type: ignore[arg-type]
