"""`kvtier env`: what kvtier finds on this machine, and what "auto" comes to here."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier.config import DEVICE_BLOCK, HOST_BLOCK, format_size
from kvtier.errors import ConfigError, KVTierError

#: The oldest versions that kvtier works with, and those of what it can do without.
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}
#: The first versions that nobody has tried: what is deprecated now may be gone.
TOO_NEW = {"transformers": (6,)}
OPTIONAL = {"triton": (3, 6)}
#: What of the environment kvtier reads.
VARIABLES = ("KVTIER_CPU", "KVTIER_KERNELS", "KVTIER_PROFILE", "TRITON_INTERPRET")

_EXAMPLES = """\
examples:
  kvtier env
  kvtier env --json >env.json     # for a bug report
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "env",
        help='versions, kernels, devices, memory, and what "auto" comes to here',
        description="Tell what kvtier finds on this machine. Nothing is measured and nothing is changed. 0: all is "
        "well; 1: something does not work, and the last lines say what.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    found = environment()
    print(json.dumps(found, indent=1) if args.json else table(found))
    return 1 if found["problems"] else 0


def environment() -> dict[str, Any]:
    """What there is, as plain data. `problems` are sentences on what does not work, `notes` on what works less well.

    Raises:
        ConfigError: torch cannot be imported.
    """
    problems: list[str] = []
    notes: list[str] = []
    versions = _versions(problems, notes)
    try:
        import torch
    except (ImportError, OSError) as error:  # it, or a library that it is linked with, is not there
        least = ".".join(map(str, OLDEST["torch"]))
        raise ConfigError(f"torch cannot be imported: {error}. kvtier needs {least} or newer.") from error
    from kvtier.memory.storage import system

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    host = _host(problems, notes)
    free = system.free_host_memory()
    memory = {
        "free": free,
        "total": system.total_host_memory(),
        "auto": _tried(lambda: _auto_host(free), problems),
    }
    return {
        "versions": versions,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "host": host | {"memory": memory},
        "devices": [x for x in (_device(device, problems, notes) for device in devices) if x],
        "auto": {
            "device_tier": bool(devices),
            "block_size": DEVICE_BLOCK if devices else HOST_BLOCK,
            "policy": "default",
        },
        "profile": _profile([*devices, torch.device("cpu")], problems, notes),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problems": problems,
        "notes": notes,
    }


def _versions(problems: list[str], notes: list[str]) -> dict[str, str | None]:
    # A plain source tree has no metadata.
    found: dict[str, str | None] = {"kvtier": sys.modules["kvtier"].__version__}
    for name in ("torch", "transformers", "accelerate", "safetensors", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    for known, told in ((OLDEST, problems), (OPTIONAL, notes)):
        for name, oldest in known.items():
            version, least = found[name], ".".join(map(str, oldest))
            if version is None and known is OLDEST:
                told.append(f"{name} is not installed: kvtier needs {least} or newer.")
            elif version is not None and _numbers(version) < oldest:
                told.append(f"{name} is {version}: kvtier needs {least} or newer.")
    for name, first in TOO_NEW.items():
        version, least = found[name], ".".join(map(str, first))
        if version is not None and _numbers(version) >= first:
            problems.append(f"{name} is {version}: kvtier needs one before {least} (`pip install '{name}<{least}'`).")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _tried(what: Callable[[], Any], problems: list[str]) -> Any:
    """The answer; None, and the error is a problem, where there is none."""
    try:
        return what()
    except KVTierError as error:
        problems.append(str(error))
        return None


def _told(what: Callable[[], Any], problems: list[str], notes: list[str]) -> Any:
    """The same, and warnings are notes."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = _tried(what, problems)
    notes += [str(x.message) for x in heard if issubclass(x.category, RuntimeWarning)]
    return found


def _host(problems: list[str], notes: list[str]) -> dict[str, Any]:
    import torch

    from kvtier.cpu import native
    from kvtier.kernels import launch

    there = _told(native.available, problems, notes)
    if not torch.cuda.device_count():  # else each device says whether KVTIER_KERNELS can be honoured
        _told(lambda: launch.available(torch.device("cpu")), problems, notes)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": launch.processor(),
        "usable_cpus": cpus,
        "threads": torch.get_num_threads(),
        "attention": "native" if there else "torch",
        "instruction_set": native.instruction_set() if there else None,
    }


def _auto_host(free: int) -> int:
    from kvtier.config import HOST_RESERVE, HOST_RESERVE_SHARE, resolve_size

    return resolve_size("host_budget", "auto", free, HOST_RESERVE, HOST_RESERVE_SHARE)


def _device(device: Any, problems: list[str], notes: list[str]) -> dict[str, Any] | None:
    try:
        return _working_device(device, problems, notes)
    except RuntimeError as error:  # torch's, where the driver does not answer
        problems.append(f"{device} does not work: {(str(error).strip().splitlines() or [''])[0]}")
        return None


def _working_device(device: Any, problems: list[str], notes: list[str]) -> dict[str, Any]:
    import torch

    from kvtier.config import DEVICE_RESERVE, DEVICE_RESERVE_SHARE, resolve_size
    from kvtier.kernels import launch
    from kvtier.memory.storage import system

    free = system.free_device_memory(device)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "kernels": "triton" if _told(lambda: launch.available(device), problems, notes) else "torch",
        "memory": {
            "free": free,
            "total": system.total_device_memory(device),
            "auto": _tried(
                lambda: resolve_size("device_budget", "auto", free, DEVICE_RESERVE, DEVICE_RESERVE_SHARE), problems
            ),
        },
    }


def _profile(devices: list[Any], problems: list[str], notes: list[str]) -> dict[str, Any]:
    from kvtier import profile
    from kvtier.kernels import launch

    on = _tried(profile.enabled, problems)
    if not on:
        return {"folder": None, "machines": []}
    machines = []
    for device in devices:
        machine = launch.machine(device)
        values = _told(partial(profile.names, machine), problems, notes)
        machines.append({"device": str(device), "file": str(profile.file_of(machine)), "values": values})
    return {"folder": str(profile.folder()), "machines": machines}


# What is shown


def table(found: dict[str, Any]) -> str:
    """The same for a reader."""
    host, auto = found["host"], found["auto"]
    versions = [f"{name} {'not installed' if v is None else v}" for name, v in found["versions"].items()]
    lines = [
        ("versions", f"{', '.join(versions[:3])}, Python {found['python']}"),
        ("", ", ".join(versions[3:])),
        ("host", f"{host['processor']}, {host['usable_cpus']} usable, torch uses {host['threads']} threads"),
        (
            "",
            f"attention by the native kernel, {host['instruction_set']}"
            if host["attention"] == "native"
            else "attention by torch: no native kernel",
        ),
        ("", f"memory {_memory('host', host['memory'])}"),
    ]
    for device in found["devices"]:
        lines.append(("device", f"{device['device']}: {device['name']}, capability {device['capability']}"))
        lines.append(("", f"attention by {'Triton' if device['kernels'] == 'triton' else 'torch'}"))
        lines.append(("", f"memory {_memory('device', device['memory'])}"))
    if not found["devices"]:
        lines.append(("device", "no CUDA device: all KV is in host memory, and attended to there"))
    tier = "the device's budget, then the host's" if auto["device_tier"] else "the host's budget; no device tier"
    lines.append(("auto", f"{tier}; blocks of {auto['block_size']} tokens; policy {auto['policy']!r}"))
    for machine in found["profile"]["machines"]:
        count = len(machine["values"])
        what = f"{count} values in {machine['file']}" if count else "none; `kvtier calibrate` measures one"
        lines.append(("profile", f"of {machine['device']}: {what}"))
    if not found["profile"]["machines"]:
        lines.append(("profile", "not read: KVTIER_PROFILE is off or wrong; estimates serve"))
    lines += [("set", f"{name}={value}") for name, value in found["environment"].items()]
    lines += [("note", text) for text in found["notes"]]
    lines += [("problem", text) for text in found["problems"]]
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _memory(tier: str, memory: dict[str, Any]) -> str:
    auto = "none" if memory["auto"] is None else format_size(memory["auto"])
    return f'{format_size(memory["free"])} free of {format_size(memory["total"])}; {tier}_budget="auto" is {auto}'
