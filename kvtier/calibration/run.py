"""`kvtier.calibrate`: what is measured on this machine, in which order, and where it is stored."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kvtier import profile
from kvtier.calibration import copies, tiles
from kvtier.calibration.shapes import STANDARD, Shape, shapes_of
from kvtier.config import DEVICE_BLOCK
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels import launch
from kvtier.kernels import tiles as choices
from kvtier.kernels.tiles import Choice, Kind
from kvtier.transfer import launches
from kvtier.transfer.engine import Direction

#: No measurement begins when so many seconds have passed. One takes less than a second, and the time to compile up to
#: three programs.
SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured value.

    Attributes:
        name: in the profile.
        value: as it is stored.
        result: in words.
        seconds: that measuring it took.
    """

    name: str
    value: list[float] | list[int]
    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration measured. Printing it gives a line for each value.

    Attributes:
        device: that was measured, such as `cuda:0`, or `cpu`.
        path: the profile; None: nothing was stored.
        measurements: in their order.
        failures: names of what could not be measured, each with the reason. The estimates, or what an earlier
            calibration stored, stay in place for these.
        skipped: names of what was not begun for want of time.
        notes: what else there is to say.
        seconds: in all.
    """

    device: str
    path: Path | None = None
    measurements: tuple[Measurement, ...] = ()
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{x.name}: {x.result}" for x in self.measurements]
        lines += [f"failed: {x}" for x in self.failures]
        lines += [f"not begun after {SECONDS:.0f} s: {x}" for x in self.skipped]
        lines += self.notes
        if self.path is not None:
            lines.append(f"{len(self.measurements)} values of {self.device} in {self.seconds:.1f} s: {self.path}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement to make: returns the value as it is stored, and the result in words."""

    name: str
    measure: Callable[[], tuple[list[float] | list[int], str]]


def calibrate(
    model_or_config: object = None,
    *,
    device: torch.device | str | None = None,
    block_size: int | None = None,
    progress: bool = True,
) -> Calibration:
    """Measure what kvtier otherwise estimates on this machine, and store it for this and later processes.

    Measured are the tiles of the attention kernels and, for both directions of the link, from how many short runs of
    blocks on one launch copies faster than the copy engine. It takes seconds, most of them to compile programs: after
    30 s no further measurement begins. Meanwhile it takes up to 256 MiB of the device, an eighth of what is free at
    most, and nothing else should use the device. Without CUDA there is nothing to measure yet, and nothing is stored.

    Tiles decide the last bits of results. A process that has used one keeps it until it ends: calibrate before the
    first forward. Later processes read the profile, in `~/.cache/kvtier` or the folder that KVTIER_PROFILE names.

    Args:
        model_or_config: a Transformers model or config, for whose shapes tiles are measured; None: common shapes.
        device: a CUDA device; None: the model's, if it has one, or the current one.
        block_size: tokens per block; None: that of a cache with a device tier.
        progress: print a line for each measurement to stderr.

    Returns:
        what was measured, and where it is stored.

    Raises:
        ConfigError: `model_or_config` is neither; there is no such device; KVTIER_PROFILE is "off", or its folder
            cannot be written.
        UnsupportedError: a CUDA graph is being captured.
    """
    shapes = STANDARD if model_or_config is None else shapes_of(model_or_config)
    block_size = DEVICE_BLOCK if block_size is None else block_size
    if block_size < 1:
        raise ConfigError(f"block_size={block_size}: it is a positive number of tokens.")
    target = _device(device, model_or_config)
    if target.type != "cuda":
        note = "There is no CUDA device to measure: nothing is stored. On a CPU there is nothing to calibrate yet."
        if progress:
            print(f"kvtier: {note}", file=sys.stderr, flush=True)
        return Calibration(str(target), notes=(note,))
    if launch.capturing(target):
        raise UnsupportedError("Nothing can be measured while a CUDA graph is captured: calibrate before.")
    with launch.on(target), torch.inference_mode(False), torch.no_grad():
        return _run(target, _jobs(target, shapes, block_size, all_widths=model_or_config is not None), progress)


def _run(device: torch.device, jobs: list[Job], progress: bool) -> Calibration:
    profile.folder()  # a setting that forbids storing is an error before anything is measured
    began = time.perf_counter()
    notes: list[str] = []
    if not jobs:
        notes.append("Triton does not run here, or there is nothing to choose: nothing is stored.")
    path, made, failures, skipped = None, [], [], []
    for i, job in enumerate(jobs, 1):
        start = time.perf_counter()
        if start - began > SECONDS:
            skipped.append(job.name)
            continue
        try:
            value, result = job.measure()
        except Exception as error:  # no memory, or whatever Triton, its compiler or its driver raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failures.append(f"{job.name}: {reason}")
            result = f"failed ({reason})"
        else:
            path = profile.store(launch.machine(device), job.name, value)
            made.append(Measurement(job.name, value, result, time.perf_counter() - start))
        if progress:
            took = time.perf_counter() - start
            print(f"kvtier: {i}/{len(jobs)} {job.name}: {result} [{took:.1f} s]", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    if any(_in_use(job, device) for job in jobs):
        notes.append("This process has used some of these kernels already, and keeps their tiles until it ends.")
    return Calibration(str(device), path, tuple(made), tuple(failures), tuple(skipped), tuple(notes), seconds)


def _in_use(job: Job, device: torch.device) -> bool:
    return (device, job.name) in choices.in_use()


def _jobs(device: torch.device, shapes: tuple[Shape, ...], block_size: int, *, all_widths: bool) -> list[Job]:
    """What to measure, the most valuable first; nothing where Triton does not run."""
    if not launch.available(device):
        return []
    kinds = [list(tiles.kinds_of(shape, block_size, all_widths=all_widths)) for shape in shapes]
    decode = [Job(kind.name, partial(_tile, kind, device)) for some in kinds for kind in some[:1]]
    others = [Job(kind.name, partial(_tile, kind, device)) for some in kinds for kind in some[1:]]
    directions = (Direction.FETCH, Direction.WRITE_BACK)
    return [*decode, *(Job(launches.profile_name(x), partial(_copies, device, x)) for x in directions), *others]


def _tile(kind: Kind, device: torch.device) -> tuple[list[float], str]:
    choice: Choice = tiles.measure(kind, device)
    first = next(iter(choice.seconds.values()))
    best = choice.seconds.get(choice.option, first)
    result = f"{choice.option}, {best * 1e6:.1f} us; the estimated tile {first * 1e6:.1f} us"
    return choices.packed(choice, kind), result


def _copies(device: torch.device, direction: Direction) -> tuple[list[int], str]:
    least = copies.measure(device, direction)
    said = [f"{n or 'no'} of {size // 1024} KiB" for size, n in zip(launches.SIZES, least, strict=True)]
    return least, f"one launch from {', '.join(said)} on"


def _device(device: torch.device | str | None, model: object) -> torch.device:
    """The device to measure.

    Raises:
        ConfigError: the one that was named is not there.
    """
    if device is None:
        own = getattr(model, "device", None)
        if isinstance(own, torch.device) and own.type == "cuda":
            return launch.numbered(own)
        return launch.numbered(torch.device("cuda")) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: kvtier calibrates CUDA devices.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: torch sees {torch.cuda.device_count() or 'no'} CUDA devices.")
    return launch.numbered(found)
