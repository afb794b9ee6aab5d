"""What is launched: whether Triton runs at all, tiles, parts and alignments."""

from __future__ import annotations

import os

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kernels import launch

CPU = torch.device("cpu")


def test_what_runs_is_what_the_variable_says(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    assert launch.available(device)
    monkeypatch.setenv("KVTIER_KERNELS", "torch")
    assert not launch.available(device)
    monkeypatch.setenv("KVTIER_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="'triton' or 'torch'"):
        launch.available(device)
    monkeypatch.delenv("KVTIER_KERNELS")
    assert launch.available(device) == (device.type == "cuda")  # nobody wants the interpreter by accident
    monkeypatch.setenv("KVTIER_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not launch.available(CPU)


def test_without_triton_plain_torch_runs_and_a_wish_for_triton_is_an_error(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: False)
    with pytest.raises(ConfigError, match="not installed"):
        launch.available(device)
    monkeypatch.delenv("KVTIER_KERNELS")
    assert not launch.available(device)
    assert "KVTIER_KERNELS" not in os.environ


def test_head_sizes_are_covered_by_powers_of_two_that_tensor_cores_take() -> None:
    for dim in range(1, 600):
        main, rest = launch.chunks(dim)
        assert main + rest >= dim
        assert all(x == 0 or (x >= 16 and x & (x - 1) == 0) for x in (main, rest))
        assert main + rest <= launch.power_of_two(max(dim, 16))
    assert [launch.chunks(dim) for dim in (64, 80, 96, 576)] == [(64, 0), (64, 16), (64, 32), (512, 64)]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_what_they_are_for(itemsize: int) -> None:
    for dim in (8, 64, 80, 96, 128, 192, 256, 576):
        before = 0
        for rows in (1, 16, 17, 32, 33, 64, 65, 128, 4096):
            made = launch.configuration(dim, dim, itemsize, rows)
            assert made.tokens >= 16
            assert before <= made.rows <= 128
            assert made.rows >= rows or not made.few
            before = made.rows


def test_calls_of_one_width_take_one_tile() -> None:
    for itemsize in (2, 4):
        for dim in (8, 64, 80, 96, 128, 192, 256, 576):
            for rows in range(1, 300):
                width = launch.width(rows)
                assert launch.configuration(dim, dim, itemsize, rows) == launch.configuration(dim, dim, itemsize, width)


def test_a_machine_is_a_device_and_versions() -> None:
    said = launch.machine(CPU)
    assert f"torch {torch.__version__}" in said
    assert "kvtier " in said
    assert "triton " in said
    assert "\n" not in said


def test_parts_are_few_and_follow_from_shapes() -> None:
    for busy in (1, 3, 8, 500):
        before = 0
        for tokens in (0, 1, 255, 256, 512, 1000, 4096, 10**5, 10**7):
            parts = launch.parts_of(busy, tokens, CPU)
            assert parts & (parts - 1) == 0
            assert before <= parts <= launch.MOST_PARTS
            assert parts == 1 or parts * 256 <= tokens
            before = parts


def test_an_alignment_divides_every_row_and_every_block() -> None:
    x = torch.zeros((4, 6, 40), dtype=torch.bfloat16)
    start = x.data_ptr() % 16
    assert start == 0
    assert launch.alignment(x) == 16
    assert launch.alignment(x[:, :, 1:]) == 2
    assert launch.alignment(x[:, :, 2:]) == 4
    assert launch.alignment(torch.zeros((4, 6, 36), dtype=torch.bfloat16)) == 8
    assert launch.alignment(x[:, :1].expand(4, 6, 40)) == 16


def test_where_a_trial_fails_plain_torch_runs_and_says_why(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from kvtier.kernels import copy_programs

    assert launch._runs(device)

    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(copy_programs, "copy", Broken())
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        assert not launch._runs(device)
