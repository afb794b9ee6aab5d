"""A cache's memory is what its stats say: it does with less where the machine has less, and gives all of it back."""

from __future__ import annotations

import functools
import gc
import json
import mmap
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.nn.functional as F

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.memory.storage.slabs import BACK_OFF_STEPS, SlabAllocator
from kvtier.testing import held, with_doubles

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")


def test_a_step_that_a_shrunk_budget_would_refuse_is_tried_with_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt's activations took is there again for the next one."""
    cache = TieredKVCache(device_budget=10**6, host_budget=10**6, block_size=4)
    x = torch.randn(1, 2, 64, 8)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = SlabAllocator._map

        def mapped(slabs: SlabAllocator, nbytes: int) -> torch.Tensor:
            if slabs.elastic:
                raise MemoryError
            return real(slabs, nbytes)

        patch.setattr(SlabAllocator, "_map", mapped)
        for _ in range(20):
            with pytest.raises(BudgetError):
                cache.update(x, x, 0)
            cache.crop(0)
            if cache.stats.device.budget < 3000:
                break
    cache.update(x, x, 0)
    for _ in range(BACK_OFF_STEPS):
        keys, _ = cache.update(x, x, 0)
    assert cache.stats.device.budget == 10**6
    assert torch.equal(keys.dense(), torch.cat([x] * (BACK_OFF_STEPS + 1), 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host_attention", [True, False])
def test_a_device_that_is_full_before_its_budget_is_used_up_does_with_less(
    monkeypatch: pytest.MonkeyPatch, host_attention: bool, device: str
) -> None:
    """A prompt's activations take what was free when the budget was set."""
    layers, slot = 3, 2 * 2 * 8 * 4 * 16
    cache = TieredKVCache(
        device_budget=400 * slot, host_budget=2**22, block_size=16, host_attention=host_attention, write_through=1.0
    )
    rng = torch.Generator().manual_seed(0)
    expected: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    has = 120 * slot

    def allocated(slabs: SlabAllocator, real: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        if slabs.budget.used > has:  # only while it is asked: what is asked for is counted by now
            raise MemoryError if device == "cpu" else torch.OutOfMemoryError
        return real(*args, **options)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(60):
            for layer in range(layers):
                x = torch.randn(1, 2, 16, 8, generator=rng).to(device)
                views = cache.update(x, x, layer)
                if not step and not layer:
                    slabs = cache._forward.readers[0].device.slabs
                    assert slabs is not None
                    owner, name = (slabs, "_map") if device == "cpu" else (torch, "empty")
                    monkeypatch.setattr(owner, name, functools.partial(allocated, slabs, getattr(owner, name)))
                expected[layer].append(x)
                whole = torch.cat(expected[layer], 2)
                query = torch.randn(1, 2, 1, 8, generator=rng).to(device)
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


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("private", [True, False])
def test_what_is_dropped_under_a_copy_waits_for_it_and_leaves_nothing_page_locked(
    private: bool, monkeypatch: pytest.MonkeyPatch, page_locking: Any
) -> None:
    make = SlabAllocator.__init__

    def locking(slabs: SlabAllocator, device: torch.device, *args: Any, **kwargs: Any) -> None:
        make(slabs, device, *args, **(kwargs | {"lock_for": torch.device("cuda", 0)}))

    monkeypatch.setattr(SlabAllocator, "__init__", locking)
    engines: list[Any] = []

    def late(device: torch.device) -> Any:
        engines.append(held(0, eagerness=0.0, late=True)(device))
        return engines[-1]

    if private:
        cache = with_doubles(TieredKVCache(device_budget=8000, host_budget=10**6, block_size=4), late)
    else:
        memory = with_doubles(TieredMemory(device_budget=8000, host_budget=10**6), late)
        cache = TieredKVCache(block_size=4, memory=memory)
        del memory
    for layer in range(2):
        x = torch.randn(1, 2, 40, 8)
        cache.update(x, x, layer)
    assert page_locking.locked
    assert any(engine.in_flight() for engine in engines)
    del cache
    gc.collect()
    assert page_locking.locked == {}
    assert not any(engine.in_flight() for engine in engines)


# A cache gives its slabs back by reference counting alone: whoever waits for the garbage collector holds gigabytes.


def filled_cache(device_budget: int | None, device: str) -> TieredKVCache:
    """A cache with two layers, in use: prefilled, attended, forked, with views read and prefetches under way."""
    cache = TieredKVCache(device_budget=device_budget, host_budget=10**6, block_size=4)
    for count in (30, 1, 1, 5, 1):
        new = torch.randn(2, 2, count, 8, device=device)
        for layer in range(2):
            keys, values = cache.update(new, new, layer)
            F.scaled_dot_product_attention(torch.randn(2, 2, 1, 8, device=device), keys, values)
    cache.reorder_cache(torch.tensor([1, 1], device=device))
    cache.layers[0].keys.sum()
    return cache


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[mmap.mmap]]:
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("device_budget", [None, 14_000, 10**6])
@pytest.mark.parametrize("ending", ENDINGS)
def test_all_memory_is_given_back_without_the_garbage_collector(
    mapped: weakref.WeakSet[mmap.mmap], ending: str, device_budget: int | None, device: str
) -> None:
    if device == "cuda":
        filled_cache(device_budget, device)  # what torch's kernels allocate at their first use, they keep
        before = torch.cuda.memory_allocated()
    cache = filled_cache(device_budget, device)
    stats = cache.stats
    assert sum(map(len, mapped)) == stats.host.bytes + (stats.device.bytes if device == "cpu" else 0)
    assert stats.device.bytes + stats.host.bytes > 0
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before >= stats.device.bytes > 0
    ENDINGS[ending](cache)
    if ending == "delete":
        del cache
    assert not mapped
    if device == "cuda":
        assert torch.cuda.memory_allocated() == before
    if ending == "reset":
        assert cache.stats.device.bytes == cache.stats.host.bytes == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("device_budget", [None, 14_000, 10**6])
def test_a_view_keeps_the_memory_of_a_dropped_cache_and_the_last_one_gives_it_back(
    mapped: weakref.WeakSet[mmap.mmap], device_budget: int | None, device: str
) -> None:
    if device == "cuda":
        filled_cache(device_budget, device)  # as above
    before = torch.cuda.memory_allocated()
    cache = filled_cache(device_budget, device)
    view = cache.layers[0].keys
    values = cache.layers[0].values.dense()
    stats = cache.stats
    held, there = sum(map(len, mapped)), stats.device.bytes if device == "cuda" else 0
    assert held + there == stats.device.bytes + stats.host.bytes > 0
    del cache
    assert sum(map(len, mapped)) == held
    assert torch.cuda.memory_allocated() - before >= there
    assert view.dense().shape == values.shape
    assert torch.equal(view.dense(), values), "both were made of the same numbers"
    del view
    assert not mapped
    assert values.isfinite().all(), "what was made dense is the reader's own"
    del values
    assert torch.cuda.memory_allocated() == before


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
    result = forks.run(PROLOGUE + script, cwd=ROOT)
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
