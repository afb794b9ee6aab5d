"""Which copies go by one launch, and what happens to them: chosen from times, exact, and as failed copies do."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_runs import make_pools, moves_exactly, some_runs
from stream_model import StreamModel
from test_missing_edges import edit
from test_ordering import by_launch

from kvtier import measured
from kvtier.errors import BudgetError, TransferError
from kvtier.kernels import copies as kernels
from kvtier.kernels import launch
from kvtier.metrics import Counters
from kvtier.storage import links
from kvtier.storage.block import BlockLayout
from kvtier.storage.links import NEVER, SIZES, Copy, Launches, TensorCopy, decide, pays, scattered, scattered_pools
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.transfer import CudaTransfers, State
from kvtier.types import Direction

Patch = pytest.MonkeyPatch
FETCH, WRITE_BACK, QUERY, RESULT = Direction
CPU = torch.device("cpu")
RUNS = [64, 64, 64, 32, 8]

# --------------------------------------------------------------------------------- when a launch pays


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
    assert links._valid(least)
    assert all(a <= b for a, b in itertools.pairwise(least) if b)
    assert all(0 <= x <= max(RUNS) for x in least)


def test_each_run_makes_up_for_its_part_of_a_launch() -> None:
    least = (4, 8, 16, 0, 0)
    assert not pays([4096] * 3, least)
    assert pays([4096] * 4, least)
    assert pays([4000] * 4, least)
    assert not pays([4097] * 7, least)  # counts as one of 16 KiB
    assert pays([4097] * 8, least)
    assert pays([4096] * 2 + [16384] * 4, least)
    assert pays([100] * 10, (10,) * 5)
    assert all(pays([4096] * n, (n,) * 5) and not pays([4096] * (n - 1), (n,) * 5) for n in range(2, 64))


def chosen(
    patch: Patch, copies: list[Any], least: tuple[int, ...] = (4, 4, 4, 0, 0), direction: Direction = FETCH
) -> tuple[list[Any], list[list[Any]]]:
    patch.setattr(links, "least_runs", lambda device, direction: least)
    return Launches(CPU).divide(copies, direction)


def test_runs_of_one_size_go_together_and_the_rest_alone_in_order(monkeypatch: Patch) -> None:
    small, large = scattered_pools(CPU, 4096, 2**20), scattered_pools(CPU, 2**17, 2**22)
    short, long = scattered(*small, 8, FETCH), scattered(*large, 8, FETCH)
    tensor = TensorCopy(torch.zeros(3), torch.zeros(3))
    mixed = [x for two in zip(short, long, strict=True) for x in two] + [tensor]
    alone, together = chosen(monkeypatch, mixed)
    assert alone == [*long, tensor]
    assert together == [short]
    alone, together = chosen(monkeypatch, mixed, (9, 9, 9, 0, 0))
    assert (alone, together) == (mixed, [])
    alone, together = chosen(monkeypatch, mixed, (4, 4, 4, 4, 0))
    assert (alone, together) == ([tensor], [short, long])
    # A run counts by all of its bytes.
    near, far = small
    run = Copy(far, far.slabs[0].base, near, near.slabs[0].base, 40)
    assert chosen(monkeypatch, [*short, run]) == ([run], [short])
    for pool in (*small, *large):
        pool.close()


@pytest.mark.parametrize("reason", ["few", "query", "result", "captured", "no kernels", "no copies"])
def test_what_does_not_pay_or_cannot_be_launched_goes_one_by_one(reason: str, monkeypatch: Patch) -> None:
    near, far = scattered_pools(CPU, 4096, 2**20)
    copies: list[Any] = scattered(near, far, 3 if reason == "few" else 8, FETCH)
    asked: list[Direction] = []
    monkeypatch.setattr(links, "least_runs", lambda device, direction: asked.append(direction) or (1,) * 5)
    monkeypatch.setattr(links.launch, "capturing", lambda device: reason == "captured")
    if reason == "no kernels":
        monkeypatch.setattr(links, "least_runs", lambda device, direction: NEVER)
    if reason == "no copies":
        copies = [TensorCopy(torch.zeros(3), torch.zeros(3))] * 8
    direction = {"query": QUERY, "result": RESULT}.get(reason, FETCH)
    launches = Launches(CPU)
    assert launches.divide(copies, direction) == (copies, [])
    assert not asked, "nothing is measured for nothing"
    near.close()
    far.close()


def test_each_direction_is_asked_about_once(monkeypatch: Patch) -> None:
    asked: list[Direction] = []
    monkeypatch.setattr(links, "least_runs", lambda device, direction: asked.append(direction) or NEVER)
    near, far = scattered_pools(CPU, 4096, 2**20)
    launches = Launches(CPU)
    for direction in (FETCH, WRITE_BACK) * 3:
        launches.divide(scattered(near, far, 8, direction), direction)
    assert asked == [FETCH, WRITE_BACK]


def test_memory_that_the_device_cannot_reach_is_left_to_the_copy_engine(monkeypatch: Patch) -> None:
    """Host slabs made before the memory was page-locked are not: a launch that read them would end the process."""
    near, far = scattered_pools(CPU, 4096, 2**20)
    copies = scattered(near, far, 8, FETCH)
    launches = Launches(torch.device("meta"))  # whose memory neither is
    monkeypatch.setattr(links, "least_runs", lambda device, direction: (1,) * 5)
    assert launches.divide(copies, FETCH) == (copies, [])
    far.memory._locked[far.slabs[0].data.data_ptr()] = far.nbytes
    assert launches.divide(copies, FETCH) == (copies, [])
    near.memory._locked[near.slabs[0].data.data_ptr()] = near.nbytes
    assert launches.divide(copies, FETCH) == ([], [copies])
    far.memory._locked.clear()
    assert launches.divide(copies, FETCH) == (copies, [])


# --------------------------------------------------------------------------------- what is measured


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path))
    monkeypatch.setattr(measured, "_known", {})
    monkeypatch.setattr(launch, "available", lambda device: True)
    return tmp_path


def test_the_least_runs_are_measured_once_and_remembered_for_each_direction(folder: Path, monkeypatch: Patch) -> None:
    taken: list[Direction] = []

    def measure(device: torch.device, direction: Direction) -> list[int]:
        taken.append(direction)
        return [len(taken)] * 5

    monkeypatch.setattr(links, "measure", measure)
    for _ in range(2):
        assert links.least_runs(CPU, FETCH) == [1] * 5
        assert links.least_runs(CPU, WRITE_BACK) == [2] * 5
        measured.forget()
    assert taken == [FETCH, WRITE_BACK]
    (file,) = folder.iterdir()
    kept = json.loads(file.read_text())
    assert len(kept["values"]) == 2
    for wrong in ([1] * 4, [1] * 4 + [-1], [1] * 4 + [True], [1.0] * 5, 3):
        measured.forget()
        file.write_text(json.dumps(kept | {"values": dict.fromkeys(kept["values"], wrong)}))
        assert links.least_runs(CPU, FETCH) == [len(taken)] * 5


def test_where_nothing_is_measured_an_estimate_serves_and_without_triton_there_are_no_launches(
    folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(links, "measure", lambda device, direction: pytest.fail("measured"))
    monkeypatch.setenv(measured.VARIABLE, "off")
    assert links.least_runs(CPU, FETCH) == links.ESTIMATE
    assert links._valid(list(links.ESTIMATE))
    monkeypatch.setattr(launch, "available", lambda device: False)
    monkeypatch.setenv(measured.VARIABLE, str(folder))
    assert links.least_runs(CPU, FETCH) == NEVER
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("error", [BudgetError("no memory", tier="host", needed=1, budget=0), RuntimeError("driver")])
def test_a_measurement_that_fails_is_said_and_leaves_the_copy_engine(
    error: Exception, folder: Path, monkeypatch: Patch
) -> None:
    def measure(device: torch.device, direction: Direction) -> list[int]:
        raise error

    monkeypatch.setattr(links, "measure", measure)
    with pytest.warns(RuntimeWarning, match=r"one by one.*(no memory|driver)"):
        assert links.least_runs(CPU, FETCH) == NEVER
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("direction", [FETCH, WRITE_BACK])
def test_a_measurement_runs_and_gives_all_memory_back(direction: Direction, monkeypatch: Patch) -> None:
    made: list[BlockPool] = []

    class Pool(BlockPool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(links, "BlockPool", Pool)
    monkeypatch.setattr(links, "_BYTES", 2**21)
    with StreamModel(0, monkeypatch) as model, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert links._valid(links.measure(CPU, direction))
    assert model.launches
    assert len(made) == 2 * len(SIZES)
    assert not any(pool.memory.budget.used for pool in made)


# --------------------------------------------------------------------------------- what is launched


@pytest.mark.parametrize("least", [(1,) * 5, (3, 3, 3, 3, 0), (2, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_mixed_runs_of_several_layouts_move_exactly(seed: int, least: tuple[int, ...], monkeypatch: Patch) -> None:
    by_launch(monkeypatch, least)
    with StreamModel(seed, monkeypatch) as model:
        moves_exactly(model.engine(CPU, Counters()), seed)
    assert model.launches >= 4 * (1 if least[1] == 0 else 3)


def some(seed: int = 0) -> tuple[BlockPool, BlockPool, list[Copy]]:
    near, far = make_pools(CPU, BlockLayout(1, 1, 4, 4, 2, torch.float32))
    return near, far, some_runs(random.Random(seed), near, far)


def test_memory_for_addresses_is_used_again_and_never_by_two(monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    made: list[int] = []
    make = Launches._make
    monkeypatch.setattr(Launches, "_make", lambda self, count: made.append(count) or make(self, count))
    with StreamModel(0, monkeypatch, eagerness=0.0) as model:
        engine = model.engine(CPU, Counters())
        near, far, copies = some()
        for _ in range(5):
            engine.submit(copies, WRITE_BACK).synchronize()
        assert made == [256]
        waiting = [engine.submit(copies, WRITE_BACK) for _ in range(3)]
        tickets = [transfer.ticket for transfer in waiting]
        assert len({ticket.batches[0].addresses.data_ptr() for ticket in tickets if ticket}) == 3
        assert made == [256] * 3
        waiting[-1].synchronize()
        engine.submit(copies, WRITE_BACK).synchronize()
        assert made == [256] * 3
        engine.close()
        assert not engine._launches._spare
    near.close()
    far.close()


def test_more_addresses_than_there_is_memory_for_replace_the_smaller() -> None:
    launches = Launches(CPU)
    layout = BlockLayout(1, 1, 32, 32, 1, torch.uint8)
    pool = BlockPool(layout, Memory(CPU, Budget("host", 10**6)))
    pool.grow(2000)
    base = pool.slabs[0].base
    sizes = []
    for count in (3, 256, 257, 900, 5, 1000):
        batch = launches.prepare([Copy(pool, base, pool, base + 1000, count)])
        assert batch.addresses[0, :count].tolist() == [pool.address(base + i) for i in range(count)]
        assert batch.addresses[1, :count].tolist() == [pool.address(base + 1000 + i) for i in range(count)]
        sizes.append(batch.addresses.shape[1])
        launches.release([batch])
    assert sizes == [256, 256, 512, 1024, 1024, 1024]
    assert len(launches._spare) == 1
    pool.close()


def broken_launch(patch: Patch, error: BaseException) -> None:
    """A launch begins, and then something is raised."""
    copy_blocks = kernels.copy_blocks

    def copied(*args: Any, **options: Any) -> None:
        copy_blocks(*args, **options)
        raise error

    patch.setattr(kernels, "copy_blocks", copied)


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_that_fails_is_a_failed_transfer_and_its_addresses_wait_for_the_stream(
    early: bool, monkeypatch: Patch
) -> None:
    by_launch(monkeypatch)
    if early:
        edit(CudaTransfers, "_start", "stream.synchronize()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        engine = model.engine(CPU, Counters())
        near, far, copies = some()
        told: list[str] = []
        with monkeypatch.context() as patch:
            broken_launch(patch, RuntimeError("no launch"))
            transfer = engine.submit(
                copies, WRITE_BACK, on_done=lambda: told.append("done"), on_failed=lambda: told.append("failed")
            )
        assert transfer.state is State.FAILED
        with pytest.raises(TransferError, match="no launch"):
            transfer.wait()
        assert told == ["failed"]
        assert {near.references(copy.src_slot) for copy in copies} == {1}
        assert not engine.in_flight()
        assert len(engine._launches._spare) == 1
        engine.submit(copies, WRITE_BACK).synchronize()
        assert (("write_back reads", "host writes") in model.pairs) == early
        engine.close()
    near.close()
    far.close()


@pytest.mark.parametrize("unrecorded", [False, True])
def test_an_interrupted_launch_is_in_flight_until_it_has_ended(unrecorded: bool, monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    if unrecorded:
        edit(CudaTransfers, "_start", "ended.record(stream)\n        raise", "raise")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        engine = model.engine(CPU, Counters())
        near, far, copies = some()
        with monkeypatch.context() as patch:
            broken_launch(patch, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.submit(copies, WRITE_BACK)
        engine.poll()
        assert bool(engine.in_flight()) != unrecorded
        engine.submit(copies, WRITE_BACK)
        assert (("write_back reads", "host writes") in model.pairs) == unrecorded
        engine.close()
        assert {near.references(copy.src_slot) for copy in copies} == {1}
    near.close()
    far.close()
