"""The bound from below is as high as what can be attained, in settings in which a simple way attains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvtier import ConfigError
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.bound import lower_bound
from kvtier.planning.simulation.simulate import Load, Machine, Simulation

#: Of all KV, of which half is spilled. Room for fetches is a small part of it where layers are numerous.
BLOCK, CONTEXT, LAYERS = 2**18, 32768, 96
KV = LAYERS * 2 * CONTEXT // 64 * BLOCK
LOAD = Load(LAYERS, 1e-4, BLOCK, 64, CONTEXT, 2, KV // 2)
#: Without what the bound leaves out.
RATES = Rates(up=25e9, host=60e9, device=1e15, copy_overhead=0.0, host_overhead=0.0, shared=0.0)
STEPS = 10


def half_in_every_other_step(step: int) -> float:
    return step % 2 / 2


@pytest.mark.parametrize(
    ("load", "rates", "traffic", "share"),
    [
        pytest.param(replace(LOAD, device_bytes=2 * KV), replace(RATES, device=1e12), None, 0.0, id="all resident"),
        pytest.param(LOAD, replace(RATES, up=1e6), None, 0.0, id="all on the host"),
        pytest.param(LOAD, replace(RATES, host=1e8), None, 1.0, id="all fetched, the link binds"),
        pytest.param(LOAD, replace(RATES, host=1e8), half_in_every_other_step, 1.0, id="all fetched, in traffic"),
        pytest.param(replace(LOAD, linear=3e-2), replace(RATES, host=1e8), None, 1.0, id="all fetched, it hides"),
        pytest.param(LOAD, RATES, None, 5 / 16, id="some of either"),
        pytest.param(replace(LOAD, linear=1e-3), RATES, None, 7 / 16, id="some of either, behind the linear part"),
        pytest.param(LOAD, replace(RATES, up=1e15, device=1.5e11), None, 7 / 16, id="both attend for as long"),
        pytest.param(
            replace(LOAD, context=2048, device_bytes=KV // 64, tokens=64),
            replace(RATES, host=1e8),
            None,
            1.0,
            id="drafts that make the context grow",
        ),
        pytest.param(
            replace(LOAD, kept=(1.0, 0.8), device_bytes=3 * KV // 8),
            replace(RATES, host=1e8),
            None,
            1.0,
            id="layers that keep parts of the context",
        ),
        pytest.param(
            replace(LOAD, kept=(1.0, 0.0), linear=1e-2, device_bytes=KV // 4),
            replace(RATES, up=1e6),
            None,
            0.0,
            id="windows",
        ),
        pytest.param(
            replace(LOAD, device_bytes=KV // 100),
            replace(RATES, up=1e6, host_overhead=1e-3),
            None,
            0.0,
            id="all on the host, which begins late",
        ),
        pytest.param(
            replace(LOAD, device_bytes=KV // 20),
            replace(RATES, host=1e8, copy_overhead=3e-3),
            None,
            1.0,
            id="all fetched, copies take longer",
        ),
    ],
)
def test_the_bound_is_attained_where_nothing_that_it_leaves_out_matters(
    load: Load, rates: Rates, traffic: Callable[[int], float] | None, share: float
) -> None:
    machine = Machine(rates) if traffic is None else Machine(rates, traffic=traffic)
    trial = Simulation(FixedShare(share), machine, load)
    trial.run(STEPS)  # blocks find their places
    later = replace(load, context=load.context + STEPS * load.tokens)
    seconds, bound = trial.run(STEPS), lower_bound(later, machine, STEPS)
    assert bound <= seconds * (1 + 1e-9), "something is faster than the bound"
    assert seconds <= 1.05 * bound, "the bound is too low to say anything"


class LargestFirst(FixedShare):
    """The layers that hold most leave first and whole; nothing is fetched."""

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        """See `Policy.victims`."""
        return self.in_turn(sorted(candidates, key=lambda x: (-(x.layer % 2), -x.layer)), blocks)


def test_the_bound_keeps_those_layers_in_which_a_byte_costs_the_host_most() -> None:
    load = replace(LOAD, kept=(0.125, 1.0), device_bytes=KV // 16 + LAYERS * 2 * 2 * BLOCK)  # room for each small layer
    machine = Machine(replace(RATES, up=1e6, host=1e12, host_overhead=1e-3))
    trial = Simulation(LargestFirst(0.0), machine, load)
    trial.run(STEPS)
    seconds, bound = trial.run(STEPS), lower_bound(replace(load, context=load.context + STEPS), machine, STEPS)
    assert bound <= seconds <= 1.05 * bound


@pytest.mark.parametrize("taken", [1.0, -0.5, float("nan")])
def test_the_bound_is_refused_where_others_take_no_part_of_the_link_but_all_of_it(taken: float) -> None:
    with pytest.raises(ConfigError, match="traffic"):
        lower_bound(LOAD, Machine(RATES, traffic=lambda step: taken), STEPS)
