"""What a share of either gains over the better of fetching all and attending to all, as predicted and as simulated."""

from __future__ import annotations

import os

from kvtier.planning.costs import CostModel
from kvtier.planning.hardware.machines import MACHINES
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.makespan.groups import alike
from kvtier.planning.policies.shares import FixedShare, all_attend, room_for
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial

#: Random settings of the always-run test; KVTIER_TEST_SETTINGS asks for more.
SETTINGS = int(os.environ.get("KVTIER_TEST_SETTINGS", "30"))
#: Shares that are tried, but for the one of nothing.
SHARES = 16
STEPS, SETTLED = 24, 12
NAMES = [name for name, machine in MACHINES.items() if machine.overlaps]


def gain(seconds: list[float]) -> float:
    """Of the best share over the better of none and all."""
    return min(seconds[0], seconds[-1]) / min(seconds)


def simulated(load: Load, machine: Machine, share: float) -> float:
    trial = Simulation(FixedShare(share), machine, load)
    trial.run(STEPS)
    return sum(x.seconds for x in trial.records[-SETTLED:])


def predicted(load: Load, machine: Machine) -> list[float]:
    """Of each share, from what a run shows that fetches nothing."""
    trial = Simulation(all_attend(), machine, load)
    trial.run(STEPS)
    state = trial._state()
    groups, model = alike(state.layers), CostModel(machine.rates)
    model.observe(trial.records[-1], model.step(groups, 0.0))
    found = []
    for i in range(SHARES + 1):
        room = room_for(groups, i / SHARES, state.device_bytes)
        found.append(model.step(groups, i / SHARES, room, room=room).seconds)
    return found


def test_the_gain_that_is_predicted_of_a_share_is_what_the_simulator_gives() -> None:
    errors = {}
    for seed in range(SETTINGS):
        load = Trial.even(seed).load
        machine = Machine(HardwareProfile.estimate(NAMES[seed % len(NAMES)]).rates())
        expected = predicted(load, machine)
        seconds = [simulated(load, machine, i / SHARES) for i in range(SHARES + 1)]
        if gain(seconds) > 1.02:
            errors[seed] = gain(expected) / gain(seconds) - 1
    assert len(errors) >= SETTINGS // 4, "a share of either hardly ever gains anything"
    worst = max(errors.values(), key=abs)
    assert abs(worst) <= 0.05, f"the worst is off by {worst:+.1%}: {errors}"
