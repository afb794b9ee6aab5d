"""Laws of the first placement: even over the layers, monotone in every number, never outside its bounds."""

from __future__ import annotations

import random

import pytest

from kvtier.planning import placement


@pytest.mark.parametrize("seed", range(10))
def test_spilling_levels_the_layers_and_touches_none_below_the_level(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randint(0, 12) for _ in range(rng.randint(1, 9))]
    left = list(counts)
    for _ in range(rng.randint(0, sum(counts))):
        layer = placement.victim_layer(enumerate(left))
        assert layer is not None
        left[layer] -= 1
    level = max(left)
    assert all(now == before or now >= level - 1 for now, before in zip(left, counts, strict=True))
    assert all(now >= min(before, level - 1) for now, before in zip(left, counts, strict=True))


def test_equal_layers_stay_within_one_block_of_each_other_and_all_of_them_can_spill() -> None:
    left = [7] * 5
    for n in range(35):
        layer = placement.victim_layer(enumerate(left))
        assert layer == n % 5, "the first of several equals"
        left[layer] -= 1
        assert max(left) - min(left) <= 1
    assert placement.victim_layer(enumerate(left)) is None
    assert placement.victim_layer([]) is None


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_nothing_is_written_through_below_the_watermark_and_never_less_with_more_in_use(share: float) -> None:
    counts = [placement.write_through_count(used, 1000, share, 3) for used in range(0, 1001, 10)]
    assert counts == sorted(counts)
    assert [bool(c) for c in counts] == [used >= share * 1000 for used in range(0, 1001, 10)]
    sealed = [placement.write_through_count(900, 1000, 0.9, n) for n in range(5)]
    assert all(count >= n for n, count in enumerate(sealed)), "the backlog must not grow above the watermark"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_when_the_budget_is_full_every_sealed_block_has_its_copy(share: float) -> None:
    budget, used, backlog = 1000, 0, 0
    while used < budget:
        used += 1
        backlog += 1
        backlog -= min(backlog, placement.write_through_count(used, budget, share, 1))
    assert backlog == 0


def test_a_slab_is_small_against_the_budget_unless_more_is_wanted() -> None:
    rng = random.Random(0)
    for _ in range(500):
        slot = rng.choice((64, 4096, 2**20, 2**25, 2**27))
        budget, held, wanted = rng.randint(1, 2**37), rng.randint(0, 2**36), rng.randint(1, 5000)
        slots = placement.slab_slots(budget, slot, held, wanted)
        assert slots >= 1
        assert slots * slot <= max(placement.MAX_SLAB_BYTES, slot)
        assert slots * slot <= max(budget / placement.SLABS_PER_BUDGET, wanted * slot, slot)


def test_slab_size_never_falls_with_more_budget_more_held_or_more_wanted() -> None:
    slot = 4096
    for numbers in (
        [placement.slab_slots(b << 20, slot, 2**28, 4) for b in range(1, 9000, 100)],
        [placement.slab_slots(2**36, slot, h << 20, 4) for h in range(0, 2000, 50)],
        [placement.slab_slots(2**30, slot, 2**24, w) for w in range(1, 30000, 500)],
    ):
        assert numbers == sorted(numbers)
        assert numbers[0] < numbers[-1]


def test_staging_is_at_least_one_slot_at_most_what_is_missing_and_at_most_its_share() -> None:
    for capacity in range(0, 200, 7):
        row = [placement.staging_slots(capacity, missing) for missing in range(0, 60)]
        assert row == sorted(row)
        for missing, slots in enumerate(row):
            assert 1 <= slots <= max(missing, 1)
            assert slots <= max(capacity / placement.STAGING_SHARE, 1)
    assert [placement.staging_slots(c, 50) for c in range(0, 600)] == sorted(
        placement.staging_slots(c, 50) for c in range(0, 600)
    )


def test_a_fetched_block_stays_only_where_neither_staging_nor_tails_will_ask_for_its_slot() -> None:
    for staging in range(1, 6):
        for tails in range(0, 6):
            kept = [placement.keep_fetched(free, staging, tails, 3, 3) for free in range(0, 40)]
            assert kept == sorted(kept)
            assert not kept[staging + tails], "room for staging and tails alone is not ample"
            assert kept[-1]
