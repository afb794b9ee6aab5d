"""The simulator takes what a cache takes, and refuses numbers that no run could be made of."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import ConfigError
from kvtier.planning.costs import Rates
from kvtier.planning.policies.names import POLICIES, policy_of
from kvtier.planning.simulation.simulate import Load, Machine, Simulation

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
