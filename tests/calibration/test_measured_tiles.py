"""A tile is measured by times of the device alone; the best wins, and the user's state stays as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvtier.calibration.measurements import tiles as measuring
from kvtier.calibration.measurements.tiles import choose, kinds_of, measure
from kvtier.calibration.shapes import STANDARD, Shape
from kvtier.config import DEVICE_BLOCK
from kvtier.kernels import launch, tiles
from kvtier.kernels.tiles import Kind, Option
from kvtier.memory.storage.layout import BlockLayout

CPU = torch.device("cpu")
#: Bytes to measure on as they are, not as these tests set them.
BYTES, LEAST_BYTES = measuring._BYTES, measuring._LEAST_BYTES
KIND = Kind(BlockLayout(2, 2, 16, 16, 16, torch.float16), 2, 16)
PREFILL = Kind(BlockLayout(2, 2, 16, 16, 16, torch.float16), 2, 128)


class Clock:
    """Makes calls, and answers that each took what `seconds` says; the calls of one round of options in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.taken = 0

    def __call__(self, call: Callable[[], object], repeats: int) -> float:
        call()
        self.taken += 1
        return self.seconds[(self.taken - 1) % len(self.seconds)]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Option]:
    """The options whose calls were made; the calls do nothing."""
    found: list[Option] = []

    def call(trial: measuring.Trial, option: Option) -> Callable[[], object]:
        found.append(option)
        return lambda: None

    monkeypatch.setattr(measuring.Trial, "call", call)
    monkeypatch.setattr(measuring, "_BYTES", 2**13)
    monkeypatch.setattr(measuring, "_LEAST_BYTES", 2**10)
    monkeypatch.setattr(measuring, "_PREFILL_BYTES", 2**13)
    monkeypatch.setattr(measuring, "_PREFILL_ROWS", 80)
    monkeypatch.setattr(measuring, "_ROUNDS", 3)
    monkeypatch.setattr(measuring, "_warm", lambda call: None)
    return found


def timed(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Clock:
    clock = Clock(*seconds)
    monkeypatch.setattr(measuring, "_clock", clock)
    return clock


# What follows from times


def table(times: dict[tuple[int, int], float]) -> Callable[[list[Option]], list[float]]:
    """Times by the number of the tile and programs."""
    return lambda options: [times[KIND.tiles.index(option.tile), option.programs] for option in options]


def test_the_least_time_wins_and_the_explicit_one_where_the_gain_is_small() -> None:
    times = {(0, 4): 100.0, (1, 4): 90.0, (2, 4): 80.0, (2, 2): 70.0, (2, 8): 79.0}
    best = choose(KIND, table(times))
    assert best.option == Option(KIND.tiles[2], 2)
    assert {(KIND.tiles.index(x.tile), x.programs): t for x, t in best.seconds.items()} == times
    near = {(0, 4): 100.0, (1, 4): 96.0, (2, 4): 99.0, (0, 2): 96.0, (0, 8): 97.0}
    assert choose(KIND, table(near)).option == Option(KIND.tiles[0], 4)


def test_what_does_not_run_is_not_chosen() -> None:
    times = {(0, 4): 100.0, (1, 4): math.inf, (2, 4): math.inf, (0, 2): math.inf, (0, 8): 10.0}
    assert choose(KIND, table(times)).option == Option(KIND.tiles[0], 8)


# Measuring


def test_every_option_is_timed_and_the_profile_can_hold_the_choice(
    monkeypatch: pytest.MonkeyPatch, made: list[Option]
) -> None:
    clock = timed(monkeypatch, 1.0, 0.5, 0.8)  # of three options, tiles or programs, the second is best
    best = measure(KIND, CPU)
    assert best.option == Option(KIND.tiles[1], tiles.PROGRAMS[1])
    assert clock.taken == 3 * (len(KIND.tiles) + len(tiles.PROGRAMS))
    assert {*made} == {*(Option(x, 4) for x in KIND.tiles), *(Option(KIND.tiles[1], n) for n in tiles.PROGRAMS)}
    assert tiles.unpacked(tiles.packed(best, KIND), KIND) == best


def test_prefill_is_measured_with_the_usual_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, made: list[Option]
) -> None:
    clock = timed(monkeypatch, 1.0, 0.5)
    best = measure(PREFILL, CPU)
    assert not best.option.tile.low_query
    assert {option.programs for option in made} == {launch.PROGRAMS}
    assert clock.taken == 3 * len(best.seconds) > 3
    assert measuring._trial(PREFILL, CPU).query.shape == (1, 4, 40, 16)
    assert measuring._trial(KIND, CPU).query.shape == (1, 4, 1, 16)


def test_measuring_leaves_the_users_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0)
    torch.rand(3)
    before = torch.random.get_rng_state()
    measure(KIND, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_tile_that_does_not_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0, 0.5)

    def call(trial: measuring.Trial, option: Option) -> Callable[[], object]:
        if option.tile == KIND.tiles[1]:
            raise RuntimeError("out of resources: shared memory")
        return lambda: None

    monkeypatch.setattr(measuring.Trial, "call", call)
    best = measure(KIND, CPU)
    assert best.option.tile == KIND.tiles[2]
    assert best.seconds[Option(KIND.tiles[1], launch.PROGRAMS)] == math.inf


def test_where_memory_runs_out_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the tile that was tried: another process may have taken the memory."""
    timed(monkeypatch, 1.0)

    def call(trial: measuring.Trial, option: Option) -> Callable[[], object]:
        if option.tile == KIND.tiles[1]:
            raise torch.OutOfMemoryError("no memory")
        return lambda: None

    monkeypatch.setattr(measuring.Trial, "call", call)
    with pytest.raises(torch.OutOfMemoryError):
        measure(KIND, CPU)


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), torch.OutOfMemoryError("no memory")])
def test_where_the_explicit_tile_does_not_run_there_is_no_choice(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(trial: measuring.Trial, option: Option) -> Callable[[], object]:
        raise error

    monkeypatch.setattr(measuring.Trial, "call", call)
    with pytest.raises(type(error)):
        measure(KIND, CPU)


def test_measuring_ends_when_its_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_ROUNDS", 50)
    options = len(KIND.tiles) + len(tiles.PROGRAMS)
    slow = timed(monkeypatch, 1.0)
    measure(KIND, CPU)
    assert slow.taken == measuring._LEAST_ROUNDS * options
    quick = timed(monkeypatch, 1e-6)
    measure(KIND, CPU)
    assert quick.taken == 50 * options


def test_the_device_waits_until_all_that_is_timed_is_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("wait" if cycles >= 10**6 else "no time"))
    assert measuring.device_seconds(lambda: done.append("call"), 3) == pytest.approx(2e-3)
    timed = ["record", *["call"] * 3, "record", "synchronize"]
    assert done == ["call", "wait", *timed]
    monkeypatch.delattr(torch.cuda, "_sleep")  # it is torch's own
    done.clear()
    measuring.device_seconds(lambda: done.append("call"), 3)
    assert done == ["call", *timed]


def test_a_device_is_kept_busy_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(measuring, "_warm", lambda call: done.append("warm"))
    monkeypatch.setattr(measuring, "_clock", lambda call, repeats: float(bool(done.append("round")) or 1))
    measure(KIND, CPU)
    assert done[:2] == ["warm", "round"]
    done.clear()
    waited = SimpleNamespace(synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waited)
    looks = itertools.count()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(looks) * 0.006))
    measuring._raise_clocks(lambda: done.append("call"))
    assert done == ["call", "wait"] * 3, "as long as 0.02 s have not passed"


def test_what_is_read_is_more_than_caches_hold_and_at_most_an_eighth_of_what_isfree_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_BYTES", BYTES)
    monkeypatch.setattr(measuring, "_LEAST_BYTES", LEAST_BYTES)
    # The launch of a call takes up to 45 us, in which 4.8 TB/s read 206 MiB; caches of devices hold up to 126 MiB.
    assert BYTES > 4.8e12 * 45e-6
    assert LEAST_BYTES > 126 * 2**20
    free = 8 * LEAST_BYTES - 1
    monkeypatch.setattr(measuring, "free_bytes", lambda device: free)
    with pytest.raises(torch.OutOfMemoryError):
        measuring._trial(KIND, CPU)
    # Prefill computes more than it reads.
    monkeypatch.setattr(measuring, "_PREFILL_BYTES", 2**20)
    assert 2**19 <= measuring._trial(PREFILL, CPU).memory.nbytes <= free // 8


# Kinds


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16, 20, 71, 200])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_every_call_of_a_shape_finds_a_measured_kind(group: int, dim: int) -> None:
    shape = Shape(group, dim, dim, torch.bfloat16)
    names = [kind.name for kind in kinds_of(shape, DEVICE_BLOCK, all_widths=True)]
    assert len(names) == len(set(names))
    for queries in (1, 2, 5, 16, 17, 64, 1000):
        layout = BlockLayout(3, 3, dim, dim, DEVICE_BLOCK, torch.bfloat16)
        kind = Kind(layout, group, tiles.width(queries * group))
        assert kind.name in names, queries
    decode, *others = kinds_of(shape, DEVICE_BLOCK, all_widths=False)
    assert decode.width == tiles.width(group)
    assert [kind.width for kind in others] == [128] * (decode.width < 128)


def test_fp32_has_only_the_explicit_tiles_and_standard_shapes_have_two_kinds() -> None:
    found = [*kinds_of(Shape(4, 128, 128, torch.float32), 64, all_widths=True)]
    assert all(len(kind.tiles) == 1 for kind in found)  # the number of programs is measured all the same
    assert all(len([*kinds_of(shape, 64, all_widths=False)]) == 2 for shape in STANDARD)
