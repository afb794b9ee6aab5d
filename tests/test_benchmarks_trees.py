"""Another source tree as a contender: measured turn by turn, by its own code, in a process that ends with the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import trees
from benchmarks.__main__ import main
from benchmarks.contenders import Case
from benchmarks.models import SHAPES, Geometry, config_of
from benchmarks.records import ROOT, Recorder, read, source_digest
from benchmarks.trees import Process, RemoteTrial, Tree
from benchmarks.turns import TrialEnded

NAME = "kvtier"
#: Stands in for the kvtier of another commit: it has nothing but the public names that every commit has.
OTHER_COMMIT = """
import os, time
print("a line on standard output")
__version__ = "0.0.0"


class BudgetError(Exception):
    pass


def enable(model):
    pass


class TieredKVCache:
    def __init__(self, config, **options):
        pass

    def update(self, keys, values, layer):
        tokens = keys.shape[2]
        if tokens == 10:
            raise BudgetError("too small")
        if tokens == 20:
            raise TypeError("no such option")
        if tokens == 30:
            time.sleep(60)
        os._exit(7)
"""


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SHAPES, "qwen3-tiny", SHAPES["qwen3-tiny"] | {"num_hidden_layers": 2})
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of this tree's kvtier, native library included, that calls itself another version."""
    tree = tmp_path / "copy"
    shutil.copytree(ROOT / "kvtier", tree / "kvtier", ignore=shutil.ignore_patterns("__pycache__"))
    init = tree / "kvtier" / "__init__.py"
    text = init.read_text(encoding="utf-8")
    init.write_text(text.replace('__version__ = "', '__version__ = "99.'), encoding="utf-8")
    return tree


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A process of that commit."""
    package = tmp_path / "other" / "kvtier"
    (package / "cpu").mkdir(parents=True)
    (package / "cpu" / "library.so").touch()
    (package / "__init__.py").write_text(OTHER_COMMIT, encoding="utf-8")
    process = Process(Tree.at(package.parent), 1, cudnn_attention=True)
    yield process
    process.close()


def begin(process: Process, context: int, contender: str = NAME) -> RemoteTrial:
    config = config_of("qwen3-tiny")
    case = Case(config, Geometry.of(config, torch.float32), torch.device("cpu"), context, 8, 0)
    return process.trial("attend", contender, 1, trees.described("qwen3-tiny", case))


@pytest.mark.slow
def test_another_tree_is_measured_turn_by_turn_with_this_one(
    tmp_path: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, int]] = []
    processes: list[Process] = []
    started = Process.__init__
    monkeypatch.setattr(Recorder, "turn", lambda self, scenario, contender, turn, **_: turns.append((contender, turn)))
    monkeypatch.setattr(Process, "__init__", lambda self, *a, **k: (processes.append(self), started(self, *a, **k))[1])
    out = tmp_path / "r.jsonl"
    arguments = ["--model=qwen3-tiny", "--device=cpu", "--contexts=16", "--rounds=2", "--new-tokens=1", "--threads=1"]
    arguments += ["--cases=attend,loop", f"--contenders={NAME}", f"--against={copied}", f"--out={out}"]
    assert main(["update", "decode", *arguments]) == 0
    other = f"{NAME} of source {source_digest(copied)}"
    assert turns == [(NAME, 0), (other, 0), (other, 1), (NAME, 1)] * 2
    found = read(out)
    assert [(r["scenario"], r["contender"], r["status"]) for r in found] == [
        (scenario, name, "ok") for scenario in ("update", "decode") for name in (NAME, other)
    ]
    assert [r["source"] for r in found] == [source_digest(), source_digest(copied)] * 2
    assert [r["commit"] == "unknown" for r in found[1::2]] == [True] * 2
    assert [r["versions"]["kvtier"].startswith("99.") for r in found] == [False, True] * 2
    assert {r["ratio"]["to"] for r in found[::2]} == {other}
    assert {r["machine"]["threads"] for r in found} == {1}
    assert len({process._child.pid for process in processes}) == 2
    assert not any(process.running for process in processes)


def test_a_tree_needs_public_names_only_and_goes_on_after_an_error(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.computing["kvtier"] == "0.0.0"
    for context, status, reason in ((10, "refused", "BudgetError: too small"), (20, "failed", "TypeError: no such")):
        with pytest.raises(TrialEnded, match=reason) as ended:
            begin(process, context)
        assert ended.value.status == status
    trial = begin(process, 16, "dynamic")
    assert trial.measure() > 0
    assert trial.facts()["held_bytes"] > 0
    trial.close()
    monkeypatch.setattr(trees, "TIME_LIMIT", 0.2)
    with pytest.raises(TrialEnded, match="did not answer"):
        begin(process, 30)
    assert not process.running


def test_the_end_of_a_process_is_an_error_of_its_contender(process: Process) -> None:
    with pytest.raises(TrialEnded, match="exit status 7") as ended:
        begin(process, 40)
    assert ended.value.status == "failed"
    with pytest.raises(TrialEnded, match="exit status 7"):
        begin(process, 10)
    assert not process.running


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["update"], "there is no kvtier"),
        (["share"], "not possible in share"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    path = tmp_path if arguments == ["update"] else ROOT
    with pytest.raises(SystemExit) as ended:
        main([*arguments, f"--against={path}"])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(not list(ROOT.glob(trees._COMPILED)), reason="the native library is not compiled")
def test_a_tree_whose_library_is_not_compiled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvtier").mkdir()
    (tmp_path / "kvtier" / "__init__.py").touch()
    with pytest.raises(trees.TreeError, match="not compiled"):
        Tree.at(tmp_path)
