"""`Budget` and `SlabAllocator`: bytes are counted before they are taken, taken exactly, and given back at once."""

from __future__ import annotations

import contextlib
import mmap
import warnings
from typing import Any

import pytest
import torch

from kvtier import BudgetError
from kvtier.memory.storage import slabs as slabs_module
from kvtier.memory.storage.slabs import BACK_OFF_STEPS, Budget, SlabAllocator

HUGE_PAGE = 2 * 2**20
CPU = torch.device("cpu")


def test_a_budget_counts_what_is_taken_and_the_most_that_was() -> None:
    budget = Budget("host", 100)
    assert budget.reserve(60)
    assert not budget.reserve(41), "one byte too many"
    assert (budget.used, budget.free, budget.peak) == (60, 40, 60)
    assert budget.reserve(40)
    budget.release(90)
    assert (budget.used, budget.free, budget.peak) == (10, 90, 100)
    with pytest.raises(AssertionError):
        budget.release(11)


def test_a_budget_refuses_before_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *args, **kw: asked.append(args[1]) or real(*args, **kw))
    slabs = SlabAllocator(CPU, Budget("host", 10_000))
    for nbytes in (10_001, 0, -5):
        assert slabs.allocate(nbytes) is None
    assert not asked
    assert slabs.budget.used == slabs.budget.peak == 0
    slab = slabs.allocate(10_000)
    assert slab is not None
    assert slabs.allocate(1) is None
    assert asked == [10_000]


@pytest.mark.parametrize("nbytes", [1, 64, 4097, HUGE_PAGE - 64, HUGE_PAGE, HUGE_PAGE + 64, 5 * HUGE_PAGE + 192])
def test_a_slab_has_exactly_the_size_asked_for_and_large_ones_begin_at_a_huge_page(nbytes: int) -> None:
    slabs = SlabAllocator(CPU, Budget("host", 2**30))
    with torch.inference_mode():
        slab = slabs.allocate(nbytes)
    assert slab is not None
    assert (slab.dtype, slab.shape, slab.is_inference()) == (torch.uint8, (nbytes,), False)
    assert slabs.budget.used == nbytes
    if nbytes >= HUGE_PAGE:
        assert slab.data_ptr() % HUGE_PAGE == 0
    slab.fill_(1)
    slabs.release(slab)
    assert slabs.budget.used == 0


def test_elastic_memory_asks_for_less_once_the_machine_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = SlabAllocator(CPU, Budget("device", 100_000), elastic=True)
    first = slabs.allocate(30_000)
    assert first is not None
    real = slabs._map

    def refuse(nbytes: int) -> torch.Tensor:
        if nbytes > 4_000:
            raise MemoryError
        return real(nbytes)

    monkeypatch.setattr(slabs, "_map", refuse)
    with pytest.warns(RuntimeWarning, match=r"does not have the 100000 bytes of the device budget.*30000"):
        assert slabs.allocate(20_000) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert [slabs.allocate(n) is None for n in (10_000, 5_000, 2_500)] == [True, True, False]
    assert (slabs.budget.limit, slabs.budget.used) == (32_500, 32_500)
    assert slabs.budget.peak == 32_500, "what was not there was not taken"
    assert slabs.shrunk
    assert not slabs.allow(100_001), "not more than was given"
    assert slabs.allow(50_000)
    assert (slabs.budget.limit, slabs.shrunk) == (50_000, True)
    assert slabs.allocate(10_000, optional=True) is None
    assert slabs.budget.limit == 50_000, "less may be there"
    assert slabs.allow(100_000)
    assert not slabs.shrunk


def test_what_the_machine_lacked_once_is_asked_for_again_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise MemoryError

    slabs = SlabAllocator(CPU, Budget("device", 100_000), elastic=True)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.warns(RuntimeWarning, match="device budget"):
            assert slabs.allocate(20_000) is None
    for _ in range(BACK_OFF_STEPS - 1):
        slabs.recover()
        assert slabs.budget.limit == 10_000
    slabs.recover()
    assert (slabs.budget.limit, slabs.shrunk) == (100_000, False)


def test_another_budget_replaces_what_was_given() -> None:
    slabs = SlabAllocator(CPU, Budget("device", 100_000), elastic=True)
    slabs.resize(50_000)
    assert not slabs.allow(50_001)
    assert slabs.allocate(50_001) is None
    slabs.resize(200_000)
    assert not slabs.shrunk
    assert slabs.allocate(150_000) is not None


def test_memory_is_locked_in_the_context_of_the_device_that_uses_it(page_locking: Any) -> None:
    slabs = SlabAllocator(CPU, Budget("host", 2**30), lock_for=torch.device("cuda", 3))
    small, large = slabs.allocate(4096), slabs.allocate(HUGE_PAGE + 64)
    assert small is not None
    assert large is not None
    assert page_locking.locked == {small.data_ptr(): 4096, large.data_ptr(): HUGE_PAGE + 64}
    assert slabs.page_locked == HUGE_PAGE + 4160
    slabs.release(small)
    assert not slabs.is_mapped(small)
    assert slabs.is_mapped(large)
    slabs.release(large)
    assert page_locking.locked == {}
    assert page_locking.devices == [torch.device("cuda", 3)] * 4


def test_a_limit_on_locked_memory_is_a_budget_error_and_nothing_is_counted(page_locking: Any) -> None:
    page_locking.code = 2
    slabs = SlabAllocator(CPU, Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    with pytest.raises(BudgetError, match=r"page-lock 4096 bytes.*ulimit -l"):
        slabs.allocate(4096)
    assert (slabs.budget.used, slabs.page_locked) == (0, 0)
    page_locking.code = 0
    assert slabs.allocate(4096) is not None


def test_where_nothing_can_be_locked_memory_serves_as_it_is_and_it_is_said_once(page_locking: Any) -> None:
    page_locking.code = 801
    slabs = SlabAllocator(CPU, Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="cannot be page-locked on this machine .CUDA error 801.") as said:
        found = [slabs.allocate(4096) for _ in range(3)]
    assert len(said) == 1
    assert slabs.budget.used == 3 * 4096
    for slab in found:
        assert slab is not None
        assert not slabs.is_mapped(slab)
        slabs.release(slab)
    assert slabs.budget.used == 0


@pytest.mark.parametrize("stays", [False, True])
def test_a_registration_that_nobody_gave_back_keeps_no_other_memory_from_being_locked(
    page_locking: Any, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    real, refused = page_locking.cudaHostRegister, list[int]()

    def register(address: int, nbytes: int, flags: int) -> int:
        """The first addresses are taken, by a registration that goes with `cudaHostUnregister` or stays."""
        if not refused:
            page_locking.locked[address] = 1
        if address in page_locking.locked or (stays and address in refused):
            refused.append(address)
            return 712
        return int(real(address, nbytes, flags))

    monkeypatch.setattr(page_locking, "cudaHostRegister", register)
    slabs = SlabAllocator(CPU, Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="a part of them is already") if stays else contextlib.nullcontext():
        first, second = slabs.allocate(4096), slabs.allocate(4096)
    assert first is not None
    assert second is not None
    assert slabs.is_mapped(first) is not stays
    assert slabs.is_mapped(second)
    assert len(refused) == 1 + stays
    for slab in (first, second):
        slabs.release(slab)
    assert page_locking.locked == {}


@pytest.mark.parametrize("how", ["refused", "raises"])
def test_a_device_that_failed_for_good_keeps_nobody_from_giving_memory_back(
    page_locking: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    slabs = SlabAllocator(CPU, Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    slab = slabs.allocate(4096)
    assert slab is not None
    if how == "refused":
        page_locking.code = 700
    else:

        def dead(device: torch.device) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "device", dead)
    slabs.release(slab)
    assert (slabs.budget.used, slabs.page_locked) == (0, 0)


def test_a_kernel_without_huge_pages_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Region)
    monkeypatch.setattr(slabs_module, "_huge_pages_are_slow", lambda: False)
    slabs = SlabAllocator(CPU, Budget("host", 2**30))
    slab = slabs.allocate(HUGE_PAGE)
    assert slab is not None
    slabs.release(slab)


@pytest.mark.parametrize("slow", [False, True])
def test_huge_pages_are_asked_for_where_they_are_not_slow_to_get(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    asked: list[int] = []

    class Region(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Region)
    monkeypatch.setattr(slabs_module, "_huge_pages_are_slow", lambda: slow)
    slabs = SlabAllocator(CPU, Budget("host", 2**30))
    slab = slabs.allocate(HUGE_PAGE)
    assert slab is not None
    assert asked == ([] if slow else [mmap.MADV_HUGEPAGE])
    slabs.release(slab)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_what_the_machine_does_not_have_is_a_budget_error_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    slabs = SlabAllocator(CPU, Budget("host", 2**30))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(BudgetError, match="host_budget") as raised:
        slabs.allocate(2**20)
    assert (raised.value.tier, raised.value.budget, raised.value.needed) == ("host", 2**30, 2**20)
    assert slabs.budget.used == 0
