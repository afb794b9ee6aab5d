"""Launching: whether Triton runs at all, launchers, parts and alignments."""

from __future__ import annotations

import functools
import io
import os
from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels import launch
from kvtier.transfer.launches import Launches

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_what_runs_is_what_the_variable_says(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    assert launch.available(device)
    monkeypatch.setenv("KVTIER_KERNELS", "torch")
    assert not launch.available(device)
    monkeypatch.setenv("KVTIER_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="'triton' or 'torch'"):
        launch.available(device)
    monkeypatch.delenv("KVTIER_KERNELS")
    assert launch.available(device) == (device.type == "cuda")  # the interpreter is used on request only
    monkeypatch.setenv("KVTIER_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not launch.available(CPU)


def test_without_triton_plain_torch_runs_and_asking_for_triton_is_an_error(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: False)
    with pytest.raises(ConfigError, match="not installed"):
        launch.available(device)
    monkeypatch.delenv("KVTIER_KERNELS")
    assert not launch.available(device)
    assert "KVTIER_KERNELS" not in os.environ


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A new device, which nothing is known of and no variable speaks of; on what the trial ran."""
    trials: list[torch.device] = []
    monkeypatch.setattr(launch, "_available", functools.cache(launch._available.__wrapped__))
    monkeypatch.setattr(launch, "_runs", lambda device: not trials.append(device))
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("KVTIER_KERNELS")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return trials


@pytest.mark.parametrize("yes", ["1", "true", "ON", "Yes", "y"])
def test_the_interpreter_is_never_given_addresses_of_a_cuda_device(
    yes: str, tried: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", yes)
    with pytest.warns(RuntimeWarning, match="TRITON_INTERPRET is set"):
        assert not launch.available(CUDA)
    monkeypatch.setenv("KVTIER_KERNELS", "triton")
    assert launch.available(CPU)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set: interpreted programs cannot read a CUDA device's"):
        launch.available(CUDA)
    monkeypatch.setenv("KVTIER_KERNELS", "torch")
    assert not launch.available(CUDA)
    assert not tried


@pytest.mark.parametrize("no", ["0", "2", "", "no"])
def test_what_triton_takes_for_a_no_is_a_no(
    no: str, tried: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", no)
    assert launch.available(CUDA)
    assert tried == [CUDA]
    monkeypatch.setenv("KVTIER_KERNELS", "triton")
    assert not launch.available(CPU)


def test_nothing_is_tried_while_a_graph_is_captured_and_nothing_of_that_is_kept(
    tried: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launch, "capturing", lambda device: True)
        with pytest.raises(UnsupportedError, match="before the capture"):
            launch.available(CUDA)
        patch.setenv("KVTIER_KERNELS", "triton")
        assert launch.available(CUDA)  # asked for by name, it needs no trial
    assert not tried
    assert launch.available(CUDA)
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    assert launch.available(CUDA)
    assert tried == [CUDA]


@pytest.mark.cuda
def test_a_capture_goes_on_where_a_first_call_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_available", functools.cache(launch._available.__wrapped__))
    monkeypatch.delenv("KVTIER_KERNELS")
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError):
            launch.available(x.device)
        x += 1
    graph.replay()
    assert int(x) == 1
    assert launch.available(x.device)


def test_tests_of_a_device_do_not_run_where_programs_are_interpreted(
    request: pytest.FixtureRequest, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip("they run here")
    here = [item for item in request.session.items if item.path == request.path and item.get_closest_marker("cuda")]
    for item in here:
        assert any("interprets" in mark.kwargs["reason"] for mark in item.iter_markers("skip"))


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert launch.numbered(torch.device("cuda")) == torch.device("cuda", 3)
    assert Launches(torch.device("cuda")).device == torch.device("cuda", 3)
    for device in (CPU, CUDA, torch.device("cuda", 1)):
        assert launch.numbered(device) == device
        assert Launches(device).device == device


class Short:
    """A program that runs with at most so many stages."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.asked: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        from kvtier.kernels import programs

        def run(*args: Any, **options: Any) -> None:
            self.asked.append(options)
            if options["num_stages"] > self.stages:
                raise programs.OutOfResources(10**6, 10**5, "shared memory")

        return run


def test_where_stages_do_not_fit_fewer_are_taken_and_kept() -> None:
    from kvtier.kernels import programs

    for stages, asked in ((5, [5, 5]), (4, [5, 3, 3]), (1, [5, 3, 1, 1])):
        program = Short(stages)
        launcher = launch.Launcher(program, {"ROWS": 16}, num_warps=4, num_stages=5)
        launcher(1)
        launcher(1)
        assert [options["num_stages"] for options in program.asked] == asked
        assert all(options | {"num_stages": 0} == program.asked[0] | {"num_stages": 0} for options in program.asked)
    with pytest.raises(programs.OutOfResources):
        launch.Launcher(Short(0), {}, num_stages=4)(1)


def test_products_and_sums_are_fused_whatever_triton_does_by_default() -> None:
    program = Short(9)
    launch.Launcher(program, {}, num_stages=1)(1)
    assert program.asked[0]["enable_fp_fusion"] is True


def test_a_machine_is_a_device_and_versions() -> None:
    said = launch.machine(CPU)
    assert f"torch {torch.__version__}" in said
    assert "kvtier " in said
    assert "triton " in said
    assert "\n" not in said


def test_parts_are_bounded_and_follow_from_shapes() -> None:
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


@pytest.mark.parametrize(
    ("said", "others"),
    [
        ("model name\t: Xeon\ncpu family\t: 6\nmodel\t\t: 85\nstepping\t: 7\n", ("stepping\t: 7", "stepping\t: 4")),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", ("0xd0c", "0xd4f")),
    ],
    ids=["Cascade Lake and Skylake", "Neoverse N1 and V2"],
)
def test_processors_of_two_generations_have_two_names(
    monkeypatch: pytest.MonkeyPatch, said: str, others: tuple[str, str]
) -> None:
    def named(content: str) -> str:
        monkeypatch.setattr(launch, "open", lambda *args, **options: io.StringIO(content), raising=False)
        return launch.processor()

    assert named(said) == named(said + "\nflags\t: another processor's")
    assert named(said) != named(said.replace(*others))
