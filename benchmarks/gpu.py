"""`python -m benchmarks.gpu` (`make gpu`): build, test and measure on a GPU, from the source tree, without a network.

First the native library is compiled, if that is not done; then come the tests that concern CUDA, then the benchmarks.
Each part has processes of its own and a time limit, so that no failure takes others with it. Records go to
benchmarks/results/gpu-<gpu>.jsonl; a table of everything is printed.

Without CUDA the same code runs at tiny sizes on an emulated device, in a minute or two. Its records are marked and go
to a temporary folder: they show that the command works and say nothing about speed.

Exit status: 0 if every part passed, 1 if not, 2 for a wrong option, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Children
from benchmarks.gpu_tests import run_tests
from benchmarks.records import RESULTS, Recorder, number, read, short, size, table
from kvtier.cpu import build as native_build
from kvtier.cpu import native
from kvtier.errors import ConfigError

LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"
BUDGETS = "dynamic,kvtier@100%,kvtier@50%,fetch@50%,kvtier@25%,fetch@25%,kvtier@10%,fetch@10%"
#: Sizes without CUDA: the same layers, everything else small, and each line of the tables once.
TINY = {LLAMA: "llama-tiny", QWEN: "qwen3-tiny"}
#: Threads of torch that wait for each other over tiny tensors take tens of times as long on a busy machine.
EMULATED = {"OMP_NUM_THREADS": "1"}
TINY_OPTIONS = {"--block-size": "16", "--new-tokens": "2", "--rounds": "1"}
#: Seconds that a child gets beyond its share before it is ended: one case may run over.
GRACE = 40.0


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        name: for the table and `--only`.
        seconds: its share of the time.
        arguments: of `python -m benchmarks`; none for the build and the tests.
        tiny: these arguments replace those of the same name without CUDA.
    """

    name: str
    seconds: float
    arguments: dict[str, str] = field(default_factory=dict)
    tiny: dict[str, str] = field(default_factory=dict)

    def command(self, *, cuda: bool, out: Path, seconds: float) -> list[str]:
        """The command line of a benchmark."""
        options = dict(self.arguments)
        if not cuda:
            options |= TINY_OPTIONS | self.tiny
            if "--model" in options:
                options["--model"] = TINY[options["--model"]]
        command = [sys.executable, "-m", "benchmarks", self.name.split()[0]]
        command += [f"{name}={value}" for name, value in options.items()]
        command += ["--dtype=bfloat16", f"--out={out}", f"--time-limit={seconds:.0f}"]
        return command if cuda else [*command, "--device=cpu", "--emulated", "--quick"]


PARTS = (
    Part("build", 30),
    Part("tests", 165),
    Part("kernels", 40),
    Part("link", 20, {"--model": LLAMA, "--contexts": "32k"}, {"--contexts": "4k"}),
    Part(
        "decode llama",
        110,
        {
            "--model": LLAMA,
            "--cases": "loop",
            "--contexts": "32k,8k,64k,16k",
            "--contenders": f"{BUDGETS},offloaded,static",
            "--rounds": "3",
            "--new-tokens": "16",
        },
        {"--contexts": "512,256"},
    ),
    Part(
        "decode qwen",
        45,
        {
            "--model": QWEN,
            "--cases": "loop",
            "--contexts": "32k,8k",
            "--contenders": f"{BUDGETS},offloaded,static",
            "--rounds": "3",
            "--new-tokens": "16",
        },
        {"--contexts": "512"},
    ),
    # Host memory holds not all contenders at this context.
    Part(
        "decode llama long",
        60,
        {
            "--model": LLAMA,
            "--cases": "loop",
            "--contexts": "128k",
            "--contenders": "dynamic,kvtier@100%,kvtier@50%,fetch@50%,kvtier@10%,fetch@10%",
            "--rounds": "2",
            "--new-tokens": "8",
        },
        {"--contexts": "512"},
    ),
    Part(
        "memory llama",
        40,
        {
            "--model": LLAMA,
            "--cases": "caches",
            "--contexts": "32k",
            "--contenders": f"{BUDGETS},static",
            "--rounds": "1",
        },
        # Each is a process of its own, which takes seconds whatever it measures.
        {"--contexts": "256", "--contenders": "dynamic,kvtier@100%,kvtier@10%,fetch@10%,static"},
    ),
    Part(
        "update llama",
        15,
        {
            "--model": LLAMA,
            "--cases": "attend",
            "--contexts": "8k",
            "--contenders": "dynamic,kvtier@100%,kvtier@25%,fetch@25%",
            "--rounds": "5",
        },
        {"--contexts": "256"},
    ),
    Part("share llama", 25, {"--model": LLAMA, "--contexts": "16k", "--rounds": "3"}, {"--contexts": "256"}),
    # Shares are fixed here. With a planner come two more parts: the errors of what it predicts, and what adapts against
    # the best fixed share.
)

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


# ------------------------------------------------------------------------------------------- the run


def run_parts(
    children: Children, parts: Sequence[Part], records: Path, recorder: Recorder, seconds: float, *, cuda: bool
) -> list[str]:
    """Run the parts one after the other. Returns what failed."""
    deadline = time.monotonic() + seconds
    failures: list[str] = []
    for i, part in enumerate(parts):
        left = deadline - time.monotonic()
        # Time that earlier parts did not use, or used beyond theirs, is shared out among those that remain.
        share = part.seconds / sum(p.seconds for p in parts[i:]) * left
        print(f"\n=== {part.name} ({share:.0f} s)\n", flush=True)
        if left < 10:
            failures.append(f"{part.name}: not run, out of time")
            continue
        try:
            if part.name == "build":
                failures += run_build(children, recorder, share)
                continue
            if part.name == "tests":
                failures += run_tests(children, recorder, share, cuda=cuda)
                continue
            soft = max(share - 10, 5)
            known = len(read(records))
            command = part.command(cuda=cuda, out=records, seconds=soft)
            environment = {} if cuda else dict(EMULATED)
            if not cuda and part.name == "kernels" and importlib.util.find_spec("triton"):
                # Triton's interpreter stands in where Triton itself is measured.
                environment |= {"TRITON_INTERPRET": "1", "KVTIER_KERNELS": "triton"}
            ended = children.run(command, min(share + GRACE, left), keep=False, **environment)
            if ended.code is None:
                failures.append(f"{part.name}: ended after its time limit; what it had recorded is kept")
            made = read(records)[known:]
            if not made and ended.code == 0:
                recorder.add(
                    part.name.split()[0],
                    status="skipped",
                    reason="nothing was measured: above it says why",
                    workload={"model": "", "context": 0},
                )
            ill = [r for r in made if r["status"] in ("failed", "refused")]
            failures += [
                f"{part.name}: {r['contender']} at {r['workload']['context']:,}: {r['status']}: {short(r['reason'])}"
                for r in ill
            ]
            if ended.code and not ill:
                failures.append(f"{part.name}: exit status {ended.code}")
        except Exception as error:
            failures.append(f"{part.name}: {type(error).__name__}: {error}")
    return failures


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """Everything that was measured, a line each."""
    rows = []
    before: tuple[str, ...] = ()
    for record in records:
        workload = record.get("workload", {})
        if record["scenario"] in ("build", "tests") or workload.get("summary"):
            continue
        context = f"{workload['context']:,}"
        group = (record["scenario"], workload["model"], context)
        shown = ["", "", ""] if group == before else list(group)
        before = group
        if "median" not in record:
            note = short(": ".join(filter(None, (record["status"], record.get("reason")))))
            rows.append([" ".join(shown[:2]).strip(), shown[2], record.get("contender", ""), "-", "", "", note])
            continue
        ratio = record["ratio"]
        times = f"{ratio['median']:.2f} x {ratio['to']}" if ratio else ""
        values = (number(record["median"]), record["unit"], times)
        rows.append([" ".join(shown[:2]).strip(), shown[2], record["contender"], *values, _note(record["facts"])])
    if rows:
        header = ["", "tokens", "", "median", "", "", ""]
        print(table(header, rows, left=(0, 2, 4, 5, 6), indent=""))


def _note(facts: dict[str, Any]) -> str:
    notes: list[tuple[str, Callable[[float], str]]] = [
        ("device_budget", lambda x: f"budget {size(x)}"),
        ("device_peak_bytes", lambda x: f"peak {size(x)}"),
        ("bytes_up_per_token", lambda x: f"fetched per token {size(x)}"),
        ("chunk_bytes", lambda x: f"{size(x)} a copy"),
    ]
    return ", ".join(show(facts[name]) for name, show in notes if facts.get(name))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the program with status 2 if it is wrong."""

    def parts(text: str) -> list[Part]:
        words = [word.strip() for word in text.split(",")]
        unknown = [word for word in words if not any(p.name.startswith(word) for p in PARTS)]
        if unknown or not all(words):
            names = ", ".join(p.name for p in PARTS)
            raise argparse.ArgumentTypeError(f"no part {', '.join(unknown) or text!r}; there are {names}")
        return [p for p in PARTS if any(p.name.startswith(word) for word in words)]

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time-limit", type=float, default=460, metavar="S", help="seconds in all (default: 460)")
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART,PART", help="such as tests,decode")
    parser.add_argument("--out", type=Path, help="folder for the records (default: benchmarks/results with CUDA)")
    args = parser.parse_args(argv)
    if args.time_limit <= 0:
        parser.error(f"argument --time-limit: {args.time_limit:g} is not a positive number of seconds")
    return args


def open_records(out: Path | None, cuda: bool) -> tuple[Recorder, int]:
    """Where records go, and how many are there. Raises OSError if none can be written, before anything is measured."""
    if out is None:
        out = RESULTS if cuda else Path(tempfile.mkdtemp(prefix="kvtier-gpu-"))
    recorder = Recorder(out, torch.device("cuda" if cuda else "cpu"), emulated=not cuda)
    recorder.out = out / f"gpu-{recorder.machine['kind']}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    recorder.out.open("a", encoding="utf-8").close()
    return recorder, len(read(recorder.out))


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print the table. Returns the exit status."""
    began = time.monotonic()
    args = parse_args(argv)
    cuda = torch.cuda.is_available()
    try:
        recorder, known = open_records(args.out, cuda)
    except OSError as error:
        print(f"benchmarks.gpu: no records can be written: {error}", file=sys.stderr)
        return 2
    records = recorder.out
    if cuda:
        print(f"{recorder.machine['gpu']}, torch {torch.__version__}, at most {args.time_limit:.0f} s")
    else:
        print("torch sees no CUDA device. The same code runs at tiny sizes on an EMULATED device: what follows")
        print(f"shows that it works, and is no measurement. Records go to {records.parent}.")
    interrupted = False
    failures: list[str] = []
    try:
        with Children() as children:
            failures = run_parts(children, args.only, records, recorder, args.time_limit, cuda=cuda)
    except KeyboardInterrupt:
        interrupted = True
    print("\n=== all results" + ("" if cuda else " (emulated)") + "\n")
    print_table(read(records)[known:])
    print(f"\nRecords: {records}")
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
