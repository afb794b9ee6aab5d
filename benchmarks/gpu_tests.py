"""The tests of a GPU run: which processes there are, several at a time, and what became of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import Children, Ended
from benchmarks.records import Recorder

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """One process of pytest.

    Attributes:
        arguments: of pytest.
        device: on which its tests make their tensors.
        share: which of the tests it runs, "1/3" for the second of three and every third from there on; empty: all.
        under: a command that it runs under.
    """

    arguments: tuple[str, ...]
    device: str
    share: str = ""
    under: tuple[str, ...] = ()


#: Tests whose tensors are made on the device.
ON_DEVICE = ("tests/storage", "tests/hf", "tests/kernels")
#: Tests that speak of the host, or emulate a device in RAM. They take long, and begin first.
ON_HOST = ("tests/cpu", "tests/test_bytes.py", "tests/test_budgets.py")
#: Files whose tests are shared out over so many processes: hundreds of variants of the programs are compiled.
SHARES = {"tests/kernels/test_paged.py": 6}
#: A small case of each kind, for tools under which everything takes many times as long.
SANITIZED = (
    "tests/kernels/test_paged.py::test_a_row_without_blocks_gives_zeros_and_minus_infinity",
    "tests/kernels/test_merge.py::test_merging_nothing_changes_nothing",
    "tests/cuda/test_transfers.py::test_a_pending_transfer_keeps_its_slots",
)


def pytest_jobs(*, cuda: bool) -> dict[str, Job]:
    """What is run, by name: a process for everything marked `cuda`, and one or several for each file that is there."""
    jobs = {"marked cuda": Job(("-m", "cuda", "tests"), "cuda" if cuda else "cpu")}
    files: dict[str, str] = {}
    for places, device in ((ON_HOST, "cpu"), (ON_DEVICE, "cuda")):
        for place in places:
            found = sorted((ROOT / place).glob("test_*.py")) or [ROOT / place]
            files |= {file.relative_to(ROOT).as_posix(): device for file in found if file.is_file()}
    if cuda:
        for path in sorted(files, key=lambda x: x not in SHARES):
            n = SHARES.get(path, 1)
            shares = [f"{i}/{n}" for i in range(n)] if n > 1 else [""]
            jobs |= {f"{path} {share}".strip(): Job((path,), files[path], share) for share in shares}
        sanitizer = shutil.which("compute-sanitizer")
        for tool in ("memcheck", "racecheck") if sanitizer else ():
            under = (str(sanitizer), f"--tool={tool}", "--error-exitcode=9", "--target-processes=application-only")
            jobs[tool] = Job(SANITIZED, "cuda", under=under)
        return jobs
    # `make test` runs them: here it is enough that they can be collected.
    return jobs | {"all others": Job(("--collect-only", *files), "cpu")}


def run_tests(children: Children, recorder: Recorder, seconds: float, *, cuda: bool) -> list[str]:
    """Run the tests, several files at a time with CUDA. Returns what failed."""
    deadline = time.monotonic() + seconds
    failures: list[str] = []

    def run_job(item: tuple[str, Job]) -> tuple[str, Job, Ended]:
        name, job = item
        if time.monotonic() > deadline:
            return name, job, Ended(None, "not begun")
        command = [
            *job.under,
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            *job.arguments,
        ]
        left = deadline - time.monotonic()
        # Several processes side by side: with threads of their own for each, they would fight for the cores.
        environment = {"KVTIER_TEST_DEVICE": job.device, "KVTIER_TEST_SHARE": job.share, "OMP_NUM_THREADS": "1"}
        return name, job, children.run(command, left, keep=True, **environment)

    if not cuda:
        print("  Without CUDA most tests are only collected here; `make test` runs them.\n")
    jobs = pytest_jobs(cuda=cuda)
    workers = max(min((os.cpu_count() or 1) // 2, 6), 1) if cuda else 1
    pool = ThreadPoolExecutor(workers)
    try:
        for name, job, ended in pool.map(run_job, jobs.items()):
            counts = {
                word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed)\b", ended.tail)
            }
            no_tests = 5
            passed = ended.code in (0, no_tests)
            status = "ok" if passed else "failed" if ended.code is not None else "out of time"
            summary = ", ".join(f"{n} {word}" for word, n in counts.items()) or _last_line(ended.tail) or "no output"
            print(f"  {name:<40} {summary if passed else f'{status}: {summary}'}", flush=True)
            recorder.add("tests", status=status, tests=name, counts=counts, workload={"device": job.device})
            if not passed:
                failures.append(f"tests: {name}: {status}")
                print("\n".join(f"    | {line}" for line in ended.tail.splitlines()[-30:]), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return failures


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
