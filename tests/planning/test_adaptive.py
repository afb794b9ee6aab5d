"""The adaptive policy in simulation: against every fixed share, through changes, and under noise."""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvtier import ConfigError, Policy, TieredKVCache
from kvtier.planning.costs import CostModel
from kvtier.planning.makespan.groups import alike
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.learner import ShareLearner
from kvtier.planning.policies.names import POLICIES, policy_of
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.rates import FASTEST, WINDOW, Median, Rates
from kvtier.planning.simulation.bound import lower_bound
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial, compare
from kvtier.planning.step import MAX_DECODE_TOKENS, LayerPlan, LayerState, StepPlan, StepRecord, StepState

#: Random settings of the always-run test; KVTIER_TEST_SETTINGS asks for more.
SETTINGS = int(os.environ.get("KVTIER_TEST_SETTINGS", "6"))
STEPS, BLOCK, SHARES = 200, 64, 16
#: What the mean of a run's noise may be off by.
NOISE = 0.01
#: What a calibration is off by.
ERROR = 0.03


def best_fixed(load: Load, machine: Machine, seed: int, steps: int, tail: int = 0) -> float:
    """Seconds of the best share, found by trying them; `tail`: of the last steps only."""
    found = []
    for share in range(SHARES + 1):
        trial = Simulation(FixedShare(share / SHARES), machine, load, seed)
        trial.run(steps)
        found.append(seconds_of(trial, tail or steps))
    return min(found)


def seconds_of(trial: Simulation, steps: int) -> float:
    """Of its last steps."""
    return sum(record.seconds for record in trial.records[-steps:])


def calibrated(trial: Trial) -> Adaptive:
    """The policy with a profile of the trial's machine."""
    return Adaptive(trial.calibrated(ERROR))


@pytest.mark.parametrize(
    ("draw", "within", "worst", "worst_simple"),
    [
        pytest.param(Trial.even, 0.95, 1.05, 1.02, id="alike"),
        pytest.param(Trial.drawn, 0.9, 1.06, 1.06, id="uneven"),
    ],
)
def test_whatever_the_setting_it_is_close_to_the_best_share_and_to_the_simple_ways(
    draw: Callable[[int], Trial], within: float, worst: float, worst_simple: float
) -> None:
    found = compare([draw(seed) for seed in range(SETTINGS)], {"calibrated": calibrated}, STEPS)["calibrated"]
    assert max(found.shares) <= worst
    assert found.within(0.02) >= within
    assert max(found.simple) <= worst_simple
    assert min(found.bounds) >= 1 - NOISE


def test_without_a_profile_it_soon_knows_the_machine() -> None:
    trials = [Trial.even(seed) for seed in range(max(SETTINGS // 3, 3))]
    found = compare(trials, {"estimated": lambda trial: Adaptive()}, STEPS)["estimated"]
    # The first steps, in which it tries, are part of it.
    assert max(found.shares) <= 1.06
    assert statistics.median(found.shares) <= 1.02


@pytest.mark.parametrize(
    ("seed", "share"),
    [
        (446, 1.0),  # few blocks: what the host attends to is a block more or none
        (736, 15 / 16),
        (605, 0.0),  # a probe evicts for room that it needs no more
        (509, 8 / 16),  # what a busy link costs decides between two good shares far apart
    ],
)
def test_in_settings_that_are_hard_to_tell_it_is_as_close(seed: int, share: float) -> None:
    trial = Trial.even(seed)
    assert trial.run(calibrated(trial), STEPS) <= 1.015 * trial.run(FixedShare(share), STEPS)


@pytest.mark.parametrize(
    ("draw", "seed", "share"),
    [
        pytest.param(Trial.drawn, 210, 14 / 16, id="a copy takes ten times as long besides its bytes as estimated"),
        pytest.param(Trial.drawn, 162, 6 / 16, id="so it does where the first copies are small"),
        pytest.param(Trial.even, 147, 1 / 16, id="what is probed shows another rate of the host"),
        pytest.param(Trial.even, 347, 4 / 16, id="by the estimates, nothing is worth fetching"),
        pytest.param(Trial.even, 7, 15 / 16, id="steps are predicted to wait for the link, and do not"),
    ],
)
def test_what_estimates_are_wrong_about_is_soon_found_out(
    draw: Callable[[int], Trial], seed: int, share: float
) -> None:
    trial = draw(seed)
    assert trial.run(Adaptive(), 200) <= 1.06 * trial.run(FixedShare(share), 200)


FOUR = [LayerState(i, 2**20, 50, 0, 50, 1, True) for i in range(4)]


def half_fetched(model: CostModel, seconds: float, stalled: float) -> StepRecord:
    """A step that fetches half, in which the host attends at 0.86 of its rate, `seconds` long besides."""
    predicted = model.step(alike(FOUR), 0.5)
    attending = predicted.host_bytes / RATES.host / 0.86
    return StepRecord(
        *(1, 4, seconds + attending, predicted.fetched_bytes),
        seconds_up=predicted.fetched_bytes / RATES.up,
        host_seconds=attending,
        host_blocks=100,
        host_bytes=predicted.host_bytes,
        stall_seconds=stalled,
    )


def test_a_short_stall_does_not_change_what_a_busy_link_costs() -> None:
    learned = []
    for stalled in (0.0, 1e-6):
        model = CostModel(replace(RATES, host_overhead=0.0, measured=True))
        for _ in range(20):
            # The link is busy in a part of host attention: each layer's turn begins with the linear part.
            model.observe(half_fetched(model, 3.2e-3, stalled), model.step(alike(FOUR), 0.5))
        learned.append(model.rates.shared)
    assert learned[0] == pytest.approx(learned[1], rel=0.01)
    assert learned[0] > 0.2, "all of host attention is taken for what the link was busy in"


def test_what_a_busy_link_costs_is_not_learned_before_it_is_known_how_long_it_was_busy() -> None:
    model = CostModel(replace(RATES, measured=True))
    model.observe(half_fetched(model, 3.6e-3, 0.0), model.step(alike(FOUR), 0.5))
    assert (model.rates.shared, model.rates.host) == (RATES.shared, RATES.host)
    assert "shared" not in model.learned


def test_a_choice_is_left_at_once_where_what_it_was_made_for_has_changed() -> None:
    policy = Adaptive(replace(RATES, host_overhead=1e-3, measured=True))
    state = replace(Simulation(policy, Machine(RATES), LOAD)._state(), layers=FOUR, model_layers=4)
    few, many = (replace(state, layers=[replace(x, spilled=n) for x in FOUR]) for n in (1, 500))
    for _ in range(3):
        policy.plan(few)
    before = policy.decisions(state.cache)[-1].prediction.share
    policy.plan(many)
    assert before >= 0.5, "a block of a layer is fetched sooner than the host is asked"
    assert policy.decisions(state.cache)[-1].prediction.share < before


def test_nothing_begins_while_nothing_of_the_cache_is_spilled() -> None:
    policy, state = Adaptive(), Simulation(Adaptive(), Machine(RATES), LOAD)._state()
    nothing = replace(state, layers=[replace(x, spilled=0, fetched=0) for x in state.layers])
    for _ in range(3):
        assert policy.plan(nothing) == Policy().plan(nothing)
    policy.plan(state)
    assert [x.reason for x in policy.decisions(state.cache)] == ["first"]


@pytest.mark.parametrize("seed", range(4))
def test_no_share_is_faster_than_the_bound(seed: int) -> None:
    trial = Trial.drawn(200 + seed)
    quiet = replace(trial, machine=replace(trial.machine, noise=0.0))
    assert quiet.bound(40) <= quiet.best_share(40)


class KeepsLayersWhole(Policy):
    """The last layers leave first and whole; the host attends to them."""

    def plan(self, state: StepState) -> StepPlan:
        return StepPlan([LayerPlan() for _ in state.layers])

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        return self.in_turn(sorted(candidates, key=lambda x: -x.layer), blocks)


def test_no_uneven_placement_is_faster_than_the_bound() -> None:
    block, layers, sealed = 64 * 1024, 8, 8192 // 64
    load = Load(layers, 1e-4, block, 64, 8192, 1, layers * (sealed // 2 + 1) * block)
    machine = Machine(Rates(up=3e9, host=200e9, device=3e12, host_overhead=150e-6, shared=0.0))
    uneven, even = (Simulation(policy, machine, load).run(40) for policy in (KeepsLayersWhole(), Policy()))
    assert uneven < 0.9 * even, "a setting in which whole layers do not pay shows nothing"
    assert lower_bound(load, machine, 40) <= uneven


#: A decode step of a model of 16 layers for which both the link and the host have work.
LOAD = Load(16, 2e-4, 4096 * BLOCK, BLOCK, 8192, 4, 16 * 4 * 8192 * 4096 * 6 // 10)
RATES = Rates(up=25e9, host=60e9, device=1.5e12, shared=0.2)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_after_the_links_rate_halves_it_is_close_to_the_new_best_in_fifty_steps(noise: float) -> None:
    machine = Machine(RATES, noise, traffic=lambda step: 0.5 if step >= 100 else 0.0)
    trial = Simulation(Adaptive(), machine, LOAD, 1)
    trial.run(200)
    slower = Machine(replace(RATES, up=RATES.up / 2), noise)
    assert seconds_of(trial, 50) <= 1.05 * best_fixed(LOAD, slower, 1, 200, tail=50)
    shares = [record.fetched for record in trial.records]
    assert statistics.median(shares[150:]) < 0.8 * statistics.median(shares[50:100]), "it fetches as before"


#: A small model on a slow machine; see `benchmarks/scenarios/planner.py`.
SMALL = Load(6, 3e-3, 32768, BLOCK, 2088, 1, 2_300_000)
SLOW = Rates(up=0.08e9, down=0.08e9, host=0.15e9, device=3e9, copy_overhead=20e-6, host_overhead=60e-6, shared=0.0)


def test_a_link_that_halves_just_after_a_probe_is_not_taken_for_what_the_probe_has_shown() -> None:
    """Else what other shares gave on the old link would count on the new one, and those that fetch more seem good."""
    policy, change, steps = Adaptive(), 225, 320
    trial = Simulation(policy, Machine(SLOW, 0.01, lambda step: 0.5 * (step >= change)), SMALL, 0)
    trial.run(steps)
    ended = [x.step for x in policy.decisions(1) if x.reason == "back"]
    assert any(change - WINDOW < x < change for x in ended), "no probe ended shortly before"
    took = [x.seconds for x in trial.records]
    settled = statistics.median(took[-20:])
    late = [statistics.median(took[i : i + 10]) for i in range(change + 20, steps - 10)]
    assert max(late) < 1.1 * settled


@pytest.mark.parametrize("link", [0.04e9, 0.08e9, 0.16e9])
def test_what_layers_wait_for_while_the_host_attends_for_them_counts_once(link: float) -> None:
    """The first steps that fetch do so for more layers than the link has time for, and wait for both. What is left of
    such a step is no less than what it computes."""
    machine, policy = Machine(replace(SLOW, up=link, down=link), noise=0.01), Adaptive()
    trial = Simulation(policy, machine, SMALL, 0)
    trial.run(120)
    assert any(x.stall_seconds > 0.1 * x.seconds and x.host_seconds > 0.2 * x.seconds for x in trial.records[1:20])
    model = policy.model(1)
    assert model is not None
    assert model.linear == pytest.approx(6 * 3e-3, rel=0.03)
    assert seconds_of(trial, 60) <= 1.02 * best_fixed(SMALL, machine, 0, 120, 60)


def test_a_burst_of_three_steps_changes_nothing() -> None:
    quiet, burst = Adaptive(), Adaptive()
    Simulation(quiet, Machine(RATES), LOAD).run(200)
    machine = Machine(RATES, traffic=lambda step: 0.7 if 100 <= step < 103 else 0.0)
    trial = Simulation(burst, machine, LOAD)
    trial.run(200)
    assert max(record.seconds for record in trial.records[100:103]) > 1.1 * trial.records[90].seconds
    assert [(x.step, x.reason, x.prediction.share) for x in burst.decisions(1)] == [
        (x.step, x.reason, x.prediction.share) for x in quiet.decisions(1)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize(
    "while_it_lasts",
    [{"up": RATES.up / 10}, {"host": RATES.host / 10}, {"host": RATES.host / 3}, {"host_overhead": 2e-3}],
    ids=["link", "host", "host, less", "overhead"],
)
def test_after_a_disturbance_it_is_as_good_as_before(while_it_lasts: dict[str, float], steps: int) -> None:
    machine = Machine(RATES, 0.02)
    trial = Simulation(Adaptive(replace(RATES, measured=True)), machine, LOAD, 5)
    trial.run(100)
    before = trial.policy.decisions(1)[-1].prediction.share
    trial.machine = replace(machine, rates=replace(RATES, **while_it_lasts))
    trial.run(steps)
    assert trial.policy.decisions(1)[-1].prediction.share != before, "nothing was disturbed"
    trial.machine = machine
    trial.run(600)
    assert seconds_of(trial, 50) <= 1.05 * best_fixed(LOAD, machine, 5, 700 + steps, tail=50)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "wrong",
    [{"host": 8e9}, {"host": 600e9}, {"up": 2.5e9}, {"up": 250e9}, {"host_overhead": 5e-3}, {"device": 1.5e11}],
    ids=["slow host", "fast host", "slow link", "fast link", "overhead", "slow device"],
)
def test_a_profile_that_is_wrong_is_found_out(wrong: dict[str, float]) -> None:
    trial = Simulation(Adaptive(replace(RATES, **wrong, measured=True)), Machine(RATES, 0.02), LOAD, 5)
    trial.run(600)
    assert seconds_of(trial, 50) <= 1.05 * best_fixed(LOAD, Machine(RATES, 0.02), 5, 600, tail=50)


@pytest.mark.parametrize("seed", [1039, 1121, 1224, 1293])
def test_where_steps_take_less_than_their_parts_are_known_to_it_learns_which_part(seed: int) -> None:
    trial = Trial.even(seed)  # what is estimated of overheads and of the device is more than all of a step
    assert trial.run(Adaptive(), STEPS) <= 1.05 * trial.best_share(STEPS)


def test_steps_that_take_no_time_at_all_do_not_make_a_rate_of_it() -> None:
    model = CostModel(RATES)
    for _ in range(3000):
        for share in (0.0, 1.0):
            model.observe(StepRecord(1, 4, 1e-12, cache=1), model.step(alike(FOUR), share))
    assert model.rates.device <= FASTEST
    assert model.rates.host_overhead == 0.0
    assert model.step(alike(FOUR), 0.5).seconds > 0


def test_probes_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    probing, quiet = Adaptive(RATES), Adaptive(RATES)
    with_probes = Simulation(probing, Machine(RATES, 0.02), LOAD, 5).run(1200)
    monkeypatch.setattr(ShareLearner, "_may_probe", lambda *args: False)
    without = Simulation(quiet, Machine(RATES, 0.02), LOAD, 5).run(1200)
    assert len([x for x in probing.decisions(1) if x.reason == "probe"]) >= 3
    assert with_probes <= 1.005 * without


@pytest.mark.parametrize(
    "wrong",
    [{name: value} for name in ("up", "down", "host", "device") for value in (0.0, -1.0, math.nan, math.inf)]
    + [{"copy_overhead": -1e-6}, {"host_overhead": math.nan}, {"shared": 1.0}, {"shared": -0.1}, {"up": "fast"}],
    ids=str,
)
def test_rates_that_no_machine_has_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="bytes per second"):
        Rates(**wrong)


def test_noise_does_not_make_it_flap() -> None:
    policy = Adaptive()
    Simulation(policy, Machine(RATES, noise=0.05), LOAD, 3).run(1000)
    moves = [x for x in policy.decisions(1) if x.step > 100 and x.reason == "model"]
    assert len(moves) <= 5


@pytest.mark.parametrize("seed", range(4))
def test_fetching_that_hides_behind_a_step_costs_nothing(seed: int) -> None:
    rng = random.Random(seed)
    layers, context = rng.choice((16, 24, 32)), rng.choice((8192, 16384))
    block = 4096 * BLOCK
    linear = 10 ** rng.uniform(-3.6, -3)
    kv = layers * context // BLOCK * block
    load = Load(layers, linear, block, BLOCK, context, 1, int(kv * 0.75))
    # The fetched part, with the room that it takes, moves within nine tenths of the computation. The host is useless.
    spilled = 0.25 * kv / (1 - 3 / layers) + 10 * layers * block
    rates = Rates(up=spilled / (0.9 * layers * linear), host=1e9, device=1e13, copy_overhead=0.0)
    trial = Simulation(Adaptive(), Machine(rates), load)
    trial.run(100)
    resident = Simulation(Adaptive(), Machine(rates), replace(load, device_bytes=4 * kv))
    resident.run(100)
    assert all(record.fetched for record in trial.records[50:])
    assert seconds_of(trial, 50) <= 1.01 * seconds_of(resident, 50)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_where_the_host_is_of_use_and_copies_have_overheads(seed: int) -> None:
    """With the rates of a machine that was measured, at any part of the step that the copies take up to nine tenths."""
    rng = random.Random(seed)
    layers, context, overhead = rng.choice((16, 24, 32)), rng.choice((8192, 16384)), 10e-6
    block, linear = 4096 * BLOCK, 10 ** rng.uniform(-3.6, -3)
    kv = layers * context // BLOCK * block
    spilled = 0.25 * kv / (1 - 3 / layers) + 10 * layers * block
    moves = layers * (rng.uniform(0.5, 0.9) * linear - overhead)  # seconds
    rates = Rates(up=spilled / moves, host=60e9, device=1.5e12, copy_overhead=overhead, measured=True)
    load = Load(layers, linear, block, BLOCK, context, 1, int(kv * 0.75))
    trial = Simulation(Adaptive(rates), Machine(rates), load)
    trial.run(100)
    resident = Simulation(Adaptive(rates), Machine(rates), replace(load, device_bytes=4 * kv))
    resident.run(100)
    assert seconds_of(trial, 50) <= 1.01 * seconds_of(resident, 50)


@pytest.mark.parametrize("free", [0, 2**24, 2**26, 2**27])
def test_where_nothing_overlaps_it_does_what_the_default_does(free: int) -> None:
    trial = Simulation(Adaptive(), Machine(RATES), LOAD)
    state = replace(trial._state(), overlaps=False, free_bytes=free)
    assert Adaptive().plan(state) == Policy().plan(state)


def test_the_link_down_changes_without_anything_being_forgotten() -> None:
    layers = [LayerState(i, 2**20, 50, 0, 50, 1, True) for i in range(4)]
    record = StepRecord(
        1, 4, 0.03, bytes_down=2**22, seconds_down=2e-4, host_seconds=3.5e-3, host_blocks=200, host_bytes=200 * 2**20
    )
    model, jumps = CostModel(replace(RATES, measured=True)), list[bool]()
    for step in range(60):
        slower = replace(record, seconds_down=(2e-4 if step < 30 else 4e-4))
        jumps.append(model.observe(slower, model.step(alike(layers), 0.0)))
    assert model.rates.down == pytest.approx(2**22 / 4e-4)
    assert not any(jumps[1:]), "no prediction depends on it"


def test_steps_of_some_tokens_and_of_one_are_learned_apart() -> None:
    policy, nbytes = Adaptive(replace(RATES, measured=True)), 200 * 2**20
    layers = [LayerState(i, 2**20, 50, 0, 50, 1, True) for i in range(4)]
    host_seconds = {1: 3.5e-3, 5: 14e-3, 500: 99e-3}
    for step in range(120):
        tokens = (1, 5, 5, 500)[step % 4]  # others ask for a draft's verification in between
        policy.plan(StepState(tokens, layers, 2**24, 2**28, cache=1, device="cuda:0", model_layers=4))
        expected = policy.prediction(1, "cuda:0")
        assert (expected is None) == (tokens == 500 or step < 2), "nothing is known before a kind's first step"
        policy.observe(
            StepRecord(
                *(tokens, 4, 0.03, nbytes * (tokens == 500), 0, 0.02 * (tokens == 500)),
                host_seconds=host_seconds[tokens],
                host_blocks=200,
                host_bytes=nbytes,
                cache=1,
            )
        )
    one, several = (policy._caches[1]["cuda:0", x].model for x in (False, True))
    for model, tokens in ((one, 1), (several, 5)):
        assert model.rates.host == pytest.approx(nbytes / host_seconds[tokens])
        assert model.rates.up == pytest.approx(nbytes / 0.02)
    assert policy.model(1) is several


@pytest.mark.parametrize("tokens", [2, 5, 16])
def test_it_adapts_where_every_step_verifies_a_draft(tokens: int) -> None:
    load, policy = replace(LOAD, tokens=tokens), Adaptive()
    trial = Simulation(policy, Machine(RATES), load)
    trial.run(STEPS)
    assert policy.decisions(1)
    assert seconds_of(trial, STEPS // 2) <= 1.02 * best_fixed(load, Machine(RATES), 0, STEPS, STEPS // 2)


def test_kinds_of_steps_in_turn_see_the_same_link_and_do_not_make_it_flap() -> None:
    # A copy is short, so that what it takes besides its bytes counts as much as these.
    small = Load(32, 5e-5, 512 * BLOCK, BLOCK, 2048, 1, 32 * 2048 * 512 * 7 // 10)
    rates = Rates(up=25e9, host=6e9, device=1.5e12, copy_overhead=20e-6, measured=True)
    policy = Adaptive(rates)
    trial, rng = Simulation(policy, Machine(rates), small), random.Random(0)
    seen = list[float]()
    for _ in range(STEPS):
        trial.load = replace(small, tokens=rng.choice((1, 5)))  # a draft to verify is not found for each step
        trial.step()
        seen += [known.model.rates.up for each in policy._caches.values() for known in each.values()]
    assert max(seen) <= 1.2 * min(seen)
    found = policy.decisions(1)
    assert len([x for x in found if x.step > 30 and x.reason == "model"]) <= 2


def test_decisions_are_in_the_order_in_which_they_were_made() -> None:
    policy, layers = Adaptive(), FOUR
    for step in range(90):
        tokens = 1 if step < 80 else 5
        policy.plan(StepState(tokens, layers, 2**24, 2**28, cache=1, device="cuda:0", model_layers=4))
        policy.observe(StepRecord(tokens, 4, 0.03, host_seconds=3.5e-3, host_blocks=200, host_bytes=2**27, cache=1))
    steps = [x.step for x in policy.decisions(1)]
    assert steps[0] == 1
    assert steps[-1] > 80, "the last one is about the last steps"


def test_what_a_cache_goes_on_with_comes_back_from_its_second_step_on() -> None:
    policy = Adaptive(replace(RATES, host=1e15, measured=True))  # which does not fetch
    state = StepState(1, FOUR, 2**30, 2**30, cache=1, device="cuda:0", model_layers=4)
    assert not any(x.fetch for x in policy.plan(state).layers), "nobody waits for it before the first token"
    state = replace(state, last=StepRecord(1, 4, 0.03, cache=1))
    assert all(x.keep for x in policy.plan(state).layers)


def test_a_prompt_between_steps_is_planned_with_their_share() -> None:
    policy = Adaptive()
    trial = Simulation(policy, Machine(RATES), LOAD)
    trial.run(60)
    decided = policy.decisions(1)[-1].prediction
    assert 0 < decided.share < 1
    state = trial._state()
    state.tokens = MAX_DECODE_TOKENS + 1
    assert [x.fetch for x in policy.plan(state).layers] == [
        x.fetch for x in FixedShare(0.0).plan_of(state, decided.share).layers
    ]
    assert policy.prediction(1, "simulated") is None


def test_its_answer_does_not_depend_on_what_other_caches_do() -> None:
    alone, shared = Adaptive(), Adaptive()
    one = Simulation(alone, Machine(RATES), LOAD)
    one.run(60)
    two = Simulation(shared, Machine(RATES), LOAD)
    other = Simulation(shared, Machine(replace(RATES, up=1e9)), LOAD)
    for _ in range(60):
        two.step()
        state = other._state()
        state.cache = 2
        shared.plan(state)
    assert [x.prediction.share for x in shared.decisions(1)] == [x.prediction.share for x in alone.decisions(1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [2003, 2083])
@pytest.mark.parametrize("period", [2, 8, 16])
def test_a_link_that_goes_to_and_fro_does_not_make_it_flap(period: int, seed: int) -> None:
    """Another process uses the link every so many steps: then there is a share between those of either rate."""
    drawn = Trial.even(seed)
    machine, rates = replace(drawn.machine, noise=0.0), drawn.machine.rates
    slow = replace(machine, rates=replace(rates, up=rates.up / 2))

    def seconds(policy: Policy) -> float:
        trial = Simulation(policy, machine, drawn.load)
        for step in range(900):
            trial.machine = slow if step // period % 2 else machine
            trial.step()
        return sum(x.seconds for x in trial.records[300:])

    best = min(seconds(FixedShare(i / 8)) for i in range(9))
    policy = Adaptive(drawn.calibrated(0.0))
    assert seconds(policy) <= 1.1 * best
    late = [x for x in policy.decisions(1) if x.step > 300]
    assert len(late) <= 600 // 16, "the share follows each change"


def test_a_new_cache_knows_the_link_that_another_one_uses() -> None:
    slow = replace(RATES, up=RATES.up / 4, down=RATES.down / 4)
    policy = Adaptive()
    Simulation(policy, Machine(slow), LOAD).run(60)
    known = policy.model(1)
    assert known is not None
    state = Simulation(policy, Machine(slow), LOAD)._state()
    state.cache = 2
    policy.plan(state)
    found = policy.model(2)
    assert found is not None
    assert (found.rates.up, found.rates.host) == (known.rates.up, Adaptive().rates.host)
    assert found.rates.up == pytest.approx(slow.up, rel=0.1)


def test_caches_that_take_turns_each_learn_however_long_ago_theirs_was() -> None:
    policy = Adaptive()
    each = [Simulation(policy, Machine(RATES), LOAD, number) for number in range(300)]
    for _ in range(12):
        for number, simulation in enumerate(each):
            state = simulation._state()
            state.cache = number
            policy.plan(state)
            policy.observe(StepRecord(cache=number, tokens=1, layers=16, seconds=0.01, bytes_up=10**8, seconds_up=0.01))
    models = [policy.model(number) for number in range(300)]
    assert {x.linear is not None for x in models if x is not None} == {True}
    assert None not in models


def test_a_median_follows_a_lasting_change_and_ignores_a_shorter_one() -> None:
    median = Median(7)
    for value in (1.0,) * 7 + (9.0,) * 3:
        median.add(value)
    assert median.value == 1.0
    median.add(9.0)
    assert median.value == 9.0


def test_policies_have_names_and_other_names_are_refused() -> None:
    for name in POLICIES:
        assert isinstance(policy_of(name, 0.25), Policy)
        assert policy_of(name, 0.25).write_through == 0.25
        TieredKVCache(policy=name)
    for wrong in ("fastest", "", 3, Policy):
        with pytest.raises(ConfigError, match="adaptive"):
            TieredKVCache(policy=wrong)  # type: ignore[arg-type]
