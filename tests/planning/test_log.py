"""The decision log: a run is decided again, by the same objects, without a model, and all decisions are the same."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier import ConfigError, Policy, TieredKVCache
from kvtier.cli.main import main
from kvtier.planning.costs import Rates
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.policies.names import POLICIES as NAMED
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.reports.log import Logged, LoggedCandidate, logged_policy, replay
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
    path.write_text(whole[:-20])
    assert replay(path, Adaptive()).decisions == len([x for x in whole.splitlines() if '"answer"' in x]) - (
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_a_full_disk_ends_the_log_and_not_the_run() -> None:
    logged = Logged("adaptive", "/dev/full")
    with pytest.warns(RuntimeWarning, match="/dev/full ends early.*No space") as said:
        assert real_run(logged) == real_run(Adaptive())
    assert [x.category for x in said].count(RuntimeWarning) == 1
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
        with pytest.raises(ConfigError, match="another Logged"):
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
    assert logged_policy(path) == name
    assert main(["replay", str(path)]) == 0
    if name in ("all-fetch", "pie"):
        assert main(["replay", str(path), "--policy", "default"]) == 1


def test_a_log_of_a_policy_without_a_name_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(Policy):
        """Somebody's own."""

    Logged(Mine(), tmp_path / "decisions.jsonl").close()
    assert main(["replay", str(tmp_path / "decisions.jsonl")]) == 2
    assert "Mine" in capsys.readouterr().err


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
