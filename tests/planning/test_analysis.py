"""What binds a step and what would change it: as the simulator then shows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.planning.costs import Prediction
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.names import policy_of
from kvtier.planning.policies.shares import FixedShare, all_attend, all_fetch
from kvtier.planning.policy import Policy
from kvtier.planning.reports.analysis import analyse
from kvtier.planning.reports.explain import _analysed
from kvtier.planning.reports.log import Logged
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial
from kvtier.planning.step import LayerState, StepRecord, StepState
from tests.planning.test_adaptive import LOAD, RATES

STEPS = 120


def trial_of(policy: Policy, machine: Machine, load: Load, seed: int = 0) -> Simulation:
    trial = Simulation(policy, machine, load, seed)
    trial.run(STEPS)
    return trial


def seen(trial: Simulation) -> float:
    return statistics.median(x.seconds for x in trial.records[-24:])


def spilled_bytes(trial: Simulation) -> int:
    return sum(x.spilled for x in trial._layers) * trial.load.block_bytes


MAKES: dict[str, Callable[[Machine], Policy]] = {
    "adaptive": lambda machine: Adaptive(),
    "adaptive, calibrated": lambda machine: Adaptive(machine.rates),
    "attend": lambda machine: all_attend(),
    "fetch": lambda machine: all_fetch(),
    "default": lambda machine: Policy(),
    "a third": lambda machine: FixedShare(1 / 3),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_gain_of_a_larger_budget_is_what_the_simulator_then_gives(name: str) -> None:
    checked = 0
    for seed in range(8):
        trial = Trial.drawn(seed)
        load, machine = trial.load, trial.machine
        policy = MAKES[name](machine)
        trial = trial_of(policy, machine, load, seed)
        if not (spilled := spilled_bytes(trial)):
            continue
        found = analyse(trial._state(), policy, trial.records[-64:], more_bytes=[spilled // 3])
        assert found.predicted == pytest.approx(seen(trial), rel=0.06)
        (change,) = [x for x in found.changes if x.more_bytes]
        larger = replace(load, device_bytes=load.device_bytes + change.more_bytes)
        gain = seen(trial) / seen(trial_of(MAKES[name](machine), machine, larger, seed))
        assert change.gain == pytest.approx(gain, rel=0.15), (seed, change)
        checked += gain > 1.1
    assert checked >= 2, "nothing was gained anywhere"


def test_where_the_room_for_fetches_is_short_more_budget_lets_a_policy_fetch_more_of_its_share() -> None:
    off, short = {}, 0
    # In the last ones layers that are as full as each other keep different parts of the context.
    for seed in (*range(20), 90, 91, 97):
        drawn = Trial.drawn(seed)
        load, machine, rates = drawn.load, drawn.machine, replace(drawn.machine.rates, measured=True)
        trial = trial_of(all_fetch(), machine, load, seed)
        spilled = spilled_bytes(trial)
        found = analyse(trial._state(), all_fetch(), trial.records[-64:], more_bytes=[spilled // 3], rates=rates)
        short += found.share < 0.9
        (change,) = [x for x in found.changes if x.more_bytes]
        larger = replace(load, device_bytes=load.device_bytes + change.more_bytes)
        gain = seen(trial) / seen(trial_of(all_fetch(), machine, larger, seed))
        if abs(change.gain / gain - 1) > 0.15:
            off[seed] = (change.gain, gain)
    assert not off
    assert short >= 2, "there was always room for all of a share"


def test_what_a_fixed_share_fetches_is_what_there_was_room_for_also_behind_a_log() -> None:
    drawn = Trial.drawn(15)
    trial = trial_of(all_fetch(), drawn.machine, drawn.load)
    plain, logged = (
        analyse(trial._state(), x, trial.records[-64:]) for x in (all_fetch(), Logged(all_fetch(), os.devnull))
    )
    assert plain == logged
    last = trial.records[-1]
    assert plain.share == pytest.approx(last.bytes_up / (last.bytes_up + last.host_bytes), rel=0.02)
    assert plain.share < 0.5


@pytest.mark.parametrize("name", ["default", "all-attend", "all-fetch", "pie", "neo"])
def test_what_holds_everything_gives_the_same_wherever_the_blocks_were(name: str) -> None:
    policy = policy_of(name)
    trial = trial_of(policy, Machine(RATES), LOAD)
    found = analyse(trial._state(), policy, trial.records, rates=RATES)
    whole = trial_of(policy_of(name), Machine(RATES), replace(LOAD, device_bytes=3 * LOAD.device_bytes))
    if name == "pie":  # of whole layers: which of them waited for copies while the host attended, no record tells
        assert 0.5 * seen(whole) < found.resident < 1.03 * seen(whole)
    else:
        assert found.resident == pytest.approx(seen(whole), rel=0.03)


def test_room_goes_to_the_layers_that_spill() -> None:
    resident, spilled = (LayerState(0, 2**20, n, 0, 100 - n, 1, True) for n in (100, 0))
    state = StepState(1, [resident, spilled] * 4, 0, 2**29, StepRecord(), 1, "cuda:0", 8)
    attending = 400 * 2**20 / RATES.host
    record = StepRecord(1, 8, 4e-3 + attending, host_seconds=attending, host_blocks=400, host_bytes=400 * 2**20)
    found = analyse(state, Policy(), [record] * 20, rates=RATES, more_bytes=[200 * 2**20, 400 * 2**20])
    seconds = {x.more_bytes >> 20: x.seconds for x in found.changes if x.more_bytes}
    assert found.predicted == pytest.approx(record.seconds)
    assert seconds[400] == pytest.approx(found.resident)
    assert found.predicted - seconds[200] == pytest.approx(attending / 2, rel=0.1)
    assert found.predicted - seconds[400] > 0.9 * attending, "room went to layers that spill nothing"


def test_with_the_devices_rate_measured_it_says_what_a_device_that_holds_everything_gives() -> None:
    policy = Adaptive(RATES)
    trial = trial_of(policy, Machine(RATES), LOAD)
    found = analyse(trial._state(), policy, trial.records)
    (change,) = [x for x in found.changes if x.more_bytes == spilled_bytes(trial)]
    whole = trial_of(Adaptive(RATES), Machine(RATES), replace(LOAD, device_bytes=2 * LOAD.device_bytes))
    assert change.gain == pytest.approx(seen(trial) / seen(whole), rel=0.03)
    assert found.resident == pytest.approx(seen(whole), rel=0.03)
    assert change.seconds == pytest.approx(found.resident)


def test_each_device_is_explained_with_what_was_learned_of_it() -> None:
    policy, state = Adaptive(), trial_of(Adaptive(), Machine(RATES), LOAD)._state()
    for device, up in (("cuda:0", 50e9), ("cuda:1", 3e9)):
        policy.use_rates(device, replace(RATES, up=up))
        policy.plan(replace(state, device=device))
    for logged in (policy, Logged(policy, os.devnull)):
        found = [analyse(replace(state, device=device), logged, []).rates.up for device in ("cuda:0", "cuda:1")]
        assert found == [50e9, 3e9]


@pytest.mark.parametrize(
    ("make", "rates", "binding"),
    [
        (all_fetch, replace(RATES, up=5e9), "link"),
        (all_attend, RATES, "host attention"),
        (all_attend, replace(RATES, host=4e12, host_overhead=0.0), "compute"),
        (all_fetch, replace(RATES, up=5e12), "compute"),
    ],
)
def test_what_binds_is_what_it_takes_to_be_faster(make: Callable[[], Policy], rates: object, binding: str) -> None:
    policy, machine = make(), Machine(rates)  # type: ignore[arg-type]
    trial = trial_of(policy, machine, LOAD)
    found = analyse(trial._state(), policy, trial.records)
    assert found.binding == binding
    for what, bound_by in (("link", "link"), ("host", "host attention")):
        (change,) = [x for x in found.changes if what in x.change.split(" twice")[0] and not x.more_bytes]
        faster = replace(
            machine.rates, **({"up": 2 * machine.rates.up} if what == "link" else {"host": 2 * machine.rates.host})
        )
        gain = seen(trial) / seen(trial_of(make(), Machine(faster), LOAD))
        assert change.gain == pytest.approx(gain, rel=0.1)
        assert (change.gain > 1.2) == (binding == bound_by)


def test_a_policy_that_chooses_is_asked_what_it_would_choose_then() -> None:
    policy = Adaptive(RATES)
    trial = trial_of(policy, Machine(RATES), LOAD)
    found = analyse(trial._state(), policy, trial.records)
    for what, rates in (("link", replace(RATES, up=2 * RATES.up)), ("host", replace(RATES, host=2 * RATES.host))):
        (change,) = [x for x in found.changes if what in x.change.split(" twice")[0] and not x.more_bytes]
        assert change.gain > 1.05
        # With the present share kept, one of the two would bind the more.
        after = trial_of(Adaptive(rates), Machine(rates), LOAD)
        assert change.gain == pytest.approx(seen(trial) / seen(after), rel=0.1)


def test_to_be_asked_changes_nothing() -> None:
    one, two = Adaptive(), Adaptive()
    quiet, asked = Simulation(one, Machine(RATES, 0.03), LOAD), Simulation(two, Machine(RATES, 0.03), LOAD)
    for _ in range(100):
        quiet.step()
        asked.step()
        analyse(asked._state(), two, asked.records[-64:])
    assert [x.seconds for x in asked.records] == [x.seconds for x in quiet.records]


def test_a_policy_that_learns_nothing_is_explained_with_the_rates_that_were_measured() -> None:
    machine, policy = Machine(replace(RATES, up=7e9, measured=True)), all_attend()  # no fetch shows the link's rate
    trial = trial_of(policy, machine, LOAD)
    found = analyse(trial._state(), policy, trial.records, rates=machine.rates)
    assert found.rates.up == 7e9
    assert "up" not in found.learned
    assert analyse(trial._state(), policy, trial.records).rates.up != 7e9


def test_before_anything_was_seen_nothing_is_said_of_seconds() -> None:
    trial = Simulation(Adaptive(), Machine(RATES), LOAD)
    found = analyse(trial._state(), Adaptive(), [])
    assert (found.predicted, found.resident, found.binding, found.changes) == (None, None, None, ())
    assert found.spilled_bytes == spilled_bytes(trial) > 0


def test_where_nothing_overlaps_only_copies_can_be_saved() -> None:
    policy = all_fetch()
    trial = trial_of(policy, Machine(replace(RATES, up=5e9)), LOAD)
    state = trial._state()
    state.overlaps = False
    found = analyse(state, policy, trial.records)
    record = trial.records[-1]
    assert found.share == 1.0
    state.layers = [replace(x, spilled=x.spilled // 8) for x in state.layers]  # as behind a larger budget
    assert analyse(state, policy, trial.records).share == 1.0, "records are of what was spilled then"
    assert found.predicted == pytest.approx(record.seconds, rel=0.02)
    assert found.resident == pytest.approx(record.seconds - record.stall_seconds, rel=0.02)
    assert all(x.more_bytes for x in found.changes), "no word of links and hosts"
    assert found.changes[0].seconds == pytest.approx(found.resident)


def test_the_hosts_rate_is_said_to_be_lower_while_the_link_is_busy() -> None:
    found = {}
    for share in (0.0, 0.5):
        policy = FixedShare(share)
        trial = trial_of(policy, Machine(replace(RATES, up=5e9, shared=0.4)), LOAD)
        rates = replace(RATES, shared=0.4, measured=True)
        found[share] = analyse(trial._state(), policy, trial.records, rates=rates).slower
    assert found[0.0] == 1.0, "nothing is fetched"
    assert found[0.5] == pytest.approx(0.6, abs=0.05), "the link is busy all the time"


@pytest.mark.parametrize("make", [all_fetch, Policy])
def test_what_attention_on_the_host_would_bring_is_what_it_then_brings(make: Callable[[], Policy]) -> None:
    machine = Machine(replace(RATES, up=5e9))
    trial = trial_of(all_fetch(), machine, LOAD)
    state = trial._state()
    state.layers = [replace(x, host_attention=False) for x in state.layers]
    found = analyse(state, make(), trial.records, rates=machine.rates)
    (change,) = [x for x in found.changes if "host_attention=True" in x.change]
    gain = seen(trial) / seen(trial_of(all_attend(), machine, LOAD))
    assert gain > 2
    assert change.gain == pytest.approx(gain, rel=0.1)


class Watched(Adaptive):
    """Keeps what each step was predicted to take, and took."""

    seen: list[tuple[Prediction, float]]

    def observe(self, record: StepRecord) -> None:
        """See `Policy.observe`."""
        if (found := self.prediction(record.cache, "simulated")) is not None:
            self.seen.append((found, record.seconds))
        super().observe(record)


def test_a_prediction_carries_what_those_of_such_steps_have_been_wrong_by() -> None:
    policy = Watched(RATES)
    policy.seen = []
    trial = trial_of(policy, Machine(RATES, 0.05), LOAD, 3)
    errors = [abs(found.seconds - seconds) / seconds for found, seconds in policy.seen]
    assert policy.seen[0][0].error is None
    assert policy.seen[-1][0].error == pytest.approx(statistics.median(errors[-65:-1]), rel=0.1)
    analysis = analyse(trial._state(), policy, trial.records[-64:])
    assert analysis.error == pytest.approx(statistics.median(errors[-64:]), rel=0.1)
    (line,) = [text for _, text in _analysed(replace(analysis, device="cuda:1"), named=True) if "computing" in text]
    assert f"wrong by {analysis.error:.1%} in the median" in line
    assert "wrong" not in str(_analysed(analysis, named=False)), "it is said with the steps"
