"""Pie's protocol as the text tells it (section 3.3, figure 4; section 3.4.2, figure 5)."""

from __future__ import annotations

import pytest

from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.rotation import Expansion, rotate
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.simulate import Load, Machine, Simulation


def test_figure_4_nine_layers_two_of_them_on_the_host_and_a_swap_of_two_computations() -> None:
    found = rotate(9, 2, compute=1, swap=2, tokens=6)
    first = [(swap.start, "out" if swap.out else "in", swap.layer) for swap in found.swaps[:5]]
    # Layer n of the first token is computed from n - 1 on. None moves at layer 1; 1 leaves at 2; at 3 none; 3 leaves
    # and 8 comes at 4.
    assert first == [(1, "out", 1), (3, "in", 8), (3, "out", 3), (5, "in", 9), (5, "out", 5)]
    assert not any(found.stalls)
    # From the beginning of its way out to the end of its way back: eight computations.
    left = {swap.layer: swap.start for swap in found.swaps if swap.out and swap.start < 9}
    back = {
        layer: min(s.end for s in found.swaps if not s.out and s.layer == layer and s.start > at)
        for layer, at in left.items()
    }
    assert {layer: back[layer] - at for layer, at in left.items()} == dict.fromkeys(left, 8.0)
    outs = [swap.layer for swap in found.swaps if swap.out]
    ins = [swap.layer for swap in found.swaps if not swap.out]
    assert ins[2 : 2 + len(outs)][:8] == outs[:8], "first out, first in"


@pytest.mark.parametrize("measured", [True, False])
def test_in_the_setting_of_figure_4_the_planner_moves_half_the_bytes_and_stalls_no_more(measured: bool) -> None:
    tokens, compute, blocks = 60, 1e-3, 36
    found = rotate(9, 2, compute=1, swap=2, tokens=tokens)
    swapped = sum(swap.start >= 9 for swap in found.swaps) / (tokens - 1)  # layers a token, both ways
    layer = blocks * 1024
    load = Load(9, compute, 1024, 64, 64 * blocks, 1, 7 * layer + 9 * 1024)
    rate = layer / (2 * compute)
    rates = Rates(up=rate, down=rate, host=1e6, device=1e15, copy_overhead=0.0, measured=measured)
    trial = Simulation(Adaptive(rates), Machine(rates), load)
    trial.run(tokens)
    # The first steps try the host, and blocks find their places.
    settled = trial.records[5:]
    assert all((x.bytes_up + x.bytes_down) / layer <= swapped / 2 for x in settled)
    assert sum(x.stall_seconds for x in settled) <= sum(found.stalls) + 1e-9
    assert max(x.seconds for x in settled) == pytest.approx(9 * compute, rel=1e-3), "nor does anybody wait for the host"
    assert sum(x.bytes_up for x in settled) >= len(settled) * layer, "nothing had to move"


def test_figure_5_more_is_swapped_while_the_link_idles_and_less_when_computation_waits() -> None:
    layers = 6
    # The link takes a third of a computation for a layer, and from token 60 on four.
    swap = [0.34] * 60 + [4.0] * 60
    found = rotate(layers, 0, compute=1, swap=swap, tokens=120, expansion=Expansion(layers))
    assert found.on_host[0] == 0, "it begins with all layers on the device"
    grown = max(found.on_host[:60])
    assert grown >= 2
    assert max(found.held[:60]) >= 1, "layers are on the host"
    assert all(held <= there + 1 for held, there in zip(found.held[:60], found.on_host, strict=False))
    swaps = [sum(token * 6 <= swap.start < token * 6 + 6 for swap in found.swaps) for token in (0, 50)]
    assert swaps[0] < swaps[1], "more is swapped"
    there = found.on_host[: found.on_host.index(grown) + 1]
    assert sorted(set(there)) == list(range(grown + 1)), "it grows step by step"
    assert there == sorted(there)
    assert min(found.on_host[len(there) : 60]) >= grown - 1, "and gives one back where computation waits"
    assert found.on_host[-1] < grown, "it shrinks when computation waits"


def test_expansion_tolerates_a_burst_and_a_load_that_wants_no_room() -> None:
    expansion = Expansion(9)
    for _ in range(12):
        expansion.observe(0.0, 1.0)
    there = expansion.on_host
    assert there == 4
    for _ in range(2):
        assert expansion.observe(1.0, 0.0) == there
    for _ in range(20):
        assert expansion.observe(0.0, 1.0, useful=False) == there
    assert [expansion.observe(1.0, 0.0) for _ in range(3)][-1] == there - 1
    # What made it wait is not tried again at once.
    assert {expansion.observe(0.0, 1.0) for _ in range(12)} == {there - 1}
