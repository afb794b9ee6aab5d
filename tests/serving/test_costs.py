"""What preemption costs, learned from steps."""

from __future__ import annotations

import random

import pytest

from kvtier.planning.costs import Rates
from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.prices import RECOMPUTE, SWAP
from kvtier.serving.costs import Costs

FIXED, PER_TOKEN, PER_PAIR = 4e-3, 2e-5, 1e-8


def costs_of(rates: Rates) -> Costs:
    """Costs that have seen steps of a machine, with one in ten disturbed."""
    costs, draw = Costs(512, rates), random.Random(0)
    for i in range(100):
        tokens, past = draw.randrange(1, 512), draw.randrange(2000)
        seconds = FIXED + PER_TOKEN * tokens + PER_PAIR * tokens * past
        costs.observe(tokens, tokens * past, seconds * (3.0 if not i % 10 else 1.0))
    costs.machine(100_000, False)
    return costs


def test_steps_tell_what_they_take_and_disturbed_ones_do_not_count() -> None:
    prices = costs_of(Rates()).prices()
    assert prices.fixed == pytest.approx(FIXED, rel=0.05)
    assert prices.per_token == pytest.approx(PER_TOKEN, rel=0.05)
    assert prices.per_pair == pytest.approx(PER_PAIR, rel=0.1)
    assert prices.up == pytest.approx(100_000 / Rates().up)


def test_a_fast_way_up_swaps_and_a_slow_one_recomputes() -> None:
    job = Job(1, 0.0, 801, 1000, cached=800, blocks=50, running=True)
    load = Load(0.0, [Job(0, 0.0, 9, 99, cached=8, blocks=1, running=True), job], [], 0, 16, 512, 8)
    assert costs_of(Rates(up=2e10, down=2e10)).way(job, load, 100)[0] == SWAP
    assert costs_of(Rates(up=1e8, down=2e10)).way(job, load, 100)[0] == RECOMPUTE
    assert costs_of(Rates(up=2e10, down=2e10)).way(job, load, 10)[0] == RECOMPUTE  # it does not fit on the host


def test_before_the_first_step_there_is_an_answer() -> None:
    costs = Costs(512, Rates())
    assert costs.prices().fixed > 0


def test_few_tokens_are_computed_one_by_one_sooner_than_many_at_once() -> None:
    costs = costs_of(Rates())  # a step takes as long as 200 tokens of it
    assert costs.one_by_one(1, 1)
    assert costs.one_by_one(2, 500)
    assert not costs.one_by_one(4, 500)
