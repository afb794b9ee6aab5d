"""`kvtier.calibrate` measures on request, stores each value as soon as it has it, and says what it did not do."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from transformers import AutoConfig, DeepseekV3Config, GPT2Config, LlamaConfig, LlamaForCausalLM, LlavaConfig

import kvtier
from kvtier import profile
from kvtier.calibration import hardware, run
from kvtier.calibration.job import Job
from kvtier.calibration.measurements import copies, tiles
from kvtier.calibration.shapes import STANDARD, Shape, shapes_of
from kvtier.cli.main import main
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels import launch
from kvtier.kernels import tiles as choices
from kvtier.kernels.tiles import Choice, Kind, Option
from kvtier.memory import measured
from kvtier.transfer import launches
from kvtier.transfer.engine import Direction

CUDA = torch.device("cuda", 0)
LLAMA = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, dtype="float16")
LEAST = [3, 4, 5, 0, 0]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CUDA device, in so far as calibration looks at one; the names of what is measured on it."""
    measured: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(launch, "available", lambda device: True)
    monkeypatch.setattr(launch, "machine", lambda device: f"a machine with {device}")

    def tile(kind: Kind, device: torch.device) -> Choice:
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        measured.append(kind.name)
        best = Option(kind.tiles[-1], kind.programs[-1])
        return Choice(best, {Option(kind.explicit, launch.PROGRAMS): 2e-6, best: 1e-6})

    def least(device: torch.device, direction: Direction) -> list[int]:
        measured.append(launches.profile_name(direction))
        return LEAST

    monkeypatch.setattr(tiles, "measure", tile)
    monkeypatch.setattr(copies, "measure", least)
    # What takes real time has tests of its own.
    monkeypatch.setattr(hardware, "jobs", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return measured


def names(found: kvtier.Calibration) -> list[str]:
    return [x.name for x in found.measurements]


# With a device


def test_what_is_calibrated_is_what_kernels_and_links_take(device: list[str]) -> None:
    kinds = [*tiles.kinds_of(shapes_of(LLAMA)[0], 64, all_widths=True)]
    assert len(kinds) >= 4
    assert launches.least_runs(CUDA, Direction.FETCH) == launches.ESTIMATE
    with torch.inference_mode():
        found = kvtier.calibrate(LLAMA, progress=False)
    assert names(found) == device
    assert {*device} == {*(x.name for x in kinds), *map(launches.profile_name, (Direction.FETCH, Direction.WRITE_BACK))}
    assert (found.device, found.failures, found.skipped, found.notes) == ("cuda:0", (), (), ())
    assert found.path == profile.file_of("a machine with cuda:0")
    for kind in kinds:
        assert choices.chosen(kind, CUDA).option == Option(kind.tiles[-1], kind.programs[-1])
    assert launches.least_runs(CUDA, Direction.FETCH) == launches.least_runs(CUDA, Direction.WRITE_BACK) == LEAST
    assert str(found).count("\n") == len(device)
    assert str(found.path) in str(found)


def test_without_a_model_common_shapes_are_measured_and_what_matters_most_first(device: list[str]) -> None:
    found = kvtier.calibrate(progress=False)
    n = len(STANDARD)
    assert len(names(found)) == 2 * n + 2
    assert all("low-query, 16 rows" in name for name in device[:n])
    assert all("block copies" in name for name in device[n : n + 2])
    assert all("prefill" in name for name in device[n + 2 :])
    assert all("blocks of 64" in name for name in device if "tile" in name)
    kvtier.calibrate(progress=False, block_size=16)
    assert "blocks of 16" in device[-1]


def test_a_second_calibration_measures_and_stores_again(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kvtier.calibrate(LLAMA, progress=False)
    before = len(device)
    monkeypatch.setattr(copies, "measure", lambda device, direction: [0] * 5)
    kvtier.calibrate(LLAMA, progress=False)
    assert len(device) == 2 * before - 2
    assert launches.least_runs(CUDA, Direction.FETCH) == [0] * 5


def test_a_tile_in_use_stays_and_that_is_said(device: list[str]) -> None:
    kind = next(tiles.kinds_of(shapes_of(LLAMA)[0], 64, all_widths=False))
    before = choices.chosen(kind, CUDA)
    found = kvtier.calibrate(LLAMA, progress=False)
    assert "until it ends" in found.notes[0]
    assert choices.chosen(kind, CUDA) is before


def test_progress_is_one_line_for_each_measurement_on_stderr(
    device: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kvtier.calibrate(LLAMA)
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert len(lines) == len(device)
    assert all(name in line for name, line in zip(device, lines, strict=True))
    assert f"1/{len(device)} " in lines[0]
    assert "1.0 us; the estimated tile 2.0 us" in lines[0]
    kvtier.calibrate(LLAMA, progress=False)
    assert capsys.readouterr().err == ""


def test_what_is_being_measured_is_told_before_it_is(
    device: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def measure(kind: Kind, on: torch.device) -> Choice:
        told.append(capsys.readouterr().err)
        assert told[-1].endswith(f" {kind.name}: ")
        raise MemoryError("none")

    monkeypatch.setattr(tiles, "measure", measure)
    kvtier.calibrate(LLAMA)
    assert len(told) > 1
    assert "kvtier: 1/" in told[0]


def test_what_fails_is_named_and_leaves_all_others_and_what_was_stored(
    device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kvtier.calibrate(LLAMA, progress=False)

    def fail(device: torch.device, direction: Direction) -> list[int]:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(copies, "measure", fail)
    found = kvtier.calibrate(LLAMA, progress=False)
    assert [x.partition(": ")[2].rpartition(": ")[2] for x in found.failures] == ["no compiler"] * 2
    assert len(found.measurements) == len({*device}) - 2
    assert "failed: block copies" in str(found)
    assert launches.least_runs(CUDA, Direction.FETCH) == LEAST


def test_no_measurement_begins_after_the_limit(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    measure = tiles.measure

    def slow(kind: Kind, device: torch.device) -> Choice:
        now[0] += 0.4 * run.SECONDS
        return measure(kind, device)

    monkeypatch.setattr(tiles, "measure", slow)
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    found = kvtier.calibrate(progress=False)
    assert len(found.measurements) == len(device) == 3
    assert len(found.skipped) == 2 * len(STANDARD) + 2 - 3
    assert "not begun after 30 s" in str(found)


def test_each_value_is_stored_as_soon_as_it_is_measured(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(device: torch.device, direction: Direction) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kvtier.calibrate(LLAMA, progress=False)
    kind = next(tiles.kinds_of(shapes_of(LLAMA)[0], 64, all_widths=False))
    assert choices.chosen(kind, CUDA).option == Option(kind.tiles[-1], kind.programs[-1])


def test_a_profile_that_cannot_be_stored_is_an_error(
    device: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for setting in ("off", "here"):
        monkeypatch.setenv(profile.VARIABLE, setting)
        with pytest.raises(ConfigError, match="KVTIER_PROFILE"):
            kvtier.calibrate(LLAMA, progress=False)
    assert not device, "that is found out before anything is measured"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be written"):
        kvtier.calibrate(LLAMA, progress=False)
    assert not device


def test_nothing_is_measured_while_a_graph_is_captured(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match="before"):
        kvtier.calibrate(LLAMA)
    assert not device


def test_rates_are_measured_after_what_matters_most_and_without_triton_too(
    device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rates(*_: Any) -> list[Job]:
        def measure() -> tuple[dict[str, Any], str]:
            device.append("rates")
            return {}, "fast"

        return [Job("rates", measure, also="rates of any shape")]

    monkeypatch.setattr(hardware, "jobs", rates)
    found = kvtier.calibrate(LLAMA, progress=False)
    assert device.index("rates") == 3
    assert profile.lookup("a machine with cuda:0", "rates of any shape", lambda value: value == {}) == {}
    assert found.notes == ()
    device.clear()
    monkeypatch.setattr(launch, "available", lambda device: False)
    found = kvtier.calibrate(LLAMA, progress=False)
    assert device == ["rates"]
    assert "Triton does not run here" in str(found)
    assert found.profile.name == "a machine with cuda:0"


# Wrong arguments


@pytest.mark.parametrize("wrong", ["cuda:99", "tpu", "meta", 1.5])
def test_a_device_that_is_not_there_is_an_error(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="device="):
        kvtier.calibrate(device=wrong)


@pytest.mark.parametrize("wrong", [0, -16, 10**9, 10**60, 1.5, 64.0, "64", True, [64]])
def test_a_block_holds_at_least_one_token_and_not_too_many(device: list[str], wrong: Any) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        kvtier.calibrate(block_size=wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, "3", None, True, [3]])
def test_the_time_for_it_is_a_positive_number(device: list[str], wrong: Any) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        kvtier.calibrate(seconds=wrong)


def test_a_forward_does_not_even_import_what_measures() -> None:
    """Nothing is measured in a forward: the modules that could are not there."""
    code = (
        "import sys, torch, kvtier;"
        "cache = kvtier.TieredKVCache(device_budget=2**20, host_budget=2**20, block_size=4);"
        "k = torch.zeros(1, 1, 9, 8);"
        "[cache.update(k, k, 0) for _ in range(3)];"
        "print([m for m in sys.modules if 'calibration' in m])"
    )
    done = forks.run(code)
    assert done.stdout == "[]\n", done.stderr


# Shapes


def shape(group: int, k_dim: int, v_dim: int | None = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Shape, ...]:
    return (Shape(group, k_dim, v_dim or k_dim, dtype),)


def test_shapes_are_read_from_configs_and_models() -> None:
    assert shapes_of(LLAMA) == shape(2, 16, dtype=torch.float16)
    assert shapes_of(LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)) == shape(1, 16)
    assert shapes_of(GPT2Config(n_embd=96, n_head=3)) == shape(1, 32)
    small = LlamaConfig(
        hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    model = LlamaForCausalLM(small)
    assert shapes_of(model) == shape(2, 16, dtype=torch.float32)
    assert shapes_of(model.half()) == shape(2, 16, dtype=torch.float16)
    assert shapes_of(LlavaConfig(text_config=LLAMA)) == shape(2, 16, dtype=torch.float16)
    latent = DeepseekV3Config(num_attention_heads=8, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
    assert shapes_of(latent) == shape(1, 48, 24)


def test_where_layers_have_heads_of_their_own_the_shape_is_that_of_those_that_are_tiered() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 6}
    gemma = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    for own, found in ((gemma, shape(4, 32)), ({}, shape(2, 512))):
        config = AutoConfig.for_model("gemma4_text", **heads, **own)
        assert shapes_of(config) == found
        assert "hidden_layers 6" in measured.model_name(config)
        assert "key_value_heads 2" in measured.model_name(config), "as its file has it"
    mixed = LlamaConfig(**heads, per_layer_config={5: {"num_key_value_heads": 1}})
    assert shapes_of(mixed) == shape(2, 16) + shape(4, 16), "that of most layers first"


def test_a_config_needs_no_transformers() -> None:
    plain = SimpleNamespace(num_attention_heads=6, num_key_value_heads=3, hidden_size=48, torch_dtype="float16")
    assert shapes_of(plain) == shape(2, 8, dtype=torch.float16)
    with_parts = SimpleNamespace(get_text_config=lambda: plain, dtype=torch.float32)
    assert shapes_of(with_parts) == shape(2, 8, dtype=torch.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        "meta-llama/Llama-3.1-8B",
        {"num_attention_heads": 8},
        LlamaConfig,
        3,
        torch.nn.Linear(2, 2),
        SimpleNamespace(num_attention_heads=None, hidden_size=8),
        SimpleNamespace(num_attention_heads=4),
        SimpleNamespace(num_attention_heads=4, num_key_value_heads=3, hidden_size=8),
        SimpleNamespace(num_attention_heads=[4, 8], hidden_size=8),
    ],
    ids=str,
)
def test_what_is_neither_a_model_nor_a_config_is_an_error_that_says_what_to_pass(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes a model or a model's config|attention|head"):
        kvtier.calibrate(wrong, progress=False)


# What something else disturbed


def parts(up: float, down: float, *, knot: float = 1e-5) -> dict[str, Any]:
    """A value as it is stored of a link, with the errors of its parts."""
    curve = {"knots": [[1024.0, knot], [2**20, 100 * knot]]}
    each = {"up": {"value": curve, "error": up}, "down": {"value": curve, "error": down}}
    return each | {"together": {"value": 0.5, "error": None}}


def measuring(value: Any) -> Job:
    return Job("link rates", lambda: (value, "fast"), also="rates of any shape")


def calibrated(job: Job, monkeypatch: pytest.MonkeyPatch) -> kvtier.Calibration:
    monkeypatch.setattr(hardware, "jobs", lambda *_: [job])
    return kvtier.calibrate(device="cpu", progress=False)


def stored() -> Any:
    return profile.lookup(launch.machine(torch.device("cpu")), "link rates", lambda value: True)


def test_what_is_disturbed_is_told_and_leaves_what_was_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = parts(0.021, 0.025), parts(2.343, 1.159, knot=9e-5)
    assert calibrated(measuring(good), monkeypatch).disturbed == ()
    found = calibrated(measuring(bad), monkeypatch)
    assert stored() == good
    assert found.measurements[0].value == good
    (said,) = found.disturbed
    assert "234% (copies up), 116% (copies down)" in said
    assert "leave it alone" in said
    assert "stays in place for 2% (copies up)" in said
    assert said in str(found)
    assert "1 measurement of cpu, 1 of them disturbed" in found.summary()
    assert found.profile.errors["up"] == 0.021
    half = parts(0.9, 0.03, knot=2e-5)
    calibrated(measuring(half), monkeypatch)
    assert stored() == half | {"up": good["up"], "together": good["together"]}


def test_what_is_disturbed_is_stored_where_there_is_nothing_better(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(measuring(parts(0.4, 0.1)), monkeypatch)
    assert "there are no better ones" in found.disturbed[0]
    for value in (parts(0.3, 0.1, knot=2e-5), parts(0.2, 0.2), parts(0.24, 0.1, knot=3e-5)):
        calibrated(measuring(value), monkeypatch)
        assert stored() == value, "nothing that is stored is clearly better"
    file = profile.file_of(launch.machine(torch.device("cpu")))
    file.write_text(file.read_text().replace("1024.0", '"x"'))
    worse = parts(2.0, 2.0)
    assert "no better ones" in calibrated(measuring(worse), monkeypatch).disturbed[0]
    assert stored() == worse, "what is damaged is not better"


def test_the_folder_is_written_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "file"))
    begun = []
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrated(Job("link rates", lambda: (begun.append(1) or {}, "")), monkeypatch)
    assert not begun
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "new"))
    profile.checked_folder()
    assert list((tmp_path / "new").iterdir()) == []


# The command


@pytest.mark.parametrize(("failures", "code"), [((), 0), (("a: b",), 1)])
def test_the_command_prints_each_result_once(
    failures: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Any:
        raise RuntimeError("b")

    jobs = [measuring(parts(0.02, 3.0)), *(Job("a", fail) for _ in failures)]
    monkeypatch.setattr(hardware, "jobs", lambda *_: jobs)
    assert main(["calibrate", "--device", "cpu"]) == code
    out, err = capsys.readouterr()
    assert (out + err).count("fast") == 1
    assert (out + err).count("link rates was disturbed") == 1
    assert ("failed: a: b" in out) == bool(failures)
    assert f"stored in {profile.file_of(launch.machine(torch.device('cpu')))}" in out
    assert "kvtier.calibration" not in out + err


def test_the_command_passes_its_options_on_and_errors_are_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def calibrate(model: Any, **options: Any) -> kvtier.Calibration:
        assert (model, options) == (None, {"device": "cuda:1", "block_size": 16})
        raise ConfigError("no such device")

    monkeypatch.setattr(run, "calibrate", calibrate)
    assert main(["calibrate", "--device=cuda:1", "--block-size=16"]) == 2
    assert capsys.readouterr().err == "kvtier: no such device\n"
    assert main(["calibrate", "--dtype", "float32"]) == 2
    assert "give a MODEL" in capsys.readouterr().err


def test_no_option_of_the_command_is_ignored(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device=cpu", "--block-size=0"]) == 2
    assert "block_size=0" in capsys.readouterr().err
    assert main(["calibrate", "--device="]) == 2


def test_the_command_measures_a_model_and_writes_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "examples/pylm"
    seen: list[Any] = []
    calibrate, jobs_in_turn = run.calibrate, run._run
    # Each measurement takes a part of a second, and all are begun however busy this machine is.
    monkeypatch.setattr(run, "_run", lambda device, jobs, limit, *rest: jobs_in_turn(device, jobs, 600.0, *rest))

    def shortly(model: Any, **options: Any) -> kvtier.Calibration:
        seen.append(model)
        return calibrate(model, seconds=1.0, **options)

    monkeypatch.setattr(run, "calibrate", shortly)
    out = tmp_path / "profile.json"
    assert main(["calibrate", model, "--device", "cpu", "--output", str(out)]) == 0
    assert isinstance(seen[0], torch.nn.Module)
    found = kvtier.HardwareProfile.from_json(out.read_text())
    assert {"up", "down", "together", "host", "linear", "prefill"} <= found.measured
    assert f"profile: {out}" in capsys.readouterr().out
    # And `plan` takes both files, and this machine's by itself.
    of_this_machine = profile.file_of(launch.machine(torch.device("cpu")))
    said = []
    for each in (out, of_this_machine, "this"):
        assert main(["plan", model, "--context", "512", "--profile", str(each)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert "measured: device, down, host, linear, prefill, together, up" in said[0]


@pytest.mark.parametrize("wrong", ["no/such/folder/x.json", "."])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "calibrate", lambda *_, **__: pytest.fail("something is measured"))
    assert main(["calibrate", "--output", str(tmp_path / wrong)]) == 2
    assert capsys.readouterr().err.startswith("kvtier: ")
    assert list(tmp_path.glob(".*")) == []


def test_an_interrupt_ends_in_a_line_of_its_own_and_the_file_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    good = parts(0.02, 0.02)
    monkeypatch.setattr(hardware, "jobs", lambda *_: [measuring(good), Job("slow", interrupted)])
    assert main(["calibrate", "--device", "cpu"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2] == "kvtier: 2/2 slow: not finished"
    assert lines[-1] == "kvtier: interrupted; what was measured before is stored, all else is as it was"
    assert stored() == good


def test_an_interrupt_while_modules_are_imported_ends_in_a_line(tmp_path: Path) -> None:
    code = (
        "import sys, signal, os\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from kvtier.cli.main import main\n"
        "print(main(['calibrate']))"
    )
    environment = {**os.environ, profile.VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "130\n", done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvtier: interrupted")
    assert "Traceback" not in done.stderr
