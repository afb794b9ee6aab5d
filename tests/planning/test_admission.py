"""Laws of admission: nothing is counted twice, nothing is left out, and more of anything never needs less."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from kvtier.planning.admission import Step, whole_slots


def drawn(rng: random.Random) -> Step:
    slot = rng.choice((64, 192, 4096))
    return Step(
        held=slot * rng.randint(0, 50),
        coming=slot * rng.randint(0, 9),
        room=rng.randint(0, 5000),
        tails=slot * rng.randint(0, 9),
        slot=slot,
        seals=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_both_tiers_hold_is_everything_and_one_slot_more(seed: int) -> None:
    rng = random.Random(seed)
    step = drawn(rng)
    near = step.near() + step.slot * rng.randint(0, 60)
    blocks_above = whole_slots(near - step.room, step.slot)
    assert step.far(near) + blocks_above == step.held + step.coming + step.slot
    assert step.alone() == step.held + step.coming + step.room


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_never_needs_less(seed: int) -> None:
    rng = random.Random(seed)
    step = drawn(rng)
    near = step.near() + rng.randint(0, 9000)
    for field in fields(Step):
        if field.name == "slot":
            continue
        more = replace(step, **{field.name: getattr(step, field.name) + 1})
        assert more.alone() >= step.alone()
        assert more.near() >= step.near()
        assert more.far(near) >= step.far(near)
    assert step.far(near + 1) <= step.far(near), "a larger device needs no larger host"


def test_a_step_that_opens_and_fills_nothing_needs_what_it_reads_through() -> None:
    step = Step(held=640, coming=0, room=100, tails=0, slot=64, seals=False)
    assert (step.near(), step.alone(), step.far(100 + 128)) == (100, 740, 640 - 64)
    assert replace(step, seals=True).near() == 164
    assert [whole_slots(n, 64) for n in (63, 64, 200)] == [0, 64, 192]
