"""A GPU run: its plan, what it tests, its tables, the targets, and what remains of a run that is ended early."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import all_scenarios, parse_args
from benchmarks.children import KILLED, Children, Ended, end_group
from benchmarks.gpu import Run, caches, run_benchmark, run_calibration
from benchmarks.gpu_plan import LLAMA, PARTS, TIME_LIMIT, parts_named, share_of
from benchmarks.gpu_table import cut_off, table_of
from benchmarks.gpu_tests import ELSEWHERE, MARKED, SANITIZED, SHARES, marked, pytest_jobs, unfinished, verdict
from benchmarks.records import RESULTS, Recorder, read, turns_of
from benchmarks.targets import Target, evaluate

ROOT = Path(__file__).resolve().parent.parent

# The plan


def test_the_shares_of_the_parts_sum_to_the_limit_and_unused_time_goes_to_later_parts() -> None:
    assert sum(part.seconds for part in PARTS) == TIME_LIMIT
    assert TIME_LIMIT <= 8 * 60 - 40, "finding a Python and importing torch take their time, too"
    rest, left = list(PARTS), TIME_LIMIT
    while rest:
        assert share_of(rest[0], rest, left) == pytest.approx(rest[0].seconds)
        left -= rest.pop(0).seconds
    assert share_of(PARTS[-2], PARTS[-2:], 100.0) > PARTS[-2].seconds


@pytest.mark.parametrize("cuda", [True, False])
def test_every_part_is_a_command_that_benchmarks_understand(cuda: bool) -> None:
    known = all_scenarios()
    for part in PARTS:
        if part.name in ("build", "calibrate", "tests"):
            continue
        command = part.command(cuda=cuda, out=Path("r.jsonl"), seconds=30)
        args, settings = parse_args([*command[3:], "--device=cpu"], known)
        assert args.scenarios == part.name.split()[:1]
        assert len(settings.contexts or (0,)) == 1
        assert settings.emulated is not cuda
        assert args.no_cudnn_attention is (part.name not in ("kernels", "host", "launch", "predictions"))


def test_parts_are_named_by_how_they_begin_and_bring_what_all_need() -> None:
    assert [part.name for part in parts_named("link,decode qwen")] == [
        "build",
        "calibrate",
        "link",
        "decode qwen 8k",
    ]
    with pytest.raises(ValueError, match="no part 'fly'"):
        parts_named("link,fly")


class FakeChildren:
    """Stands in for the child processes: a run adds a record and ends with the given exit status."""

    def __init__(self, recorder: Recorder, kernels: str | None, code: int | None = 0) -> None:
        self.recorder, self.kernels, self.code = recorder, kernels, code

    def run(self, command: Sequence[str], seconds: float, *, keep: bool, **environment: str) -> Ended:
        """What `Children` does."""
        if self.kernels:
            self.recorder.add("decode", status="ok", median=1.0, kernels=self.kernels, workload={})
        return Ended(self.code, "")


@pytest.mark.parametrize(
    ("cuda", "kernels", "code", "failure"),
    [
        (True, "triton", 0, None),
        (True, "torch", 0, "plain torch stood in"),
        (False, "torch", 0, None),
        (True, None, 0, "nothing was measured"),
        (False, None, 0, None),
        (True, "triton", None, "time limit"),
        (True, "triton", -11, "exit status -11"),
    ],
)
def test_a_part_that_did_not_measure_what_it_should_is_a_failure_on_a_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda: bool,
    kernels: str | None,
    code: int | None,
    failure: str | None,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    recorder = Recorder(tmp_path / "r.jsonl", torch.device("cpu"), emulated=not cuda)
    (part,) = parts_named("decode llama 64k")[2:]
    children: Any = FakeChildren(recorder, kernels, code)
    failures = run_benchmark(children, part, Run(recorder, cuda, 0, 0), 30.0, 60.0)
    assert len(failures) == (failure is not None)
    assert all(x.startswith("decode llama 64k: ") and str(failure) in x for x in failures)


@pytest.mark.parametrize(
    ("code", "printed", "status", "failures"),
    [
        (0, "tile: 16 x 64\n2 measurements of cuda:0", "ok", []),
        (1, "failed: tile: no compiler", "failed", ["calibrate: failed: tile: no compiler"]),
        (2, "kvtier: KVTIER_PROFILE=off: there is no profile. Unset it, or give a folder.", "skipped", []),
        (None, "", "out of time", ["calibrate: exit status None"]),
    ],
)
def test_a_run_calibrates_first_and_records_what_it_found(
    tmp_path: Path, code: int | None, printed: str, status: str, failures: list[str]
) -> None:
    class Printing(FakeChildren):
        def run(self, command: Sequence[str], seconds: float, *, keep: bool, **environment: str) -> Ended:
            assert command[1:] == ["-m", "kvtier", "calibrate"]
            assert keep
            return Ended(self.code, printed)

    recorder = Recorder(tmp_path / "r.jsonl", torch.device("cpu"), emulated=False)
    children: Any = Printing(recorder, None, code)
    assert run_calibration(children, recorder, 20.0) == failures
    (made,) = read(recorder.out)
    assert (made["scenario"], made["status"], made["result"]) == ("calibrate", status, printed.splitlines())
    assert [part.name for part in PARTS[:2]] == ["build", "calibrate"]


# The tests


def test_the_device_and_the_host_are_tested_most_valuable_files_first() -> None:
    jobs = pytest_jobs(cuda=True)
    assert next(iter(jobs)).startswith(MARKED)
    assert {"tests/cuda/test_transfers.py", "tests/memory/test_giving_back.py"} <= {
        x.arguments[-1] for x in jobs.values()
    }
    assert set(marked()) <= {x for job in jobs.values() for x in job.arguments}
    assert jobs["tests/hf/test_modes.py"].device == jobs["tests/test_view.py"].device == "cuda"
    assert jobs["tests/cpu/test_accuracy.py"].device == "cpu"
    assert all((ROOT / x.split("::")[0]).exists() for job in jobs.values() for x in job.arguments if "/" in x)
    for path, name in (x.split("::") for x in SANITIZED):
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), name
    files = [job.arguments[0] for name, job in jobs.items() if not name.startswith(MARKED) and not job.under]
    assert set(pytest_jobs(cuda=False)["all others"].arguments[1:]) == set(files)
    order = [
        files.index(f"tests/{x}.py") for x in ("kernels/test_paged", "hf/test_split", "test_view", "hf/test_modes")
    ]
    assert order == sorted(order)
    for path, n in SHARES.items():
        assert [job.share for job in jobs.values() if job.arguments == (path,)] == [f"{i}/{n}" for i in range(n)]


def test_files_that_concern_no_device_are_not_run_there() -> None:
    assert all((ROOT / path).is_file() for path in ELSEWHERE)
    assert not ELSEWHERE & {x for job in pytest_jobs(cuda=True).values() for x in job.arguments}


@pytest.mark.parametrize(
    ("name", "code", "tail", "expected"),
    [
        (
            "racecheck",
            9,
            "3 passed in 4.1s\n== RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)",
            "warnings",
        ),
        ("racecheck", 9, "3 passed in 4.1s\n== RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", "failed"),
        (
            "racecheck",
            9,
            "1 failed in 4.1s\n== RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)",
            "failed",
        ),
        ("racecheck", 0, "3 passed in 4.1s", "ok"),
        ("memcheck", 9, "== ERROR SUMMARY: 1 error", "failed"),
        ("memcheck", 255, "== Error: Device not supported. Please refer to the documentation", "unavailable"),
        ("tests/test_view.py", 5, "no tests ran", "ok"),
        ("marked cuda, tests/cuda/test_transfers.py", 5, "no tests ran", "failed"),
        ("tests/test_view.py", None, "", "out of time"),
    ],
)
def test_the_verdict_on_a_job_follows_from_its_exit_status_and_output(
    name: str, code: int | None, tail: str, expected: str
) -> None:
    assert verdict(name, Ended(code, tail)) == expected


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("tests/a.py::test_b PASSED     [ 50%]\ntests/a.py::test_c[1 MiB-x] \n", ["tests/a.py::test_c[1 MiB-x]"]),
        ("tests/a.py::test_b PASSED     [ 50%]\n== 1 passed in 0.1s ==", []),
        ("collecting ... ", []),
    ],
)
def test_of_a_job_that_was_ended_it_is_known_which_test_was_under_way(tail: str, expected: list[str]) -> None:
    assert unfinished(Ended(None, tail)) == expected


def test_for_what_is_marked_no_other_file_is_imported() -> None:
    mark = ".".join(("pytest", "mark", "cuda"))
    having = {path for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()}
    assert {ROOT / name for name in marked()} == having


def test_a_test_that_takes_too_long_is_named_before_its_process_ends(tmp_path: Path) -> None:
    test = tmp_path / "test_long.py"
    test.write_text("import time\n\ndef test_short(): pass\n\ndef test_long(): time.sleep(600)\n")
    with Children() as children, ThreadPoolExecutor(1) as pool:  # of whose threads each has a process
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(test)]
        ended = pool.submit(children.run, command, 80, keep=True, notice=60.0).result()
    assert ended.code is None
    assert time.monotonic() - began < 79, "it was interrupted"
    assert "1 passed" in ended.tail
    assert ended.tail.count("test_long ") == 1


# The tables


def record(scenario: str, contender: str, median: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """As a benchmark writes it; without a median if that is None."""
    workload = {"model": LLAMA, "context": 32768, "batch": 1} | more.pop("workload", {})
    values = {} if median is None else {"median": median, "n": 1, "rounds": {"0": median}}
    fields = {"status": "ok", "unit": "x", "ratio": None, "facts": {}, "workload": workload}
    return {"scenario": scenario, "contender": contender} | fields | values | more


def test_a_comparison_that_was_cut_off_is_in_the_table_with_its_turns() -> None:
    turn = {"scenario": "decode", "unit": "tokens/s", "workload": {"model": LLAMA, "context": 65536}, "facts": {}}
    turns = [turn | {"contender": "dynamic", "turn": i, "value": value} for i, value in enumerate((10.0, 30.0, 20.0))]
    turns += [turn | {"contender": "offloaded", "turn": 0, "value": 2.5}]
    left = cut_off(turns)
    assert [(r["contender"], r["median"], r["n"]) for r in left] == [("dynamic", 20.0, 3), ("offloaded", 2.5, 1)]
    made = [{"scenario": "build", "status": "ok"}, {"scenario": "host", "status": "skipped", "workload": {}}]
    text = table_of([*made, record("decode", "kvtier@100%", None, status="refused", reason="too small"), *left])
    assert "cut off after 3 turns" in text
    assert [t.figure for t in evaluate(left) if t.name == "all resident at 64k, tokens/s of dynamic"] == [None]
    both = [*turns, turns[1] | {"contender": "kvtier@100%", "value": 60.0}]
    assert [t.figure for t in evaluate(cut_off(both)) if t.name == "all resident at 64k, tokens/s of dynamic"] == [2.0]
    assert "refused: too small" in text
    assert "build" not in text
    assert table_of([]) == "nothing was measured"


def test_targets_of_a_scenario_are_in_the_table_by_their_names() -> None:
    made = [Target("speed, of the longer of two", figure, ">=", 0.95).fields() for figure in (0.97, None)]
    records = [{"scenario": "overlap", "status": "ok", "workload": {"model": LLAMA, "context": 16}} | x for x in made]
    first, second = table_of(records).splitlines()[1:]
    assert re.search(r"speed, of the longer of two +0\.970? +>= 0\.95 +met", first)
    assert re.search(r"speed, of the longer of two +- +>= 0\.95 +no figure", second)


def test_what_every_scenario_of_the_plan_records_fits_the_tables() -> None:
    """Each with fields of its own; a run on a GPU prints all of them at its end."""
    planned = {part.name.split()[0] for part in PARTS}
    found = [record for file in RESULTS.glob("*.jsonl") for record in read(file) if record["scenario"] in planned]
    assert {record["scenario"] for record in found} >= {"decode", "host", "memory", "overlap", "predictions"}
    assert table_of(found) != "nothing was measured"
    evaluate(found)


# The targets


def plan() -> list[dict[str, Any]]:
    """A record of everything in the plan that a target is about: all targets are met."""
    resident, step = 100.0, 0.01
    facts = {"bytes_up_per_token": 1e6, "copies_up_per_token": 64.0, "bytes_down_per_token": 131072.0}
    facts |= {"device_budget": 1000, "host_bytes": 2e9}
    made = [
        record("kernels", "copy on the device", 3000.0),
        record("kernels", "paged", 2700.0),
        record("host", "kvtier", 100.0),
        record("update", "kvtier@100%", facts={"issue_us_per_layer": 20.0}),
    ]
    for r in made[:2]:
        r["workload"] |= {"model": "kernels", "queries": 1, "heads": 32, "kv_heads": 8, "block_size": 64}
    for word in ("fetch", "write back"):
        made += [record("link", f"{word} {size} MiB", rate) for size, rate in (("1.00", 40.0), ("64.0", 50.0))]
        for nbytes, rate in ((4096, 5.0), (2**18, 46.0), (2**20, 49.0)):
            made.append(record("link", f"{word}, chosen", rate, workload={"model": "link", "chunk_bytes": nbytes}))
    for part in PARTS:
        workload = {"context": int(part.arguments.get("--contexts", "0k")[:-1]) * 1024}
        if part.name.startswith("decode llama"):
            workload |= {"layers": 32, "token_bytes": 131072}
            for name in part.arguments["--contenders"].split(","):
                rate = {"dynamic": resident * 0.99, "offloaded": resident / 10, "kvtier@100%": resident}.get(name)
                if rate is None:
                    rate = 1 / max(step, 2e9 / 150e9) if name.startswith("kvtier") else resident * 0.98
                made.append(record("decode", name, rate, facts=facts if "@" in name else {}, workload=workload))
        if part.name.startswith("memory"):
            workload |= {"peak_of": "device"}
            for name in part.arguments["--contenders"].split(","):
                known = {"peak_bytes": 1000, "device_budget": 1000, "page_locked_bytes": 2100, "kv_bytes": 2000}
                made.append(record("memory", name, facts=known if "@" in name else {}, workload=workload))
    return made


def verdicts(found: list[Target]) -> dict[str, str]:
    return {target.name: target.verdict for target in found}


def test_the_plan_measures_every_target() -> None:
    assert set(verdicts(evaluate(plan())).values()) == {"met"}


@pytest.mark.slow
def test_targets_find_what_benchmarks_really_record(tmp_path: Path) -> None:
    """The plan above is made up: names and facts are those that scenarios write."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only=link,host,update,decode llama 64k", f"--out={tmp_path}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.jsonl")
    records = read(file)
    found = {target.name: target.figure for target in evaluate(records)}
    # The others are about sizes that are not measured here.
    for name in (
        "runs fetched per layer and token (launches are fewer)",
        "bytes written back but for a backlog, of the new tokens' KV",
        "a step, of the longer of all resident and host bytes / (link + host attention)",
        "Python per layer and step, us",
    ):
        assert found[name] is not None, name
    for word in ("fetch", "write back"):
        assert any(
            r["scenario"] == "link" and r.get("contender") == f"{word}, chosen" and r["workload"]["chunk_bytes"]
            for r in records
        )


def test_without_records_there_is_no_figure() -> None:
    assert set(verdicts(evaluate([])).values()) == {"no figure"}
    broken = [r | {"status": "failed"} for r in plan()]
    assert set(verdicts(evaluate(broken)).values()) == {"no figure"}
    without = [{k: v for k, v in r.items() if k not in ("median", "rounds")} for r in plan()]
    assert set(verdicts(evaluate(without)).values()) == {"no figure"}


def test_zeros_and_missing_facts_give_no_figure_and_no_error() -> None:
    zeros = [r | {"median": 0.0, "rounds": {"0": 0.0}} for r in plan()]
    found = {target.name: target.figure for target in evaluate(zeros)}
    assert found["paged decode at 32k, of a copy's GB/s on the device"] is None
    empty = [r | {"facts": dict.fromkeys(r["facts"])} for r in plan()]
    named = verdicts(evaluate(empty))
    assert named["Python per layer and step, us"] == named["peak of device memory, of the budget"] == "no figure"
    assert named["all resident at 8k, tokens/s of dynamic"] == "met"


@pytest.mark.parametrize(
    ("name", "scenario", "contender", "change"),
    [
        ("paged decode at 32k, of a copy's GB/s on the device", "kernels", "paged", 0.8),
        ("all resident at 8k, tokens/s of dynamic", "decode", "kvtier@100%", 0.9),
        ("fetch blocks of 256 KiB and more, of the link's best GB/s", "link", "fetch, chosen", 0.9),
        ("6.25% at 64k, fetching only, tokens/s of offloaded", "decode", "fetch@6.25%", 0.1),
        ("50% at 64k, with host attention, tokens/s of offloaded", "decode", "kvtier@50%", 0.5),
        ("a step, of the longer of all resident and host bytes / (link + host attention)", "decode", "kvtier@50%", 0.5),
        ("fetches below 80% of what the link carries in a step, tokens/s of all resident", "decode", "fetch@95%", 0.9),
    ],
)
def test_a_target_is_missed_when_one_figure_is_worse(name: str, scenario: str, contender: str, change: float) -> None:
    made = plan()
    for r in made:
        if (r["scenario"], r["contender"]) == (scenario, contender):
            r["median"] *= change
            r["rounds"] = {i: value * change for i, value in r["rounds"].items()}
    assert verdicts(evaluate(made))[name] == "missed"


def test_all_resident_must_be_faster_at_32k_and_may_be_as_fast_at_8k() -> None:
    made = [
        record("decode", name, 50.0, workload={"context": context})
        for name in ("dynamic", "kvtier@100%")
        for context in (8192, 32768)
    ]
    found = verdicts(evaluate(made))
    assert found["all resident at 8k, tokens/s of dynamic"] == "met"
    assert found["all resident at 32k, tokens/s of dynamic"] == "missed"


# Its end


def running(marker: str) -> list[int]:
    """Processes whose command line has a word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


linux = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes")


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_ended_early_prints_and_keeps_its_table(tmp_path: Path, number: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--only=decode llama 64k", f"--out={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Who runs tests in the background has Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: any(read(turns) for turns in tmp_path.glob("*.turns.jsonl")), 120)
        run.send_signal(number)
        output, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, output
    (records,) = (file for file in tmp_path.glob("*.jsonl") if file != turns_of(file) and "turns" not in file.name)
    table = records.with_suffix(".table.txt").read_text()
    assert "cut off after" in table
    assert table.strip() in output
    assert [r["scenario"] for r in read(records)] == ["build", "calibrate", "targets"]
    assert not running(str(tmp_path))


@linux
def test_no_child_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    sleeping = json.dumps([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    script = f"from benchmarks.children import Children\nChildren().run({sleeping}, 60, keep=True)"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    wait_until(lambda: any(pid != run.pid for pid in running(str(tmp_path))))
    run.kill()
    run.wait()
    wait_until(lambda: not running(str(tmp_path)))


def test_a_killed_child_that_does_not_end_keeps_no_run_from_going_on() -> None:
    class Stuck:
        """In the midst of a call of a driver that hangs."""

        pid = 2**30  # nobody's
        waited: float | None = None

        def poll(self) -> None: ...

        def wait(self, timeout: float | None = None) -> int:
            self.waited = timeout
            raise subprocess.TimeoutExpired("python", timeout or 0.0)

    child: Any = Stuck()
    end_group(child)
    assert child.waited == KILLED


@pytest.mark.parametrize("known", [True, False])
def test_where_the_home_folder_cannot_be_written_a_run_has_caches_of_its_own(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.touch()  # a file: no user can make a folder in it
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    if not known:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # of a user that the system does not know
    variables = ("KVTIER_PROFILE", "TRITON_CACHE_DIR")
    for name in (*variables, "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with caches():
        folders = [Path(os.environ[name]) for name in variables]
        assert len(set(folders)) == 2
        for folder in folders:
            (folder / "some").write_text("")
    assert not any(name in os.environ for name in variables)
    assert not any(folder.exists() for folder in folders)
    assert list(tmp_path.iterdir()) == [home]


def test_a_run_uses_the_usual_caches_and_what_the_user_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVTIER_PROFILE", "off")
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    with caches():
        assert "TRITON_CACHE_DIR" not in os.environ
        assert os.environ["KVTIER_PROFILE"] == "off"
    assert (tmp_path / ".triton" / "cache").is_dir()
