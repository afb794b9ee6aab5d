"""The default follows whichever policy hits most, by shadows of a sample of the keys."""

from __future__ import annotations

import random

import pytest

from kvtier import ConfigError
from kvtier.eviction.policies.adaptive import Adaptive, hashed
from kvtier.eviction.policies.lfu import LFU
from kvtier.eviction.policies.lru import LRU
from kvtier.eviction.policies.names import CANDIDATES, FIXED, POLICIES
from kvtier.eviction.replay.offline import best_possible
from kvtier.eviction.replay.one_tier import Hits, replay, replay_one
from kvtier.eviction.replay.traces import Request, agents
from kvtier.eviction.tree import PrefixTree

BOTH = {"lru": LRU, "lfu": LFU}


def single(keys: list[int]) -> list[Request]:
    return [Request(float(i), (key,), 1, 1, 1) for i, key in enumerate(keys)]


def popular_then_recent(seed: int) -> tuple[list[Request], list[Request]]:
    """A load on which LFU is better than LRU, and one on which it is the other way round."""
    draw = random.Random(seed)
    scan = iter(range(10**6, 10**7))
    popular = [draw.randrange(80) if draw.random() < 0.4 else next(scan) for _ in range(20000)]
    recent = []
    for i in range(20000):
        recent.append(10**8 + i // 3 - draw.randrange(60))
    return single(popular), single(recent)


def test_it_follows_the_load_there_and_back() -> None:
    popular, recent = popular_then_recent(0)
    policy = Adaptive(BOTH)
    rates = {name: [replay(part, make(), 100).rate for part in (popular, recent)] for name, make in BOTH.items()}
    assert rates["lfu"][0] > rates["lru"][0] + 0.1
    assert rates["lru"][1] > rates["lfu"][1] + 0.1
    together = replay([*popular, *recent, *popular], policy, 100)
    best = 2 * rates["lfu"][0] + rates["lru"][1]
    assert policy.switches >= 2
    assert policy.leader == "lfu"
    assert together.rate * 3 >= 0.9 * best
    fixed = [replay([*popular, *recent, *popular], make(), 100).rate for make in BOTH.values()]
    assert together.rate > max(fixed)


@pytest.mark.parametrize("blocks", [500, 2000, 4000])
def test_the_default_is_close_to_the_best_policy_on_a_trace_of_agents(blocks: int) -> None:
    requests = agents(count=60, turns=20, per_second=0.4)
    rates = {name: replay(requests, make(), blocks).rate for name, make in POLICIES.items()}
    bound = best_possible(requests, blocks).rate
    assert rates["adaptive"] >= 0.98 * max(rates.values())
    assert max(rates.values()) <= bound
    assert min(rates.values()) < 0.97 * max(rates.values()), "the choice matters"


@pytest.mark.parametrize("name", CANDIDATES)
def test_with_one_candidate_it_is_that_policy_whatever_is_sampled(name: str) -> None:
    requests = agents(count=12, turns=10, per_second=0.4)
    alone = replay(requests, FIXED[name](), 300)
    for shadow in (1, 30, 1000):
        assert replay(requests, Adaptive({name: FIXED[name]}, shadow_blocks=shadow), 300) == alone


def test_a_shadow_of_a_sample_hits_as_often_as_the_whole() -> None:
    requests = agents(count=60, turns=20, per_second=0.4)
    for blocks in (2000, 5000):
        for name in ("lru", "arc"):
            policy = Adaptive({name: FIXED[name]}, shadow_blocks=blocks // 4, half_life=1e9)
            rate = replay(requests, policy, blocks).rate
            used = sum(hashed(key) < policy.rate * 2**32 for request in requests for key in request.keys)
            assert policy.rate == 0.25
            assert policy.scores()[name] / used == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("name", ["lru", "arc", "pensieve"])
def test_a_tier_that_grows_is_sampled_less_and_the_shadows_go_on(name: str) -> None:
    """From the last time on that half of the keys leave them, they hit as often as the whole."""
    requests = agents(count=60, turns=20, per_second=0.4)
    policy = Adaptive({name: FIXED[name]}, shadow_blocks=500, half_life=1e9)
    tree, found, rates = PrefixTree(policy, 500), Hits(), [1.0]
    score = used = before = blocks = 0.0
    for request in requests:
        if tree.free < len(request.keys) and tree.capacity < 5000:
            tree.resize(tree.capacity + 500)
        replay_one(tree, request, found)
        shadow = policy._shadows[name].tree
        assert len(shadow) < 1000
        if policy.rate < rates[-1]:
            rates.append(policy.rate)
            score, used, before, blocks = policy.scores()[name], 0, found.hits, found.blocks
        else:
            used += sum(hashed(key) < policy.rate * 2**32 for key in request.keys)
    shadow.check_integrity()
    assert rates == [1, 1 / 2, 1 / 4, 1 / 8]
    assert len(shadow) == pytest.approx(5000 / 8, rel=0.1)
    assert all(hashed(key) < policy.rate * 2**32 for key in shadow)
    rate = (found.hits - before) / (found.blocks - blocks)
    assert (policy.scores()[name] - score) / used == pytest.approx(rate, abs=0.03)


def test_what_is_sampled_is_even_and_the_same_everywhere() -> None:
    for keys in (range(20000), [f"block {i}" for i in range(20000)], [(i, "x") for i in range(20000)]):
        part = sum(hashed(key) < 0.1 * 2**32 for key in keys) / 20000
        assert part == pytest.approx(0.1, abs=0.01)
    assert [hashed(1), hashed("a"), hashed(b"a")] == [2433363437, 1899454895, 1431053258]


def test_nothing_to_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Adaptive({})
