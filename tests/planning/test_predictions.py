"""What a share is predicted to fetch, to leave and to take, seen from another one, and what it does then."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from kvtier.planning.costs import CostModel
from kvtier.planning.makespan.groups import alike, parted
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.shares import FixedShare, room_for
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial

#: Steps after which blocks do not move any more.
SETTLED = 24
#: Tokens of a block: more than there are steps, so that the context does not grow.
BLOCK = 4096


def drawn(seed: int) -> tuple[Load, Machine]:
    """A setting at random: also of few layers, few blocks, and layers that keep little."""
    rng = random.Random(seed)
    layers, blocks, rows = rng.choice((5, 6, 8, 16, 40)), rng.choice((8, 16, 32, 64, 200)), rng.choice((1, 1, 2, 4))
    kept = rng.choice(((), (), (), (1.0, 0.5), (1.0, 0.0), (1.0, 0.25, 0.25)))
    load = Load(layers, 10 ** rng.uniform(-4.5, -3), 2**18, BLOCK, blocks * BLOCK, rows, 2**40, kept=kept)
    held = sum(load.sealed(i, blocks) for i in load.tiered) * rows
    part = rng.choice((rng.uniform(0.3, 0.95), rng.uniform(0.85, 0.99)))
    load = replace(load, device_bytes=(int(part * held) + len(load.tiered) * rows) * load.block_bytes)
    return load, Machine(
        Rates(
            up=10 ** rng.uniform(9.5, 11),
            host=10 ** rng.uniform(9.7, 11.3),
            host_overhead=rng.uniform(1e-5, 1.5e-4),
            copy_overhead=rng.choice((0.0, 10 ** rng.uniform(-6, -3.3))),
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_a_share_does_is_predicted_from_any_other_one(seed: int) -> None:
    load, machine = drawn(seed)
    rng = random.Random(-1 - seed)
    policy, nbytes = FixedShare(0.0), load.block_bytes
    trial = Simulation(policy, machine, load)
    for share in (rng.choice((0.0, 1.0, rng.random())), rng.choice((0.0, 0.5, 1.0, rng.random()))):
        policy.share = share
        trial.run(SETTLED)
    layers, reserve = alike(trial._state().layers), trial.plans[-1].reserve
    model = CostModel(machine.rates, linear=load.layers * load.linear)
    for share in (0.0, 0.125, 0.25, 0.5, 0.5625, 0.75, 0.875, 0.9375, 1.0):
        room = room_for(layers, share, load.device_bytes, reserve)
        found = model.step(layers, share, room - reserve, room=room)
        after = copy.deepcopy(trial)
        after._policy.share = share  # type: ignore[attr-defined]
        after.run(SETTLED)
        seen, now = after.records[-1], alike(after._state().layers)
        assert abs(room - after.plans[-1].reserve) <= max(0.05 * room, 2 * nbytes), share
        most = max(0.02 * (seen.bytes_up + seen.host_bytes), len(load.tiered) * nbytes)
        assert abs(found.fetched_bytes - seen.bytes_up) <= most, share
        assert abs(found.host_bytes - seen.host_bytes) <= most, share
        there = model.step(now, share, room=after.plans[-1].reserve)
        assert found.seconds == pytest.approx(there.seconds, rel=0.05), share


@pytest.mark.parametrize("share", [0.25, 0.5, 0.5625, 0.8125, 0.9375])
def test_parts_of_blocks_are_whole_ones_of_some_layers(share: float) -> None:
    for spilled in (0.0, 0.3, 1.75, 2.5, 8.25, 15.9):
        whole = [int(spilled) + (i < round((spilled - int(spilled)) * 100)) for i in range(100)]
        fetched = [min(int(n * share + 0.5), 7) for n in whole]
        take, fetch, leave = parted(spilled, share, 7)
        assert take == pytest.approx(sum(fetched) / 100)
        assert fetch == pytest.approx(sum(n > 0 for n in fetched) / 100)
        assert leave == pytest.approx(sum(n < had for n, had in zip(fetched, whole, strict=True)) / 100)


@pytest.mark.parametrize("share", [0.5, 0.5625, 0.8125, 0.9375])
@pytest.mark.parametrize("kept", [(), (1.0, 0.5)])
def test_the_room_of_a_share_does_not_go_to_and_fro(share: float, kept: tuple[float, ...]) -> None:
    """Also where that share of the few blocks that are spilled is all of them."""
    load = Load(8, 1e-4, 2**18, BLOCK, 64 * BLOCK, 4, 2**40, kept=kept)
    held = sum(load.sealed(i, 64) for i in load.tiered) * 4
    for spilled in (4, 8, 12):
        budget = (held + 32 - spilled) * load.block_bytes
        trial = Simulation(FixedShare(share), Machine(Rates()), replace(load, device_bytes=budget))
        trial.run(2 * SETTLED)
        assert len({x.reserve for x in trial.plans[SETTLED:]}) == 1
        assert len({x.bytes_up for x in trial.records[SETTLED:]}) == 1


@pytest.mark.parametrize("seed", [124, 127])
def test_a_share_that_leaves_the_host_little_is_not_taken_for_all(seed: int) -> None:
    """Settings of few blocks, in which such a share takes far longer than all."""
    trial = Trial.even(seed)
    best = trial.run(FixedShare(1.0), 200)
    assert trial.run(Adaptive(trial.calibrated(0.03)), 200) <= 1.01 * best
    assert trial.run(Adaptive(), 200) <= 1.05 * best


def test_the_first_fetch_over_an_unknown_link_fetches_some_block() -> None:
    """Of one block of each layer small shares are none, and the first one that is not costs more than is risked."""
    load = Load(40, 5.75e-5, 2**20, BLOCK, 4 * BLOCK, 1, 186 * 2**20)
    machine = Machine(Rates(up=20e9, host=11e9, device=2e12, host_overhead=25e-6))
    trial, best = (Simulation(x, machine, load) for x in (Adaptive(), FixedShare(1.0)))
    assert trial.run(100) <= 1.05 * best.run(100)
