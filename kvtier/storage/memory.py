"""Memory that is counted before it is taken."""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from kvtier.errors import BudgetError, TransferError

_HUGE_PAGE = 2 * 2**20
#: `cudaHostRegisterPortable | cudaHostRegisterMapped`: every device copies from it, and reads it by address.
_FOR_ALL_DEVICES = 1 | 2
#: Steps that take memory until more is asked of a machine that had none: asking in vain empties torch's allocator.
PATIENCE = 8
#: `cudaErrorMemoryAllocation`.
_OUT_OF_MEMORY = 2


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

    Attributes:
        lock_for: a CUDA device; memory from now on is page-locked by registration, for all of them, so that copies run
            asynchronously and programs read it by address. None: it is not, or cannot be on this machine.
        elastic: what its budget allows but the machine does not have is as what the budget does not allow, and the
            budget shrinks: for a tier with another one below.
        yielding: who holds memory that it can do without; see `make_way`.
    """

    def __init__(
        self, device: torch.device, budget: Budget, *, lock_for: torch.device | None = None, elastic: bool = False
    ) -> None:
        self.device = device
        self.budget = budget
        self.lock_for = lock_for
        self.elastic = elastic
        self._given = budget.limit
        self._patience = 0
        self._warned = False
        self._mapped = device.type == "cpu"
        self._locked: dict[int, _Locked] = {}
        self.yielding: list[Holder] = []

    @property
    def page_locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(locked.nbytes for locked in self._locked.values())

    def allocate(self, nbytes: int, *, luxury: bool = False) -> torch.Tensor | None:
        """A `uint8` tensor of `nbytes`, counted; None if the budget does not allow it.

        Args:
            nbytes: exactly.
            luxury: less would do: that elastic memory does not have so many says nothing of less.

        Raises:
            BudgetError: the budget allows it but the machine does not have it, and this memory is not elastic.
        """
        peak = self.budget.peak
        if nbytes <= 0 or not self.budget.reserve(nbytes):
            return None
        try:
            # Slabs outlive the mode in which the first forward happens to run.
            with torch.inference_mode(False):
                if self._mapped:
                    return self._map(nbytes)
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except (OSError, MemoryError, torch.OutOfMemoryError, TransferError) as error:
            self._not_taken(nbytes, peak)
            if self.elastic:
                if not luxury:
                    self._shrink(nbytes)
                return None
            raise BudgetError(
                f"The {self.budget.tier} budget of {self.budget.limit} bytes allows {nbytes} more, but the machine "
                f"does not have them: {error}. Give a smaller {self.budget.tier}_budget.",
                tier=self.budget.tier,
                needed=self.budget.used + nbytes,
                budget=self.budget.limit,
            ) from error
        except BaseException:
            self._not_taken(nbytes, peak)
            raise

    def _not_taken(self, nbytes: int, peak: int) -> None:
        self.budget.release(nbytes)
        self.budget.peak = peak

    def _shrink(self, nbytes: int) -> None:
        """The machine did not have `nbytes` more: from now on less is asked of it, for asking in vain is slow."""
        was, self.budget.limit = self.budget.limit, self.budget.used + nbytes // 2
        self._patience = PATIENCE
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.device} does not have the {was} bytes of the {self.budget.tier} budget: the cache goes on with "
                f"the {self.budget.used} that it holds, and asks again later. Give a smaller {self.budget.tier}_budget "
                "to leave room for the model's activations.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def shrunk(self) -> bool:
        """Whether the budget is less than what was given, for want of memory."""
        return self.budget.limit < self._given

    def recover(self) -> None:
        """Told of each step that takes memory: some steps later all that was given is allowed again."""
        if self.shrunk:
            self._patience -= 1
            if self._patience <= 0:
                self.budget.limit = self._given

    def insist(self, limit: int) -> bool:
        """Before anything is refused for what was missing once: allow `limit` bytes again, if so many were given.

        Whether that is more than before. The machine is asked anew, and may refuse.
        """
        grown = self.budget.limit < limit <= self._given
        if grown:
            self.budget.limit = limit
        return grown

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
        self.budget.release(slab.numel())
        locked = self._locked.pop(slab.data_ptr(), None)
        if locked is not None:
            # Refused only where CUDA has failed for good, or was never begun (a forked child): the error that the user
            # has to see is another.
            with contextlib.suppress(RuntimeError), torch.cuda.device(locked.device):
                _succeeded(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))

    def is_locked(self, slab: torch.Tensor) -> bool:
        """Whether this slab is page-locked; one from before `lock_for` was set is not."""
        return slab.data_ptr() in self._locked

    def _map(self, nbytes: int) -> torch.Tensor:
        # Aligned to a huge page when it is worth one; the surplus is address space only and never touched.
        align = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
        # Private: a forked child must not write into its parent's KV.
        region = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if align and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                region.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(region, dtype=torch.uint8)
        start = -whole.data_ptr() % align if align else 0
        slab = whole[start : start + nbytes]
        if self.lock_for is not None:
            self._lock(slab, self.lock_for)
        return slab

    def _lock(self, slab: torch.Tensor, device: torch.device) -> None:
        # Within the device's own context: elsewhere it would make one, some hundred MiB on a device nobody uses.
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), _FOR_ALL_DEVICES)
            if _succeeded(code):
                self._locked[slab.data_ptr()] = _Locked(device, slab.numel())
                return
        if int(code) == _OUT_OF_MEMORY:
            raise TransferError(f"CUDA could not page-lock {slab.numel()} bytes of it (see `ulimit -l`)")
        self.lock_for = None
        warnings.warn(
            f"Host memory cannot be page-locked on this machine (CUDA error {int(code)}): it serves as it is, and "
            "copies wait for each other.",
            RuntimeWarning,
            stacklevel=2,
        )


class _Locked(NamedTuple):
    """Page-locked memory: in which device's context, and how much."""

    device: torch.device
    nbytes: int


def _succeeded(code: Any) -> bool:
    """Whether a call of CUDA's runtime on the current device did; if not, torch does not hear of it any more."""
    if int(code) == 0:
        return True
    # CUDA keeps the error for whoever asks next, which is the check behind torch's next launch: let that be this one.
    with contextlib.suppress(Exception):
        torch.empty(1, device="cuda").fill_(1)
    return False


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
