"""The decision log: a run is decided again, by the same objects, without a model, and all decisions are the same."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier import ConfigError, Policy, TieredKVCache
from kvtier.cli.main import main
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.names import POLICIES as NAMED
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.rates import Rates
from kvtier.planning.reports.log import Logged, LoggedCandidate, replay
from kvtier.planning.reports.log_file import header
from kvtier.planning.resuming.loading import LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix
from kvtier.planning.simulation.simulate import Load, Machine, Simulation
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepState
from kvtier.testing import held, with_doubles

POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "calibrated": lambda: Adaptive(Rates(up=1e9, host=2e9, measured=True)),
    "default": Policy,
    "half": lambda: FixedShare(0.5, write_through=0.2),
}
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


def real_run(policy: Policy, seed: int = 0) -> list[int]:
    """Generate with most blocks spilled and copies that come late; the tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    cache = TieredKVCache(CONFIG, device_budget="40KiB", block_size=4, policy=policy)
    with_doubles(cache, held(seed, late=True))
    out = model.generate(torch.arange(40)[None], max_new_tokens=60, past_key_values=cache, do_sample=False)
    cache.close()
    tokens: list[int] = out[0].tolist()
    return tokens


@pytest.mark.parametrize("name", POLICIES)
def test_the_log_of_a_real_run_is_decided_again_in_the_same_way(name: str, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    logged = Logged(POLICIES[name](), path)
    assert real_run(logged) == real_run(POLICIES[name]()), "the log changes what is decided"
    logged.close()
    found = replay(path, POLICIES[name]())
    assert found.kinds["plan"] > 50, str(found)
    assert found.kinds["victims"] > 0
    assert found.kinds["write_back"] > 0
    assert found.differences == [], str(found)
    assert "all the same" in str(found)


def test_the_log_of_a_simulation_is_decided_again_in_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    logged = Logged(Adaptive(), path)
    load = Load(16, 2e-4, 262144, 64, 8192, 4, 16 * 4 * 8192 * 4096 * 6 // 10)
    machine = Machine(Rates(), noise=0.05, traffic=lambda step: 0.5 if step > 60 else 0.0)
    Simulation(logged, machine, load).run(150)
    found = replay(path, Adaptive())
    assert found.decisions >= 150
    assert found.differences == [], str(found)
    assert len({json.dumps(x["answer"]) for x in map(json.loads, path.read_text().splitlines()) if "plan" in x}) > 3


def test_another_policy_decides_otherwise_and_the_replay_says_where(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    real_run(Logged(FixedShare(0.5), path))
    found = replay(path, FixedShare(1.0))
    assert found.differences
    number, kind, was, now = found.differences[0]
    assert was != now
    assert f"line {number}: {kind}" in str(found)


def test_a_log_that_was_cut_short_counts_up_to_there_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    real_run(Logged(Adaptive(), path))
    whole = path.read_text()
    assert replay(path, Adaptive()).cut is None
    path.write_text(whole[:-20])
    found = replay(path, Adaptive())
    assert found.cut == len(whole.splitlines())
    assert f"ends early, in the middle of line {found.cut}" in str(found)
    assert found.decisions == len([x for x in whole.splitlines() if '"answer"' in x]) - (
        '"answer"' in whole.splitlines()[-1]
    )
    path.write_text(whole[:400] + "\n" + whole)
    with pytest.raises(ConfigError, match="line"):
        replay(path, Adaptive())
    path.write_text(whole.splitlines()[0] + "\n{}\n")
    with pytest.raises(ConfigError, match="line 2"):
        replay(path, Adaptive())
    path.write_text("tokens\n")
    with pytest.raises(ConfigError, match="not a decision log"):
        replay(path, Adaptive())


@pytest.mark.parametrize(
    "line",
    [
        b'{"plan":{"tokens":1}}',
        b'{"plan":7,"answer":7}',
        b'{"victims":[[1]],"blocks":1}',
        b'{"write_back":[1,2]}',
        b'{"use_rates":"cpu","rates":{"up":1,"sideways":2}}',
        b'{"observe":null}',
        b'{"told":1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_any_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    Logged(Adaptive(), path).close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ConfigError, match="line 2: this is not a line of a decision log"):
        replay(path, Adaptive())


def test_an_empty_file_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="is empty"):
        replay(tmp_path / "empty", Adaptive())


def test_after_close_the_policy_decides_on(tmp_path: Path) -> None:
    logged = Logged(Adaptive(), tmp_path / "decisions.jsonl")
    logged.close()
    assert real_run(logged) == real_run(Adaptive())
    assert len((tmp_path / "decisions.jsonl").read_text().splitlines()) == 1


def test_a_process_that_is_forked_decides_on_without_the_log(tmp_path: Path) -> None:
    code = """
import os, sys
from kvtier.planning.reports.log import Logged, replay
path = sys.argv[1]
logged = Logged("default", path)
logged.write_back(2, 3, 1)
if not os.fork():
    assert logged.write_back(3, 3, 1) == 2
    Logged("default", path + ".own").close()  # of which it is the only one
    logged.close()
    sys.exit()
os.wait()
logged.write_back(3, 3, 2)
logged.close()
print(replay(path, "default"))
"""
    done = forks.run(code, str(tmp_path / "log.jsonl"))
    assert done.stdout == "2 decisions (2 of write_back): all the same.\n", done.stderr
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_a_full_disk_ends_the_log_and_not_the_run() -> None:
    with pytest.warns(RuntimeWarning, match="/dev/full ends early.*No space"):
        logged = Logged("adaptive", "/dev/full")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert real_run(logged) == real_run(Adaptive())
        logged.close()


def test_a_copy_decides_as_the_policy_does_and_leaves_the_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    logged = Logged(FixedShare(0.5), path)
    for twin in (copy.deepcopy(logged), pickle.loads(pickle.dumps(logged))):
        assert real_run(twin) == real_run(FixedShare(0.5))
    real_run(logged)
    logged.close()
    found = replay(path, FixedShare(0.5))
    assert (found.kinds["plan"] > 50, found.differences) == (True, [])
    assert path.read_text().count('"log"') == 1


def test_rates_that_a_memory_found_in_a_profile_are_part_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    logged = Logged(Adaptive(), path)
    logged.use_rates("simulated", Rates(up=3e9, host=90e9, measured=True))
    load = Load(16, 2e-4, 262144, 64, 8192, 4, 16 * 4 * 8192 * 4096 * 6 // 10)
    Simulation(logged, Machine(Rates(), noise=0.02), load).run(40)
    logged.close()
    assert replay(path, Adaptive()).differences == []
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if "use_rates" not in x))
    assert replay(path, Adaptive()).differences


def test_two_logs_do_not_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    first = Logged("default", path)
    (tmp_path / "link").symlink_to(path)
    before = path.read_text()
    for same in (path, tmp_path / "link", tmp_path / "." / "decisions.jsonl"):
        with pytest.raises(ConfigError, match="another decision log"):
            Logged("default", same)
    assert path.read_text() == before
    first.close()
    Logged("default", path).close()
    Logged("default", tmp_path / "other.jsonl")


@pytest.mark.parametrize("name", NAMED)
def test_a_log_says_whose_decisions_it_has_and_is_replayed_by_that_policy(name: str, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    policy = Logged(name, path)
    Simulation(policy, Machine(Rates()), Load(4, 1e-3, 2**16, 16, 640, 2, 2**23)).run(30)
    policy.close()
    assert header(path)["policy"] == name
    assert main(["replay", str(path)]) == 0
    if name in ("all-fetch", "pie"):
        assert main(["replay", str(path), "--policy", "default"]) == 1


def test_a_log_of_a_policy_without_a_name_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(Policy):
        """Somebody's own."""

    Logged(Mine(), tmp_path / "decisions.jsonl").close()
    assert main(["replay", str(tmp_path / "decisions.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "--policy module:Mine" in said
    assert "Mine(...))" in said


def test_a_policy_of_ones_own_is_replayed_by_module_and_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_policies.py").write_text(
        "import kvtier\n\nclass Mine(kvtier.Policy):\n    pass\n\nclass Broken(kvtier.Policy):\n"
        "    def plan(self, state):\n        return state.nothing\n\nclass Other:\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine: Any = importlib.import_module("own_policies")
    log = run_and_log(mine.Mine(), tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert main(["replay", str(log)]) == 2
    assert "--policy own_policies:Mine" in capsys.readouterr().err
    assert main(["replay", str(log), "--policy", "own_policies:Mine"]) == 0
    assert "all the same" in capsys.readouterr().out
    for wrong, said in (
        ("own_policies:Broken", ": the policy fails at this question (AttributeError"),
        ("own_policies:Other", "no kvtier.Policy"),
        ("own_policies:Missing", "Missing"),
        ("no_such_module:Mine", "no_such_module"),
    ):
        assert main(["replay", str(log), "--policy", wrong]) == 2
        assert said in capsys.readouterr().err
    assert sys.path == before
    del sys.modules["own_policies"]


def test_a_log_without_decisions_compares_nothing_and_that_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Logged("default", tmp_path / "decisions.jsonl").close()
    assert main(["replay", str(tmp_path / "decisions.jsonl")]) == 1
    assert "Nothing was compared" in capsys.readouterr().out


def test_a_difference_is_told_by_the_fields_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run_and_log(FixedShare(0.5), tmp_path)
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    number = next(i for i, x in enumerate(lines) if "plan" in x)
    lines[number]["answer"]["layers"][1]["fetch"] += 7
    log.write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = replay(log, FixedShare(0.5))
    was, fetch = lines[number]["answer"]["layers"][1]["fetch"], lines[number]["answer"]["layers"][1]["fetch"] - 7
    assert len(found.differences) == 1
    assert f"line {number + 1}: plan: layers[1].fetch {was} in the log, {fetch} now." in str(found)
    other = str(replay(log, "all-attend"))
    assert len(other) < 500
    assert "layers[0].fetch" in other
    found.differences = [(2, "victims", [[0, 3, False], [1, 1, False]], [[0, 2, False]])]
    assert "number of victims 2 in the log, 1 now; victims[0].blocks 3 in the log, 2 now." in str(found)
    found.differences = [(2, "write_back", 3, 4)]
    assert "write_back: 3 in the log, 4 now." in str(found)


@pytest.fixture(scope="module")
def real_log(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The lines of a run of `FixedShare(0.5)`."""
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    with contextlib.closing(Logged(FixedShare(0.5), path)) as logged:
        real_run(logged)
    return [json.loads(x) for x in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "where", "place", "other"),
    [
        # By the names that a policy answers with, so that a field that nobody writes down is missed here.
        *(("plan", ("answer", "layers", 0), x.name, lambda was: was + 1) for x in fields(LayerPlan)),
        ("plan", ("answer",), "reserve", lambda was: was + 1),
        ("plan", ("answer",), "on_host", lambda was: [0] if was is None else None),
        ("plan", ("answer",), "layers", lambda was: was[:-1]),
        ("victims", ("answer", -1), 0, lambda was: was + 1),
        ("victims", ("answer", -1), 1, lambda was: was + 1),
        ("victims", ("answer", -1), 2, lambda was: not was),
        ("victims", (), "answer", lambda was: was[:-1]),
        ("victims", (), "answer", lambda was: was[::-1] if len(was) > 1 else []),
        ("write_back", (), "answer", lambda was: was + 1),
    ],
)
def test_whatever_of_an_answer_is_another_in_the_log_is_a_difference(
    kind: str, where: tuple[Any, ...], place: Any, other: Callable[[Any], Any], real_log: list[Any], tmp_path: Path
) -> None:
    lines = copy.deepcopy(real_log)
    number = [i for i, x in enumerate(lines) if kind in x and x["answer"]][-1]
    target = lines[number]
    for each in where:
        target = target[each]
    target[place] = other(target[place])
    (tmp_path / "edited").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = replay(tmp_path / "edited", FixedShare(0.5))
    assert [x[:2] for x in found.differences] == [(number + 1, kind)]
    assert f"line {number + 1}: {kind}" in str(found)


class AnswersOtherwise(FixedShare):
    """As `FixedShare(0.5)`, but for one thing at a time."""

    def __init__(self, what: str) -> None:
        super().__init__(0.5)
        self.what = what

    def plan(self, state: StepState) -> StepPlan:
        found = super().plan(state)
        if self.what == "reserve":
            found.reserve += 64
        elif self.what == "on_host":
            found.on_host = [0]
        elif self.what in ("fetch", "ahead", "keep", "leave"):
            setattr(found.layers[-1], self.what, getattr(found.layers[-1], self.what) + 1)
        return found

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> list[Victims]:
        found = list(super().victims(candidates, blocks))
        if self.what == "latest_first":
            return [x._replace(latest_first=not x.latest_first) for x in found]
        if self.what == "blocks":
            return [x._replace(blocks=x.blocks + 1) for x in found]
        if self.what == "candidate":
            return [x._replace(candidate=candidates[0]) for x in found]
        return found

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        return super().write_back(used_bytes, device_bytes, sealed) + (self.what == "write_back")


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *((x, "plan") for x in ("fetch", "ahead", "keep", "leave", "reserve", "on_host")),
        *((x, "victims") for x in Victims._fields),
        ("write_back", "write_back"),
        ("", None),
    ],
)
def test_a_policy_that_answers_one_thing_otherwise_differs_in_that(
    what: str, kind: str | None, real_log: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("".join(json.dumps(x) + "\n" for x in real_log))
    found = replay(tmp_path / "log", AnswersOtherwise(what))
    assert {x[1] for x in found.differences} == ({kind} if kind else set())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda x: x["plan"]["layers"][0].update(block_bytes="abc"),
            "block_bytes is 'abc', and has to be a whole number",
        ),
        (lambda x: x["plan"]["layers"][0].update(host_attention=1), "host_attention is 1, and has to be true or false"),
        (lambda x: x["plan"].update(free_bytes=None), "free_bytes is None"),
        (lambda x: x["plan"].update(row_bytes="abc"), "row_bytes is 'abc'"),
        (
            lambda x: x["plan"]["layers"][0].update(block_bytes=0),
            "the policy fails at this question (ZeroDivisionError",
        ),
    ],
)
def test_an_edited_log_is_refused_with_the_file_and_the_line(
    change: Callable[[Any], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_and_log(Policy(), tmp_path)
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    number = next(i for i, x in enumerate(lines) if "plan" in x)
    for layer in lines[number]["plan"]["layers"]:
        layer["host_attention"] = False
        if "ZeroDivision" in said:
            layer["block_bytes"] = 0
            lines[number]["plan"]["free_bytes"] = 2**40
    change(lines[number])
    log.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert main(["replay", str(log), "--policy", "default"]) == 2
    assert f"kvtier: {log}, line {number + 1}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x["load_from"].update(length="abc"), "length is 'abc', and has to be a whole number"),
        (lambda x: x["load_from"].update(files=[["a", 1]]), "the policy fails at this question"),
        (lambda x: x["learned"].update(loads=[[1, -1.0]]), "this is not a line of a decision log"),
        (lambda x: x.pop("learned"), "this is not a line of a decision log"),
    ],
)
def test_an_edited_decision_about_what_is_saved_is_refused(
    change: Callable[[Any], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned, path = LoadOrCompute(), tmp_path / "decisions.jsonl"
    for tokens in (64, 256):
        learned.loaded(tokens * 1000, tokens * 1e-6)
        learned.computed(tokens, 0, 1, tokens * 1e-3)
    with contextlib.closing(Logged("default", path)) as logged:
        assert logged.load_from(learned, SavedPrefix([(0, 300_000), (256, 40_000)], 300, 16, 5, 16)) == 16
    assert not replay(path, "default").differences
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    change(lines[-1])
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert main(["replay", str(path), "--policy", "default"]) == 2
    assert f"line 2: {said}" in capsys.readouterr().err


def run_and_log(policy: Policy, folder: Path) -> Path:
    """A simulated run of some decisions."""
    path = folder / "decisions.jsonl"
    with contextlib.closing(Logged(policy, path)) as logged:
        Simulation(logged, Machine(Rates()), Load(4, 1e-3, 2**16, 16, 640, 2, 2**23)).run(30)
    return path


@pytest.mark.parametrize("rows", [{2, 0}, frozenset([1]), (1, 0), range(2), np.arange(2), None], ids=repr)
def test_whatever_answers_a_memory_takes_are_logged_and_are_the_same_in_a_replay(rows: Any, tmp_path: Path) -> None:
    class Answers(Policy):
        def plan(self, state: StepState) -> StepPlan:
            each = LayerPlan(np.int64(3), 1)  # type: ignore[arg-type]
            return StepPlan((each, each), np.int64(0), rows)  # type: ignore[arg-type]

        def victims(self, candidates: Sequence[Candidate], blocks: int) -> Any:
            return ((candidates[-1], np.int64(blocks), np.bool_(True)), Victims(LoggedCandidate(0, 0, 9, 0, 0), 1))

        def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> Any:
            return np.int32(sealed)

    state = StepState(1, [LayerState(i, 2**20, 50, 0, 50, 1, True) for i in range(2)], 2**20, 2**24, cache=1)
    with contextlib.closing(Logged(Answers(), tmp_path / "decisions.jsonl")) as logged:
        assert len(logged.plan(state).layers) == 2
        assert len(logged.victims([LoggedCandidate(0, 0, 9, 0, 0), LoggedCandidate(1, 0, 9, 0, 0)], 2)) == 2
        assert logged.write_back(1, 2, 3) == 3
    found = replay(tmp_path / "decisions.jsonl", Answers())
    assert found.decisions == 3
    assert found.differences == [], str(found)


@pytest.mark.parametrize("answer", [None, StepPlan([LayerPlan()]), StepPlan([LayerPlan(0.5), LayerPlan()])], ids=repr)  # type: ignore[arg-type]
def test_what_is_no_plan_is_refused_as_without_a_log(answer: Any, tmp_path: Path) -> None:
    class Answers(Policy):
        def plan(self, state: StepState) -> StepPlan:
            return answer

    state = StepState(1, [LayerState(i, 2**20, 50, 0, 50, 1, True) for i in range(2)], 2**20, 2**24, cache=1)
    with contextlib.closing(Logged(Answers(), tmp_path / "decisions.jsonl")) as logged, pytest.raises(ConfigError):
        logged.plan(state)
