"""The benchmarks run at tiny sizes, record what they measured, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import PARTS
from benchmarks.gpu_tests import SANITIZED, pytest_jobs
from benchmarks.models import SHAPES
from benchmarks.neighbour import Neighbour
from benchmarks.records import read
from benchmarks.scenarios.decode import fit

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 6
TINY = ("--model=qwen3-tiny", "--device=cpu", "--rounds=2", "--new-tokens=2", "--contenders=dynamic,kvtier")


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Any:
    threads = torch.get_num_threads()
    with torch.device("cpu"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def _few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen3-tiny", SHAPES["qwen3-tiny"] | {"num_hidden_layers": LAYERS})


def records(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Of a run of `python -m benchmarks`."""
    assert main([*arguments, *TINY, f"--out={out}"]) == 0
    return read(out)


@pytest.mark.usefixtures("_few_layers")
def test_decoding_is_measured_by_the_bare_loop_and_through_generate(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "decode", "--contexts=16,32,64", "--batch=2")
    assert {r["status"] for r in found} == {"ok"}
    turns = [r for r in found if "summary" not in r["workload"]]
    assert [(r["workload"]["through"], r["workload"]["context"], r["contender"]) for r in turns] == [
        (through, context, name)
        for through in ("loop", "generate")
        for context in (16, 32, 64)
        for name in ("dynamic", "kvtier")
    ]
    assert {r["workload"]["batch"] for r in found} == {2}
    geometry = LAYERS * 2 * 2 * 16 * 4  # bytes of a token
    assert turns[0]["workload"]["kv_bytes"] == 2 * (16 + 3 + 2 * 2) * geometry
    summaries = [r for r in found if "summary" in r["workload"]]
    assert [r["contender"] for r in summaries] == ["dynamic", "kvtier"] * 2
    assert all(r["facts"]["least_ratio"] > 0 for r in summaries)


@pytest.mark.usefixtures("_few_layers")
def test_an_update_alone_is_compared_with_itself_at_the_shortest_context(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "update", "--cases=alone", "--contexts=64,16")
    assert [(r["contender"], r["workload"]["context"], r["ratio"]["to"]) for r in found] == [
        (f"{name} at {context}", context, f"{name} at 16") for name in ("dynamic", "kvtier") for context in (16, 64)
    ]


def test_the_share_on_the_host_is_what_was_asked_for(tmp_path: Path) -> None:
    found = records(tmp_path / "r.jsonl", "share", "--contexts=128", "--block-size=8")
    assert {r["status"] for r in found} == {"ok"}
    for record in found[1:]:
        assert record["facts"]["host_percent"] == pytest.approx(record["workload"]["host_share"], abs=15)
    assert [r["workload"]["host_share"] for r in found[1::2]] == [0, 10, 25, 50, 75, 100]


def test_a_line_is_found_and_what_is_off_it_is_said() -> None:
    line = fit({1: 5.0, 2: 7.0, 10: 23.0})
    assert (line.base, line.slope, line.off) == pytest.approx((3.0, 2.0, 0.0))
    assert fit({1: 5.0, 2: 7.0, 10: 40.0}).off > 0.05


def test_a_part_that_no_scenario_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["update", "--cases=busy"])
    assert ended.value.code == 2
    assert "no busy here; there are alone, attend" in capsys.readouterr().err


def ended(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process is gone, or is so within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins a process to a core")


@linux
def test_a_busy_neighbour_ends_with_its_block_whatever_ends_that() -> None:
    neighbour = Neighbour(max(os.sched_getaffinity(0)))
    with contextlib.suppress(KeyboardInterrupt), neighbour:
        assert neighbour.child.poll() is None
        assert os.sched_getaffinity(neighbour.child.pid) == {neighbour.core}
        raise KeyboardInterrupt
    assert neighbour.child.poll() is not None


@linux
def test_a_busy_neighbour_ends_when_its_parent_is_killed() -> None:
    script = (
        "import os, sys, time\nfrom benchmarks.neighbour import Neighbour\n"
        "with (n := Neighbour(max(os.sched_getaffinity(0)))):\n    print(n.child.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not ended(pid, 0.1)
    parent.kill()
    parent.communicate()
    assert ended(pid)


def test_a_gpu_run_tests_the_device_and_the_host_and_fits_its_limit() -> None:
    jobs = pytest_jobs(cuda=True)
    assert jobs["tests/hf/test_modes.py"].device == "cuda"
    assert jobs["tests/cpu/test_accuracy.py"].device == jobs["tests/test_budgets.py"].device == "cpu"
    assert all((ROOT / x.split("::")[0]).exists() for job in jobs.values() for x in job.arguments if "/" in x)
    assert all((ROOT / x.split("::")[0]).exists() for x in SANITIZED)
    files = {job.arguments[0] for name, job in jobs.items() if name != "marked cuda" and not job.under}
    assert set(pytest_jobs(cuda=False)["all others"].arguments[1:]) == files
    shares = [job.share for job in jobs.values() if job.arguments == ("tests/kernels/test_paged.py",)]
    assert shares == [f"{i}/{len(shares)}" for i in range(len(shares))]
    assert sum(part.seconds for part in PARTS) < 1.2 * 460  # shares of the limit, near enough to seconds
