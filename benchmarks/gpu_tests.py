"""The tests of a GPU run: which processes there are, several at a time, and what became of them."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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


#: Tests whose tensors are made on the device, folders or files, the most valuable first. Folders that are about the
#: host, doubles or emulation alone (memory, transfer, planning) are not here: `make test` runs them anywhere.
ON_DEVICE = (
    "tests/kernels",
    "tests/hf/test_split.py",
    "tests/hf/test_streamed.py",
    "tests/hf/attention/test_attention_forward.py",
    "tests/tables",
    "tests/attention",
    "tests/forward",
    "tests/test_view.py",
    "tests/hf",
)
#: Of these, what `make test` runs as well anywhere: what needs no device, and a call that is repeated where the CPU
#: reads all blocks, which never happens on one.
ELSEWHERE = frozenset(("tests/kernels/test_compiled.py", "tests/attention/test_repeat.py"))
#: Tests of what computes on the host: its processor is not the one they were written on.
ON_HOST = ("tests/cpu/test_accuracy.py",)
#: Files whose tests are shared out over so many processes: hundreds of variants of programs are compiled.
SHARES = {"tests/kernels/test_paged.py": 6}
#: A small case of each kind, for tools that slow everything down many times, and may wait for every launch.
SANITIZED = (
    "tests/kernels/test_paged.py::test_a_row_without_blocks_gives_zeros_and_minus_infinity",
    "tests/kernels/test_merging.py::test_merging_nothing_changes_nothing",
    "tests/cuda/test_transfers.py::test_copies_see_what_the_compute_stream_wrote_and_readers_see_the_copies[0]",
)
#: Further options of a tool. Errors of calls that torch makes to see what there is are no accesses to memory.
SANITIZERS = {"memcheck": ("--report-api-errors=no",), "racecheck": ()}
#: A process of tests computes with one core, and some cores are left for what the driver and compilers do.
SPARE_CORES, MOST_WORKERS = 4, 10
#: The name of a process for what is marked `cuda`.
MARKED = "marked cuda"
#: Of pytest.
NO_TESTS = 5
#: Seconds that a process of pytest gets to say where it is, before it is ended.
NOTICE = 5.0


def pytest_jobs(*, cuda: bool) -> dict[str, Job]:
    """What is run, by name: a process or several for each file that is there, and of files that are not among those one
    for what is marked `cuda`."""
    files = {path: "cuda" for path in _files(ON_DEVICE)} | {path: "cpu" for path in _files(ON_HOST)}
    if not cuda:
        # `make test` runs them: here it is enough that they can be collected.
        return {
            MARKED: Job(("-m", "cuda", *marked()), "cpu"),
            "all others": Job(("--collect-only", *files), "cpu"),
        }
    jobs = {f"{MARKED}, {path}": Job(("-m", "cuda", path), "cuda") for path in marked() if path not in files}
    sanitizer = shutil.which("compute-sanitizer")
    for tool, options in SANITIZERS.items() if sanitizer else ():
        under = (str(sanitizer), f"--tool={tool}", "--error-exitcode=9", "--target-processes=application-only")
        jobs[tool] = Job(SANITIZED, "cuda", under=(*under, *options))
    for path, device in files.items():
        n = SHARES.get(path, 1)
        shares = [f"{i}/{n}" for i in range(n)] if n > 1 else [""]
        jobs |= {f"{path} {share}".strip(): Job((path,), device, share) for share in shares}
    return jobs


def marked() -> list[str]:
    """The files that have tests marked `cuda`: no other is imported for them, and needs what is missing there."""
    return [path for path in _files(("tests/cuda", "tests")) if "pytest.mark.cuda" in (ROOT / path).read_text()]


def _files(places: Sequence[str]) -> list[str]:
    """The files of tests in these places, in their order, each once; of a folder and those in it, those first that
    are shared out."""
    found: dict[str, None] = {}
    for place in places:
        paths = sorted((ROOT / place).rglob("test_*.py")) if (ROOT / place).is_dir() else [ROOT / place]
        names = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
        found |= dict.fromkeys(sorted(names, key=lambda name: name not in SHARES))
    return [name for name in found if name not in ELSEWHERE]


def run_tests(children: Children, recorder: Recorder, seconds: float, *, cuda: bool) -> list[str]:
    """Run the tests, several files at a time with CUDA. Returns what failed."""
    deadline = time.monotonic() + seconds

    def run_job(item: tuple[str, Job]) -> tuple[str, Job, Ended]:
        name, job = item
        left = deadline - time.monotonic()
        return name, job, _run_job(children, job, left) if left > 0 else Ended(None, "not begun")

    if not cuda:
        print("  Without CUDA most tests are only collected here; `make test` runs them.\n")
    workers = max(min(recorder.machine["cores"] - SPARE_CORES, MOST_WORKERS), 1) if cuda else 1
    pool = ThreadPoolExecutor(workers)
    failures: list[str] = []
    try:
        # Each is recorded as soon as it ends, whatever others do.
        for future in as_completed([pool.submit(run_job, item) for item in pytest_jobs(cuda=cuda).items()]):
            failures += _record(recorder, *future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return failures


def _run_job(children: Children, job: Job, seconds: float) -> Ended:
    # Each test is named when it begins: of a process that is ended this says where it was.
    pytest = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--durations=3"]
    # A file that cannot be collected fails its job, and keeps no other from running.
    pytest += ["--continue-on-collection-errors"]
    environment = {
        "KVTIER_TEST_DEVICE": job.device,
        "KVTIER_TEST_SHARE": job.share,
        "OMP_NUM_THREADS": "1",  # side by side, processes with many threads would fight for the cores
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the tests need no plugins; whatever is installed there takes time
    }
    return children.run([*job.under, *pytest, *job.arguments], seconds, keep=True, notice=NOTICE, **environment)


def _record(recorder: Recorder, name: str, job: Job, ended: Ended) -> list[str]:
    """Show and record what became of a job. Returns what failed."""
    status = verdict(name, ended)
    counted = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed)\b", ended.tail)
    counts = {word: int(n) for n, word in counted}
    summary = ", ".join(f"{n} {word}" for word, n in counts.items()) or _last_line(ended.tail) or "no output"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.tail, re.MULTILINE)
    failed += [f"in {test}" for test in unfinished(ended) if status == "out of time"]
    print(f"  {name:<44} {summary if status == 'ok' else f'{status}: {summary}'}", flush=True)
    recorder.add("tests", status=status, tests=name, counts=counts, failed=failed, workload={"device": job.device})
    if status == "ok":
        return []
    with recorder.out.with_suffix(".tests.log").open("a", encoding="utf-8") as log:
        log.write(f"=== {name}: {status}\n{ended.tail}\n")
    if status in ("warnings", "unavailable"):
        return []
    print("\n".join(f"    | {line}" for line in ended.tail.splitlines()[-30:]), flush=True)
    return [f"tests: {name}: {status}" + (f": {', '.join(failed)}" if failed else "")]


def verdict(name: str, ended: Ended) -> str:
    """`ok`, `failed` or `out of time`; or what is no failure: `warnings`, and `unavailable`, of a tool that does not
    know the device, as on some virtual machines."""
    if ended.code is None:
        return "out of time"
    if ended.code == 0 or (ended.code == NO_TESTS and not name.startswith(MARKED)):
        return "ok"
    if name in SANITIZERS and "Device not supported" in ended.tail:
        return "unavailable"
    # What one warp writes and reads again without a barrier is a warning to racecheck, and often is no race.
    only_warnings = name == "racecheck" and re.search(r"RACECHECK SUMMARY: .*\(0 errors?, \d+ warnings?\)", ended.tail)
    return "warnings" if only_warnings and not re.search(r"\b\d+ (failed|errors?) in ", ended.tail) else "failed"


def unfinished(ended: Ended) -> list[str]:
    """The test that was under way when a process ended, if one was."""
    begun = re.findall(r"^(tests/\S+?::.*?)\s*$", ended.tail, re.MULTILINE)[-1:]
    return [test for test in begun if not re.search(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", test)]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
