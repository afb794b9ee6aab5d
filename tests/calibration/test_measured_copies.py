"""From which size on a launch pays is decided from times, and measuring it leaves no memory behind."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from stream_model import StreamModel

from kvtier.calibration.measurements import copies as measuring
from kvtier.calibration.measurements.copies import decide
from kvtier.errors import TransferError
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.transfer.engine import Direction
from kvtier.transfer.launches import SIZES, valid

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
RUNS = [64, 64, 64, 32, 8]


def times(call: float, fixed: float, rate: float, kernel_rate: float | None = None) -> tuple[list[float], ...]:
    """Seconds of copies and launches, from those of one call of each and the bytes per second of the link."""
    kernel_rate = kernel_rate or rate
    engine = [n * max(call, size / rate) for n, size in zip(RUNS, SIZES, strict=True)]
    one = [fixed + size / kernel_rate for size in SIZES]
    many = [fixed + n * size / kernel_rate for n, size in zip(RUNS, SIZES, strict=True)]
    return engine, one, many


def test_calls_that_cost_more_than_their_bytes_make_small_runs_go_together() -> None:
    # 4 KiB take 0.16 us of the link, 16 KiB 0.66 us, 64 KiB 2.6 us; 256 KiB take longer than a call.
    least = decide(RUNS, *times(5e-6, 40e-6, 25e9))
    assert least == [10, 11, 22, 0, 0]
    # A launch that costs less pays for fewer, and a call that costs more makes it pay for larger ones.
    assert decide(RUNS, *times(5e-6, 10e-6, 25e9)) == [3, 3, 6, 0, 0]
    assert decide(RUNS, *times(20e-6, 40e-6, 25e9)) == [3, 3, 3, 6, 0]


def test_a_launch_that_is_never_faster_never_pays() -> None:
    assert decide(RUNS, *times(1e-6, 200e-6, 25e9)) == [0] * 5  # too dear
    assert decide(RUNS, *times(1e-7, 1e-7, 1e9)) == [0] * 5  # as fast as the copy engine: that is no gain
    assert decide(RUNS, *times(5e-6, 40e-6, 25e9, kernel_rate=1e8)) == [0] * 5  # reads slowly over the link


def test_a_launch_that_is_always_faster_always_pays() -> None:
    least = decide(RUNS, *times(1e-3, 40e-6, 25e9))
    assert least == [1] * 5
    assert decide(RUNS, [1.0] * 5, [0.0] * 5, [0.0] * 5) == [1] * 5


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("kind", range(3))
def test_one_disturbed_time_does_not_keep_smaller_runs_from_going_together(place: int, kind: int) -> None:
    right = decide(RUNS, *times(5e-6, 40e-6, 25e9))
    disturbed = times(5e-6, 40e-6, 25e9)
    disturbed[kind][place] *= 10
    least = decide(RUNS, *disturbed)
    for i in range(5):
        if i > place:
            assert least[i] == right[i]
        elif i < place:
            assert least[i] == (min(right[i] or least[place], least[place]) if least[place] else right[i])
    assert all(a <= b for a, b in itertools.pairwise(least) if b)


@pytest.mark.parametrize("seed", range(30))
def test_of_any_times_a_decision_is_made(seed: int) -> None:
    r = random.Random(seed)
    some = [[10 ** r.uniform(-7, -2) for _ in SIZES] for _ in range(3)]
    least = decide(RUNS, *some)
    assert valid(least)
    assert all(a <= b for a, b in itertools.pairwise(least) if b)
    assert all(0 <= x <= max(RUNS) for x in least)


@pytest.mark.parametrize("direction", [Direction.FETCH, Direction.WRITE_BACK])
def test_a_measurement_runs_and_gives_all_memory_back(direction: Direction, monkeypatch: Patch) -> None:
    made: list[BlockPool] = []

    class Pool(BlockPool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(measuring, "BlockPool", Pool)
    monkeypatch.setattr(measuring, "_BYTES", 2**21)
    with StreamModel(0, monkeypatch) as model, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert valid(measuring.measure(CPU, direction))
    assert model.launches
    assert len(made) == 2 * len(SIZES)
    assert not any(pool.allocator.budget.used for pool in made)


def test_nothing_is_launched_on_memory_that_the_device_does_not_see(monkeypatch: Patch) -> None:
    with StreamModel(0, monkeypatch) as model:
        monkeypatch.setattr(SlabAllocator, "is_mapped", lambda slabs, slab: False)
        with pytest.raises(TransferError, match="cannot be page-locked"):
            measuring.measure(CPU, Direction.FETCH)
    assert not model.launches
