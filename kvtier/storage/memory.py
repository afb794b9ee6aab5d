"""Memory that is counted before it is taken."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

import torch

from kvtier.errors import BudgetError, TransferError

_HUGE_PAGE = 2 * 2**20


class Budget:
    """A hard limit in bytes. Whoever takes memory asks here first.

    Attributes:
        tier: `"device"` or `"host"`, for messages.
        limit: bytes.
        used, peak: bytes taken now, and at the most.
    """

    def __init__(self, tier: str, limit: int) -> None:
        self.tier = tier
        self.limit = limit
        self.used = 0
        self.peak = 0

    @property
    def free(self) -> int:
        """Bytes that may still be taken."""
        return self.limit - self.used

    def reserve(self, nbytes: int) -> bool:
        """Take `nbytes`; False, and nothing taken, if they do not fit."""
        if nbytes > self.free:
            return False
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return True

    def release(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        self.used -= nbytes
        assert self.used >= 0, "more bytes given back than taken"


class Holder(Protocol):
    """Who holds memory that it can do without."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""

    def release(self) -> None:
        """Give them back."""


class Memory:
    """Where slabs come from: one device or the host, under one budget.

    Host memory is mapped, not allocated: exactly the size asked (torch's pinned allocator rounds up to powers of two),
    on huge pages where the kernel grants them, resident only where touched, and given back to the system at once.
    With `page_lock`, it is page-locked by registration, so that copies to an accelerator run asynchronously.

    Attributes:
        yielding: who holds memory that it can do without; see `make_way`.
    """

    def __init__(self, device: torch.device, budget: Budget, *, page_lock: bool = False) -> None:
        self.device = device
        self.budget = budget
        self.page_lock = page_lock
        self._mapped = device.type == "cpu"
        self._locked: dict[int, int] = {}
        self.yielding: list[Holder] = []

    @property
    def page_locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(self._locked.values())

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """A `uint8` tensor of `nbytes`, counted; None if the budget does not allow it.

        Raises:
            BudgetError: the budget allows it but the machine does not have it.
        """
        if nbytes <= 0 or not self.budget.reserve(nbytes):
            return None
        try:
            # Slabs outlive the mode in which the first forward happens to run.
            with torch.inference_mode(False):
                if self._mapped:
                    return self._map(nbytes)
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except (OSError, MemoryError, torch.OutOfMemoryError, TransferError) as error:
            self.budget.release(nbytes)
            raise BudgetError(
                f"The {self.budget.tier} budget of {self.budget.limit} bytes allows {nbytes} more, but the machine "
                f"does not have them: {error}. Give a smaller {self.budget.tier}_budget.",
                tier=self.budget.tier,
                needed=self.budget.used + nbytes,
                budget=self.budget.limit,
            ) from error
        except BaseException:
            self.budget.release(nbytes)
            raise

    def make_way(self, nbytes: int) -> bool:
        """Have everything given back that its holders can do without, if `nbytes` are free then. Whether they are."""
        held = sum(holder.nbytes for holder in self.yielding)
        if not held or self.budget.free + held < nbytes:
            return False
        for holder in self.yielding:
            holder.release()
        return True

    def release(self, slab: torch.Tensor) -> None:
        """Give a slab back. The caller drops its own references to it."""
        if self._locked.pop(slab.data_ptr(), None) is not None:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()), "unlock host memory")
        self.budget.release(slab.numel())

    def is_locked(self, slab: torch.Tensor) -> bool:
        """Whether this slab is page-locked; one from before `page_lock` was set is not."""
        return slab.data_ptr() in self._locked

    def _map(self, nbytes: int) -> torch.Tensor:
        # Aligned to a huge page when it is worth one; the surplus is address space only and never touched.
        align = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
        # Private: a forked child must not write into its parent's KV.
        region = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if align and hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(region, dtype=torch.uint8)
        start = -whole.data_ptr() % align if align else 0
        slab = whole[start : start + nbytes]
        if self.page_lock:
            _check_cuda(
                torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), nbytes, 0),
                f"page-lock {nbytes} bytes of host memory (see `ulimit -l`)",
            )
            self._locked[slab.data_ptr()] = nbytes
        return slab


def _check_cuda(code: object, what: str) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise TransferError(f"CUDA could not {what} (error {int(code)}).")  # type: ignore[call-overload]


def free_host_memory() -> int:
    """Bytes of host memory that this process may still take: the system's, or its control group's if that is less."""
    free = _meminfo("MemAvailable")
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            # What is cached of files counts as usage, but is given up as soon as somebody needs it.
            cached = _field(Path(usage_file).parent / "memory.stat", "inactive_file")
            free = min(free, int(limit) - int(usage) + cached)
    return max(free, 0)


def _field(file: Path, name: str) -> int:
    try:
        return next((int(x.split()[1]) for x in file.read_text().splitlines() if x.split()[0] == name), 0)
    except OSError:
        return 0


def _meminfo(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: the physical memory is the best guess that the standard library has.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_device_memory(device: torch.device) -> int:
    """Bytes free on an accelerator, counting what torch has cached but does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_memory()
