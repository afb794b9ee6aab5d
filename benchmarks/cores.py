"""The threads and CPU cores that contenders get: all contenders of a comparison get the same number.

torch has one number of threads for the whole process, and kvtier's host attention may use threads of its own. Torch's
number alone is therefore not enough: while a model runs on the CPU, the process is also kept to that number of cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside the `with` block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Keep every thread of this process, and those started meanwhile, to `count` cores inside the `with` block.

    Without effect where the process has no more cores than that, or where the system has no affinity.
    """
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) <= count:
        yield
        return
    before = os.sched_getaffinity(0)
    _set_affinity(chosen(before, count))
    try:
        yield
    finally:
        _set_affinity(before)


def words(threads: int) -> str:
    """`one thread`, `2 threads`."""
    return "one thread" if threads == 1 else f"{threads} threads"


def chosen(allowed: set[int], count: int) -> set[int]:
    """`count` of the allowed logical CPUs, on as many physical cores as possible."""
    seen: dict[str, int] = {}
    ranks: dict[int, int] = {}
    for cpu in sorted(allowed):
        core = _core_of(cpu)
        ranks[cpu] = seen[core] = seen.get(core, -1) + 1
    return set(sorted(allowed, key=lambda cpu: (ranks[cpu], cpu))[:count])


def _core_of(cpu: int) -> str:
    try:
        return Path(_SIBLINGS.format(cpu)).read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _set_affinity(cpus: set[int]) -> None:
    tasks = [int(entry.name) for entry in _TASKS.iterdir()] if _TASKS.is_dir() else [0]
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(task, cpus)
