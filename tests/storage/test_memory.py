"""Laws of memory: asked for before it is taken, taken exactly, resident as counted, and given back at once."""

from __future__ import annotations

import functools
import gc
import json
import mmap
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvtier import BudgetError, TieredKVCache
from kvtier.storage.memory import PATIENCE, Budget, Memory, free_host_memory

HUGE_PAGE = 2 * 2**20
ROOT = Path(__file__).resolve().parents[2]
#: Whether a device tier is emulated in mapped memory.
ON_HOST = torch.get_default_device().type == "cpu"

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")


def test_a_budget_counts_what_is_taken_and_remembers_the_most() -> None:
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
    memory = Memory(torch.device("cpu"), Budget("host", 10_000))
    for nbytes in (10_001, 0, -5):
        assert memory.allocate(nbytes) is None
    assert not asked
    assert memory.budget.used == memory.budget.peak == 0
    slab = memory.allocate(10_000)
    assert slab is not None
    assert memory.allocate(1) is None
    assert asked == [10_000]


@pytest.mark.parametrize("nbytes", [1, 64, 4097, HUGE_PAGE - 64, HUGE_PAGE, HUGE_PAGE + 64, 5 * HUGE_PAGE + 192])
def test_a_slab_has_exactly_the_size_asked_for_and_large_ones_begin_at_a_huge_page(nbytes: int) -> None:
    memory = Memory(torch.device("cpu"), Budget("host", 2**30))
    with torch.inference_mode():
        slab = memory.allocate(nbytes)
    assert slab is not None
    assert (slab.dtype, slab.shape, slab.is_inference()) == (torch.uint8, (nbytes,), False)
    assert memory.budget.used == nbytes
    if nbytes >= HUGE_PAGE:
        assert slab.data_ptr() % HUGE_PAGE == 0
    slab.fill_(1)
    memory.release(slab)
    assert memory.budget.used == 0


def test_elastic_memory_asks_for_less_once_the_machine_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(torch.device("cpu"), Budget("device", 100_000), elastic=True)
    first = memory.allocate(30_000)
    assert first is not None
    real = memory._map

    def refuse(nbytes: int) -> torch.Tensor:
        if nbytes > 4_000:
            raise MemoryError
        return real(nbytes)

    monkeypatch.setattr(memory, "_map", refuse)
    with pytest.warns(RuntimeWarning, match=r"does not have the 100000 bytes of the device budget.*30000"):
        assert memory.allocate(20_000) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert [memory.allocate(n) is None for n in (10_000, 5_000, 2_500)] == [True, True, False]
    assert (memory.budget.limit, memory.budget.used) == (32_500, 32_500)
    assert memory.budget.peak == 32_500, "what was not there was not taken"
    assert memory.shrunk
    assert not memory.insist(100_001), "not more than was given"
    assert memory.insist(50_000)
    assert (memory.budget.limit, memory.shrunk) == (50_000, True)
    assert memory.allocate(10_000, luxury=True) is None
    assert memory.budget.limit == 50_000, "less may be there"
    assert memory.insist(100_000)
    assert not memory.shrunk


def test_a_step_that_a_shrunk_budget_would_refuse_is_tried_with_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt's activations took is there again for the next one."""
    cache = TieredKVCache(device_budget=10**6, host_budget=10**6, block_size=4)
    x = torch.randn(1, 2, 64, 8)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = Memory._map

        def mapped(memory: Memory, nbytes: int) -> torch.Tensor:
            if memory.elastic:
                raise MemoryError
            return real(memory, nbytes)

        patch.setattr(Memory, "_map", mapped)
        for _ in range(20):
            with pytest.raises(BudgetError):
                cache.update(x, x, 0)
            cache.crop(0)
            if cache.layers and cache._runtime.layers and cache.stats.device.budget < 3000:
                break
    cache.update(x, x, 0)
    for _ in range(PATIENCE):
        keys, _ = cache.update(x, x, 0)
    assert cache.stats.device.budget == 10**6
    assert torch.equal(keys.dense(), torch.cat([x] * (PATIENCE + 1), 2))


@pytest.mark.parametrize("host_attention", [True, False])
def test_a_device_that_is_full_before_its_budget_is_used_up_does_with_less(
    monkeypatch: pytest.MonkeyPatch, host_attention: bool
) -> None:
    """A prompt's activations take what was free when the budget was set."""
    layers, slot = 3, 2 * 2 * 8 * 4 * 16
    cache = TieredKVCache(
        device_budget=400 * slot, host_budget=2**22, block_size=16, host_attention=host_attention, write_through=1.0
    )
    rng = torch.Generator().manual_seed(0)
    expected: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    has = 120 * slot

    def allocated(near: Memory, real: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        if near.budget.used > has:  # only while it is asked: what is asked for is counted by now
            raise MemoryError if ON_HOST else torch.OutOfMemoryError
        return real(*args, **options)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(60):
            for layer in range(layers):
                x = torch.randn(1, 2, 16, 8, generator=rng)
                views = cache.update(x, x, layer)
                near = cache._runtime.layers[layer].tiers.near
                if not step and not layer:
                    owner, name = (near, "_map") if ON_HOST else (torch, "empty")
                    monkeypatch.setattr(owner, name, functools.partial(allocated, near, getattr(owner, name)))
                expected[layer].append(x)
                whole = torch.cat(expected[layer], 2)
                query = torch.randn(1, 2, 1, 8, generator=rng)
                torch.testing.assert_close(
                    F.scaled_dot_product_attention(query, *views), F.scaled_dot_product_attention(query, whole, whole)
                )
            cache.check_integrity()
    assert [w for w in said if "device_budget" in str(w.message)][1:] == [], "said once"
    stats = cache.stats
    assert stats.evictions > 0
    assert stats.device.bytes <= has
    assert stats.device.bytes <= stats.device.budget
    cache.close()


def test_memory_is_locked_in_the_context_of_the_device_that_uses_it(page_locking: Any) -> None:
    memory = Memory(torch.device("cpu"), Budget("host", 2**30), lock_for=torch.device("cuda", 3))
    small, large = memory.allocate(4096), memory.allocate(HUGE_PAGE + 64)
    assert small is not None
    assert large is not None
    assert page_locking.locked == {small.data_ptr(): 4096, large.data_ptr(): HUGE_PAGE + 64}
    assert memory.page_locked == HUGE_PAGE + 4160
    memory.release(small)
    assert not memory.is_locked(small)
    assert memory.is_locked(large)
    memory.release(large)
    assert page_locking.locked == {}
    assert page_locking.devices == [torch.device("cuda", 3)] * 4


def test_a_limit_on_locked_memory_is_a_budget_error_and_nothing_is_counted(page_locking: Any) -> None:
    page_locking.code = 2
    memory = Memory(torch.device("cpu"), Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    with pytest.raises(BudgetError, match=r"page-lock 4096 bytes.*ulimit -l"):
        memory.allocate(4096)
    assert (memory.budget.used, memory.page_locked) == (0, 0)
    page_locking.code = 0
    assert memory.allocate(4096) is not None


def test_where_nothing_can_be_locked_memory_serves_as_it_is_and_it_is_said_once(page_locking: Any) -> None:
    page_locking.code = 801
    memory = Memory(torch.device("cpu"), Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="cannot be page-locked on this machine .CUDA error 801.") as said:
        slabs = [memory.allocate(4096) for _ in range(3)]
    assert len(said) == 1
    assert memory.budget.used == 3 * 4096
    for slab in slabs:
        assert slab is not None
        assert not memory.is_locked(slab)
        memory.release(slab)
    assert memory.budget.used == 0


@pytest.mark.parametrize("how", ["refused", "raises"])
def test_a_device_that_failed_for_good_keeps_nobody_from_giving_memory_back(
    page_locking: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    memory = Memory(torch.device("cpu"), Budget("host", 2**30), lock_for=torch.device("cuda", 0))
    slab = memory.allocate(4096)
    assert slab is not None
    if how == "refused":
        page_locking.code = 700
    else:

        def dead(device: torch.device) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch.cuda, "device", dead)
    memory.release(slab)
    assert (memory.budget.used, memory.page_locked) == (0, 0)


def test_a_kernel_without_huge_pages_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Region)
    memory = Memory(torch.device("cpu"), Budget("host", 2**30))
    slab = memory.allocate(HUGE_PAGE)
    assert slab is not None
    memory.release(slab)


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_what_the_machine_does_not_have_is_a_budget_error_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    memory = Memory(torch.device("cpu"), Budget("host", 2**30))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(BudgetError, match="host_budget") as raised:
        memory.allocate(2**20)
    assert (raised.value.tier, raised.value.budget, raised.value.needed) == ("host", 2**30, 2**20)
    assert memory.budget.used == 0


def test_free_host_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    import os

    assert 0 < free_host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# A cache gives its slabs back by reference counting alone: whoever waits for the garbage collector holds gigabytes.


def filled_cache(device_budget: int | None) -> TieredKVCache:
    """A cache with two layers, in use: prefilled, attended, forked, with views read and prefetches under way."""
    cache = TieredKVCache(device_budget=device_budget, host_budget=10**6, block_size=4)
    for count in (30, 1, 1, 5, 1):
        new = torch.randn(2, 2, count, 8)
        for layer in range(2):
            keys, values = cache.update(new, new, layer)
            F.scaled_dot_product_attention(torch.randn(2, 2, 1, 8), keys, values)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.layers[0].keys.sum()
    return cache


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[mmap.mmap]:
    """Every live memory map made since: a map lives as long as any tensor over it."""
    live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
    real = mmap.mmap

    def tracked(*args: int, **kwargs: int) -> mmap.mmap:
        region = real(*args, **kwargs)
        live.add(region)
        return region

    monkeypatch.setattr(mmap, "mmap", tracked)
    gc.collect()
    gc.disable()
    yield live
    gc.enable()


ENDINGS: dict[str, Callable[[TieredKVCache], None]] = {
    "close": lambda cache: cache.close(),
    "reset": lambda cache: cache.reset(),
    "exit": lambda cache: cache.__exit__(),
    "delete": lambda cache: None,
}


@pytest.mark.parametrize("device_budget", [None, 14_000, 10**6])
@pytest.mark.parametrize("ending", ENDINGS)
def test_all_memory_is_given_back_without_the_garbage_collector(
    mapped: weakref.WeakSet[mmap.mmap], ending: str, device_budget: int | None
) -> None:
    if not ON_HOST:
        filled_cache(device_budget)  # what torch's kernels allocate at their first use, they keep
        before = torch.cuda.memory_allocated()
    cache = filled_cache(device_budget)
    stats = cache.stats
    assert sum(map(len, mapped)) == stats.host.bytes + (stats.device.bytes if ON_HOST else 0)
    assert stats.device.bytes + stats.host.bytes > 0
    if not ON_HOST:
        assert torch.cuda.memory_allocated() - before >= stats.device.bytes > 0
    ENDINGS[ending](cache)
    if ending == "delete":
        del cache
    assert not mapped
    if not ON_HOST:
        assert torch.cuda.memory_allocated() == before
    if ending == "reset":
        assert cache.stats.device.bytes == cache.stats.host.bytes == 0


@pytest.mark.parametrize("device_budget", [None, 14_000, 10**6])
def test_a_view_that_outlives_its_cache_holds_no_memory_of_it(
    mapped: weakref.WeakSet[mmap.mmap], device_budget: int | None
) -> None:
    cache = filled_cache(device_budget)
    view, read = cache.layers[0].keys, cache.layers[1].keys
    total = read.sum()
    del cache
    assert not mapped
    assert read.sum() == total, "what was made dense before is the reader's own"
    assert view.shape == read.shape


# Processes: what is counted is what the system sees.

PROLOGUE = """
import json, os, sys
import torch
from kvtier import TieredKVCache

def resident(field="VmRSS"):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

torch.set_num_threads(1)
"""

HOST_CACHE = """
GIB = 2**30
chunk = torch.ones(1, 8, 256, 64)            # 1 MiB of keys and values per layer
cache = TieredKVCache(host_budget=2 * GIB, block_size=64)
for layer in range(4):
    cache.update(chunk, chunk, layer)        # everything is loaded that will be
before, peak_before = resident(), resident("VmHWM")
while cache.stats.host.bytes < 0.93 * GIB:
    for layer in range(4):
        cache.update(chunk, chunk, layer)
full, counted, peak = resident(), cache.stats.host.bytes, resident("VmHWM")
cache.close()
print(json.dumps(dict(before=before, full=full, counted=counted, peak=peak, after=resident())))
"""

FORKED = """
cache = TieredKVCache(host_budget=2**24, block_size=4)
first = torch.arange(12.0).view(1, 1, 6, 2)
for layer in range(2):
    cache.update(first, first, layer)
child = os.fork()
if child == 0:
    cache.crop(-5)
    for layer in range(2):
        cache.update(-first, -first, layer)
    os._exit(0)
os.waitpid(child, 0)
more = torch.full((1, 1, 1, 2), 7.0)
held = [cache.update(more, more, layer) for layer in range(2)]
right = all(torch.equal(k.dense(), torch.cat([first, more], 2)) for k, v in held)
print(json.dumps(dict(right=right)))
"""


def run(script: str) -> dict:
    """What a script printed last, as JSON, from a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@linux
def test_the_process_grows_and_shrinks_by_what_the_cache_counts_within_a_tenth() -> None:
    seen = run(HOST_CACHE)
    assert seen["counted"] > 0.9 * 2**30
    grown, given_back = seen["full"] - seen["before"], seen["full"] - seen["after"]
    assert 0.9 * seen["counted"] < grown < 1.1 * seen["counted"]
    assert 0.9 * seen["counted"] < given_back
    assert seen["peak"] - seen["before"] < 1.1 * seen["counted"], "growth must not copy what exists"


@linux
def test_a_forked_child_does_not_write_into_the_memory_of_its_parent() -> None:
    assert run(FORKED)["right"]
