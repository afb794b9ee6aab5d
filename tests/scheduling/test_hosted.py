"""An engine in simulation whose rows decode on the host: all is accounted for at each step, and where the host is of
little use, trying costs a bounded part."""

from __future__ import annotations

import math
import random

import pytest

from kvtier.planning.hardware.machines import Machine, ModelSize
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.simulation.hosted import Hosted
from kvtier.scheduling.simulation.loads import poisson, uniform
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import Simulation, simulate

SMALL = ModelSize(32, 4096, 32, 128, 32, 6_740_000_000, 6_600_000_000, embedding=131_000_000)


def profile_of(rng: random.Random) -> Profile:
    machine = Machine(
        rng.choice((65e12, 500e12)),
        rng.choice((320e9, 2e12)),
        16 * 10**9,
        rng.choice((15e9, 60e9)),
        rng.choice((50e9, 140e9, 500e9)),
    )
    return Profile(machine, SMALL, rng.randint(60, 400), rng.randint(0, 2000), 16, rng.choice((0.0, 2e-3)))


@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_and_every_block_is_accounted_for(seed: int) -> None:
    rng = random.Random(seed)
    profile, count = profile_of(rng), rng.randint(1, 40)
    rate = rng.choice((math.inf, 2.0))
    requests = poisson(count, rate, uniform(rng.choice((20, 300))), uniform(rng.choice((5, 60))), seed=seed)
    simulation = Hosted(requests, profile, FirstComeFirstServed(), check=True)
    found = simulation.run()
    assert all(x.finished > x.first >= x.arrived for x in found.requests if x.output > 1)
    assert sum(simulation.steps_by_way.values()) == found.steps
    assert simulation.free == simulation.profile.device_blocks
    assert not simulation._running
    assert not simulation._waiting


@pytest.mark.parametrize("seed", range(12))
def test_the_device_alone_is_not_much_quicker(seed: int) -> None:
    rng = random.Random(seed)
    profile = profile_of(rng)
    requests = poisson(40, math.inf, uniform(200), uniform(rng.choice((10, 50, 150))), seed=seed)
    alone = Simulation(
        requests,
        Profile(profile.machine, SMALL, profile.device_blocks, 0, 16, profile.overhead),
        FirstComeFirstServed(),
    ).run()
    found = Hosted(requests, profile, FirstComeFirstServed()).run()
    assert found.seconds <= 1.25 * alone.seconds


def test_a_small_device_gains_several_times() -> None:
    """Neo, section 5.4: the weights leave a T4 room for so few sequences that it computes them for next to nothing."""
    machine = Machine(65e12, 320e9, 16 * 10**9, 15.75e9, 140.8e9)
    profile = Profile(machine, SMALL, 147, 4700, 16, 2e-3)
    requests = poisson(100, math.inf, uniform(200), uniform(100), seed=1)
    alone = simulate(requests, Profile(machine, SMALL, 147, 0, 16, 2e-3), FirstComeFirstServed())
    simulation = Hosted(requests, profile, FirstComeFirstServed())
    assert alone.seconds > 2.5 * simulation.run().seconds
    assert simulation.steps_by_way["sub-batches"] > 0.5 * simulation.outcome.steps
