"""What the adaptive policy makes of steps that take something other than predicted, told to it step by step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.planning.costs import CostModel, Prediction
from kvtier.planning.makespan.groups import alike
from kvtier.planning.makespan.linear import KEPT, LATE, TRUSTED, LinearPart
from kvtier.planning.makespan.linear import LINEAR as LINEAR_WINDOW
from kvtier.planning.policies.adaptive import CACHES, Adaptive
from kvtier.planning.policies.learner import (
    BELIEVED,
    CHOICES,
    HYSTERESIS,
    MEMORY,
    PERIOD,
    PROBE,
    SPACING,
    ShareLearner,
    _as_good,
    _least,
    _near,
    _some,
)
from kvtier.planning.policy import Policy
from kvtier.planning.rates import WINDOW, Rates
from kvtier.planning.simulation.simulate import Machine, Simulation
from kvtier.planning.step import LayerState, StepPlan, StepRecord, StepState
from tests.planning.test_adaptive import LOAD, RATES

LAYERS = [LayerState(i, 2**20, 50, 0, 200, 1, True) for i in range(16)]
STATE = StepState(1, LAYERS, 2**30, 2**33, StepRecord(), 1, "cuda:0", len(LAYERS))
TRUE = Rates(up=25e9, host=60e9, device=1.5e12, copy_overhead=0.0, host_overhead=0.0, shared=0.0, measured=True)
LINEAR = 2e-4 * len(LAYERS)


def step_of(rates: Rates, share: float, linear: float = LINEAR) -> StepRecord:
    """What a step with this share takes, at these rates."""
    world = CostModel(rates, linear=linear)
    true = world.step(alike(LAYERS), share)
    return StepRecord(
        *(1, len(LAYERS), true.seconds, true.fetched_bytes),
        seconds_up=true.link,
        host_seconds=true.host_bytes / rates.host,
        host_bytes=true.host_bytes,
        # What is longer than computing and the host's part is a wait for fetches, which began with the host's part.
        stall_seconds=true.link - true.base if true.link > true.base + true.exposed else 0.0,
        cache=1,
    )


class Told:
    """A policy, and steps that take what `rates` say, times a factor for what it has chosen."""

    def __init__(self) -> None:
        self.policy = Adaptive(TRUE)
        self.rates = TRUE

    def run(
        self, steps: int, factor: Callable[[float, int], float] = lambda share, step: 1.0, stalled: float = 0.0
    ) -> None:
        """`stalled`: the part of each step in which layers wait for copies, at the least."""
        for step in range(steps):
            self.policy.plan(STATE)
            record = step_of(self.rates, self.share)
            record.seconds *= factor(self.share, step)
            record.stall_seconds = max(record.stall_seconds, stalled * record.seconds)
            self.policy.observe(record)

    @property
    def share(self) -> float:
        return self.policy.decisions(1)[-1].prediction.share


def test_what_is_wrong_about_one_choice_is_less_wrong_about_another_far_from_it() -> None:
    told = Told()
    told.run(40)
    before, decided = told.share, len(told.policy.decisions(1))
    told.run(20, lambda share, step: 1.8 if abs(share - before) < 0.1 else 1.0)
    after = [x for x in told.policy.decisions(1)[decided:] if x.reason == "model"]
    assert after, "it stays with what takes longer, as if all choices did"
    assert max(abs(x.prediction.share - before) for x in after) > 0.1
    assert after[-1].step < PROBE


def test_what_a_choice_once_gave_is_forgotten_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShareLearner, "_may_probe", lambda *args: False)  # which finds it out sooner
    told = Told()
    told.run(40)
    before = told.share
    told.run(20, lambda share, step: 1.8 if abs(share - before) < 0.1 else 1.0)
    assert abs(told.share - before) > 0.1, "nothing was disturbed"
    told.run(MEMORY - 60)
    assert abs(told.share - before) > 0.05, "it goes back without a reason"
    told.run(100)
    assert told.share == pytest.approx(before, abs=0.05)


def test_devices_that_share_a_model_each_answer_for_their_part_of_it() -> None:
    shared, alone = Halves(Adaptive(replace(RATES, measured=True))), Adaptive(replace(RATES, measured=True))
    trial = Simulation(shared, Machine(RATES), LOAD)
    trial.run(100)
    Simulation(alone, Machine(RATES), LOAD).run(100)
    assert sum(x.seconds for x in shared.expected) == pytest.approx(trial.records[-1].seconds, rel=0.05)
    share = alone.decisions(1)[-1].prediction.share
    assert [x.share for x in shared.expected] == pytest.approx([share] * 2, abs=0.07)


class Halves(Policy):
    """Asks a policy for two devices that have half of the layers each."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.expected: list[Prediction] = []

    def plan(self, state: StepState) -> StepPlan:
        half = len(state.layers) // 2
        found = [
            self.policy.plan(
                replace(
                    state,
                    layers=layers,
                    device=device,
                    free_bytes=state.free_bytes // 2,
                    device_bytes=state.device_bytes // 2,
                )
            )
            for device, layers in (("a", state.layers[:half]), ("b", state.layers[half:]))
        ]
        self.expected = [x for x in (self.policy.prediction(1, device) for device in ("a", "b")) if x is not None]
        return StepPlan(found[0].layers + found[1].layers, max(x.reserve for x in found))

    def observe(self, record: StepRecord) -> None:
        self.policy.observe(record)


def test_after_a_rate_has_changed_nothing_is_held_against_a_choice() -> None:
    told, fresh = Told(), Told()
    told.run(30)
    before = told.share
    told.run(14, lambda share, step: 1.8 if abs(share - before) < 0.1 else 1.0)
    assert abs(told.share - before) > 0.1, "nothing was disturbed"
    told.rates = fresh.rates = replace(TRUE, up=1.2 * TRUE.up)
    told.run(19)  # no probe has found it out yet
    fresh.run(63)
    assert told.share == pytest.approx(fresh.share, abs=0.05)


@pytest.mark.parametrize(("wrong", "moves"), [(0.0, True), (0.3, False)])
def test_where_predictions_are_worse_a_change_has_to_promise_more(wrong: float, moves: bool) -> None:
    told = Told()
    told.run(60, lambda share, step: (1 + wrong, 1.0, 1 - wrong, 1.0)[step % 4])
    before = told.share
    told.rates = replace(TRUE, up=1.07 * TRUE.up, host=0.93 * TRUE.host)  # too little to be other ones
    told.run(50, lambda share, step: (1 + wrong, 1.0, 1 - wrong, 1.0)[step % 4])
    assert (told.share != before) == moves
    # What there is to gain is more than a change has to promise where predictions are right.
    model = CostModel(told.rates, linear=LINEAR)
    gain = model.step(alike(LAYERS), before).seconds / min(model.step(alike(LAYERS), i / 32).seconds for i in range(33))
    assert 1.015 < gain < 1.05


def learned(model: CostModel, record: StepRecord, share: float) -> bool:
    return model.observe(record, model.step(alike(LAYERS), share))


def test_a_step_in_which_blocks_still_move_says_nothing_of_the_linear_part() -> None:
    model = CostModel(TRUE)
    for _ in range(10):
        learned(model, step_of(TRUE, 0.0), 0.0)
    before, errors = model.linear, list(model._errors._values)
    for _ in range(40):
        # What the last share has asked for is still on its way.
        learned(model, replace(step_of(TRUE, 0.0), bytes_up=800 * 2**20, seconds_up=0.03, seconds=0.2), 0.0)
    assert before == pytest.approx(LINEAR)
    assert model.linear == before
    assert list(model._errors._values) == errors
    assert "up" in model.learned, "the link's rate is learned from it all the same"


def test_what_is_idle_behind_a_link_that_is_late_is_no_linear_part() -> None:
    """While fetches wait for room and reads for fetches, nothing computes, and no stall says so."""
    model, groups = CostModel(TRUE, chooses=True), alike(LAYERS)
    for share in (0.0, 0.95):
        for _ in range(100):
            prediction, record = model.step(groups, share), step_of(TRUE, share)
            if share:
                assert prediction.waits
                assert prediction.binding == "link"
                record.seconds += 0.5 * LINEAR
            model.observe(record, prediction)
    assert model.linear == pytest.approx(LINEAR)
    assert model.step(groups, 0.0).seconds == pytest.approx(step_of(TRUE, 0.0).seconds)


def test_a_policy_that_chooses_does_not_take_waits_for_computing() -> None:
    told = Told()
    told.run(40, stalled=0.02)
    model = told.policy.model(1)
    assert model is not None
    before = model.linear
    told.run(100, lambda share, step: 1.1, stalled=0.02)  # no rate is another one, and layers waited before, too
    assert model.linear == pytest.approx(before)


def test_where_no_layer_waits_for_copies_longer_steps_are_taken_for_computing() -> None:
    """However near to waiting for the link they were predicted to be, as they are with the best share."""
    told = Told()
    told.run(40)
    model = told.policy.model(1)
    assert model is not None
    assert model.linear == pytest.approx(LINEAR)
    expected = step_of(TRUE, told.share).seconds
    assert expected == pytest.approx(model.step(alike(LAYERS), told.share).fetching, rel=0.1)
    told.run(100, lambda share, step: 1.1)
    assert model.linear > 1.02 * LINEAR


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95, 1.0])
def test_a_linear_part_that_is_shorter_than_known_is_learned_from_all_steps(share: float) -> None:
    model, groups = CostModel(TRUE, chooses=True, linear=2 * LINEAR), alike(LAYERS)
    for _ in range(200):
        model.observe(step_of(TRUE, share), model.step(groups, share))
    assert model.linear == pytest.approx(LINEAR)


def test_of_noise_behind_a_link_that_is_late_the_linear_part_does_not_become_shorter() -> None:
    model, groups, rng = CostModel(TRUE, chooses=True), alike(LAYERS), random.Random(0)
    for share in (0.0, 0.95):
        for _ in range(300):
            record = step_of(TRUE, share)
            record.seconds += rng.gauss(0.0, 0.1 * LINEAR)
            model.observe(record, model.step(groups, share))
    assert model.linear == pytest.approx(LINEAR, rel=0.05)


def test_what_a_disturbance_adds_to_the_linear_part_goes_also_while_steps_wait_for_the_link() -> None:
    model, groups = CostModel(TRUE, chooses=True), alike(LAYERS)

    def steps(number: int, share: float, linear: float, idle: float = 0.0) -> None:
        for _ in range(number):
            record = step_of(TRUE, share, linear)
            record.seconds += idle
            model.observe(record, model.step(groups, share))

    steps(63, 0.0, LINEAR)
    steps(63, 0.0, 1.5 * LINEAR)  # disturbed
    assert model.linear == pytest.approx(1.5 * LINEAR)
    steps(63, 0.95, LINEAR, 0.2 * LINEAR)
    assert model.linear == pytest.approx(1.2 * LINEAR), "such steps show at most so much"
    steps(KEPT + 1, 0.0, LINEAR)  # a probe
    assert model.linear == pytest.approx(LINEAR)
    steps(LATE, 0.95, LINEAR, 0.2 * LINEAR)
    assert model.linear == pytest.approx(LINEAR)
    steps(LINEAR_WINDOW, 0.0, 2 * LINEAR)
    assert model.linear == pytest.approx(2 * LINEAR), "what waited for the link says nothing of what is slower now"


@pytest.mark.parametrize("late", [True, False])
def test_of_noise_alone_nothing_is_host_overhead(late: bool) -> None:
    """Steps that wait for the link make what is known of others no surer."""
    model, groups, rng = CostModel(TRUE, chooses=True), alike(LAYERS), random.Random(3)
    for _ in range(100):
        for share in (0.0, *[0.95] * (10 * late), 1.0):
            record = step_of(TRUE, share)
            record.seconds += abs(rng.gauss(0.0, 0.1 * LINEAR))
            model.observe(record, model.step(groups, share))
    assert model.rates.host_overhead == TRUE.host_overhead


@pytest.mark.parametrize("believed", [10e-6, 300e-6])
@pytest.mark.parametrize("chooses", [False, True])
def test_the_overhead_of_host_attention_is_learned_from_steps_with_it_and_without(
    believed: float, chooses: bool
) -> None:
    true = replace(TRUE, host_overhead=100e-6)
    model = CostModel(replace(true, host_overhead=believed), chooses=chooses)
    for _ in range(5):
        learned(model, step_of(true, 0.0), 0.0)
        learned(model, step_of(true, 1.0), 1.0)
    assert model.rates.host_overhead == pytest.approx(100e-6, rel=0.02)
    assert model.linear == pytest.approx(LINEAR, rel=0.02)


def test_the_first_slow_steps_of_a_kind_do_not_stand_for_it_where_the_other_one_is_known() -> None:
    found = LinearPart()
    for slow in (39.0, 60.0, 30.0):  # the first steps of all
        found.add(slow, hosted=True)
    assert found.value == 39.0
    for _ in range(TRUSTED):
        found.add(23.0, hosted=False)
    assert found.of(True) == 23.0, "else a step with host attention would never be worth its while"
    for _ in range(TRUSTED):
        found.add(28.0, hosted=True)
    assert (found.of(True), found.of(False)) == (28.0, 23.0)


def test_steps_that_waited_for_the_link_show_too_that_a_kind_is_no_shorter() -> None:
    found = LinearPart(28.0, hosted=True)
    for _ in range(TRUSTED):
        found.add(23.0, hosted=False)
    assert found.of(True) == 23.0, "its first step may have been slow"
    for _ in range(TRUSTED):
        found.add(28.0, hosted=True, late=True)
    assert found.of(True) == 28.0


def test_the_first_slow_steps_with_host_attention_do_not_show_an_overhead_of_it() -> None:
    found = LinearPart()
    for slow in (39.0, 56.0, 61.0, 47.0, 24.0):
        found.add(slow, hosted=True)
    for i in range(TRUSTED):
        found.add(23.0 + i % 2, hosted=False)
    assert abs(found.more_with_host() or 0.0) <= 1.0


def test_a_difference_that_may_be_noise_is_no_overhead() -> None:
    true = replace(TRUE, host_overhead=100e-6)
    model, rng = CostModel(true), random.Random(1)
    for _ in range(40):
        for share in (0.0, 1.0):
            learned(model, step_of(true, share, LINEAR * rng.gauss(1, 0.3)), share)
    assert model.rates.host_overhead == pytest.approx(100e-6, rel=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("believed", [1e-6, 10e-6, 500e-6])
def test_what_a_copy_takes_besides_its_bytes_is_learned_from_copies_of_two_sizes(believed: float, noise: float) -> None:
    true, rng = replace(TRUE, copy_overhead=100e-6), random.Random(2)
    model = CostModel(replace(true, copy_overhead=believed, up=10e9, measured=False))
    for share in [0.05] * 12 + [0.15] * 12:
        record = step_of(true, share)
        learned(model, replace(record, seconds_up=record.seconds_up * max(rng.gauss(1, noise), 0.5)), share)
    # Of copies of 0.5 and 1.4 ms, twelve of each: three times the noise of one is the standard error of what is found.
    assert model.rates.copy_overhead == pytest.approx(100e-6, rel=0.02 + 7 * noise)
    assert model.rates.up == pytest.approx(true.up, rel=0.02 + 7 * noise)


@pytest.mark.parametrize(("measured", "shares"), [(False, [0.1]), (True, [0.05, 0.15])], ids=["alike", "measured"])
def test_copies_of_one_size_and_a_profile_leave_it_as_it_is(measured: bool, shares: list[float]) -> None:
    true = replace(TRUE, copy_overhead=100e-6)
    model = CostModel(replace(true, copy_overhead=10e-6, measured=measured))
    for i in range(40):
        share = shares[i % len(shares)]
        learned(model, step_of(true, share), share)
    assert model.rates.copy_overhead == 10e-6


def test_what_was_measured_of_the_host_counts_until_steps_show_another_rate() -> None:
    """Of a first step nobody knows what its linear part was, nor so how long the link was busy."""
    model, busy = CostModel(TRUE), 0.53
    learned(model, step_of(TRUE, 0.2, 6 * LINEAR), 0.2)
    for _ in range(10):
        record = step_of(TRUE, 0.2)
        learned(model, replace(record, host_seconds=record.host_seconds / (1 - 0.4 * busy)), 0.2)
        assert model.rates.host == pytest.approx(TRUE.host)
    assert model.rates.shared == pytest.approx(0.4, abs=0.05)
    for _ in range(40):
        learned(model, step_of(replace(TRUE, host=30e9), 0.0), 0.0)
    assert model.rates.host == pytest.approx(30e9)


def test_few_looks_are_at_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, best, predict = list[int](), ShareLearner._best, ShareLearner._predict
    told = Told()

    def looked(known: ShareLearner, *args: Any) -> int:
        looks.append(0)
        return best(known, *args)

    def predicted(known: ShareLearner, *args: Any) -> Prediction:
        if looks:
            looks[-1] += 1
        return predict(known, *args)

    monkeypatch.setattr(ShareLearner, "_may_probe", lambda *args: False)
    monkeypatch.setattr(ShareLearner, "_best", looked)
    monkeypatch.setattr(ShareLearner, "_predict", predicted)
    told.run(PERIOD * (BELIEVED + 1) * 4)
    looks = looks[-(BELIEVED + 1) * 3 :]
    assert sum(x >= CHOICES for x in looks) == 3, "a choice is not believed for ever, nor looked at all the time"
    assert statistics.median(looks) <= CHOICES / 2
    while looks[-1] < CHOICES:  # the next ones see some choices only
        told.run(1)
    told.rates, share = replace(TRUE, up=TRUE.up / 2), told.share
    told.run(WINDOW // 2 + 2 * PERIOD)
    assert told.share < share, "what some choices show is followed"


def at_once_or_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Learning from some steps at once, as it is; and then from each. Nothing is probed."""
    monkeypatch.setattr(ShareLearner, "_may_probe", lambda *args: False)
    yield True
    monkeypatch.setattr(ShareLearner, "_is_calm", lambda *args: False)
    yield False


@pytest.mark.parametrize("seed", range(4))
def test_to_learn_of_some_steps_at_once_finds_what_learning_of_each_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at_once in at_once_or_each(monkeypatch):
        told, noise = Told(), iter(random.Random(seed).choices([0.97, 0.99, 1.0, 1.01, 1.03], k=300))
        told.run(100, lambda share, step: next(noise))  # noqa: B023
        told.rates = replace(TRUE, up=TRUE.up * 0.6, host=TRUE.host * 0.7)
        told.run(100, lambda share, step: next(noise))  # noqa: B023
        model, known = told.policy.model(1), told.policy._caches[1]["cuda:0", False]
        assert model is not None
        assert bool(known.told) == at_once
        known.learn()
        assert all(x.ratio.value == pytest.approx(1, abs=0.03) for x in known.seen.values())
        seconds = [model.step(alike(LAYERS), share).seconds for share in (0.0, 0.2, 0.5)]
        found.append([told.policy.decisions(1)[-1].prediction.seconds, model.rates.up, model.rates.host, *seconds])
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
def test_what_was_predicted_before_a_rate_changed_tells_nothing_of_what_a_choice_gives(factor: float) -> None:
    told = Told()
    told.run(100)
    told.rates = replace(TRUE, host=TRUE.host * factor)
    for _ in range(4 * PERIOD):
        told.run(1)
        seen = told.policy._caches[1]["cuda:0", False].seen.values()
        changed = told.policy.model(1).rates.host != TRUE.host  # type: ignore[union-attr]
        assert not changed or all(x.ratio.value == pytest.approx(1, abs=0.05) for x in seen)
    assert changed


def test_what_is_learned_is_predicted_where_the_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    told.run(100)
    monkeypatch.setattr(ShareLearner, "_best", lambda known, predict: known.choice)
    monkeypatch.setattr(ShareLearner, "_may_probe", lambda *args: False)
    told.rates = replace(TRUE, host=TRUE.host * 0.5)
    told.run(WINDOW + 2 * PERIOD)
    told.policy.plan(STATE)
    said = told.policy.prediction(1, "cuda:0")
    assert said is not None
    assert said.seconds == pytest.approx(step_of(told.rates, told.share).seconds, rel=0.05)


@pytest.mark.parametrize("choice", range(CHOICES))
@pytest.mark.parametrize("look", [_near, _some])
def test_a_look_at_some_choices_sees_a_quarter_of_what_the_best_one_gains(
    choice: int, look: Callable[[int], list[int]]
) -> None:
    """It may be that nothing is gained behind the best one."""
    seen = look(choice)
    assert {choice, 0, CHOICES - 1} <= set(seen)
    for best in range(CHOICES):
        between = [x for x in seen if min(choice, best) <= x <= max(choice, best)]
        assert max(abs(x - choice) for x in between) * SPACING >= abs(best - choice)


@pytest.mark.parametrize("choice", range(CHOICES))
@pytest.mark.parametrize("gains", [True, False])
def test_a_choice_is_left_for_one_that_gains_enough_wherever_that_is(choice: int, gains: bool) -> None:
    """The makespan falls straight to it, and is as it was behind it."""
    for best in set(range(CHOICES)) - {choice}:
        gain = HYSTERESIS * (1.01 if gains else 0.97)

        def predicted(x: int, best: int = best, gain: float = gain) -> Any:
            way = (x - choice) / (best - choice)
            return SimpleNamespace(seconds=1 - (gain / (1 + gain) * way if 0 < way <= 1 else 0.0))

        known = ShareLearner(CostModel(TRUE), choice=choice, started=True, step=1000)
        found = known._best(predicted)
        assert (found != choice) == gains, best
        assert predicted(found).seconds <= predicted(best).seconds * (1 + HYSTERESIS / 4) or not gains


@pytest.mark.parametrize("seed", range(200))
def test_a_search_finds_what_a_look_at_all_choices_finds(seed: int) -> None:
    """The makespan falls, is level or not, and rises, with steps at none and all."""
    rng = random.Random(seed)
    first, last = sorted(rng.choices(range(CHOICES), k=2)) if seed % 2 else [rng.randrange(CHOICES)] * 2
    falls, rises, ends = (
        rng.uniform(0.001, 0.1),
        rng.uniform(0.001, 0.1),
        rng.sample((0, CHOICES - 1), rng.randrange(3)),
    )
    curve = [1 + falls * max(first - x, 0) + rises * max(x - last, 0) for x in range(CHOICES)]
    for end in ends:
        curve[end] = rng.uniform(0.9, 2)
    looks = list[int]()

    def seconds(choice: int) -> float:
        looks.append(choice)
        return curve[choice]

    seen = {x: seconds(x) for x in _some(rng.randrange(CHOICES))}
    best = curve[_least(seconds, seen)]
    assert best == min(curve)
    found = _as_good(seconds, seen, best * 1.0025)
    assert curve[found] <= best * 1.0025
    assert ends or found == min(x for x in range(CHOICES) if curve[x] <= best * 1.0025)
    assert len(looks) <= CHOICES * 2 / 3


def test_what_turns_out_to_be_less_is_so_once_of_steps_that_are_learned_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left of a step becomes less than nothing: device attention takes less than it was said to."""
    found = []
    for _ in at_once_or_each(monkeypatch):
        told, given = Told(), replace(TRUE, up=4e12)
        told.policy, true = Adaptive(given), replace(given, device=8 * TRUE.device)
        for step in range(400):
            told.policy.plan(STATE)
            told.policy.observe(step_of(true, told.share, LINEAR * max(1 - step / 300, 0.01)))
        found.append(told.policy.model(1).rates.device)  # type: ignore[union-attr]
    assert found[0] > 1.1 * TRUE.device
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_of_caches_that_are_long_gone_nothing_is_kept() -> None:
    policy = Adaptive(TRUE)
    for cache in range(CACHES + 3):
        policy.plan(replace(STATE, cache=cache))
        policy.plan(replace(STATE, cache=1))  # one that goes on
    kept = [cache for cache in range(CACHES + 3) if policy.decisions(cache)]
    assert kept == [1, *range(4, CACHES + 3)]
