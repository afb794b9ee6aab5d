"""`kvtier.calibrate`: what is measured on this machine, in which order, and where it is stored."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from kvtier import profile
from kvtier.calibration import disturbed, hardware
from kvtier.calibration.job import Job, Value
from kvtier.calibration.measurements import attention, copies, tiles
from kvtier.calibration.shapes import STANDARD, Shape, shapes_of
from kvtier.config import DEVICE_BLOCK, parse_count
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.kernels import launch
from kvtier.kernels import tiles as choices
from kvtier.kernels.tiles import Choice, Kind
from kvtier.memory import measured
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.stats import Printed
from kvtier.transfer import launches
from kvtier.transfer.engine import Direction

#: No measurement begins when so many seconds have passed. Most take less than a second, and the time to compile up to
#: three programs; those of rates share it.
SECONDS = 30.0
#: Tokens of a block, at the most.
MOST_TOKENS = 2**20


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
    value: Value
    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration(Printed):
    """What a calibration measured. Printing it gives a line for each value.

    Attributes:
        device: that was measured, such as `cuda:0`, or `cpu`.
        path: the profile; None: nothing was stored.
        measurements: in their order.
        failures: names of what could not be measured, each with the reason. The estimates, or what an earlier
            calibration stored, stay in place for these.
        skipped: names of what was not begun for want of time.
        disturbed: of what was measured, what is not to be trusted, for something else used the machine meanwhile; each
            with what to do, and with what of an earlier calibration stays in place.
        notes: what else there is to say.
        seconds: in all.
        limit: seconds after which nothing more was begun.
        profile: what is known of the machine now, and of the model: measured, or estimated.
    """

    device: str
    path: Path | None = None
    measurements: tuple[Measurement, ...] = ()
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    limit: float = SECONDS
    profile: HardwareProfile = field(default_factory=lambda: HardwareProfile.estimate("cpu"))

    def __str__(self) -> str:
        return "\n".join([*(f"{x.name}: {x.result}" for x in self.measurements), *self.disturbed, self.summary()])

    def summary(self) -> str:
        """What there is to say besides the values: what is missing, how many there are, and where they are stored."""
        lines = [f"failed: {x}" for x in self.failures]
        lines += [f"not begun after {self.limit:.0f} s: {x}" for x in self.skipped]
        lines += self.notes
        n = len(self.measurements)
        what = f"{n} measurement{'' if n == 1 else 's'} of {self.device}"
        if self.disturbed:
            what += f", {len(self.disturbed)} of them disturbed"
        where = "nothing is stored" if self.path is None else f"stored in {self.path}"
        return "\n".join([*lines, f"{what}, {self.seconds:.1f} s: {where}"])


def calibrate(
    model_or_config: object = None,
    *,
    device: torch.device | str | None = None,
    block_size: int | None = None,
    seconds: float = SECONDS,
    progress: bool = True,
) -> Calibration:
    """Measure what kvtier otherwise estimates on this machine, and store it for this and later processes.

    Measured are copies over the link by size, each way and both at once; attention on the host by bytes, threads and
    queries, and while the link is busy; and, of a model, the time of its layers by tokens and of a prefill by new and
    cached tokens. On a CUDA device also attention there, the tiles of the attention kernels, and from how many short
    runs of blocks on one launch copies faster than the copy engine. Without CUDA a device tier is emulated, and copies
    are within the host's memory.

    It takes seconds to a minute. Meanwhile nothing else should use the machine: what predicts the rest of its own
    measurements badly was disturbed, which `Calibration.disturbed` says, and replaces nothing that was clearly better.
    It takes up to 512 MiB of host memory and 256 MiB of the device, an eighth of what is free there at most, and with a
    model the caches of some thousand tokens.

    Tiles decide the last bits of results. A process that has used one keeps it until it ends: calibrate before the
    first forward. Rates are what `policy="adaptive"` begins with; nothing is measured in a forward. Later processes
    read the profile, in `~/.cache/kvtier` or the folder that KVTIER_PROFILE names.

    Args:
        model_or_config: a Transformers model, which is timed, or a config, for whose shapes attention is measured;
            None: common shapes.
        device: a CUDA device, or "cpu"; None: the model's, or else the current CUDA device, if there is one.
        block_size: tokens per block; None: that of a cache with a device tier.
        seconds: after so many no measurement begins, and those that repeat share them.
        progress: print a line for each measurement to stderr, its name when it begins and its result when it ends.

    Returns:
        what was measured, where it is stored, and all of it as a `HardwareProfile`.

    Raises:
        ConfigError: `model_or_config` is neither; `block_size` is not a whole number of at least 1, or `seconds` not
            a positive number; there is no such device, or the model is on another one; KVTIER_PROFILE is "off", or its
            folder cannot be written.
        UnsupportedError: a CUDA graph is being captured.
    """
    shapes = STANDARD if model_or_config is None else shapes_of(model_or_config)
    block_size = DEVICE_BLOCK if block_size is None else parse_count("block_size", block_size, 1, "tokens")
    if block_size > MOST_TOKENS:
        raise ConfigError(f"block_size={block_size}: a block that is measured has {MOST_TOKENS} tokens at the most.")
    given: Any = seconds
    if isinstance(given, bool) or not isinstance(given, Real) or not float(given) > 0:
        raise ConfigError(f"seconds={seconds!r}: it is a positive number of seconds.")
    target = _device(device, model_or_config)
    model = model_or_config if isinstance(model_or_config, torch.nn.Module) else None
    if model is not None and launch.numbered(model.device) != target:  # type: ignore[arg-type]
        raise ConfigError(f"The model is on {model.device}, and not on device={str(target)!r}: leave device= away.")
    if launch.capturing(target):
        raise UnsupportedError("Nothing can be measured while a CUDA graph is captured: calibrate before.")
    with launch.on(target), torch.inference_mode(False), torch.no_grad():
        jobs = _jobs(target, shapes, block_size, seconds, model, all_widths=model_or_config is not None)
        layout = attention.layout_of(shapes[0], block_size)
        named = "" if model is None else measured.model_name(model.config)
        return _run(target, jobs, seconds, progress, lambda: measured.hardware(target, layout, named))


def _run(
    device: torch.device, jobs: list[Job], limit: float, progress: bool, known: Callable[[], HardwareProfile]
) -> Calibration:
    profile.checked_folder()  # what forbids storing is an error before anything is measured
    began = time.perf_counter()
    notes: list[str] = []
    if device.type == "cuda" and not launch.available(device):
        notes.append("Triton does not run here: there are no tiles to choose.")
    path, made, failures, skipped, wrong = None, [], [], [], list[str]()
    machine = launch.machine(device)
    for i, job in enumerate(jobs, 1):
        start = time.perf_counter()
        if start - began > limit:
            skipped.append(job.name)
            continue
        if progress:  # before it runs: some take half of the time
            print(f"kvtier: {i}/{len(jobs)} {job.name}: ", end="", file=sys.stderr, flush=True)
        value: Value | None = None
        try:
            value, result = job.measure()
        except Exception as error:  # no memory, or whatever Triton, its compiler or its driver raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failures.append(f"{job.name}: {reason}")
            result = f"failed ({reason})"
        except BaseException:  # Ctrl-C: what is said of it is not said behind the name
            if progress:
                print("not finished", file=sys.stderr, flush=True)
            raise
        took = time.perf_counter() - start
        if progress:
            print(f"{result} [{took:.1f} s]", file=sys.stderr, flush=True)
        if value is None:
            continue
        path, stored, stay = _store(machine, job, value)
        made.append(Measurement(job.name, stored, result, took))
        if too_large := disturbed.disturbed(value):
            wrong.append(disturbed.told(job.name, too_large, stay))
            if progress:
                print(f"kvtier: {wrong[-1]}", file=sys.stderr, flush=True)
    spent = time.perf_counter() - began
    if any(_in_use(job, device) for job in jobs):
        notes.append("This process has used some of these kernels already, and keeps their tiles until it ends.")
    return Calibration(
        str(device),
        path,
        tuple(made),
        tuple(failures),
        tuple(skipped),
        tuple(wrong),
        tuple(notes),
        spent,
        limit,
        known(),
    )


def _store(machine: str, job: Job, value: Value) -> tuple[Path, Value, dict[str, float]]:
    """Store a value under its names, but for what was clearly better before; the file, what is stored now, and the
    errors of the parts that stay."""
    found, errors = value, dict[str, float]()
    for name in (job.name, *filter(None, (job.also,))):
        before = profile.lookup(machine, name, lambda value: True)
        stored, stay = disturbed.kept(value, before)
        path = profile.store(machine, name, stored)
        if name == job.name:
            found, errors = stored, stay
    return path, found, errors


def _in_use(job: Job, device: torch.device) -> bool:
    return (device, job.name) in choices.in_use()


def _jobs(
    device: torch.device,
    shapes: tuple[Shape, ...],
    block_size: int,
    seconds: float,
    model: torch.nn.Module | None,
    *,
    all_widths: bool,
) -> list[Job]:
    """What to measure, the most valuable first. Kernels only where Triton runs."""
    kernels = launch.available(device)
    kinds = [list(tiles.kinds_of(shape, block_size, all_widths=all_widths)) for shape in shapes if kernels]
    decode = [Job(kind.name, partial(_tile, kind, device)) for some in kinds for kind in some[:1]]
    others = [Job(kind.name, partial(_tile, kind, device)) for some in kinds for kind in some[1:]]
    directions = (Direction.FETCH, Direction.WRITE_BACK) if kernels else ()
    launched = [Job(launches.profile_name(x), partial(_copies, device, x)) for x in directions]
    return [*decode, *launched, *hardware.jobs(device, shapes[0], block_size, seconds, model), *others]


def _tile(kind: Kind, device: torch.device) -> tuple[Value, str]:
    choice: Choice = tiles.measure(kind, device)
    first = next(iter(choice.seconds.values()))
    best = choice.seconds.get(choice.option, first)
    result = f"{choice.option}, {best * 1e6:.1f} us; the estimated tile {first * 1e6:.1f} us"
    return choices.packed(choice, kind), result


def _copies(device: torch.device, direction: Direction) -> tuple[Value, str]:
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
        if isinstance(own, torch.device) and own.type in ("cuda", "cpu"):
            return launch.numbered(own)
        return launch.numbered(torch.device("cuda")) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: {str(error).splitlines()[0]}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: kvtier calibrates CPUs and CUDA devices.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: torch sees {torch.cuda.device_count() or 'no'} CUDA devices.")
    return launch.numbered(found)
