"""Records: one JSON line for each measured value, with all that is needed to judge it; and tables of them.

A line names neither paths nor the host.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import kvtier

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Recorder:
    """Appends records of one run to a JSON-lines file.

    Args:
        out: a folder, in which each scenario has its file for each kind of machine; or one `.jsonl` file for all.
        device: where models run.
        emulated: mark the records as made on an emulated device.
        more: for every record.
    """

    def __init__(self, out: Path, device: torch.device, *, emulated: bool, **more: Any) -> None:
        self.out = out
        self._turns_before = 0
        self.machine = machine(device)
        self.common = {
            "commit": commit(),
            "source": source_digest(),
            "machine": self.machine,
            "versions": versions(),
            "emulated": emulated,
            **more,
        }

    def file(self, scenario: str) -> Path:
        """Where records of a scenario go."""
        if self.out.suffix == ".jsonl":
            return self.out
        return self.out / f"{scenario}-{self.machine['kind']}.jsonl"

    def begin_turns(self, scenario: str) -> None:
        """A comparison begins."""
        file = turns_of(self.file(scenario))
        self._turns_before = file.stat().st_size if file.is_file() else 0

    def turn(self, scenario: str, **fields: Any) -> None:
        """Append a turn to a file next to the records: all that remains of a comparison that is cut off."""
        self._append(turns_of(self.file(scenario)), {"scenario": scenario} | fields)

    def drop_turns(self, scenario: str) -> None:
        """Drop the turns since the last begin, for records have it all. Those of earlier runs stay."""
        file = turns_of(self.file(scenario))
        if file.is_file():
            os.truncate(file, self._turns_before)
            if not self._turns_before:
                file.unlink()

    def add(self, scenario: str, **fields: Any) -> None:
        """Append one line, whole or not at all. Fields take precedence over what all records have in common."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        common = {name: value for name, value in self.common.items() if name not in fields}
        record = {"scenario": scenario, "time": now} | fields | common | {"load": _load()}
        self._append(self.file(scenario), record)

    @staticmethod
    def _append(file: Path, record: Mapping[str, Any]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as stream:  # one write: a process that is killed leaves no partial line
            stream.write((json.dumps(record) + "\n").encode())


def turns_of(file: Path) -> Path:
    """Where single turns go, as they are made."""
    return file.with_name(file.stem + ".turns.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file; none if there is no file."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a writer was killed even so, or the disk was full
            found.append(json.loads(line))
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure depends on. `kind` names files: `nvidia-h200`, `cpu-amd-epyc-family-25-model-1-2c`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = _proc("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    family, model = _proc("/proc/cpuinfo", "cpu family"), _proc("/proc/cpuinfo", "model")
    if family and not any(c.isdigit() for c in cpu):  # a virtual machine often says no more than "AMD EPYC"
        cpu += f", family {family} model {model}"
    memory = _proc("/proc/meminfo", "MemTotal")
    found: dict[str, Any] = {
        "kind": f"{_slug('cpu ' + cpu)}-{cores}c",
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["kind"] = _slug(properties.name)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def versions() -> dict[str, str | int | None]:
    """Of everything that computes."""
    return {
        "kvtier": kvtier.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(tree: Path = ROOT) -> str:
    """The commit of a source tree, with `+` if files of kvtier differ from it; `unknown` outside a repository."""
    named = os.environ.get("KVTIER_COMMIT")  # a copy of this tree may come without its repository
    if named and tree == ROOT:
        return named
    head = _git(tree, "rev-parse", "HEAD")
    if head is None or not (tree / ".git").exists():
        return "unknown"
    return head[:12] + ("+" if _git(tree, "status", "--porcelain", "--", "kvtier") else "")


def source_digest(tree: Path = ROOT) -> str:
    """Names the code of a source tree, committed or not."""
    digest = hashlib.sha256()
    package = tree / "kvtier"
    for file in sorted(f for f in package.rglob("*") if f.suffix in {".py", ".cpp", ".h"}):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0, -1), indent: str = "  "
) -> str:
    """Aligned columns, those in `left` to the left and all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    to_left = {i % len(header) for i in left}

    def aligned(line: Sequence[str]) -> str:
        pairs = enumerate(zip(line, widths, strict=True))
        return "  ".join(text.ljust(width) if i in to_left else text.rjust(width) for i, (text, width) in pairs)

    return "\n".join((indent + aligned(line)).rstrip() for line in lines)


def short(text: str, width: int = 100) -> str:
    """Text for a table; records have all of it."""
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def number(value: float) -> str:
    """Three significant digits or all digits of a large number."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(2 - int(f'{abs(value):e}'.split('e')[1]), 0)}f}"


def size(nbytes: float) -> str:
    """Bytes for people."""
    units: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    for unit, scale in units.items():
        if nbytes >= scale:
            return f"{number(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _proc(file: str, field: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
