"""Random walks: whatever several caches do on one memory, each holds and attends to what its dense model holds."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
from walk import ENGINES, Counts, Walk, walk

from kvtier.planning.policies.names import POLICIES, policy_of
from kvtier.stats import Counters

#: Operations of all walks on shared memories together; KVTIER_TEST_OPERATIONS asks for more.
OPERATIONS = int(os.environ.get("KVTIER_TEST_OPERATIONS", "5000"))
#: Operations of one walk.
STEPS = 125
WALKS = -(-OPERATIONS // STEPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_caches_on_one_memory_hold_what_dense_caches_hold(engine: str) -> None:
    kinds = list(ENGINES)
    total = Counts()
    for seed in range(kinds.index(engine), WALKS, len(kinds)):
        counts = walk(seed, STEPS, engine=ENGINES[engine](seed))
        for name, n in vars(counts).items():
            setattr(total, name, getattr(total, name) + n)
    assert total.attended
    assert total.refused
    assert bool(total.failed) == (engine == "failing")


@pytest.mark.parametrize("seed", range(4))
def test_caches_on_a_memory_without_a_device_tier_hold_what_dense_caches_hold(seed: int) -> None:
    walk(1000 + seed, STEPS, device=(None,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
def test_caches_that_park_and_continue_hold_what_dense_caches_hold(engine: str) -> None:
    followed = 0
    for seed in range(6000, 6000 + max(WALKS // 20, 2)):
        for device in ((6_000, 20_000, 60_000), (None,)):
            trip = Walk(seed, ENGINES[engine](seed), device=device, parking=True)
            for _ in range(STEPS):
                trip.step()
            trip.end()
            followed += trip.counts.followed
    assert followed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(2))
def test_a_cache_with_a_memory_of_its_own_holds_what_a_dense_cache_holds(engine: str, seed: int) -> None:
    walk(2000 + seed, STEPS, engine=ENGINES[engine](seed), private=True, device=(None, 6_000, 20_000))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"default"}))
def test_under_every_policy_with_a_name_caches_hold_what_dense_caches_hold(name: str, engine: str) -> None:
    for seed in range(5000, 5000 + max(WALKS // 80, 1)):
        walk(seed, STEPS, engine=ENGINES[engine](seed), policy=policy_of(name))


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_a_budget_that_is_refused_leaves_what_was_there(private: bool) -> None:
    options: dict[str, Any] = {"private": private, "device": (None, 5_000), "host": (8_000, 14_000)}
    assert sum(walk(3000 + seed, STEPS, **options).refused for seed in range(3))


def test_walks_come_by_everything_that_can_happen_to_a_block() -> None:
    seen = {field.name: 0 for field in fields(Counters)}
    for seed in range(6):
        trip = Walk(4000 + seed, ENGINES["held, any order" if seed % 2 else "failing"](seed), members=3)
        for _ in range(STEPS):
            trip.step()
        total = trip.memory.stats
        seen = {name: seen[name] + bool(getattr(total, name)) for name in seen}
        trip.end()
    unseen = {name for name, walks in seen.items() if not walks}
    # Copies of queries and results are for devices that work behind the CPU's back.
    # No model here needs tensors, and nothing is damaged.
    others = {"io_buffer_misses", "dense_reads", "dense_read_bytes", "corrupt_blocks"}
    assert unseen <= others, f"no walk comes by {unseen - others}"
