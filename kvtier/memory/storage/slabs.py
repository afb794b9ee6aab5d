"""Budgets, and the slabs that are allocated under them: bytes are counted before they are taken."""

from __future__ import annotations

import contextlib
import functools
import mmap
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.storage import system
from kvtier.planning import sizing

_HUGE_PAGE = 2 * 2**20
#: `cudaHostRegisterPortable | cudaHostRegisterMapped`: every device copies from it, and reads it by address.
_FOR_ALL_DEVICES = 1 | 2
#: Steps until a device that had no memory is asked again for what its budget allows: asking in vain empties torch's
#: allocator.
BACK_OFF_STEPS = 8
#: A byte of what is NaN in fp32, bf16 and fp16 alike.
POISON = 0xFF
#: `cudaErrorMemoryAllocation`, `cudaErrorHostMemoryAlreadyRegistered`.
_OUT_OF_MEMORY, _REGISTERED = 2, 712


class Budget:
    """A hard limit in bytes. Whoever takes memory asks here first.

    Attributes:
        tier: `"device"` or `"host"`, for messages.
        limit: bytes.
        used, peak: bytes taken now, and at the most.
        rounded: bytes that an allocator takes on top of those, because it takes whole segments. They are shown, not
            limited: blocks were promised the whole budget.
        goal: the limit that a resize under way is about to set; None: there is none.
    """

    def __init__(self, tier: str, limit: int) -> None:
        self.tier = tier
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.rounded = 0
        self.goal: int | None = None

    @property
    def lasting(self) -> int:
        """What may be promised: the limit, or less where it is about to fall."""
        return self.limit if self.goal is None else min(self.limit, self.goal)

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


class SlabAllocator:
    """Allocates slabs of one device, or of the host, under one budget.

    Host memory is mapped, not allocated: exactly the size asked (torch's pinned allocator rounds up to powers of two),
    on huge pages where the kernel grants them and they are not slow to get (`lends_free_memory`), resident only where
    touched, and given back to the system at once.

    Args:
        device: where the memory is.
        budget: what may be taken.
        lock_for: a CUDA device; memory from now on is page-locked by registration, for all devices, so that copies run
            asynchronously and programs read it by address. None: it is not, or cannot be on this machine.
        elastic: what the budget allows but the machine does not have is treated as what the budget does not allow, and
            the budget shrinks: for a tier with another one below.
        poison: fill what is given back with NaN (tests: nobody may read it any more).
        gives_back: called with a slab of a device before it is given back.

    Attributes:
        divisible: whether a part of a slab can be given back, see `cut`.
        in_segments: whether memory is taken in whole segments, as torch's allocator for CUDA does.
    """

    def __init__(
        self,
        device: torch.device,
        budget: Budget,
        *,
        lock_for: torch.device | None = None,
        elastic: bool = False,
        poison: bool = False,
        gives_back: Callable[[torch.Tensor], None] = lambda slab: None,
    ) -> None:
        self.device = device
        self.budget = budget
        self.lock_for = lock_for
        self.elastic = elastic
        self.poison = poison
        self._gives_back = gives_back
        self._given = budget.limit
        self._back_off = 0
        self._warned = False
        self._on_host = device.type == "cpu"
        self.divisible = self._on_host
        self.in_segments = device.type == "cuda"
        # By address: what is allocated, and what of it is page-locked.
        self._live: dict[int, _Live] = {}
        self._locked: dict[int, _Locked] = {}
        # What is being locked or unlocked: after an interrupt, nobody knows which.
        self._unsure: tuple[int, torch.device] | None = None

    @property
    def page_locked(self) -> int:
        """Bytes that are page-locked now."""
        return sum(locked.nbytes for locked in self._locked.values())

    def allocate(self, nbytes: int, *, optional: bool = False) -> torch.Tensor | None:
        """A `uint8` tensor of `nbytes`, counted; None if the budget does not allow it.

        Args:
            nbytes: exactly.
            optional: less would do: that elastic memory does not have so many says nothing about less.

        Raises:
            BudgetError: the budget allows it but the machine does not have it, and this memory is not elastic.
        """
        peak = self.budget.peak
        if nbytes <= 0 or not self.budget.reserve(nbytes):
            return None
        live: _Live | None = None
        try:
            # Slabs outlive the mode in which the first forward happens to run.
            with torch.inference_mode(False):
                live = self._map(nbytes) if self._on_host else self._empty(nbytes)
            self._live[live.slab.data_ptr()] = live
            if self._on_host and self.lock_for is not None:
                self._lock(live.slab, self.lock_for)
            self.budget.rounded += self._rounding(nbytes)
            return live.slab
        except (OSError, MemoryError, torch.OutOfMemoryError, TransferError) as error:
            self._not_taken(nbytes, live, peak)
            if isinstance(error, TimeoutError):
                raise  # of a signal handler, not of the machine
            if self.elastic:
                if not optional:
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
            self._not_taken(nbytes, live, peak)
            raise

    def release(self, slab: torch.Tensor) -> None:
        """Give a slab back. The caller drops its own references to it."""
        self._gives_back(slab)
        if self.poison:
            slab.fill_(POISON)
        self._unlock(slab.data_ptr())
        del self._live[slab.data_ptr()]
        self.budget.release(slab.numel())
        self.budget.rounded -= self._rounding(slab.numel())

    def cut(self, slab: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Give back all but the first `nbytes` of a slab, in place: for memory that is `divisible`.

        Returns:
            What is left, for the caller to refer to instead. Page-locked as before, unless the machine refuses.
        """
        assert self.divisible, "a slab that is whole or gone"
        address = slab.data_ptr()
        live, locked = self._live[address], self._locked.get(address)
        with torch.inference_mode(False):
            left = slab[:nbytes]
        self._unlock(address)
        self._live[address] = live._replace(slab=left)
        self.budget.release(slab.numel() - nbytes)
        if self.poison:
            slab[nbytes:].fill_(POISON)
        else:
            live.give_back_behind(nbytes)
        if locked is not None:
            with contextlib.suppress(TransferError, RuntimeWarning):
                self._lock(left, locked.device)
        return left

    def keep(self, owned: Iterable[torch.Tensor]) -> None:
        """After a change was cut short: these slabs have owners; all others go, and bytes are counted again."""
        mine = {slab.data_ptr(): slab for slab in owned}
        if self._unsure is not None:
            self._unlock(self._unsure[0])
        for address, live in list(self._live.items()):
            if address in mine:
                self._live[address] = live._replace(slab=mine[address])
                continue
            self._gives_back(live.slab)
            if self.poison:
                live.slab.fill_(POISON)
            self._unlock(address)
            del self._live[address]
        self.budget.used = sum([live.slab.numel() for live in self._live.values()])
        self.budget.rounded = sum([self._rounding(live.slab.numel()) for live in self._live.values()])

    def is_mapped(self, slab: torch.Tensor) -> bool:
        """Whether a program on a device can use the addresses of this slab."""
        return not self._on_host or slab.data_ptr() in self._locked

    def _rounding(self, nbytes: int) -> int:
        """Bytes that are taken with a slab and are not of it."""
        return sizing.segment_bytes(nbytes) - nbytes if self.in_segments else 0

    # Elastic budgets

    @property
    def shrunk(self) -> bool:
        """Whether the budget is less than what was given, for want of memory."""
        return self.budget.limit < self._given

    @property
    def limits(self) -> Limits:
        """The budget, now and as given."""
        return Limits(self.budget.limit, self._given)

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.budget.limit, self._given = limits

    def resize(self, limit: int) -> None:
        """Give another budget. The caller makes sure that no more is taken."""
        self._given = self.budget.limit = limit
        self._back_off = 0

    def recover(self) -> None:
        """Told of each step that takes memory: some steps later all that was given is allowed again."""
        if self.shrunk:
            self._back_off -= 1
            if self._back_off <= 0:
                self.budget.limit = self._given

    def allow(self, limit: int) -> bool:
        """Before anything is refused for what was missing once: allow `limit` bytes again, if so many were given.

        Whether that is more than before. The machine is asked again, and may refuse.
        """
        grown = self.budget.limit < limit <= self._given
        if grown:
            self.budget.limit = limit
        return grown

    def _not_taken(self, nbytes: int, live: _Live | None, peak: int) -> None:
        if live is not None:
            self._unlock(live.slab.data_ptr())
            self._live.pop(live.slab.data_ptr(), None)
        self.budget.release(nbytes)
        self.budget.peak = peak

    def _shrink(self, nbytes: int) -> None:
        """The machine did not have `nbytes` more: from now on less is asked of it, for asking in vain is slow."""
        was, self.budget.limit = self.budget.limit, self.budget.used + nbytes // 2
        self._back_off = BACK_OFF_STEPS
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.device} does not have the {was} bytes of the {self.budget.tier} budget: the cache goes on with "
                f"the {self.budget.used} that it holds, and asks again later. Give a smaller {self.budget.tier}_budget "
                "to leave room for the model's activations.",
                RuntimeWarning,
                stacklevel=2,
            )

    # Host memory

    def _empty(self, nbytes: int) -> _Live:
        return _Live(torch.empty(nbytes, dtype=torch.uint8, device=self.device), None, 0)

    def _map(self, nbytes: int) -> _Live:
        # Aligned to a huge page when it is as large; the surplus is address space only and never touched.
        align = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
        # Private: a forked child must not write into its parent's KV.
        region = mmap.mmap(-1, nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(region, dtype=torch.uint8)
        start = -whole.data_ptr() % align if align else 0
        # Reading is faster on huge pages, by a few percent. What is page-locked is touched at once in any case.
        if align and hasattr(mmap, "MADV_HUGEPAGE") and (self.lock_for is not None or not _huge_pages_are_slow()):
            # Only what is whole huge pages: another one at the end would be resident beyond what is counted.
            with contextlib.suppress(OSError):  # a kernel without them
                region.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE_PAGE * _HUGE_PAGE)
        return _Live(whole[start : start + nbytes], region, start)

    def _lock(self, slab: torch.Tensor, device: torch.device) -> None:
        self._unsure = slab.data_ptr(), device
        # Within the device's own context: elsewhere it would make one, some hundred MiB on a device nobody uses.
        with torch.cuda.device(device):
            for _ in range(2):
                code = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), _FOR_ALL_DEVICES)
                succeeded = _succeeded(code)
                if int(code) != _REGISTERED:
                    break
                # Memory that was there before, and that nobody gave back: the addresses are this slab's now.
                _succeeded(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))
        if succeeded:
            self._locked[slab.data_ptr()] = _Locked(device, slab.numel())
        self._unsure = None
        if succeeded:
            return
        if int(code) == _OUT_OF_MEMORY:
            raise TransferError(f"CUDA could not page-lock {slab.numel()} bytes of it (see `ulimit -l`)")
        what = f"{slab.numel()} bytes of host memory cannot be page-locked, for a part of them is already"
        if int(code) != _REGISTERED:  # else others may be locked
            self.lock_for = None
            what = "Host memory cannot be page-locked on this machine"
        warnings.warn(
            f"{what} (CUDA error {int(code)}): it serves as it is, and copies wait for each other.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _unlock(self, address: int) -> None:
        """Memory at this address is page-locked no longer, if it is."""
        locked = self._locked.get(address)
        if locked is not None:
            self._unsure = address, locked.device
            del self._locked[address]
        if self._unsure is None or self._unsure[0] != address:
            return
        # Refused only where it was not locked, or CUDA has failed for good, or was never begun (a forked child): the
        # error that the user has to see is another.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._unsure[1]):
            _succeeded(torch.cuda.cudart().cudaHostUnregister(address))
        self._unsure = None


class Limits(NamedTuple):
    """Bytes of a budget: now, and as it was given; see `SlabAllocator.shrunk`."""

    limit: int
    given: int


class _Live(NamedTuple):
    """A slab that is allocated: on the host, in a region of mapped memory, from a byte of it on."""

    slab: torch.Tensor
    region: mmap.mmap | None
    start: int

    def give_back_behind(self, nbytes: int) -> None:
        """Let the system have the pages behind the first `nbytes` of the slab; their addresses stay taken."""
        assert self.region is not None
        begin = -(-(self.start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self.region) and hasattr(mmap, "MADV_DONTNEED"):
            with contextlib.suppress(OSError):
                self.region.madvise(mmap.MADV_DONTNEED, begin, len(self.region) - begin)


class _Locked(NamedTuple):
    """Page-locked memory: in which device's context, and how much."""

    device: torch.device
    nbytes: int


@functools.cache
def _huge_pages_are_slow() -> bool:
    """To be touched for the first time. Looked up once in a process."""
    return system.lends_free_memory()


def _succeeded(code: Any) -> bool:
    """Whether a call of CUDA's runtime on the current device did; if not, torch does not hear of it any more."""
    if int(code) == 0:
        return True
    # CUDA keeps the error for whoever asks next, which is the check behind torch's next launch: let that be this one.
    with contextlib.suppress(Exception):
        torch.empty(1, device="cuda").fill_(1)
    return False
