"""Tiles are chosen by measured times, once for a machine, and what cannot be measured changes nothing."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier import measured
from kvtier.kernels import launch, paged, tuning
from kvtier.kernels.launch import Configuration
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.kernels.tuning import Blocks, Option

CPU = torch.device("cpu")
#: Bytes to measure on as they are, not as these tests want them.
BYTES, LEAST_BYTES = tuning._BYTES, tuning._LEAST_BYTES
LAYOUT = Blocks(2, 2, 16, 16, 16, torch.float16)
EXPLICIT = launch.configuration(16, 16, 2, 16)
TILES = [Configuration(16, tokens, 4, 3, True) for tokens in (64, 32, 16)]

# The interpreter is numpy, which warns of what is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")


class Clock:
    """Makes calls, and says that each took what `seconds` says; the calls of one round of options in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.taken = 0

    def __call__(self, call: Callable[[], object], repeats: int) -> float:
        call()
        self.taken += 1
        return self.seconds[(self.taken - 1) % len(self.seconds)]


@pytest.fixture(autouse=True)
def _measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measured.VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "_measures", lambda device: True)
    monkeypatch.setattr(tuning, "_BYTES", 2**13)
    monkeypatch.setattr(tuning, "_LEAST_BYTES", 2**10)
    monkeypatch.setattr(tuning, "_ROUNDS", 3)
    monkeypatch.setattr(tuning, "_warm", lambda call: None)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process knows: as another one begins."""
    monkeypatch.setattr(tuning, "_held", {})
    monkeypatch.setattr(paged, "_kinds", {})
    measured.forget()


def timed(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Clock:
    clock = Clock(*seconds)
    monkeypatch.setattr(tuning, "_clock", clock)
    return clock


def nothing(trial: tuning.Trial, option: Option) -> Callable[[], object]:
    return lambda: None


def chosen(
    layout: Blocks = LAYOUT, prepare: tuning.Prepare = nothing, device: torch.device = CPU, width: int = 16
) -> tuning.Choice:
    return tuning.chosen(layout, device, 2, width, prepare)


# What follows from times


def table(times: dict[tuple[int, int], float]) -> Callable[[list[Option]], list[float]]:
    """Times by tokens of the tile and programs."""
    return lambda options: [times[option.tile.tokens, option.programs] for option in options]


def test_the_least_time_wins_and_the_explicit_one_where_the_gain_is_small() -> None:
    times = {(64, 4): 100.0, (32, 4): 90.0, (16, 4): 80.0, (16, 2): 70.0, (16, 8): 79.0}
    made = tuning.choose(TILES, (4, 2, 8), table(times))
    assert made.option == Option(TILES[2], 2)
    assert {(x.tile.tokens, x.programs): t for x, t in made.seconds.items()} == times
    near = {(64, 4): 100.0, (32, 4): 96.0, (16, 4): 99.0, (64, 2): 96.0, (64, 8): 97.0}
    assert tuning.choose(TILES, (4, 2, 8), table(near)).option == Option(TILES[0], 4)
    assert tuning.choose(TILES, (4,), table(near)).option == Option(TILES[0], 4)


def test_what_does_not_run_is_not_chosen() -> None:
    times = {(64, 4): 100.0, (32, 4): math.inf, (16, 4): math.inf, (64, 2): math.inf, (64, 8): 10.0}
    assert tuning.choose(TILES, (4, 2, 8), table(times)).option == Option(TILES[0], 8)


def test_a_choice_is_read_as_it_was_written_and_nothing_else_is_read() -> None:
    times = {(64, 4): 100.0, (32, 4): math.inf, (16, 4): 80.0, (16, 2): 70.0, (16, 8): 79.0}
    made = tuning.choose(TILES, (4, 2, 8), table(times))
    packed = tuning._packed(made, TILES, (4, 2, 8))
    assert tuning._unpacked(packed, TILES, (4, 2, 8)) == made
    wrong = [None, [], packed[:5], packed[:-1], [*packed, 1.0], [128, *packed[1:]], [*packed[:4], 16, *packed[5:]]]
    for value in [*wrong, ["16", *packed[1:]], {"tile": packed}, [[16]], [True] * len(packed)]:
        assert tuning._unpacked(value, TILES, (4, 2, 8)) is None, value
    assert tuning._unpacked(packed, TILES[:2], (4, 2, 8)) is None  # a tile that is no candidate any more


def test_candidates_are_few_and_the_explicit_tile_is_first() -> None:
    for itemsize in (2, 4):
        for k_dim, v_dim in ((8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)):
            for width in (16, 32, 64, 128):
                explicit = launch.configuration(k_dim, v_dim, itemsize, width)
                found = tuning.candidates(explicit, k_dim, v_dim, itemsize)
                assert found[0] == explicit
                assert 1 <= len(found) == len(set(found)) <= 3
                for tile in found:
                    # Few queries are one tile, of which none is left out.
                    assert tile.few == explicit.few
                    assert not tile.few or tile.rows == explicit.rows
                    assert tile.tokens >= 16


# Measured


def test_a_choice_is_measured_once_for_a_machine_and_every_process_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 3
    clock = timed(monkeypatch, 1.0, 0.5, 0.8)  # of three options, whichever they are, the second is best
    tiles = tuning.candidates(EXPLICIT, 16, 16, 2)
    assert len(tiles) == 3
    first = chosen()
    assert first.option == Option(tiles[1], tuning.PROGRAMS[1])
    assert clock.taken == rounds * (len(tiles) + len(tuning.PROGRAMS))
    again = timed(monkeypatch, 1.0)
    assert chosen() is first
    assert chosen(Blocks(5, 5, 16, 16, 16, torch.float16)) is first  # heads do not matter
    forget(monkeypatch)
    assert chosen() == first
    assert again.taken == 0
    other = chosen(Blocks(2, 2, 16, 16, 32, torch.float16))  # another block size is another kind
    assert again.taken > 0
    assert other.option == Option(EXPLICIT, launch.PROGRAMS)


def test_calls_take_the_tile_that_was_chosen(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(tuning, "_ROUNDS", 1)
    clock = timed(monkeypatch, 1.0, 0.5, 0.8)
    best = chosen(prepare=paged._prepare, device=device).option
    assert clock.taken
    assert best.tile != EXPLICIT
    tokens: list[int] = []
    real = launch.Launcher.__call__

    def noted(self: launch.Launcher, count: int, *args: object) -> None:
        tokens.append(self._constants.get("TOKENS", 0))
        real(self, count, *args)

    programs: list[int] = []

    def parts_of(busy: int, tokens: int, device: torch.device, number: int) -> int:
        programs.append(number)
        return 1

    monkeypatch.setattr(launch.Launcher, "__call__", noted)
    monkeypatch.setattr(launch, "parts_of", parts_of)
    memory = torch.ones(4 * LAYOUT.k_numel, dtype=LAYOUT.dtype, device=device)
    where = AddressTable(torch.tensor([[memory.data_ptr()]], device=device))
    query = torch.ones((1, 4, 1, 16), dtype=LAYOUT.dtype, device=device)
    out, _ = paged.attend(query, where, LAYOUT, 16, AttentionParams(1.0))
    assert tokens == [best.tile.tokens]
    assert programs == [best.programs] != [launch.PROGRAMS]
    assert bool((out == 1.0).all())


def test_threads_that_ask_at_once_measure_once_and_get_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0, 0.5, 0.8)
    both = threading.Barrier(2)
    measuring: set[int] = set()

    def prepare(trial: tuning.Trial, option: Option) -> Callable[[], object]:
        if threading.get_ident() not in measuring:
            measuring.add(threading.get_ident())
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # time enough for the other to begin as well, if nothing keeps it from that
        return lambda: None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: chosen(prepare=prepare), range(2))
    assert len(measuring) == 1
    assert first is second


def test_measuring_leaves_the_users_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0)
    before = torch.random.get_rng_state()
    chosen()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_measuring_takes_nothing_from_the_users_modes_and_leaves_them_alone(
    mode: Callable[[], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel's first call makes may be kept, for calls in other modes."""
    timed(monkeypatch, 1.0)
    weight = torch.ones(1, requires_grad=True)
    made: list[torch.Tensor] = []

    def prepare(trial: tuning.Trial, option: Option) -> Callable[[], object]:
        made.append(trial.query)
        return lambda: made.append(weight * 2)

    with mode():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        chosen(prepare=prepare)
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == before
    assert made
    assert not any(x.is_inference() or x.requires_grad for x in made)


@pytest.mark.parametrize("text", ["", "{", '{"machine": "another"}'])
def test_a_damaged_file_is_measured_anew(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0, 0.5, 0.8)
    first = chosen()
    measured.file_of(launch.machine(CPU)).write_text(text)
    forget(monkeypatch)
    assert timed(monkeypatch, 1.0, 0.5, 0.8).taken == 0
    assert chosen() == first


def test_off_and_other_devices_take_the_explicit_tile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = timed(monkeypatch, 1.0, 0.5, 0.8)
    with monkeypatch.context() as patch:
        patch.setenv(measured.VARIABLE, "off")
        assert chosen() == tuning.Choice(Option(EXPLICIT, launch.PROGRAMS), {})
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_measures", lambda device: device.type == "cuda")
        assert chosen() == tuning.Choice(Option(EXPLICIT, launch.PROGRAMS), {})
    assert clock.taken == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["captured", "no memory", "little memory", "memory runs out"])
def test_what_cannot_be_measured_now_stays_explicit_in_this_process_and_is_not_kept(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed(monkeypatch, 1.0, 0.5, 0.8)

    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        if what == "captured":
            patch.setattr(launch, "capturing", lambda device: True)
        elif what == "no memory":
            patch.setattr(tuning, "_trial", short)
        elif what == "little memory":
            patch.setattr(tuning, "_free", lambda device: 2**10 * tuning._SHARE - 1)
        else:
            patch.setattr(tuning, "_clock", short)
        first = chosen()
    assert first == tuning.Choice(Option(EXPLICIT, launch.PROGRAMS), {})
    # Results must not change in the middle of a generation.
    assert chosen() is first
    assert not list(tmp_path.iterdir())
    forget(monkeypatch)
    assert chosen().option.tile != EXPLICIT


def test_a_tile_that_does_not_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0, 0.5)
    tiles = tuning.candidates(EXPLICIT, 16, 16, 2)

    def prepare(trial: tuning.Trial, option: Option) -> Callable[[], object]:
        if option.tile == tiles[1]:
            raise RuntimeError("out of resources: shared memory")
        return lambda: None

    made = chosen(prepare=prepare)
    assert made.option.tile == tiles[2]
    assert made.seconds[Option(tiles[1], launch.PROGRAMS)] == math.inf
    forget(monkeypatch)
    assert chosen() == made  # as it was kept


def test_where_not_even_the_explicit_tile_runs_it_is_said_and_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(trial: tuning.Trial, option: Option) -> Callable[[], object]:
        raise RuntimeError("no compiler")

    with pytest.warns(RuntimeWarning, match="no compiler"):
        made = chosen(prepare=prepare)
    assert made.option == Option(EXPLICIT, launch.PROGRAMS)


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
    assert tuning._device_seconds(lambda: done.append("call"), 3) == pytest.approx(2e-3)
    timed = ["record", *["call"] * 3, "record", "synchronize"]
    assert done == ["call", "wait", *timed]
    monkeypatch.delattr(torch.cuda, "_sleep")  # it is torch's own
    done.clear()
    tuning._device_seconds(lambda: done.append("call"), 3)
    assert done == ["call", *timed]


def test_a_device_is_kept_busy_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 1.0)
    done: list[str] = []
    monkeypatch.setattr(tuning, "_warm", lambda call: done.append("warm"))
    monkeypatch.setattr(tuning, "_clock", lambda call, repeats: float(bool(done.append("round")) or 1))
    chosen()
    assert done[:2] == ["warm", "round"]
    done.clear()
    waited = SimpleNamespace(synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waited)
    began = time.perf_counter()
    tuning._raise_clocks(lambda: done.append("call"))
    assert time.perf_counter() - began >= 0.02
    assert done[:4] == ["call", "wait"] * 2


def test_what_is_read_is_more_than_caches_hold_and_at_most_an_eighth_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "_BYTES", BYTES)
    monkeypatch.setattr(tuning, "_LEAST_BYTES", LEAST_BYTES)
    # The launch of a call takes up to 45 us, in which 4.8 TB/s read 206 MiB; caches of devices hold up to 126 MiB.
    assert BYTES > 4.8e12 * 45e-6
    assert LEAST_BYTES > 126 * 2**20
    free = 8 * LEAST_BYTES - 1
    monkeypatch.setattr(tuning, "_free", lambda device: free)
    with pytest.raises(torch.OutOfMemoryError):
        tuning._trial(LAYOUT, CPU, 2, 16, few=True)
    # Many queries compute more than they read.
    monkeypatch.setattr(tuning, "_MANY_ROWS", 64)
    assert 2**20 <= tuning._trial(LAYOUT, CPU, 2, 128, few=False).memory.nbytes <= free // 8


def test_measuring_ends_when_its_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_ROUNDS", 50)
    slow = timed(monkeypatch, 1.0)
    chosen()
    assert slow.taken == tuning._LEAST_ROUNDS * (3 + len(tuning.PROGRAMS))
    forget(monkeypatch)
    monkeypatch.setenv(measured.VARIABLE, str(Path(measured.file_of("")).parent / "other"))
    quick = timed(monkeypatch, 1e-6)
    chosen()
    assert quick.taken == 50 * (3 + len(tuning.PROGRAMS))


def test_many_queries_are_measured_with_tiles_of_many_and_the_usual_programs(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(tuning, "_MANY_BYTES", 2**13)
    monkeypatch.setattr(tuning, "_MANY_ROWS", 80)
    monkeypatch.setattr(tuning, "_ROUNDS", 1)
    clock = timed(monkeypatch, 1.0, 0.5)
    layout = Blocks(2, 2, 16, 16, 16, torch.bfloat16)
    shapes: list[torch.Size] = []

    def prepare(trial: tuning.Trial, option: Option) -> Callable[[], object]:
        shapes.append(trial.query.shape)
        return paged._prepare(trial, option)

    made = chosen(layout, prepare, device, 128)
    assert {*shapes} == {(1, 16, 40, 16)}
    assert not made.option.tile.few
    assert made.option.programs == launch.PROGRAMS
    assert clock.taken == len(made.seconds) > 1
