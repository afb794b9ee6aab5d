"""The simulator takes what a cache takes, and refuses numbers that no run could be made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvtier import BudgetError, ConfigError, Policy
from kvtier.planning.policies.names import POLICIES, policy_of
from kvtier.planning.policies.pie import WholeLayers
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial
from kvtier.planning.step import LayerPlan, StepPlan, StepState

RIGHT: dict[str, Any] = {
    "layers": 4,
    "linear": 1e-3,
    "block_bytes": 2**16,
    "block_size": 16,
    "context": 640,
    "sequences": 2,
    "device_bytes": 2**23,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_by_name_decides_as_the_object_does(name: str) -> None:
    runs = [Simulation(x, Machine(Rates()), Load(**RIGHT)).run(30) for x in (name, policy_of(name))]
    assert runs[0] == runs[1] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"context": -1},
        {"block_bytes": 0},
        {"block_size": 0},
        {"layers": 0},
        {"sequences": 0},
        {"tokens": 0},
        {"device_bytes": "8GiB"},
        {"linear": -1e-3},
        {"linear": float("nan")},
        {"context": 0.5},
        {"kept": (1.0, 1.5)},
        {"kept": (0.0,)},
        {"kept": 0.5},
    ],
    ids=str,
)
def test_a_load_of_wrong_numbers_is_refused_by_their_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Load(**RIGHT | wrong)


@pytest.mark.parametrize("wrong", [{"noise": -0.1}, {"noise": "much"}, {"rates": 1e9}, {"traffic": 0.5}], ids=str)
def test_a_machine_of_wrong_numbers_is_refused_by_their_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Machine(**{"rates": Rates()} | wrong)


@pytest.mark.parametrize("taken", [1.0, -0.5, float("nan")])
def test_others_take_a_part_of_the_link_and_not_all_of_it(taken: float) -> None:
    trial = Simulation("all-fetch", Machine(Rates(), traffic=lambda step: taken), Load(**RIGHT | {"context": 6400}))
    with pytest.raises(ConfigError, match="traffic"):
        trial.run(10)


class Odd(Policy):
    """As the default, but for some answers."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers

    def plan(self, state: StepState) -> StepPlan:
        plan = super().plan(state)
        plan.layers = self.answers.get("layers", plan.layers)
        return plan

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        found = super().victims(candidates, blocks)
        return self.answers["victims"](found) if "victims" in self.answers else found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"layers": [LayerPlan()]}, "1 layers where 4"),
        ({"layers": [LayerPlan(0.5)] * 4}, "fetch is 0.5"),  # type: ignore[arg-type]
        ({"victims": lambda found: None}, "list of Victims"),
        ({"victims": lambda found: [(x[0], x[1]) for x in found]}, "a tuple of 2"),
        ({"victims": lambda found: []}, "Odd.victims names too few"),
        ({"victims": lambda found: [Victims(x.candidate, -1) for x in found]}, "Odd.victims names too few"),
        ({"victims": lambda found: [Victims(object(), x.blocks) for x in found]}, "Odd.victims names too few"),
    ],
)
def test_what_a_cache_refuses_of_a_policy_is_refused(answers: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, BudgetError), match=said):
        Simulation(Odd(**answers), Machine(Rates()), Load(**RIGHT)).run(20)


@pytest.mark.parametrize("name", POLICIES)
def test_a_device_of_few_slots_never_holds_more_than_these(name: str) -> None:
    load = Load(**RIGHT | {"sequences": 20, "device_bytes": 83 * 2**16})
    simulation = Simulation(name, Machine(Rates()), load)
    for _ in range(40):
        assert simulation._free >= 0
        assert simulation._free + sum(x.evictable for x in simulation._layers) == 3
        simulation.step()


def test_what_is_no_simulation_is_refused() -> None:
    machine, load = Machine(Rates()), Load(**RIGHT)
    with pytest.raises(ConfigError, match="'fastest'"):
        Simulation("fastest", machine, load)
    with pytest.raises(ConfigError, match="in this order"):
        Simulation("default", load, machine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"device_bytes=65536.*655360"):
        Simulation("default", machine, Load(**RIGHT | {"device_bytes": 2**16}))
    Simulation("default", machine, Load(**RIGHT | {"device_bytes": 655360}))
    with pytest.raises(ConfigError, match="steps"):
        Simulation("default", machine, load).run(-1)


@pytest.mark.parametrize("name", POLICIES)
def test_layers_may_keep_parts_of_the_context_or_windows(name: str) -> None:
    load = Load(**RIGHT | {"layers": 7, "context": 6400, "kept": (1.0, 0.0, 0.25), "tokens": 16})
    trial = Simulation(name, Machine(Rates()), load)
    assert load.tiered == [0, 2, 3, 5, 6]
    for step in range(30):
        trial.step()
        layers = trial._state().layers
        assert [x.layer for x in layers] == load.tiered
        blocks = 400 + step + 1
        assert [x.resident + x.spilled for x in layers] == [2 * n for n in (blocks, blocks // 4) * 2 + (blocks,)]
        held = sum(x.resident + x.fetched + load.sequences for x in layers) * load.block_bytes
        assert held <= load.device_bytes
    assert trial.records[-1].layers == 5


def test_a_window_takes_as_long_as_the_rest_of_a_layer() -> None:
    every, some = (Load(**RIGHT | {"layers": n, "kept": kept}) for n, kept in ((4, ()), (8, (1.0, 0.0))))
    seconds = [Simulation("default", Machine(Rates()), load).run(20) for load in (every, some)]
    assert seconds[1] - seconds[0] == pytest.approx(20 * 4 * every.linear)


def test_drawn_settings_are_of_every_kind() -> None:
    trials = [Trial.drawn(seed) for seed in range(100)]
    assert {x.load.tokens for x in trials} == {1, 4, 16}
    assert {len(x.load.kept) for x in trials} == {0, 2, 3, 4}
    overheads = [x.machine.rates.copy_overhead for x in trials]
    assert min(overheads) == 0.0
    assert 3e-4 < max(overheads) <= 5.02e-4
    # What they are but for that is the same.
    assert all(
        replace(trial.load, tokens=1, kept=()) == Trial.even(trial.seed).load for trial in trials if not trial.load.kept
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_policy_is_faster_than_the_bound_wherever_layers_differ(seed: int) -> None:
    trial = Trial.drawn(seed)
    quiet = replace(trial, machine=replace(trial.machine, noise=0.0))
    bound = quiet.bound(12)
    for make in (*map(partial(partial, FixedShare), (0.0, 0.5, 1.0)), WholeLayers, Policy):
        assert bound <= quiet.run(make(), 12)
