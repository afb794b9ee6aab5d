"""`kvtier env`: what is shown is what the cache would find, and what does not work is said."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtier
from kvtier import TieredKVCache, profile
from kvtier.cli.env import TOO_NEW, environment
from kvtier.cli.main import main
from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.memory.storage import system

pytestmark = pytest.mark.usefixtures("on_the_host")


def env(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    status = main(["env", *args])
    return status, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status, out = env(capsys, "--json")
    return status, json.loads(out)


def test_what_it_says_is_what_a_cache_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "free_host_memory", lambda: 20 * 2**30)
    status, found = as_json(capsys)
    assert status == 0
    assert found["problems"] == []
    assert found["versions"]["kvtier"] == kvtier.__version__
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["host"]["instruction_set"] == (native.instruction_set() if native.available() else None)
    with TieredKVCache() as cache:
        cache.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), 0)
        assert found["host"]["memory"]["auto"] == cache.stats.host.budget == 16 * 2**30
        layer = cache._forward.layer(0)
        assert layer is not None
        if not torch.cuda.is_available():
            assert found["auto"]["block_size"] == layer.layout.block_size
            assert found["devices"] == []
    _, out = env(capsys)
    assert 'host_budget="auto" is 16 GiB' in out
    assert "problem" not in out


def test_a_device_is_shown_and_one_that_does_not_answer_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(device: torch.device) -> int:
        if device.index == 1:
            raise RuntimeError("CUDA error: no answer\nmore")
        return 70 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A device")
    monkeypatch.setattr(system, "free_device_memory", free)
    monkeypatch.setattr(system, "total_device_memory", lambda device: 80 * 2**30)
    monkeypatch.setattr(launch, "available", lambda device: True)
    status, found = as_json(capsys)
    assert status == 1
    assert found["problems"] == ["cuda:1 does not work: CUDA error: no answer"]
    assert found["devices"] == [
        {
            "device": "cuda:0",
            "name": "A device",
            "capability": "9.0",
            "kernels": "triton",
            "memory": {"free": 70 * 2**30, "total": 80 * 2**30, "auto": 56 * 2**30},
        }
    ]
    assert found["auto"] == {"device_tier": True, "block_size": 64, "policy": "default"}
    _, out = env(capsys)
    assert "cuda:0: A device, capability 9.0" in out
    assert 'device_budget="auto" is 56 GiB' in out
    assert "problem   cuda:1" in out


@pytest.mark.parametrize(("version", "works"), [("5.24.0", True), ("6.0.0.dev0", False), ("6.1.2", False)])
def test_a_version_that_is_too_new_is_a_problem(version: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    told = {"transformers": version}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: told.get(name) or installed(name))
    problems = environment()["problems"]
    assert [x.split(":")[0] for x in problems] == ([] if works else [f"transformers is {version}"])


def test_what_is_too_new_is_what_packages_refuse() -> None:
    project = tomllib.loads((Path(kvtier.__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    for name, first in TOO_NEW.items():
        (requirement,) = (x for x in project["dependencies"] if x.startswith(name))
        assert requirement.endswith(f",<{'.'.join(map(str, first))}")


@pytest.mark.parametrize(
    ("version", "works"), [("2.11.0", True), ("2.9.1+cu128", False), ("3.0.0.dev2026", True), ("2.11rc1", True)]
)
def test_a_version_that_is_too_old_is_a_problem(
    version: str, works: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch" else installed(name))
    status, found = as_json(capsys)
    assert status == (0 if works else 1)
    assert found["problems"] == ([] if works else [f"torch is {version}: kvtier needs 2.11 or newer."])


def test_without_a_torch_that_works_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["env"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvtier: torch cannot be imported: ")
    assert said.endswith("kvtier needs 2.11 or newer.\n")
    assert said.count("\n") == 1


def test_kernels_that_there_are_not_are_a_problem_also_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.VARIABLE, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert environment()["problems"] == ["KVTIER_KERNELS='cuda': it is 'triton' or 'torch', or not set."]


def test_a_profile_is_found_where_calibration_stores_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "profile   not read" in env(capsys)[1]
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path))
    assert "profile   of cpu: none" in env(capsys)[1]
    path = profile.store(launch.machine(torch.device("cpu")), "a rate", 1.0)
    assert f"profile   of cpu: 1 values in {path}" in env(capsys)[1]
    monkeypatch.setenv(profile.VARIABLE, "not/absolute")
    status, found = as_json(capsys)
    assert status == 1
    assert found["profile"]["folder"] is None
    assert found["environment"][profile.VARIABLE] == "not/absolute"
    assert len(found["problems"]) == 1


def test_a_damaged_profile_is_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path))
    profile.file_of(launch.machine(torch.device("cpu"))).write_text("{")
    status, found = as_json(capsys)
    assert status == 0
    assert any("is not used" in note for note in found["notes"])


def test_without_a_native_kernel_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> bool:
        import warnings

        warnings.warn("kvtier's native kernel is not used: it was not compiled.", RuntimeWarning, stacklevel=1)
        return False

    monkeypatch.setattr(native, "available", missing)
    status, out = env(capsys)
    assert status == 0
    assert "attention by torch" in out
    assert "note      kvtier's native kernel is not used" in out
