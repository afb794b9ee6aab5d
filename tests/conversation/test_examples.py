"""The examples of conversations run, and re-use what they say."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., str]
NAMES = ("resume_chat.py", "shared_prompt.py", "branches.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_a_second_run_reads_what_the_first_saved(run: Run, tmp_path: Path) -> None:
    found = [run("resume_chat.py", "--store", str(tmp_path / "chats")) for _ in range(2)]
    assert [x.splitlines()[0] for x in found] == ["turns so far: 0", "turns so far: 1"]
    loaded = [int(re.findall(r"loaded=(\d+)", x)[0]) for x in found]
    assert loaded[0] == 0 < 20 < loaded[1]


def test_a_system_prompt_is_computed_once_and_is_there_once(run: Run) -> None:
    rows = [[int(x) for x in line.split()[1:]] for line in run("shared_prompt.py").splitlines()[1:]]
    first, *others = rows
    assert first[1:3] == [0, first[0]]
    assert all(cached > 250 > 10 > computed for _, cached, computed, _ in others)
    more = [b[3] - a[3] for a, b in zip(rows, others, strict=False)]
    assert all(each < first[3] for each in more), "each has the system prompt again"


def test_branches_compute_what_is_new(run: Run) -> None:
    rows = re.findall(r"cached +(\d+), computed +(\d+)", run("branches.py"))
    assert len(rows) == 6
    assert all(int(computed) < 15 < int(cached) for cached, computed in rows[1:])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_takes_a_model(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.count("\n") < 60
    assert '"--model"' in text


@pytest.mark.parametrize("name", [*NAMES, "many_requests.py", "conversations.py"])
def test_a_model_that_is_not_there_is_a_sentence(
    run: Run, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--model", str(tmp_path / "none"))
    assert ended.value.code == 2
    *_, said = capsys.readouterr().err.splitlines()
    if name == "conversations.py":
        assert "unrecognized arguments: --model" in said
    else:
        assert said.startswith(f"{Path(sys.argv[0]).name}: error: --model {tmp_path / 'none'} cannot be loaded: ")
