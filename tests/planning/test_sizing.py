"""Sizes: within their bounds, and monotone in every number."""

from __future__ import annotations

import random

from kvtier.planning import sizing


def test_a_slab_is_small_against_the_budget_and_what_is_held_unless_more_is_wanted() -> None:
    rng = random.Random(0)
    for _ in range(500):
        slot = rng.choice((64, 4096, 2**20, 2**25, 2**27))
        budget, held, wanted = rng.randint(1, 2**37), rng.randint(0, 2**36), rng.randint(1, 5000)
        slots = sizing.slab_slots(budget, slot, held, wanted)
        assert slots >= 1
        assert slots * slot <= max(sizing.MAX_SLAB_BYTES, slot)
        own = min(held / sizing.GROWTH_SHARE, budget / sizing.SLABS_PER_BUDGET)
        assert slots * slot <= max(own, min(wanted * slot, budget / sizing.RUN_SHARE), slot)


def test_slab_size_never_falls_with_more_budget_more_held_or_more_wanted() -> None:
    slot = 4096
    for numbers in (
        [sizing.slab_slots(b << 20, slot, 2**28, 4) for b in range(1, 9000, 100)],
        [sizing.slab_slots(2**36, slot, h << 20, 4) for h in range(0, 2000, 50)],
        [sizing.slab_slots(2**30, slot, 2**24, w) for w in range(1, 30000, 500)],
    ):
        assert numbers == sorted(numbers)
        assert numbers[0] < numbers[-1]


def test_a_portion_of_a_layer_is_at_least_a_block_of_each_row_and_at_most_its_share() -> None:
    rng = random.Random(1)
    for _ in range(500):
        budget, block, batch = rng.randint(1, 2**34), rng.choice((64, 4096, 2**20)), rng.randint(0, 9)
        for device in (False, True):
            blocks = sizing.stream_blocks(budget, block, batch, device=device)
            bound = budget / sizing.STREAM_SHARE
            bound = bound if device else min(bound, sizing.STREAM_BYTES)
            assert blocks >= 1
            assert blocks == 1 or blocks * block * max(batch, 1) <= bound
            assert sizing.stream_blocks(2 * budget, block, batch, device=device) >= blocks
            assert sizing.stream_blocks(budget, block, batch + 1, device=device) <= blocks


def test_only_many_short_runs_are_scattered() -> None:
    assert not sizing.scattered(sizing.SCATTERED_RUNS, sizing.SCATTERED_RUNS)
    many = sizing.SCATTERED_RUNS + 1
    assert sizing.scattered(many, sizing.SHORT_RUN * many - 1)
    assert not sizing.scattered(many, sizing.SHORT_RUN * many)
