"""Scripts for other libraries: all are run by `make integrations`, and what needs no other package runs here."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "integrations"


@pytest.fixture
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("integrations_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_script_is_run_and_listed(runner: ModuleType) -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")} - {"run.py", "judge.py"}
    assert {x.script for x in runner.INTEGRATIONS.values()} == scripts
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(scripts) if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", ["pipeline", "tensor-parallel"])
def test_a_script_that_needs_no_other_package_gives_what_generate_gives(name: str, runner: ModuleType) -> None:
    """A pipeline with several prompts; two processes with half of the heads each."""
    result, said = runner.run(name)
    assert result == "passed", said
    assert f"the same {'answers' if name == 'pipeline' else 'tokens'}: yes" in said


def test_replicas_of_ray_serve_keep_their_conversations(runner: ModuleType) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed here; `make integrations ARGS=ray` installs it in an environment of its own")
    result, said = runner.run("ray")
    assert result == "passed", said
    assert "the same tokens: yes" in said


def test_what_cannot_be_installed_is_skipped_with_the_reason(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pip(command: list[Any], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: No matching distribution found for peft\n")

    made: list[Path] = []

    def create(folder: Path, **options: Any) -> None:
        made.append(folder)
        own = runner.sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(own).mkdir(parents=True)

    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.venv, "create", create)
    monkeypatch.setattr(runner.subprocess, "run", pip)
    assert runner.run("peft") == ("skipped", "ERROR: No matching distribution found for peft")
    assert made == [tmp_path / "peft"]
    constraints = (tmp_path / "peft" / "constraints.txt").read_text(encoding="utf-8").split()
    assert any(line.startswith("torch==") for line in constraints)


def test_an_environment_that_shares_nothing_is_held_to_the_version_of_torch_alone(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.venv, "create", lambda folder, **options: folder.mkdir())
    monkeypatch.setattr(runner.subprocess, "run", lambda command, **options: done)
    runner.python_for("judge", ("aiperf",), shared=False)
    (pin,) = (tmp_path / "judge" / "constraints.txt").read_text(encoding="utf-8").split()
    assert pin.startswith("torch==")
    assert not list((tmp_path / "judge").rglob("*.pth"))


def test_a_script_that_fails_or_takes_too_long_is_a_failure(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[Any], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "the same tokens: no\n", "")

    monkeypatch.setattr(runner.subprocess, "run", fails)
    assert runner.run("pipeline") == ("failed", "the same tokens: no\n")

    def hangs(command: list[Any], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(runner.subprocess, "run", hangs)
    assert runner.run("pipeline")[0] == "failed"
