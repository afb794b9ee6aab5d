"""A run's schedule is decided again from its log: the same scheduler says the same at each step."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import World, random_world

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.planning.policies.adaptive import Adaptive
from kvtier.planning.reports import log as decisions
from kvtier.planning.reports.log_file import header
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.job import Job, Load, Step, Ways
from kvtier.scheduling.log import LoggedScheduler, replay
from kvtier.scheduling.prices import Always, Prices
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.simulation.loads import lognormal, poisson
from kvtier.scheduling.simulation.outcome import Outcome
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import simulate

PRICES = Prices(fixed=4e-3, per_token=2e-5, per_pair=1e-8, up=1e-6, down=1e-6)


def simulated(profile: Profile, scheduler: Scheduler, seed: int, ways: Ways | str | None = None) -> Outcome:
    """A crowded engine with tenants and priorities: many give up their blocks."""
    requests = poisson(30, float("inf"), lognormal(20, 0.8, 80), lognormal(20, 0.8, 60), seed=seed)
    requests = [replace(x, tenant=f"tenant {i % 3}", priority=int(i % 5 == 0)) for i, x in enumerate(requests)]
    return simulate(requests, profile, scheduler, max_tokens=16, ways=ways)


def logged_run(path: Path, profile: Profile, seed: int, name: str = "fair", ways: Ways | str | None = None) -> Outcome:
    """One that is logged."""
    with contextlib.closing(LoggedScheduler(name, path)) as scheduler:
        return simulated(profile, scheduler, seed, ways)


def test_a_log_without_steps_says_when_a_scheduler_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LoggedScheduler("fair", tmp_path / "schedule.jsonl").close()
    assert main(["replay", str(tmp_path / "schedule.jsonl")]) == 1
    assert "A scheduler is asked at each step" in capsys.readouterr().out


@pytest.mark.parametrize("ways", [None, "swap", "recompute"])
@pytest.mark.parametrize("name", ["fair", "fcfs"])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_scheduler_decides_a_run_again(
    tmp_path: Path, profile: Profile, seed: int, name: str, ways: str | None
) -> None:
    path = tmp_path / "schedule.jsonl"
    outcome = logged_run(path, profile, seed, name, ways)
    found = replay(path, name)
    assert found.differences == []
    assert found.decisions == found.kinds["step"] >= outcome.steps
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    preempted = sum(len(line["answer"]["preempt"]) for line in lines)
    assert preempted == sum(x.swapped + x.recomputed for x in outcome.requests)
    assert preempted


@pytest.mark.parametrize("seed", range(40))
def test_a_log_changes_nothing(tmp_path: Path, seed: int) -> None:
    def story(scheduler: Scheduler) -> list[Any]:
        world: World = random_world(seed, scheduler)
        return [world.steps, world.preempted, [job.number for job in world.order], sorted(world.ended.values())]

    logged = LoggedScheduler("fair", tmp_path / "schedule.jsonl")
    assert story(logged) == story(Fair())
    logged.close()
    assert replay(tmp_path / "schedule.jsonl", "fair").differences == []


def test_another_scheduler_or_another_price_decides_otherwise(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "schedule.jsonl"
    logged_run(path, profile, 0)
    found = replay(path, "fcfs")
    assert found.differences
    assert "the first in line 2: step: tokens[" in str(found)
    cheap = [json.loads(line) for line in path.read_text().splitlines()]
    for line in cheap[1:]:
        line["step"]["ways"]["up"] = 1e9  # nothing comes back over such a link
    path.write_text("".join(json.dumps(line) + "\n" for line in cheap))
    differs = replay(path, "fair").differences
    assert differs
    assert all(kind == "step" for _, kind, _, _ in differs)


def test_a_price_that_is_learned_meanwhile_is_the_same_for_all_of_a_step(tmp_path: Path) -> None:
    class Learned:
        """Its prices differ each time that somebody looks."""

        looked = 0

        def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
            return self.now().way(job, load, host_blocks)

        def step(self, load: Load) -> float:
            return self.now().step(load)

        def now(self) -> Ways:
            self.looked += 1
            return Always("swap" if self.looked % 2 else "recompute")

    ways, path = Learned(), tmp_path / "schedule.jsonl"
    running = [Job(i, 0.0, 17, 99, cached=16, blocks=4, running=True) for i in range(4)]
    load = Load(0.0, running, [], 0, 4, 64, 8, free_host_blocks=99, ways=ways)
    with contextlib.closing(LoggedScheduler("fcfs", path)) as scheduler:
        steps = [scheduler.plan(load) for _ in range(4)]
    assert ways.looked == 4
    assert [set(step.ways.values()) for step in steps] == [{"swap"}, {"recompute"}] * 2
    assert replay(path, "fcfs").differences == []


def test_only_jobs_that_changed_are_written(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    waiting = [Job(i, 0.0, 9, 99) for i in range(1, 500)]
    runs = Job(0, 0.0, 9, 99, cached=8, blocks=1, running=True)
    with contextlib.closing(LoggedScheduler("fcfs", path)) as scheduler:
        for _ in range(5):
            scheduler.plan(Load(0.0, [runs], waiting, 0, 16, 64, 1))
            runs.cached += 1
            runs.tokens += 1
    jobs = [len(json.loads(line)["step"]["jobs"]) for line in path.read_text().splitlines()[1:]]
    assert jobs == [500, 1, 1, 1, 1]
    assert replay(path, "fcfs").differences == []


def test_a_job_is_the_same_object_in_each_step(tmp_path: Path) -> None:
    class Patient(Scheduler):
        """Keeps something of its own with each job."""

        def __init__(self) -> None:
            self.seen: dict[Job, int] = {}

        def key(self, job: Job, load: Load) -> int:
            self.seen[job] = self.seen.get(job, 0) + 1
            return -self.seen[job]

    path = tmp_path / "schedule.jsonl"
    with contextlib.closing(LoggedScheduler(Patient(), path)) as scheduler:
        random_world(3, scheduler)
    assert replay(path, Patient()).differences == []
    assert header(path)["scheduler"] == "Patient"


def test_a_copy_decides_as_the_scheduler_does_and_leaves_the_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    logged = LoggedScheduler("fair", path)
    before = path.stat().st_size
    for twin in (copy.deepcopy(logged), pickle.loads(pickle.dumps(logged))):
        assert random_world(1, twin).steps == random_world(1, Fair()).steps
    logged.close()
    assert len(path.read_text().splitlines()) == 1
    assert before <= path.stat().st_size


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '{"step":{}}',
        '{"step":{"jobs":[[1]]},"answer":{}}',
        '{"step":{"jobs":[],"running":[7],"waiting":[]},"answer":{}}',
        '{"step":null,"answer":null}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "schedule.jsonl"
    LoggedScheduler("fair", path).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 2: this is not a line of a decision log"):
        replay(path, "fair")


@pytest.mark.parametrize(("name", "value"), [("free_blocks", "3"), ("now", None), ("chunked", 1), ("max_tokens", 0.5)])
def test_a_field_of_another_type_is_named(tmp_path: Path, profile: Profile, name: str, value: object) -> None:
    path = tmp_path / "schedule.jsonl"
    logged_run(path, profile, 0)
    first, second, *rest = path.read_text().splitlines()
    line = json.loads(second)
    line["step"][name] = value
    path.write_text("\n".join([first, json.dumps(line), *rest]) + "\n")
    with pytest.raises(ConfigError, match=f"line 2: {name} is {value!r}"):
        replay(path, "fair")


def test_the_command_line_knows_whose_decisions_a_log_has(
    tmp_path: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.jsonl"
    logged_run(path, profile, 0)
    assert main(["replay", str(path)]) == 0
    assert "all the same" in capsys.readouterr().out
    assert main(["replay", str(path), "--scheduler", "fcfs"]) == 1
    assert main(["replay", str(path), "--policy", "adaptive"]) == 2
    assert "has the decisions of a scheduler: give --scheduler" in capsys.readouterr().err
    assert main(["replay", str(path), "--scheduler", "nobody"]) == 2
    assert "'fair', 'fcfs'" in capsys.readouterr().err
    decisions.Logged(Adaptive(), tmp_path / "decisions.jsonl").close()
    assert main(["replay", str(tmp_path / "decisions.jsonl"), "--scheduler", "fair"]) == 2
    assert "has the decisions of a policy: give --policy" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="a log of other decisions"):
        replay(tmp_path / "decisions.jsonl", "fair")
    with pytest.raises(ConfigError, match="a log of other decisions"):
        decisions.replay(path, "adaptive")


class Backwards(Scheduler):
    """The last first, as a user's own."""

    def key(self, job: Job, load: Load) -> int:
        """See `Scheduler.key`."""
        return -job.number


def test_a_scheduler_of_ones_own_is_named_by_module_and_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedule.jsonl"
    with contextlib.closing(LoggedScheduler(Backwards(), path)) as scheduler:
        random_world(5, scheduler)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr().err
    assert "--scheduler test_scheduler_log:Backwards" in said
    assert main(["replay", str(path), "--scheduler", "test_scheduler_log:Backwards"]) == 0
    assert main(["replay", str(path), "--scheduler", "test_scheduler_log:PRICES"]) == 2
    assert "this is no kvtier.Scheduler" in capsys.readouterr().err


def test_prices_of_a_class_of_ones_own_are_refused(tmp_path: Path) -> None:
    class Mine:
        """Neither of the two that a log takes."""

        def way(self, job: Job, load: Load, host_blocks: int) -> tuple[str, float]:
            return "swap", 0.0

        def step(self, load: Load) -> float:
            return 0.0

        def now(self) -> Ways:
            return self

    with contextlib.closing(LoggedScheduler("fcfs", tmp_path / "log")) as scheduler, pytest.raises(ConfigError):
        scheduler.plan(Load(0.0, [], [], 0, 4, 64, 8, ways=Mine()))


def test_a_step_of_nothing_is_a_decision_too(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    with contextlib.closing(LoggedScheduler("fcfs", path)) as scheduler:
        assert scheduler.plan(Load(0.0, [], [], 0, 4, 64, 8, ways=PRICES)) == Step()
    assert replay(path, "fcfs").decisions == 1
