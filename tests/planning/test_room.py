"""What a share spills for the room of its fetches, and what fits into it: as predicted and as simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier.planning.costs import CostModel
from kvtier.planning.makespan.groups import Groups, alike
from kvtier.planning.makespan.levels import Rising, Sinking
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.learner import CAUTION
from kvtier.planning.policies.shares import DEPTH, FixedShare, room_for
from kvtier.planning.policy import fill, level
from kvtier.planning.rates import Rates
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.simulation.trials import Trial
from kvtier.planning.step import LayerState, StepRecord, StepState

RATES = Rates(up=20e9, host=50e9, copy_overhead=0.0)
#: 16 layers of a sequence of 256 blocks, half of which have room.
LOAD = Load(16, 1e-4, 2**18, 64, 256 * 64, 1, 16 * 128 * 2**18)


@pytest.mark.parametrize("seed", range(50))
def test_the_highest_are_lowered_to_one_height(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [(rng.randint(1, 4), rng.choice((0, 3, rng.randint(0, 200)))) for _ in range(rng.randint(1, 6))]
    total = rng.choice((0, 1, rng.randint(0, 300), 10_000))
    height = Sinking([(float(h), n) for n, h in kinds]).after(total)
    taken = sum(n * max(h - height, 0.0) for n, h in kinds)
    assert taken == pytest.approx(min(total, sum(n * h for n, h in kinds)))
    # As whole blocks are taken from layers, but for a part of a block of each.
    each = [(i, h) for i, h in enumerate([h for n, h in kinds for _ in range(n)])]
    found = dict(level(each, total))
    assert all(abs(h - found.get(i, 0) - min(h, height)) < 1 + 1e-9 for i, h in each)


@pytest.mark.parametrize("seed", range(50))
def test_the_lowest_are_raised_to_one_height(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [(rng.randint(1, 4), rng.randint(0, 100), rng.choice((0, rng.randint(0, 100)))) for _ in range(6)]
    total = rng.choice((0, 1, rng.randint(0, 300), 10_000))
    height = Rising([(float(h), float(most), n) for n, h, most in kinds]).after(total)
    added = [min(max(height - h, 0.0), most) for _, h, most in kinds]
    assert sum(n * x for (n, _, _), x in zip(kinds, added, strict=True)) == pytest.approx(
        min(total, sum(n * most for n, _, most in kinds))
    )
    # As whole blocks come back to layers, but for a part of a block of each.
    each = [(i, h, most) for i, (h, most) in enumerate([(h, most) for n, h, most in kinds for _ in range(n)])]
    found = dict(fill(each, total))
    assert all(abs(found.get(i, 0) - min(max(height - h, 0.0), most)) < 1 + 1e-9 for i, h, most in each)


@pytest.mark.parametrize("kept", [(), (1.0, 0.5), (1.0, 0.25, 0.25), (0.3, 1.0, 0.1)])
@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (1.0, 0.0625), (0.75, 0.125), (0.5, 0.25)])
def test_what_was_spilled_for_a_larger_share_comes_back_to_where_it_was(
    before: float, after: float, kept: tuple[float, ...]
) -> None:
    load = replace(LOAD, kept=kept, device_bytes=LOAD.device_bytes * 3 // 4)
    policy = FixedShare(before)
    changed, straight = (Simulation(x, Machine(RATES), load) for x in (policy, FixedShare(after)))
    changed.run(8), straight.run(8)
    state, reserve = changed._state(), changed.plans[-1].reserve
    room = room_for(alike(state.layers), after, load.device_bytes, reserve)
    found = CostModel(RATES).step(alike(state.layers), after, room - reserve, room=room)
    policy.share = after
    changed.run(6), straight.run(6)
    pairs = list(zip(changed._state().layers, straight._state().layers, strict=True))
    assert all(abs(one.spilled - other.spilled) <= 1 for one, other in pairs)
    seen = changed.records[-1]
    more = seen.bytes_up + seen.host_bytes - found.fetched_bytes - found.host_bytes
    assert abs(more) <= 2 * load.layers * load.block_bytes


@pytest.mark.parametrize("after", [0.25, 0.5, 0.75, 0.875])
@pytest.mark.parametrize("layers", [6, 16, 40])
def test_a_smaller_share_is_predicted_where_layers_are_not_as_full_as_each_other(layers: int, after: float) -> None:
    """Behind a step that had all fetched, what comes back has reached some of them."""
    load = replace(LOAD, layers=layers, context=32 * 64, device_bytes=layers * 24 * LOAD.block_bytes)
    changed, straight = (Simulation(FixedShare(x), Machine(RATES), load) for x in (1.0, after))
    changed.run(12), straight.run(24)
    reserve, state = changed.plans[-1].reserve, changed._state()
    moved = [3, 2, *[-1] * 5, *[0] * (layers - 7)] if layers > 6 else [3, 2, -2, -1, -1, -1]
    uneven = [
        replace(x, resident=x.resident + n, spilled=x.spilled - n) for x, n in zip(state.layers, moved, strict=True)
    ]
    groups = alike(uneven)
    room = room_for(groups, after, load.device_bytes, reserve)
    found = CostModel(RATES).step(groups, after, room - reserve, room=room)
    seen = straight.records[-1]
    assert abs(found.fetched_bytes - seen.bytes_up) <= layers * load.block_bytes, "but for a block of each layer"
    assert found.fetched_bytes


def test_no_step_waits_for_more_than_a_part_of_what_comes_back_and_the_first_for_nothing() -> None:
    layers = [LayerState(i, 2**20, 10, 0, spilled, 1, True) for i, spilled in enumerate((100, 100, 2, 0))]
    state = StepState(1, layers, 2**30, 2**34, StepRecord())
    assert [(x.fetch, x.keep) for x in FixedShare(0.125).plan(state).layers] == [(25, 25), (25, 25), (1, 1), (0, 0)]
    assert [(x.fetch, x.keep) for x in FixedShare(0.5).plan(state).layers] == [(50, 50), (50, 50), (1, 1), (0, 0)]
    first = FixedShare(0.125).plan(replace(state, last=None))
    assert [(x.fetch, x.keep) for x in first.layers] == [(13, 13), (13, 13), (0, 0), (0, 0)]


def test_layers_without_blocks_on_the_device_spill_nothing_for_the_room_of_fetches() -> None:
    empty = LayerState(0, 2**20, 0, 0, 0, 1, True)
    full = LayerState(1, 2**20, 100, 0, 100, 1, True)
    more = CostModel(RATES).step(Groups([(empty, 8), (full, 8)], [0, 1] * 8), 1.0, 160 * 2**20)
    assert more.copies == 8
    assert more.fetched_bytes == 8 * 120 * 2**20


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kept", [(), (1.0, 0.5), (1.0, 0.25, 0.25)])
def test_what_a_share_fetches_and_leaves_is_predicted_from_a_step_without_fetches(
    share: float, kept: tuple[float, ...]
) -> None:
    """What is spilled for the room of fetches needs room in turn."""
    load = replace(LOAD, kept=kept, device_bytes=LOAD.device_bytes * 3 // 4)
    before, after = (Simulation(FixedShare(x), Machine(RATES), load) for x in (0.0, share))
    before.run(4), after.run(24)
    state = before._state()
    groups = alike(state.layers)
    room = room_for(groups, share, load.device_bytes)
    found = CostModel(RATES).step(groups, share, room, room=room)
    seen = after.records[-1]
    spilled = seen.bytes_up + seen.host_bytes
    assert found.fetched_bytes + found.host_bytes == pytest.approx(spilled, rel=0.04)
    assert found.fetched_bytes == pytest.approx(seen.bytes_up, rel=0.06)
    # Seen from the share itself there is nothing to add.
    state = after._state()
    now = room_for(alike(state.layers), share, load.device_bytes, room)
    assert now == pytest.approx(after.plans[-1].reserve, rel=0.06)


def test_layers_as_full_as_each_other_but_for_a_block_all_spill_for_the_room_of_fetches() -> None:
    alike_but_one = [LayerState(i, 2**20, 100 + (i == 3), 0, 50 - (i == 3), 1, True) for i in range(16)]
    all_alike = [LayerState(i, 2**20, 100, 0, 50, 1, True) for i in range(16)]
    for share, reserve in ((1.0, 0), (0.25, 100 * 2**20)):
        one, other = (room_for(alike(x), share, 2**40, reserve) for x in (alike_but_one, all_alike))
        assert one == pytest.approx(other, rel=0.01)


def test_layers_as_full_as_each_other_spill_for_the_room_whatever_each_keeps() -> None:
    for reserve in (0, 300 * 2**20):
        rooms = []
        for others in (100, 60):  # blocks that the other half of the layers has spilled
            layers = [LayerState(i, 2**20, 50, 0, (100, others)[i % 2], 1, True) for i in range(8)]
            rooms.append(room_for(alike(layers), 1.0, 2**40, reserve))
        assert rooms[0] == rooms[1], "only the largest fetch needs the room, and all of them give it"


@pytest.mark.parametrize("kept", [(1.0, 0.3), (1.0, 1.0, 0.3, 0.3), (0.3, 1.0, 0.3, 0.3)])
def test_what_the_layer_before_fetches_says_in_how_many_copies_a_short_room_is_filled(kept: tuple[float, ...]) -> None:
    load = replace(LOAD, layers=8, device_bytes=8 * 40 * 2**18, kept=kept)
    trial = Simulation(FixedShare(1.0), Machine(RATES), load, traced=True)
    trial.run(24)
    state, room = trial._state(), trial.plans[-1].reserve
    found = CostModel(RATES).step(alike(state.layers), 1.0, room=room)
    seen = [x for x in trial.events if x.lane == "up" and 8 <= x.args["step"] < 24]
    assert found.copies == pytest.approx(len(seen) / 16, abs=0.5)


def test_where_room_for_fetches_is_short_the_host_attends_to_the_rest() -> None:
    load = replace(LOAD, layers=4, device_bytes=4 * 40 * 2**18)
    trial = Simulation(FixedShare(1.0), Machine(RATES), load)
    trial.run(24)
    state, seen = trial._state(), trial.records[-1]
    room = room_for(alike(state.layers), 1.0, load.device_bytes, trial.plans[-1].reserve)
    assert room < DEPTH * max(x.spilled * x.block_bytes for x in state.layers), "there is room for all"
    found = CostModel(RATES).step(alike(state.layers), 1.0, room=room)
    assert found.host_bytes == pytest.approx(seen.host_bytes, rel=0.05)
    assert found.fetched_bytes == pytest.approx(seen.bytes_up, rel=0.05)


@pytest.mark.parametrize("budget", [0.06, 0.1, 0.5])
@pytest.mark.parametrize("up", [10e9, 50e9])
@pytest.mark.parametrize("overhead", [0.0, 5e-4])
def test_fetches_that_wait_for_room_take_what_is_predicted(budget: float, up: float, overhead: float) -> None:
    """Where two layers' fetches do not fit into it, a part of each waits for the layer before, in a copy of its own."""
    load = replace(LOAD, device_bytes=int(2 * budget * LOAD.device_bytes))
    rates = replace(RATES, up=up, device=5e11, copy_overhead=overhead)
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        trial = Simulation(FixedShare(share), Machine(rates), load, traced=True)
        trial.run(24)
        seen, step = trial.records[-1], len(trial.records) - 1
        model = CostModel(rates, linear=load.layers * load.linear)
        found = model.step(alike(trial._state().layers), share, room=trial.plans[-1].reserve)
        assert found.seconds == pytest.approx(seen.seconds, rel=0.005)
        assert found.link == pytest.approx(seen.seconds_up, rel=0.005)
        assert found.copies == sum(x.lane == "up" and x.args["step"] == step for x in trial.events)


@pytest.mark.parametrize("kept", [(), (0.25, 1.0, 0.25)])
@pytest.mark.parametrize("up", [2e9, 20e9, 60e9])
def test_room_for_two_layers_keeps_the_link_as_busy_as_room_for_more(up: float, kept: tuple[float, ...]) -> None:
    """One is read while the next one arrives, however many are between them; more room only spills more."""
    machine, load = Machine(replace(RATES, up=up)), replace(LOAD, kept=kept)
    if kept:  # only the large layers spill
        load = replace(load, device_bytes=load.device_bytes * 3 // 4)
    trial = Simulation(FixedShare(1.0), machine, load)
    trial.run(24)
    seen, layers = trial.records[-1], trial._state().layers
    assert sum(x.spilled > 0 for x in layers) == (5 if kept else 16)
    held = sum((x.resident + x.spilled) * x.block_bytes for x in layers)
    linear, device = load.layers * load.linear, held / machine.rates.device
    assert seen.host_bytes == 0
    # Nothing hides behind the attention of a layer that itself waits for its blocks.
    largest = max(x.spilled * x.block_bytes for x in layers) / machine.rates.device
    assert seen.seconds <= 1.01 * max(seen.seconds_up, linear + device) + 2 * largest


@pytest.mark.parametrize("up", [1e9, 3e9, 20e9, 100e9])
def test_the_first_fetch_over_an_unknown_link_costs_little(up: float) -> None:
    load = replace(LOAD, device_bytes=LOAD.device_bytes // 2)
    trial = Simulation(Adaptive(), Machine(replace(RATES, up=up)), load)
    trial.run(24)
    first = next(i for i, x in enumerate(trial.records) if x.bytes_up)
    before, seen = trial.records[first - 1], trial.records[first]
    slower = max(22e9 / up / CAUTION, 1.0)
    assert seen.seconds <= 1.1 * slower * before.seconds
    assert seen.bytes_up >= 0.8 * min(before.seconds * 22e9 / CAUTION, before.host_bytes), "more would cost as little"
    if up == 100e9:
        assert trial.records[first + 2].bytes_up > seen.bytes_up, "it stays careful with what it knows"


def test_the_rate_of_a_link_is_learned_where_copies_are_mostly_overhead() -> None:
    layers = [LayerState(i, 2**20, 50, 0, 4, 1, True) for i in range(16)]
    true = Rates(up=50e9, copy_overhead=3e-4, measured=True)
    model = CostModel(replace(true, up=30e9))
    predicted = model.step(alike(layers), 1.0)
    seconds = 16 * (true.copy_overhead + 4 * 2**20 / true.up)
    for _ in range(9):
        record = StepRecord(1, 16, 0.02, predicted.fetched_bytes, seconds_up=seconds)
        model.observe(record, predicted)
    assert model.rates.up == pytest.approx(true.up, rel=0.01)


@pytest.mark.parametrize("seed", [22, 91, 94])
def test_small_layers_are_not_expected_to_make_room(seed: int) -> None:
    """Settings in which a copy for each of them is most of a step."""
    trial = Trial.drawn(seed)
    assert trial.run(Adaptive(trial.calibrated(0.03)), 200) <= 1.03 * trial.best_share(200)


def test_a_share_is_not_left_and_taken_again_for_what_its_own_room_takes() -> None:
    """A setting in which two layers spill and others keep so little that they do not."""
    trial = Trial.drawn(304)
    policy = Adaptive(trial.calibrated(0.03))
    assert trial.run(policy, 200) <= 1.02 * trial.best_share(200)
    assert len(policy.decisions(1)) <= 12


@pytest.mark.parametrize("seed", [522, 645])
def test_what_another_choice_shows_of_the_rates_is_no_change_of_the_machine(seed: int) -> None:
    """Settings in which the host's rate depends on how much is fetched, so that it seems to jump with each choice."""
    trial = Trial.drawn(seed)
    assert trial.run(Adaptive(), 200) <= 1.05 * trial.best_share(200)


def test_an_overhead_that_is_measured_wrong_tells_nothing_of_the_link() -> None:
    """Copies of which bytes are a tenth: 4% of the rest are as much as 40% of that."""
    layers = [LayerState(i, 2**20, 50, 0, 2, 1, True) for i in range(16)]
    true = Rates(up=50e9, copy_overhead=3.8e-4, measured=True)
    model = CostModel(replace(true, copy_overhead=1.04 * true.copy_overhead))
    predicted = model.step(alike(layers), 1.0)
    seconds = 16 * (true.copy_overhead + 2 * 2**20 / true.up)
    for _ in range(9):
        model.observe(StepRecord(1, 16, 0.02, predicted.fetched_bytes, seconds_up=seconds), predicted)
    assert model.rates.up == true.up


def test_one_step_does_not_refute_a_link_that_was_measured() -> None:
    layers = [LayerState(i, 2**20, 50, 0, 40, 1, True) for i in range(16)]
    rates = Rates(up=50e9, measured=True)
    for steps, known in ((2, 50e9), (3, 25e9)):
        model = CostModel(rates)
        predicted = model.step(alike(layers), 1.0)
        for _ in range(steps):
            record = StepRecord(1, 16, 0.1, predicted.fetched_bytes, seconds_up=2 * predicted.link)
            model.observe(record, predicted)
        assert model.rates.up == pytest.approx(known, rel=0.02)


def test_what_one_eviction_frees_stays_free() -> None:
    block = 2**20
    layers = [LayerState(i, block, 1000, 0, 100, 1, True) for i in range(4)]
    for share in (0.0, 0.125):
        state = StepState(1, layers, 0, 4000 * block, StepRecord())
        reserve = FixedShare(share).plan(state).reserve
        for free, comes in ((14, 0), (15, 15)):
            state.free_bytes = reserve + free * block
            assert sum(x.keep for x in FixedShare(share).plan(state).layers) == comes
