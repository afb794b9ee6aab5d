"""The memory that the host and the devices have, and what is free of it, within the limits of control groups.

A batch system (SLURM), a systemd scope and a container each limit memory by control groups, which are nested: the
process may take what is left in its own group and in every group above it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

ROOT = Path("/")
#: The kind of a virtio device that is a balloon, and of its features the reporting of free pages.
_BALLOON, _REPORTING = 5, 5
#: `MADV_POPULATE_WRITE`, since Linux 5.14; others refuse it.
_POPULATE_WRITE = 23


@dataclass(frozen=True)
class _Files:
    """The files of a memory controller.

    Attributes:
        limits: of the group: exceeding one ends a process or slows it down.
        usage: of the group and all groups below it.
        reclaimable: fields of `memory.stat` with the part of the usage that is inactive page cache, which the kernel
            drops when memory is needed; the first of them that exists counts.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))
_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file",))


def free_host_memory(root: Path = ROOT) -> int:
    """Bytes of host memory that this process may still take.

    They are what the system has available, or what its control group or a group above has left if that is less.

    Args:
        root: folder that holds `proc` and the mounted control groups; another one for tests.
    """
    free = _meminfo(root, "MemAvailable")
    if free is None:
        free = _physical_memory() // 2  # not Linux: nothing better is known
    for group, files in _groups(root):
        limit, usage = _limit(group, files), _number(group / files.usage)
        if limit is not None and usage is not None:
            cached = next((x for name in files.reclaimable if (x := _stat(group, name)) is not None), 0)
            free = min(free, limit - max(usage - cached, 0))
    return max(free, 0)


def lends_free_memory(root: Path = ROOT) -> bool:
    """Whether this is a virtual machine that gives what it has free back to its host (the reporting of free pages of a
    virtio balloon), and gets it again, small page by small page, when it is written to first.

    What is given back are large ranges, and so huge pages are what mostly has to be got again. To write to these first
    takes several times as long as to ordinary pages, which come from what the machine has kept.
    """
    for device in (root / "sys/bus/virtio/devices").glob("*"):
        try:
            if int((device / "device").read_text(encoding="utf-8"), 16) == _BALLOON:
                return (device / "features").read_text(encoding="utf-8")[_REPORTING] == "1"
        except (OSError, ValueError, IndexError):
            continue
    return False


def populate(address: int, nbytes: int) -> None:
    """Get the pages within some mapped memory from the system, if it can: whoever writes there then does not wait for
    them. What they hold stays. The GIL is given back."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and sys.platform == "linux":
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def total_host_memory(root: Path = ROOT) -> int:
    """Bytes of host memory that this process could ever take: the machine's, or the least limit of its control groups.

    Args:
        root: as for `free_host_memory`.
    """
    total = _meminfo(root, "MemTotal")
    limits = (_limit(group, files) for group, files in _groups(root))
    return min([_physical_memory() if total is None else total, *(x for x in limits if x is not None)])


def free_device_memory(device: torch.device) -> int:
    """Bytes free on an accelerator, with those that torch's allocator holds and does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_memory()


def total_device_memory(device: torch.device) -> int:
    """Bytes that an accelerator has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return total_host_memory()


def is_there(name: str) -> bool:
    """Whether torch finds a device ("cuda:1"), or any of a type ("cuda")."""
    kind, _, index = name.partition(":")
    if kind in ("cpu", "privateuseone"):  # a CPU is always there, and of the other torch only knows its name
        return True
    count = getattr(getattr(torch, kind, None), "device_count", lambda: 0)()
    return bool(count > int(index or 0))


def has_alternatives(device: torch.device) -> bool:
    """Whether a model with a layer on this device may have others on devices of the same kind."""
    return device.type == "cuda" and torch.cuda.device_count() > 1


# Control groups


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's memory group and of all groups above it that can be seen, the own one first."""
    paths = _own_groups(root)
    mounts = _mounts(root)
    for version, files in ((1, _V1), (2, _V2)):
        path = paths.get(version)
        if path is None:
            continue
        for mounted, point in mounts[version]:
            # Of a container's hierarchy often only its own part is mounted.
            below = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
            if ".." in below.parts:  # outside the control group namespace: only the mounted part can be seen
                below = PurePosixPath()
            for group in (below, *below.parents):
                yield point / group, files


def _own_groups(root: Path) -> dict[int, PurePosixPath]:
    """Paths of this process's groups by version of the hierarchy, as `/proc/self/cgroup` names them."""
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found[1] = PurePosixPath(path)
        elif hierarchy == "0" and not controllers:
            found[2] = PurePosixPath(path)
    return found


def _mounts(root: Path) -> dict[int, list[tuple[PurePosixPath, Path]]]:
    """Where hierarchies with memory groups are mounted, by version: the part that is mounted, and the folder."""
    found: dict[int, list[tuple[PurePosixPath, Path]]] = {1: [], 2: []}
    for line in _lines(root / "proc/self/mountinfo"):
        # "31 23 0:28 /mounted /mount/point rw,relatime [optional ...] - cgroup2 source rw,memory", see proc(5).
        place, _, kind = line.partition(" - ")
        fields, types = place.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(types[0])
        if version is None or (version == 1 and "memory" not in types[2].split(",")):
            continue
        mounted, point = (_unescaped(x) for x in fields[3:5])
        found[version].append((PurePosixPath(mounted), root / point.lstrip("/")))
    if not (found[1] or found[2]):  # it cannot be read: where they are mounted as a rule
        found[1].append((PurePosixPath("/"), root / "sys/fs/cgroup/memory"))
        found[2].append((PurePosixPath("/"), root / "sys/fs/cgroup"))
    return found


def _unescaped(path: str) -> str:
    """A path of mountinfo, in which white space and backslashes are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _limit(group: Path, files: _Files) -> int | None:
    """The least limit of a group; None if it has none."""
    return min((x for name in files.limits if (x := _number(group / name)) is not None), default=None)


# Files


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", and for a file that does not exist or cannot be read."""
    text = next(iter(_lines(file)), "").strip()
    return int(text) if text.isdecimal() else None


def _stat(group: Path, name: str) -> int | None:
    fields = (line.split() for line in _lines(group / "memory.stat"))
    return next((int(x[1]) for x in fields if len(x) == 2 and x[0] == name), None)


def _meminfo(root: Path, name: str) -> int | None:
    """A field of `/proc/meminfo`, in bytes."""
    fields = (line.split() for line in _lines(root / "proc/meminfo"))
    return next((int(x[1]) * 1024 for x in fields if len(x) > 1 and x[0] == name + ":"), None)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
