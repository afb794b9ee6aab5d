"""Which copies go by one launch, and what happens to them: chosen from times, exact, and as failed copies do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conversations import by_launch, edit
from mixed_runs import make_pools, moves_exactly, some_runs
from stream_model import StreamModel

from kvtier import profile
from kvtier.calibration.measurements.copies import scattered, scattered_pools
from kvtier.errors import ConfigError, TransferError
from kvtier.kernels import copies as kernels
from kvtier.kernels import launch
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.transfer import launches as module
from kvtier.transfer.copies import Copy, TensorCopy
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction, InlineTransfers, State
from kvtier.transfer.launches import NEVER, Launches, pays

Patch = pytest.MonkeyPatch
FETCH, WRITE_BACK, QUERY, RESULT = Direction
CPU = torch.device("cpu")

# When a launch pays


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


def names(alone: list[Any], together: list[list[Any]]) -> tuple[list[int], list[list[int]]]:
    """Which copies these are: copies of equal spans would be equal."""
    return [id(x) for x in alone], [[id(x) for x in group] for group in together]


def chosen(
    patch: Patch, copies: list[Any], least: tuple[int, ...] = (4, 4, 4, 0, 0)
) -> tuple[list[int], list[list[int]]]:
    patch.setattr(module, "least_runs", lambda device, direction: least)
    return names(*Launches(CPU).divide(copies, FETCH))


def test_runs_of_one_size_go_together_and_the_rest_alone_in_order(monkeypatch: Patch) -> None:
    small, large = scattered_pools(CPU, 4096, 2**20), scattered_pools(CPU, 2**17, 2**22)
    tensor = TensorCopy(torch.zeros(3), torch.zeros(3))
    for pool in (*small, *large):
        pool.slabs[0].mapped = True
    short, long = scattered(*small, 8, FETCH), scattered(*large, 8, FETCH)
    mixed = [x for two in zip(short, long, strict=True) for x in two] + [tensor]
    assert chosen(monkeypatch, mixed) == names([*long, tensor], [short])
    assert chosen(monkeypatch, mixed, (9, 9, 9, 0, 0)) == names(mixed, [])
    assert chosen(monkeypatch, mixed, (4, 4, 4, 4, 0)) == names([tensor], [short, long])
    # A run counts by all of its bytes.
    near, far = small
    run = Copy(far.span(far.slabs[0].base, 40), near.span(near.slabs[0].base, 40))
    assert chosen(monkeypatch, [*short, run]) == names([run], [short])
    for pool in (*small, *large):
        pool.close()


@pytest.mark.parametrize("reason", ["few", "query", "result", "captured", "no kernels", "no copies"])
def test_what_does_not_pay_or_cannot_be_launched_goes_one_by_one(reason: str, monkeypatch: Patch) -> None:
    near, far = scattered_pools(CPU, 4096, 2**20)
    for pool in (near, far):
        pool.slabs[0].mapped = True
    copies: list[Any] = scattered(near, far, 3 if reason == "few" else 8, FETCH)
    asked: list[Direction] = []
    monkeypatch.setattr(module, "least_runs", lambda device, direction: asked.append(direction) or (1,) * 5)
    monkeypatch.setattr(module.launch, "capturing", lambda device: reason == "captured")
    if reason == "no kernels":
        monkeypatch.setattr(module, "least_runs", lambda device, direction: NEVER)
    if reason == "no copies":
        copies = [TensorCopy(torch.zeros(3), torch.zeros(3))] * 8
    direction = {"query": QUERY, "result": RESULT}.get(reason, FETCH)
    launches = Launches(CPU)
    assert names(*launches.divide(copies, direction)) == names(copies, [])
    assert not asked, "nothing is measured for nothing"
    near.close()
    far.close()


def test_each_direction_is_asked_about_once(monkeypatch: Patch) -> None:
    asked: list[Direction] = []
    monkeypatch.setattr(module, "least_runs", lambda device, direction: asked.append(direction) or NEVER)
    near, far = scattered_pools(CPU, 4096, 2**20)
    launches = Launches(CPU)
    for direction in (FETCH, WRITE_BACK) * 3:
        launches.divide(scattered(near, far, 8, direction), direction)
    assert asked == [FETCH, WRITE_BACK]


@pytest.mark.parametrize("end", ["neither", "source", "target", "both"])
def test_memory_that_the_device_cannot_reach_is_left_to_the_copy_engine(end: str, monkeypatch: Patch) -> None:
    """Host slabs made before the memory was page-locked are not: a launch that read them would end the process."""
    near, far = scattered_pools(CPU, 4096, 2**20)
    for pool, which in ((far, "source"), (near, "target")):
        (slab,) = pool.slabs
        assert not slab.mapped, "memory of the host that is not page-locked"
        slab.mapped = end in (which, "both")
    copies = scattered(near, far, 8, FETCH)
    assert chosen(monkeypatch, copies, (1,) * 5) == (names([], [copies]) if end == "both" else names(copies, []))
    near.close()
    far.close()


# The profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path))
    monkeypatch.setattr(launch, "available", lambda device: True)
    return tmp_path


def test_the_least_runs_are_those_of_the_profile_for_each_direction(folder: Path) -> None:
    for direction, least in ((FETCH, [1, 2, 3, 4, 5]), (WRITE_BACK, [0] * 5)):
        profile.store(launch.machine(CPU), module.profile_name(direction), least)
    assert module.least_runs(CPU, FETCH) == [1, 2, 3, 4, 5]
    assert module.least_runs(CPU, WRITE_BACK) == [0] * 5


@pytest.mark.parametrize("wrong", [[1] * 4, [1] * 4 + [-1], [1] * 4 + [True], [1.0] * 5, 3, None])
def test_what_is_no_list_of_least_runs_is_not_read(wrong: Any, folder: Path) -> None:
    profile.store(launch.machine(CPU), module.profile_name(FETCH), wrong)
    assert module.least_runs(CPU, FETCH) == module.ESTIMATE


def test_without_a_profile_an_estimate_serves_and_without_triton_there_are_no_launches(
    folder: Path, monkeypatch: Patch
) -> None:
    assert module.least_runs(CPU, FETCH) == module.ESTIMATE
    assert module.valid(list(module.ESTIMATE))
    assert not [*folder.iterdir()], "looking a value up stores nothing"
    profile.store(launch.machine(CPU), module.profile_name(FETCH), [1] * 5)
    with monkeypatch.context() as patch:
        patch.setenv(profile.VARIABLE, "off")
        assert module.least_runs(CPU, FETCH) == module.ESTIMATE
    monkeypatch.setattr(launch, "available", lambda device: False)
    assert module.least_runs(CPU, FETCH) == NEVER


def test_a_wrong_setting_is_an_error_before_the_first_transfer(monkeypatch: Patch) -> None:
    monkeypatch.setenv(profile.VARIABLE, "here")
    with pytest.raises(ConfigError, match="absolute path"):
        Launches(CPU)


# What is launched


@pytest.mark.parametrize("least", [(1,) * 5, (3, 3, 3, 3, 0), (2, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_mixed_runs_of_several_layouts_move_exactly(seed: int, least: tuple[int, ...], monkeypatch: Patch) -> None:
    by_launch(monkeypatch, least)
    with StreamModel(seed, monkeypatch) as model:
        moves_exactly(model.engine(CPU), seed)
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
        engine = model.engine(CPU)
        near, far, copies = some()
        for _ in range(5):
            engine.submit(copies, WRITE_BACK, Counters()).synchronize()
        assert made == [256]
        waiting = [engine.submit(copies, WRITE_BACK, Counters()) for _ in range(3)]
        tickets = [transfer.ticket for transfer in waiting]
        assert len({ticket.batches[0].addresses.data_ptr() for ticket in tickets if ticket}) == 3
        assert made == [256] * 3
        waiting[-1].synchronize()
        engine.submit(copies, WRITE_BACK, Counters()).synchronize()
        assert made == [256] * 3
        engine.close()
        assert not engine._launches._spare
    near.close()
    far.close()


def test_more_addresses_than_there_is_memory_for_replace_the_smaller() -> None:
    launches = Launches(CPU)
    layout = BlockLayout(1, 1, 32, 32, 1, torch.uint8)
    pool = BlockPool(layout, SlabAllocator(CPU, Budget("host", 10**6)))
    pool.grow(2000)
    base = pool.slabs[0].base
    sizes = []
    for count in (3, 256, 257, 900, 5, 1000):
        batch = launches.prepare([Copy(pool.span(base, count), pool.span(base + 1000, count))])
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
        engine = model.engine(CPU)
        near, far, copies = some()
        told: list[str] = []
        with monkeypatch.context() as patch:
            broken_launch(patch, RuntimeError("no launch"))
            transfer = engine.submit(
                copies,
                WRITE_BACK,
                Counters(),
                on_done=lambda: told.append("done"),
                on_failed=lambda: told.append("failed"),
            )
        assert transfer.state is State.FAILED
        with pytest.raises(TransferError, match="no launch"):
            transfer.wait()
        assert told == ["failed"]
        assert not engine.in_flight()
        assert len(engine._launches._spare) == 1
        engine.submit(copies, WRITE_BACK, Counters()).synchronize()
        assert (("write_back reads", "host writes") in model.pairs) == early
        engine.close()
    near.close()
    far.close()


@pytest.mark.parametrize("unrecorded", [False, True])
def test_who_waits_for_an_interrupted_launch_waits_for_its_end(unrecorded: bool, monkeypatch: Patch) -> None:
    by_launch(monkeypatch)
    if unrecorded:
        edit(CudaTransfers, "_start", "ticket.ended.record(stream)\n        raise", "raise")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False) as model:
        engine = model.engine(CPU)
        near, far, copies = some()
        with monkeypatch.context() as patch:
            broken_launch(patch, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.submit(copies, WRITE_BACK, Counters())
        engine.poll()
        (transfer,) = engine.in_flight()
        with pytest.raises(TransferError, match="it was cut short"):
            transfer.synchronize()
        engine._launches._spare[0].fill_(0)  # the addresses that it read
        assert bool(model.pairs) == unrecorded
        engine.close()
    near.close()
    far.close()


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("mutation", [None, "taken to be whole", "settled while others go on"])
def test_what_an_interrupt_kept_from_being_copied_is_not_done(
    cut: int, mutation: str | None, monkeypatch: Patch
) -> None:
    """Its stream ends, and has not copied all: whoever took it to be done would read what was in the slots before."""
    if mutation == "taken to be whole":
        edit(CudaTransfers, "_end", "not ticket.whole", "False")(monkeypatch)
    elif mutation:
        edit(CudaTransfers, "poll", "ticket.whole and ", "")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=1.0, strict=False) as model:
        engine = model.engine(CPU)
        near, far, copies = some()
        told: list[str] = []
        with monkeypatch.context() as patch:
            run, left = Copy.run, [cut]

            def interrupted(self: Copy, non_blocking: bool = False) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                run(self, non_blocking)

            patch.setattr(Copy, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.submit(
                    copies[:2],
                    WRITE_BACK,
                    Counters(),
                    on_done=lambda: told.append("done"),
                    on_failed=lambda: told.append("failed"),
                )
        after = engine.submit(copies, WRITE_BACK, Counters())
        engine.poll()
        assert (told == []) == (mutation != "settled while others go on")
        engine.drain()
        assert told == [("done" if mutation == "taken to be whole" else "failed")]
        assert after.state is State.DONE
        engine.close()
    near.close()
    far.close()


@pytest.mark.parametrize("mutation", [False, True])
def test_what_a_device_that_has_failed_may_have_copied_is_not_done(mutation: bool, monkeypatch: Patch) -> None:
    if mutation:
        edit(CudaTransfers, "_end", "transfer.settle(error or failure)", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=1.0, strict=False) as model:
        engine = model.engine(CPU)
        near, far, copies = some()
        transfer = engine.submit(copies, WRITE_BACK, Counters())

        def fails(*_: object) -> float:
            raise RuntimeError("an illegal memory access")

        with monkeypatch.context() as patch:
            patch.setattr(type(transfer.ticket.began), "elapsed_time", fails)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                engine.poll()
        assert transfer.state is (State.DONE if mutation else State.FAILED)
        engine.close()
    near.close()
    far.close()


def test_a_time_limit_within_a_submission_reaches_the_caller(monkeypatch: Patch) -> None:
    """A handler of SIGALRM raises `TimeoutError`: a transfer that only failed would let the caller go on."""
    with StreamModel(0, monkeypatch, strict=False) as model:
        for engine in (model.engine(CPU), InlineTransfers(CPU)):
            near, far, copies = some()
            told: list[str] = []

            def over(self: Copy, non_blocking: bool = False) -> None:
                raise TimeoutError

            with monkeypatch.context() as patch:
                patch.setattr(Copy, "run", over)
                with pytest.raises(TimeoutError):
                    engine.submit(copies[:2], FETCH, Counters(), on_failed=lambda told=told: told.append("failed"))  # type: ignore[misc]
            assert told == ["failed"]
            assert not engine.in_flight()
            engine.close()
            near.close()
            far.close()
