"""Traces are read and made as they say, a replay counts prefixes, and the offline bound is one."""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from kvtier import ConfigError
from kvtier.eviction.policies.lru import LRU
from kvtier.eviction.policies.names import POLICIES
from kvtier.eviction.replay.offline import best_possible
from kvtier.eviction.replay.one_tier import replay
from kvtier.eviction.replay.traces import Request, agents, azure, mooncake
from kvtier.eviction.tree import PrefixTree


def drawn(seed: int, count: int) -> list[Request]:
    """Requests over a small random tree."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        name, keys = "", []
        for _ in range(draw.randint(1, 5)):
            name += draw.choice("abc" if not name else "aab")
            keys.append(name)
        found.append(Request(float(i), tuple(keys), len(keys), 1, 1))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_hit_is_what_is_kept_of_the_prefix(name: str) -> None:
    requests = drawn(3, 300)
    policy = POLICIES[name]()
    once = replay(requests, policy, 12)
    assert once.blocks == sum(len(r.keys) for r in requests)
    assert once.refused == 0
    new = {key for r in requests for key in r.keys}
    everything = replay(requests, POLICIES[name](), len(new))
    assert everything.hits == everything.blocks - len(new), "a tier of any size misses only what is new"
    assert everything.evicted == 0
    assert once.blocks - once.hits == once.evicted + 12, "what was missed is kept, or was evicted"
    assert replay(requests, POLICIES[name](), 12) == once, "the same again"


def test_a_prompt_larger_than_the_tier_keeps_its_beginning() -> None:
    request = Request(0.0, tuple(range(9)), 9, 1, 1)
    found = replay([request, request], LRU(), 5)
    assert (found.hits, found.refused) == (5, 8)


def best_by_search(requests: list[Request], blocks: int) -> int:
    """The most hits that any choice of victims gives: all sets of blocks that can be kept, from request to request."""
    states = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset, int] = {}
        for kept, hits in states.items():
            path = frozenset(request.keys)
            found = next((i for i, key in enumerate(request.keys) if key not in kept), len(request.keys))
            others = kept - path
            room = blocks - len(path)
            # Others that stay: any set of them closed under prefixes, as large as there is room for.
            most = min(room, len(others))
            for size in range(most, max(most - 2, -1), -1):
                for stay in itertools.combinations(sorted(others), size):
                    now = path | set(stay)
                    if all(len(key) == 1 or key[:-1] in now for key in stay):
                        after[now] = max(after.get(now, 0), hits + found)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_nothing_hits_more_than_the_offline_bound(seed: int) -> None:
    requests = drawn(seed, 14)
    bound = best_possible(requests, 6)
    assert bound.hits == best_by_search(requests, 6)
    longer = drawn(seed, 400)
    bound = best_possible(longer, 10)
    for make in POLICIES.values():
        assert replay(longer, make(), 10).hits <= bound.hits


def test_the_order_grows_with_leaves_and_not_with_blocks() -> None:
    tree = PrefixTree(LRU(), 40_000)
    for i in range(40_000):
        tree.insert(i, i - 1 if i % 100 else None, float(i), held=True)
        if i % 100:
            tree.release(i - 1)
        if i % 100 == 99:
            tree.release(i)
    for _ in range(20):
        for i in range(99, 40_000, 100):
            tree.reuse(i, 50_000.0)
    assert tree.leaves == 400
    assert len(tree.policy._leaves) < 3 * 400  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ traces


def test_agents_have_the_turns_and_think_times_that_are_asked_for() -> None:
    requests = agents(count=200, turns=43, turn_tokens=2200, per_second=1000.0, shared=0)
    by_agent: dict[str, list[Request]] = {}
    for request in requests:
        by_agent.setdefault(str(request.keys[0]).split(",")[0], []).append(request)
    assert statistics.mean(len(found) for found in by_agent.values()) == pytest.approx(43, rel=0.05)
    gaps = sorted(b.time - a.time for found in by_agent.values() for a, b in itertools.pairwise(found))
    assert statistics.median(gaps) == pytest.approx(5.0, rel=0.1)
    assert gaps[int(0.99 * len(gaps))] == pytest.approx(80.0, rel=0.2)
    for found in by_agent.values():
        for a, b in itertools.pairwise(found):
            assert b.tokens - a.tokens == 2200
            whole = a.tokens // a.block
            assert b.keys[:whole] == a.keys[:whole]
            assert len(b.keys) == -(-b.tokens // b.block)
            assert b.keys[whole] not in a.keys
    assert agents(count=5) == agents(count=5)
    assert agents(count=5) != agents(count=5, seed=1)


def test_files_are_read_and_others_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    row = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}
    file.write_text(json.dumps(row) + "\n")
    assert mooncake(file) == [Request(1.5, (0, 4), 600, 7, 512)]
    with pytest.raises(ConfigError, match="not an Azure"):
        azure(file, conversations=2)
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9305900,700,9\n2023-11-16 18:15:51.0,700,9\n"
    )
    found = azure(file, conversations=1)
    assert [(r.time, r.tokens, r.output) for r in found] == [
        (0.0, 374, 44),
        (4.25, 700, 9),
        (pytest.approx(4.31941), 700, 9),
    ]
    file.write_text(file.read_text() + "2023-11-16 18:15:52.0,many,9\n")
    with pytest.raises(ConfigError, match="line 5: not a request of an Azure"):
        azure(file, conversations=1)
    with pytest.raises(ConfigError, match="line 1: not a request of a Mooncake trace"):
        mooncake(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        mooncake(tmp_path / "none")
    file.write_bytes(b"\x1f\x8b\x08")
    for read in (mooncake, functools.partial(azure, conversations=1)):
        with pytest.raises(ConfigError, match="is no text"):
            read(file)
