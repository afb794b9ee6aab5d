"""What preemption costs, learned from steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from families import tiny_model
from workloads import _bytes_of_a_block, by_generate

from kvtier import Engine, TieredMemory
from kvtier.planning.rates import Rates
from kvtier.scheduling.job import Job, Load
from kvtier.scheduling.log import LoggedScheduler, replay
from kvtier.scheduling.prices import RECOMPUTE, SWAP
from kvtier.serving.costs import Costs
from kvtier.stats import Counters
from kvtier.testing import emulated_device, throttled, with_doubles

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


def test_steps_that_decode_do_not_drive_out_what_prompts_took() -> None:
    costs, draw = costs_of(Rates()), random.Random(1)
    for i in range(1000):
        pairs = 4 * (2000 + i)
        costs.observe(4, pairs, (FIXED + PER_TOKEN * 4 + PER_PAIR * pairs) * draw.uniform(0.98, 1.02))
    prices = costs.prices()
    assert prices.fixed == pytest.approx(FIXED, rel=0.05)
    assert prices.per_token == pytest.approx(PER_TOKEN, rel=0.05)


def test_a_fast_way_up_swaps_and_a_slow_one_recomputes() -> None:
    job = Job(1, 0.0, 801, 1000, cached=800, blocks=50, running=True)
    load = Load(0.0, [Job(0, 0.0, 9, 99, cached=8, blocks=1, running=True), job], [], 0, 16, 512, 8)
    assert costs_of(Rates(up=2e10, down=2e10)).way(job, load, 100)[0] == SWAP
    assert costs_of(Rates(up=1e8, down=2e10)).way(job, load, 100)[0] == RECOMPUTE
    assert costs_of(Rates(up=2e10, down=2e10)).way(job, load, 10)[0] == RECOMPUTE  # it does not fit on the host


def test_the_link_is_priced_by_what_copies_took() -> None:
    costs, rng = costs_of(Rates(up=2e10, down=2e10)), random.Random(0)
    total = Counters()
    for i in range(40):
        slow = 10.0 if not i % 5 else 1.0  # some copies are disturbed
        for way, rate in (("up", 4e8), ("down", 1e9)):
            nbytes = rng.randrange(1 << 20, 1 << 24)
            setattr(total, f"bytes_{way}", getattr(total, f"bytes_{way}") + nbytes)
            setattr(total, f"seconds_{way}", getattr(total, f"seconds_{way}") + slow * nbytes / rate)
        costs.copied(total)
    assert costs.prices().up == pytest.approx(100_000 / 4e8)
    assert costs.prices().down == pytest.approx(100_000 / 1e9)
    job = Job(1, 0.0, 801, 1000, cached=800, blocks=50, running=True)
    load = Load(0.0, [Job(0, 0.0, 9, 99, cached=8, blocks=1, running=True), job], [], 0, 16, 512, 8)
    assert costs.way(job, load, 100)[0] == RECOMPUTE, "the link is fifty times as slow as was said"


def test_copies_of_little_say_nothing_of_the_link_until_they_are_much() -> None:
    costs, total = costs_of(Rates(up=2e10)), Counters()
    for nbytes, rate in ((1 << 19, 2e10), ((1 << 20) - 1, 2e10), (1 << 20, 2e6), (1 << 21, 2e6)):
        total.bytes_up, total.seconds_up = nbytes, nbytes / 2e6
        costs.copied(total)
        assert costs.prices().up == pytest.approx(100_000 / rate)


@pytest.mark.parametrize(("link", "way"), [(4e9, "swap"), (2e5, "recompute")], ids=["fast", "slow"])
def test_an_engine_prices_the_way_back_by_its_own_link(link: float, way: str, tmp_path: Path) -> None:
    """A prompt of 20 tokens takes some 10 ms, 30 KB over the link 8 us or 0.15 s. All of it is decided again from its
    log."""
    model, machine, size = tiny_model("llama"), throttled(link, host=1e9), 4
    one = _bytes_of_a_block("llama", size)
    memory = TieredMemory(device_budget=13 * one, host_budget=200 * one)
    with_doubles(memory, machine)
    scheduler = LoggedScheduler("fair", tmp_path / "schedule.jsonl")
    engine = Engine(model, memory=memory, block_size=size, spill=False, sub_batches=False, scheduler=scheduler)
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1, 120) for _ in range(20)) for _ in range(6)]
    with emulated_device(model, machine, linear=1e-3, device_rate=1e9):
        names = [engine.add_request(list(p), max_new_tokens=8, do_sample=False) for p in prompts]
        while engine.step():
            pass
    outputs = [engine.output(each) for each in names]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == by_generate("llama", prompt)[0][:8]
    preempted, swapped = sum(x.preempted for x in outputs), sum(x.swapped for x in outputs)
    assert preempted
    assert swapped == (preempted if way == "swap" else 0)
    engine.close()
    memory.close()
    scheduler.close()
    found = replay(tmp_path / "schedule.jsonl", "fair")
    assert found.differences == []
    assert found.decisions > 6


def test_before_the_first_step_there_is_an_answer() -> None:
    costs = Costs(512, Rates())
    assert costs.prices().fixed > 0


def test_few_tokens_are_computed_one_by_one_sooner_than_many_at_once() -> None:
    costs = costs_of(Rates())  # a step takes as long as 200 tokens of it
    assert costs.one_by_one(1, 1)
    assert costs.one_by_one(2, 500)
    assert not costs.one_by_one(4, 500)
