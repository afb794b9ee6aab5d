"""From how many short runs on one launch copies faster than the copy engine: both are timed, in either direction.

The copies are between scattered slots of a pool on the device and one on the host, as transfers make them; the Python
that issues them counts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvtier.errors import TransferError
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.transfer.copies import Copy
from kvtier.transfer.engine import Direction
from kvtier.transfer.launches import SIZES, Batch, Launches

#: Bytes at each end that a measurement takes, runs of one measured call at most, and seconds for all of it.
_BYTES, _RUNS, _SECONDS = 8 * 2**20, 64, 0.2
#: A launch takes programs of the device from others: it must be faster by this part.
_MARGIN = 0.1


def decide(runs: Sequence[int], engine: Sequence[float], one: Sequence[float], every: Sequence[float]) -> list[int]:
    """From times, the least runs of each size for which a launch pays; 0: it never does.

    A launch of `n` runs is taken to cost a fixed time and `n` times one for each. No size gets fewer than a smaller
    one, which makes up for more: so one time that was disturbed does not keep small runs from going together.

    Args:
        runs: for each size, how many were copied; at least 2.
        engine: seconds of as many copies by the copy engine.
        one, every: seconds of a launch of one run, and of a launch of all.

    Returns:
        for each size 0, or a number of at most `runs`: what was not seen to pay does not.
    """
    least = []
    for n, alone, first, together in zip(runs, engine, one, every, strict=True):
        each = max(together - first, 0.0) / (n - 1)
        gain = (1 - _MARGIN) * alone / n - each
        needed = math.ceil(max(first - each, 0.0) / gain) if gain > 0 else 0
        least.append(max(needed, 1) if gain > 0 and needed <= n else 0)
    for i in reversed(range(len(least) - 1)):
        if least[i + 1]:
            least[i] = min(least[i] or least[i + 1], least[i + 1])
    return least


def measure(device: torch.device, direction: Direction) -> list[int]:
    """For each of `launches.SIZES`, the least runs for which a launch pays; 0: it never does. See `decide`.

    Waits for the compute stream first; takes about a fifth of a second, and 8 MiB at each end meanwhile, outside the
    budgets of caches.

    Raises:
        BudgetError: there is no memory for it. TransferError: host memory cannot be page-locked.
    """
    compute, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        counts = [min(_RUNS, _BYTES // size) for size in SIZES]
        times = [_times(device, direction, compute, stream, size, n) for size, n in zip(SIZES, counts, strict=True)]
    return decide(counts, *zip(*times, strict=True))


def _times(
    device: torch.device,
    direction: Direction,
    compute: torch.cuda.Stream,
    stream: torch.cuda.Stream,
    size: int,
    count: int,
) -> tuple[float, ...]:
    """The shortest of some times: of `count` copies by the copy engine, of a launch of one, of a launch of all."""
    pools = scattered_pools(device, size, _BYTES)
    compute.synchronize()  # new memory may be what kernels in flight still use, and they would disturb the times
    launches = Launches(device)
    try:
        copies = scattered(*pools, count, direction)
        check_mapped(copies)

        def alone() -> Sequence[Batch]:
            for copy in copies:
                copy.run(non_blocking=True)
            return ()

        def together(some: Sequence[Copy]) -> Sequence[Batch]:
            batch = launches.prepare(some)
            launches.launch(batch)
            return (batch,)

        def seconds(call: Callable[[], Sequence[Batch]]) -> float:
            began = time.perf_counter()
            batches = call()
            stream.synchronize()
            took = time.perf_counter() - began
            launches.release(batches)
            return took

        calls: tuple[Callable[[], Sequence[Batch]], ...] = (
            alone,
            partial(together, copies[:1]),
            partial(together, copies),
        )
        for call in calls:  # what the first call compiles or allocates does not count
            seconds(call)
        shortest = [math.inf] * len(calls)
        until = time.perf_counter() + _SECONDS / len(SIZES)
        for turn in range(20):
            if turn > 1 and time.perf_counter() > until:
                break
            shortest = [min(x, seconds(call)) for x, call in zip(shortest, calls, strict=True)]
        return tuple(shortest)
    finally:
        stream.synchronize()
        for pool in pools:
            pool.close()


def scattered_pools(device: torch.device, nbytes: int, total: int) -> tuple[BlockPool, BlockPool]:
    """Pools of `total` bytes in slots of `nbytes` (a multiple of 64), on a device and in page-locked host memory.

    Raises:
        BudgetError: there is no memory for it.
    """
    layout = BlockLayout(1, 1, nbytes // 2, nbytes // 2, 1, torch.uint8)
    near = BlockPool(layout, SlabAllocator(device, Budget("device", total)))
    host = SlabAllocator(torch.device("cpu"), Budget("host", total), lock_for=device if device.type == "cuda" else None)
    far = BlockPool(layout, host)
    try:
        for pool in (near, far):
            pool.grow(total // nbytes)
    except BaseException:
        near.close()
        raise
    return near, far


def scattered(near: BlockPool, far: BlockPool, count: int, direction: Direction, seed: int = 0) -> list[Copy]:
    """Copies of `count` single slots between two pools of one slab each, in random order at both ends. Before they are
    launched, see `check_mapped`."""
    order = random.Random(seed)
    slots = [[p.slabs[0].base + i for i in order.sample(range(p.slots), count)] for p in (near, far)]
    ends = [(near, slots[0]), (far, slots[1])]
    (src, sources), (dst, targets) = reversed(ends) if direction is Direction.FETCH else ends
    return [Copy(src.span(a, 1), dst.span(b, 1)) for a, b in zip(sources, targets, strict=True)]


def check_mapped(copies: Sequence[Copy]) -> None:
    """Raise `TransferError` where a program on the device cannot use the addresses: CUDA would fail for good."""
    if not all(copy.source.mapped and copy.target.mapped for copy in copies):
        raise TransferError("Host memory cannot be page-locked here, so that no program on the device can copy it.")
