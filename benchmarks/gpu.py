"""`python -m benchmarks.gpu` (`make gpu`): build, test and measure on a GPU, from the source tree, without a network.

First the native library is compiled, if that is not done, and the machine is calibrated: its profile is stored where
`kvtier.calibrate` stores it. Then come benchmarks and the tests that concern CUDA, the most valuable first. Each part
has processes of its own and a time limit, so that no failure takes others with it.

Records go to benchmarks/results/gpu-<gpu>.jsonl. In the same folder are the tables of everything (.table.txt), the
output of failing tests (.tests.log), and single turns of what was cut off (.turns.jsonl), after Ctrl-C or a kill too.
KVTIER_COMMIT names the commit for the records where the tree comes without its repository. Where the home folder cannot
be written, profile and compiled programs go to temporary folders, which are deleted with the run.

Without CUDA the same code runs at tiny sizes on an emulated device, in a minute or two. Its records are marked and go
to a temporary folder: they show that the command works and say nothing about speed.

Exit status: 0 if every part passed, 1 if not, 2 for a wrong option, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_table, targets
from benchmarks.children import Children
from benchmarks.gpu_plan import PARTS, TIME_LIMIT, Part, parts_named, share_of
from benchmarks.gpu_tests import run_tests
from benchmarks.records import RESULTS, Recorder, read, short, turns_of
from benchmarks.targets import Target
from kvtier import profile
from kvtier.cpu import build as native_build
from kvtier.cpu import native
from kvtier.errors import ConfigError

#: Threads of torch that wait for each other over tiny tensors take tens of times as long on a busy machine.
EMULATED = {"OMP_NUM_THREADS": "1"}
#: Seconds that a child gets beyond its share before it is ended: one case may run over.
GRACE = 40.0
#: All others need the build and the profile: these may take so long.
BUILD = 60.0
CALIBRATION = 45.0
#: Less than this is not worth beginning with.
LEAST = 10.0

# --------------------------------------------------------------------------------- build and tests


def run_build(children: Children, recorder: Recorder, seconds: float) -> list[str]:
    """Compile the native library; record which instruction set it uses here. Returns what failed.

    That there is no compiler is no failure: the rest runs without.
    """
    status, reason, instruction_set = "ok", None, None
    try:
        native_build.compiler()
        began = time.monotonic()
        ended = children.run([sys.executable, "-m", "kvtier.cpu.build"], seconds, keep=True)
        if ended.code is None:
            status, reason = "out of time", f"not compiled in {seconds:.0f} s"
        elif ended.code:
            status, reason = "failed", ended.tail.strip()
        elif native.available():
            instruction_set = native.instruction_set()
            print(f"  native library: {instruction_set}, ready in {time.monotonic() - began:.1f} s", flush=True)
        else:
            status, reason = "skipped", f"{native.VARIABLE}=none"
    except (native_build.BuildError, ConfigError) as error:
        status, reason = "skipped", str(error)
    if status != "ok":
        print(f"  WITHOUT the native library, {status}: {reason}", flush=True)
    recorder.add("build", status=status, reason=reason, instruction_set=instruction_set)
    return [] if status in ("ok", "skipped") else [f"build: {short(reason or status)}"]


def run_calibration(children: Children, recorder: Recorder, seconds: float) -> list[str]:
    """Calibrate the machine in a process of its own; record what it printed. Returns what failed.

    What it stored before it was ended serves. A profile that may not be written is no failure: estimates serve.
    """
    ended = children.run([sys.executable, "-m", "kvtier", "calibrate"], seconds, keep=True)
    print(ended.tail, flush=True)
    status = {0: "ok", 2: "skipped", None: "out of time"}.get(ended.code, "failed")
    lines = ended.tail.strip().splitlines()
    reason = None if status == "ok" else (lines[-1] if lines else f"exit status {ended.code}")
    recorder.add("calibrate", status=status, reason=reason, result=lines)
    return [] if status in ("ok", "skipped") else [f"calibrate: {short(reason or status)}"]


# ------------------------------------------------------------------------------------------- the run


@contextlib.contextmanager
def caches() -> Iterator[None]:
    """Folders for what a run keeps between its processes, the machine's profile and what Triton compiles: the usual
    ones, or temporary ones where those cannot be written. Without one, Triton runs nothing."""
    with contextlib.ExitStack() as stack:
        usual = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
        lacking = []
        if not os.environ.get("TRITON_CACHE_DIR") and not _writable(usual):
            lacking.append("TRITON_CACHE_DIR")
        try:
            if not os.environ.get(profile.VARIABLE):
                profile.checked_folder()
        except ConfigError:
            lacking.append(profile.VARIABLE)
        for variable in lacking:
            before = os.environ.get(variable)
            os.environ[variable] = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True)
            )
            stack.callback(_set, variable, before)
        yield


def _set(variable: str, value: str | None) -> None:
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if it is missing. Not where it begins with a "~": nobody
    knows the home folder."""
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Run:
    """Where a run records, and what was there before it.

    Attributes:
        recorder: of this process; other processes append to the same file.
        cuda: whether there is a device; else it is emulated.
        known, turns: how many records, and how many turns of comparisons that were cut off, earlier runs left.
    """

    recorder: Recorder
    cuda: bool
    known: int
    turns: int

    @classmethod
    def begin(cls, out: Path | None, *, cuda: bool) -> Run:
        """Open the records. Raises OSError if none can be written, before anything is measured."""
        if out is None:
            out = RESULTS if cuda else Path(tempfile.mkdtemp(prefix="kvtier-gpu-"))
        recorder = Recorder(out, torch.device("cuda" if cuda else "cpu"), emulated=not cuda)
        recorder.out = out / f"gpu-{recorder.machine['kind']}.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        recorder.out.open("a", encoding="utf-8").close()
        recorder.out.with_suffix(".tests.log").unlink(missing_ok=True)  # of an earlier run
        return cls(recorder, cuda, len(read(recorder.out)), len(read(turns_of(recorder.out))))

    @property
    def file(self) -> Path:
        """Of the records."""
        return self.recorder.out

    def made(self) -> list[dict[str, Any]]:
        """The records of this run so far."""
        return read(self.file)[self.known :]

    def tables(self) -> tuple[str, list[Target]]:
        """Everything that was measured so far, and the targets; also written to a file next to the records."""
        found = [*self.made(), *gpu_table.cut_off(read(turns_of(self.file))[self.turns :])]
        reached = targets.evaluate(found)
        text = f"{gpu_table.table_of(found)}\n\n{targets.table_of(reached)}"
        self.file.with_suffix(".table.txt").write_text(text + "\n", encoding="utf-8")
        return text, reached


def run_parts(children: Children, parts: Sequence[Part], run: Run, seconds: float, failures: list[str]) -> None:
    """Run the parts one after the other, and add what failed."""
    deadline = time.monotonic() + seconds
    parts = [part for part in parts if run.cuda or part.tiny is not None]
    for i, part in enumerate(parts):
        left = deadline - time.monotonic()
        share = share_of(part, parts[i:], left)
        print(f"\n=== {part.name} ({max(share, 0):.0f} s)\n", flush=True)
        if left < LEAST:
            failures.append(f"{part.name}: not run, out of time")
            continue
        try:
            if part.name == "build":
                failures += run_build(children, run.recorder, max(share, min(BUILD, left)))
            elif part.name == "calibrate":
                failures += run_calibration(children, run.recorder, max(share, min(CALIBRATION, left)))
            elif part.name == "tests":
                failures += run_tests(children, run.recorder, share, cuda=run.cuda)
            else:
                failures += run_benchmark(children, part, run, share, left)
            run.tables()  # whatever ends the run, they are there
        except Exception as error:
            failures.append(f"{part.name}: {type(error).__name__}: {error}")


def run_benchmark(children: Children, part: Part, run: Run, share: float, left: float) -> list[str]:
    """Run one benchmark, in a process of its own. Returns what failed.

    Args:
        share: seconds after which it begins no further case.
        left: seconds after which it is ended in any case.
    """
    known = len(read(run.file))
    environment = {} if run.cuda else dict(EMULATED)
    installed = importlib.util.find_spec("triton") is not None
    if not run.cuda and part.name == "kernels" and installed:
        # Triton's interpreter stands in where Triton itself is measured.
        environment |= {"TRITON_INTERPRET": "1", "KVTIER_KERNELS": "triton"}
    command = part.command(cuda=run.cuda, out=run.file, seconds=max(share - 10, 10))
    ended = children.run(command, min(share + GRACE, left), keep=False, **environment)
    made = read(run.file)[known:]
    failures = []
    if ended.code is None:
        failures.append("ended after its time limit; what it had recorded is kept")
    ill = [r for r in made if r["status"] in ("failed", "refused")]
    for record in ill:
        workload = record["workload"]
        at = f" at {workload['context']:,}" if workload.get("context") else ""
        failures.append(f"{record['contender']}{at}: {record['status']}: {short(record['reason'])}")
    late = sum(r["status"] == "not reached in time" for r in made)
    if late and run.cuda:
        failures.append(f"{late} not reached in time")
    if ended.code and not ill:
        failures.append(f"exit status {ended.code}")
    if ended.code == 0 and not any("median" in r for r in made):
        reason = "nothing was measured: above it says why"
        if not made:
            run.recorder.add(part.name.split()[0], status="skipped", reason=reason, workload={})
        failures += [reason] if run.cuda else []
    if run.cuda and installed and any(r.get("kernels") == "torch" for r in made):
        failures.append("plain torch stood in for the Triton kernels: above it says why; the results are kept")
    return [f"{part.name}: {failure}" for failure in failures]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with status 2 if it is wrong."""

    def some(text: str) -> list[Part]:
        try:
            return parts_named(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT, metavar="S", help=f"seconds in all (default: {TIME_LIMIT:.0f})"
    )
    parser.add_argument(
        "--only",
        type=some,
        default=list(PARTS),
        metavar="PART,PART",
        help="such as tests,decode; build and calibrate come with it",
    )
    parser.add_argument("--out", type=Path, help="folder for the records (default: benchmarks/results with CUDA)")
    args = parser.parse_args(argv)
    if args.time_limit <= 0:
        parser.error(f"argument --time-limit: {args.time_limit:g} is not a positive number of seconds")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print the tables. Returns the exit status."""
    began = time.monotonic()
    args = parse_args(argv)
    cuda = torch.cuda.is_available()
    try:
        run = Run.begin(args.out, cuda=cuda)
    except OSError as error:
        print(f"benchmarks.gpu: no records can be written: {error}", file=sys.stderr)
        return 2
    if cuda:
        print(f"{run.recorder.machine['gpu']}, torch {torch.__version__}, at most {args.time_limit:.0f} s")
    else:
        print("torch sees no CUDA device. The same code runs at tiny sizes on an EMULATED device: what follows")
        print(f"shows that it works, and is no measurement. Records go to {run.file.parent}.")
    interrupted = False
    failures: list[str] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with caches(), Children() as children:
            run_parts(children, args.only, run, args.time_limit, failures)
    except KeyboardInterrupt:
        interrupted = True
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C does not keep the tables from being printed
    text = "no tables"
    try:
        text, reached = run.tables()
        run.recorder.add("targets", status="ok", targets=[target.fields() for target in reached], workload={})
    except Exception as error:  # what was measured is recorded, and is worth more than its table
        failures.append(f"tables: {type(error).__name__}: {error}")
    print("\n=== all results" + ("" if cuda else " (emulated)") + f"\n\n{text}\n\nRecords: {run.file}")
    for failure in failures:
        print(f"FAILED  {failure}")
    if interrupted:
        print("Interrupted; what was recorded is kept.")
        return 130
    result = f"{len(failures)} failed" if failures else "everything passed"
    print(f"{time.monotonic() - began:.0f} s in all, {result}.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
