"""The tile of a call is the stored one, or the explicit one; it is the same until the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvtier import profile
from kvtier.calibration.measurements import tiles as calibration
from kvtier.errors import ConfigError
from kvtier.kernels import forms, launch, paged, tiles
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.kernels.tiles import Choice, Kind, Option, Tile
from kvtier.memory.storage.layout import BlockLayout

CPU = torch.device("cpu")
LAYOUT = BlockLayout(2, 2, 16, 16, 16, torch.float16)
KIND = Kind(LAYOUT, 2, 16)
EXPLICIT = Option(KIND.explicit, launch.PROGRAMS)

# The interpreter is numpy, which warns of what is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def _own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path))
    another_process(monkeypatch)


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is chosen yet."""
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(forms, "_variants", {})


def store(option: Option, device: torch.device = CPU, kind: Kind = KIND) -> Choice:
    """As calibration does."""
    times = dict.fromkeys(tiles._measured(option.tile, kind.tiles, kind.programs), 2.0) | {option: 1.0}
    choice = Choice(option, times)
    profile.store(launch.machine(device), kind.name, tiles.packed(choice, kind))
    return choice


# Tiles


def test_head_sizes_are_covered_by_powers_of_two_that_tensor_cores_take() -> None:
    for dim in range(1, 600):
        main, rest = tiles.chunks(dim)
        assert main + rest >= dim
        assert all(x == 0 or (x >= 16 and x & (x - 1) == 0) for x in (main, rest))
        assert main + rest <= launch.power_of_two(max(dim, 16))
    assert [tiles.chunks(dim) for dim in (64, 80, 96, 576)] == [(64, 0), (64, 16), (64, 32), (512, 64)]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_low_query_tile_holds_all_rows(itemsize: int) -> None:
    for dim in (8, 64, 80, 96, 128, 192, 256, 576):
        before = 0
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 4096):
            made = tiles.explicit_tile(dim, dim, itemsize, rows)
            assert made.tokens >= 16
            assert before <= made.rows <= 128
            assert made.rows >= rows or not made.low_query
            before = made.rows


def test_calls_of_one_width_take_one_tile() -> None:
    for itemsize in (2, 4):
        for dim in (8, 64, 80, 96, 128, 192, 256, 576):
            for rows in range(1, 300):
                width = tiles.width(rows)
                assert tiles.explicit_tile(dim, dim, itemsize, rows) == tiles.explicit_tile(dim, dim, itemsize, width)


def test_there_are_at_most_three_candidates_and_the_explicit_tile_is_first() -> None:
    for itemsize in (2, 4):
        for k_dim, v_dim in ((8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)):
            for width in (16, 32, 64, 128):
                explicit = tiles.explicit_tile(k_dim, v_dim, itemsize, width)
                found = tiles.candidates(explicit, k_dim, v_dim, itemsize)
                assert found[0] == explicit
                assert 1 <= len(found) == len(set(found)) <= 3
                for tile in found:
                    # A call with few queries is one tile, which must hold them all.
                    assert tile.low_query == explicit.low_query
                    assert not tile.low_query or tile.rows == explicit.rows
                    assert tile.tokens >= 16


# Choices


def test_without_a_profile_the_explicit_tile_is_taken_and_nothing_is_stored(tmp_path: Path) -> None:
    assert tiles.chosen(KIND, CPU) == Choice(EXPLICIT, {})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", range(3))
def test_a_stored_choice_is_taken_and_heads_do_not_matter(number: int) -> None:
    made = store(Option(KIND.tiles[number], tiles.PROGRAMS[number]))
    assert tiles.chosen(KIND, CPU) == made
    assert tiles.chosen(Kind(BlockLayout(5, 5, 16, 16, 16, torch.float16), 2, 16), CPU) == made


def test_a_stored_choice_is_of_one_kind() -> None:
    store(Option(KIND.tiles[1], 2))
    for layout, group, width in (
        (BlockLayout(2, 2, 16, 16, 32, torch.float16), 2, 16),
        (BlockLayout(2, 2, 16, 16, 16, torch.bfloat16), 2, 16),
        (BlockLayout(2, 2, 16, 32, 16, torch.float16), 2, 16),
        (BlockLayout(2, 2, 32, 16, 16, torch.float16), 2, 16),
        (LAYOUT, 3, 16),
        (LAYOUT, 2, 32),
        (LAYOUT, 2, 128),
    ):
        kind = Kind(layout, group, width)
        assert tiles.chosen(kind, CPU).option == Option(kind.explicit, launch.PROGRAMS)


def test_a_choice_holds_until_the_process_ends_whatever_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiles.chosen(KIND, CPU)
    for number in (1, 2):
        made = store(Option(KIND.tiles[number], launch.PROGRAMS))
        assert tiles.chosen(KIND, CPU) is first
        another_process(monkeypatch)
        first = tiles.chosen(KIND, CPU)
        assert first == made


def test_threads_that_choose_at_once_get_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    numbers = iter((1, 2))

    def lookup(*_: object) -> object:
        option = Option(KIND.tiles[next(numbers)], launch.PROGRAMS)
        both.wait(120)  # both look up before either has chosen
        return tiles.packed(Choice(option, {}), KIND)

    monkeypatch.setattr(profile, "lookup", lookup)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: tiles.chosen(KIND, CPU), range(2))
    assert first is second


def test_where_there_is_nothing_to_choose_no_profile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "lookup", lambda *_: pytest.fail("read"))
    kind = Kind(BlockLayout(2, 2, 16, 16, 16, torch.float32), 2, 128)
    assert not kind.has_alternatives
    assert tiles.chosen(kind, CPU).option.tile == kind.explicit


def test_off_takes_the_explicit_tile_and_a_wrong_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store(Option(KIND.tiles[1], 2))
    with monkeypatch.context() as patch:
        patch.setenv(profile.VARIABLE, "here")
        with pytest.raises(ConfigError):
            tiles.chosen(KIND, CPU)
        patch.setenv(profile.VARIABLE, "off")
        assert tiles.chosen(KIND, CPU) == Choice(EXPLICIT, {})


@pytest.mark.parametrize("text", ["", "{", '{"machine": "another"}'])
def test_a_damaged_profile_means_the_explicit_tile(text: str) -> None:
    store(Option(KIND.tiles[1], 2))
    profile.file_of(launch.machine(CPU)).write_text(text)
    assert tiles.chosen(KIND, CPU) == Choice(EXPLICIT, {})


def test_a_choice_is_read_as_it_was_written_and_nothing_else_is_read() -> None:
    option = Option(KIND.tiles[2], 2)
    order = tiles._measured(option.tile, KIND.tiles, KIND.programs)
    seconds = dict(zip(order, (100.0, float("inf"), 80.0, 70.0, 79.0), strict=True))
    made = Choice(option, seconds)
    packed = tiles.packed(made, KIND)
    assert tiles.unpacked(packed, KIND) == made
    wrong = [None, [], packed[:5], packed[:-1], [*packed, 1.0], [128, *packed[1:]], [*packed[:4], 16, *packed[5:]]]
    for value in [*wrong, ["16", *packed[1:]], {"tile": packed}, [[16]], [True] * len(packed)]:
        assert tiles.unpacked(value, KIND) is None, value
    assert tiles.unpacked(packed, Kind(LAYOUT, 2, 32)) is None  # no candidate there


# Calls


@pytest.mark.parametrize("prepared", [False, True])
def test_calls_take_the_tile_that_is_chosen(
    prepared: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    best = store(Option(KIND.tiles[1], 2), device).option
    assert best.tile != EXPLICIT.tile
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
    explicit = Option(Tile(16, 16, 4, 1, True), 9)

    def attend(option: Option | None = None) -> torch.Tensor:
        if prepared:
            return paged.Prepared(LAYOUT, option=option)(query, where, 16, AttentionParams(1.0))[0]
        return paged.attend(query, where, LAYOUT, 16, AttentionParams(1.0))[0]

    assert bool((attend() == 1.0).all())
    assert tokens == [best.tile.tokens]
    assert programs == [best.programs] != [launch.PROGRAMS]
    if prepared:  # with a tile of its own
        assert bool((attend(explicit) == 1.0).all())
        assert (tokens[1:], programs[1:]) == ([16], [9])


@pytest.mark.parametrize("width", [16, 128])
def test_calibration_times_the_kernel_itself_with_each_tile(
    width: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    kind = Kind(LAYOUT, 2, width)
    ran: list[tuple[int, int]] = []
    real = launch.Launcher.__call__

    def noted(self: launch.Launcher, count: int, *args: object) -> None:
        if "ROWS" in self._constants:
            ran.append((self._constants["ROWS"], self._constants["TOKENS"]))
        real(self, count, *args)

    def clock(call: Callable[[], object], repeats: int) -> float:
        call()
        return 1.0 + len(ran)  # the later, the slower: the explicit tile wins

    monkeypatch.setattr(launch.Launcher, "__call__", noted)
    for name, value in (("_BYTES", 2**12), ("_LEAST_BYTES", 2**10), ("_PREFILL_BYTES", 2**12), ("_PREFILL_ROWS", 80)):
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_clock", clock)
    monkeypatch.setattr(calibration, "_warm", lambda call: None)
    made = calibration.measure(kind, device)
    assert made.option.tile == kind.explicit
    assert {*ran} == {(tile.rows, tile.tokens) for tile in kind.tiles}
    assert len(made.seconds) == len(kind.tiles) + len(kind.programs) - 1
