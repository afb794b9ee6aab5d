"""Admission: nothing is counted twice, nothing is left out, and more of anything never needs less."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier.planning.admission import Claim, ClaimSum, Demand, demand, whole_slots


def drawn(rng: random.Random, slot: int = 0) -> Claim:
    """What a cache with blocks of one size may claim."""
    slot = slot or rng.choice((64, 192, 4096))
    filling = slot * rng.randint(0, 9)
    return Claim(
        held=filling + slot * rng.randint(0, 50),
        filling=filling,
        room=64 * rng.randint(0, 80),
        slot=slot if rng.random() < 0.8 else 0,
        smallest=slot,
        largest=slot,
    )


@pytest.mark.parametrize("seed", range(20))
def test_with_blocks_of_one_size_both_tiers_hold_all_of_them_and_the_device_one_slot_more(seed: int) -> None:
    rng = random.Random(seed)
    slot = rng.choice((64, 192, 4096))
    claims = [replace(drawn(rng, slot), slot=slot) for _ in range(rng.randint(1, 4))]
    held, filling, room = (sum(getattr(claim, name) for claim in claims) for name in ("held", "filling", "room"))
    least = demand(claims, 0).device
    assert least == filling + room + slot
    for limit in range(least, least + 5 * slot, slot // 2):
        found = demand(claims, limit)
        assert found.device == least, "what the device needs does not depend on what it has"
        assert found.host == max(held - whole_slots(limit - room - slot, slot), 0)
    assert demand(claims, None) == Demand(0, held + room), "without a device tier the host holds all"


@pytest.mark.parametrize("seed", range(10))
def test_with_several_sizes_the_host_holds_what_the_device_is_not_sure_to_hold(seed: int) -> None:
    rng = random.Random(seed)
    claims = [replace(drawn(rng, slot), slot=slot) for slot in (64, 192, 4096)]
    held, room = sum(claim.held for claim in claims), sum(claim.room for claim in claims)
    for limit in range(room + 4096, room + 40000, 576):
        # Beside the slot that blocks pass through, almost another largest slot may be left over.
        assert demand(claims, limit).host == max(held - max(limit - room - 2 * 4096 + 64, 0), 0)


@pytest.mark.parametrize("seed", range(40))
def test_the_device_holds_what_the_host_is_not_asked_to_hold(seed: int) -> None:
    rng = random.Random(seed)
    claims = [drawn(rng) for _ in range(rng.randint(1, 3))]
    claims = [x if x.slot else replace(x, held=x.filling) for x in claims]
    filling = [(x.filling, x.smallest) for x in claims]
    sealed = [x.slot for x in claims for _ in range((x.held - x.filling) // x.smallest)]
    held = sum(x.held for x in claims)
    limit = demand(claims, 0).device + rng.randint(0, 9000)
    # Open blocks cannot leave; what else is there when no block fits beside it, and one can still pass through.
    free = limit - sum(x.room for x in claims) - sum(n for n, _ in filling) - max(x.slot for x in claims)
    rng.shuffle(sealed)
    stored = sum(n for n, _ in filling)
    for slot in sorted(sealed, reverse=rng.random() < 0.5):
        if slot > free:
            break
        free -= slot
        stored += slot
    assert held - stored <= demand(claims, limit).host


@pytest.mark.parametrize("seed", range(40))
def test_more_of_anything_never_needs_less(seed: int) -> None:
    rng = random.Random(seed)
    claims = [drawn(rng) for _ in range(rng.randint(1, 3))]
    limit = demand(claims, 0).device + rng.randint(0, 9000)
    before, alone = demand(claims, limit), demand(claims, None)
    for name in ("held", "filling", "room"):
        more = [replace(claims[0], **{name: getattr(claims[0], name) + 1}), *claims[1:]]
        for one, other in ((demand(more, limit), before), (demand(more, None), alone)):
            assert one.device >= other.device
            assert one.host >= other.host
    more = [*claims, drawn(rng)]
    assert demand(more, limit).device >= before.device, "another cache"
    assert demand(more, limit).host >= before.host
    assert demand(claims, limit + 1).host <= before.host, "a larger device needs no larger host"


@pytest.mark.parametrize("seed", range(40))
def test_a_union_is_enough_for_both(seed: int) -> None:
    rng = random.Random(seed)
    one, other = drawn(rng), drawn(rng)
    both = one.union(other)
    assert both == other.union(one)
    for name in ("held", "filling", "room", "slot"):
        assert getattr(both, name) == max(getattr(one, name), getattr(other, name))
    limit = demand([both], 0).device + rng.randint(0, 9000)
    for claim in (one, other):
        assert demand([both], limit).device >= demand([claim], limit).device
        assert demand([both], limit).host >= demand([claim], limit).host
        assert demand([both], None).host >= demand([claim], None).host


def test_a_step_that_seals_nothing_needs_no_slot_for_blocks_to_pass_through() -> None:
    claim = Claim(held=640, filling=128, room=100, slot=0, smallest=64, largest=64)
    assert demand([claim], 0).device == 228
    sealing = replace(claim, slot=64)
    assert demand([sealing], 0).device == 292
    assert demand([sealing], 292 + 64) == Demand(292, 640 - 192)
    assert demand([], 1000) == demand([], None) == Demand(0, 0)
    assert [whole_slots(n, 64) for n in (63, 64, 200)] == [0, 64, 192]


def test_layers_are_added_up_and_those_without_blocks_count_for_nothing() -> None:
    claimed = ClaimSum()
    claimed.add(64, 0, 0, sealed=False)
    assert claimed.claim() == Claim()
    claimed.add(192, 3, 3, sealed=False)
    claimed.add(128, 5, 1, sealed=True, layers=2)
    claimed.add(4096, 1, 1, sealed=True, layers=0)
    assert claimed.claim(7) == Claim(
        held=3 * 192 + 10 * 128, filling=3 * 192 + 2 * 128, room=7, slot=128, smallest=128, largest=192
    )
