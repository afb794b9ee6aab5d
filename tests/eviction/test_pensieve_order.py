"""Pensieve's order (section 4.3): conversations by size x idle time over cost, the trailing half of one at a time."""

from __future__ import annotations

import random

import pytest
from eviction_models import PensieveModel

from kvtier.eviction.policies.pensieve import Pensieve
from kvtier.eviction.tree import PrefixTree


def conversations(tree: PrefixTree, lengths: list[int], times: list[float]) -> None:
    for i, (length, time) in enumerate(zip(lengths, times, strict=True)):
        for j in range(length):
            tree.insert((i, j), (i, j - 1) if j else None, time)


def drained(tree: PrefixTree, now: float) -> list[tuple[int, int]]:
    found = []
    while (key := tree.evict(now)) is not None:
        found.append(key)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
def test_conversations_go_by_score_and_give_up_their_trailing_half(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(12)]
    times = sorted(draw.uniform(0, 100) for _ in lengths)
    policy = Pensieve(None if seed % 2 else lambda depth: 1.0 + depth * depth / 50)
    cost = policy._cost or (lambda depth: 1.0)
    tree = PrefixTree(policy, 1000)
    conversations(tree, lengths, times)
    now = 101.0
    left = list(lengths)
    order = drained(tree, now)
    assert len(order) == sum(lengths)
    at = 0
    while at < len(order):
        i = order[at][0]
        scores = [n / cost(n) * (now - times[k]) if n else -1.0 for k, n in enumerate(left)]
        assert scores[i] == max(scores)
        half = left[i] - left[i] // 2
        assert order[at : at + half] == [(i, left[i] - 1 - j) for j in range(half)]
        left[i] -= half
        at += half


def test_the_paper_s_score_is_of_size_and_idle_time_and_a_cost_divides_it() -> None:
    def first(cost, lengths, times):
        tree = PrefixTree(Pensieve(cost), 100)
        conversations(tree, lengths, times)
        return tree.evict(20.0)[0]

    assert first(None, [4, 4], [0.0, 10.0]) == 0, "of one size: idle for longer"
    assert first(None, [8, 4], [5.0, 5.0]) == 0, "idle alike: the larger one"
    assert first(None, [8, 4], [15.0, 5.0]) == 1, "4 x 15 s against 8 x 5 s"
    assert first(lambda depth: float(depth * depth), [8, 4], [5.0, 5.0]) == 1, "long ones cost more to compute again"


def test_a_use_in_the_middle_of_an_eviction_ends_it() -> None:
    tree = PrefixTree(Pensieve(), 100)
    conversations(tree, [8, 7], [0.0, 1.0])
    assert [tree.evict(50.0) for _ in range(2)] == [(0, 7), (0, 6)]
    for j in range(6):
        tree.reuse((0, j), 50.0)
    assert tree.evict(51.0) == (1, 6)


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_gives_the_victims_of_the_model(seed: int) -> None:
    draw = random.Random(seed)
    tree, model = PrefixTree(Pensieve(), 80), PensieveModel(80)
    now, victims = 0.0, 0
    for _ in range(3000):
        now += draw.uniform(0.0, 1.0)
        name, length = draw.randrange(15), draw.randint(1, 16)
        # Conversations of a group have their first blocks in common.
        path = [(name // 3 if j < 3 else 100 + name, j) for j in range(length)]
        for j, key in enumerate(path):
            if key in tree:
                tree.reuse(key, now)
                model.reuse(key, now)
                continue
            if j:
                tree.hold(path[j - 1])
                model.blocks[path[j - 1]].holds += 1
            if tree.free < 1:
                expected = model.victim(now)
                assert tree.evict(now) == expected
                model.remove(expected, evicted=True)
                victims += 1
            tree.insert(key, path[j - 1] if j else None, now)
            model.insert(key, path[j - 1] if j else None, now)
            if j:
                tree.release(path[j - 1])
                model.blocks[path[j - 1]].holds -= 1
        for _ in range(draw.choice((0, 0, 0, 6))):
            expected = model.victim(now)
            assert tree.evict(now) == expected
            model.remove(expected, evicted=True)
            victims += 1
    assert victims > 3000
