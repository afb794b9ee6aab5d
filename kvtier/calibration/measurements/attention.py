"""How long attention takes on the host, by bytes, threads and queries, and on the device.

The calls read random blocks of one layer, in pools as caches have them, each time others, so that no cache of the CPU
serves them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier.attention.split import MAX_HOST_QUERIES
from kvtier.calibration.measurements import link, tiles
from kvtier.calibration.shapes import Shape
from kvtier.calibration.timing import in_turn
from kvtier.config import format_size
from kvtier.cpu import native
from kvtier.errors import KVTierError
from kvtier.kernels import paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.planning.fit import held_out_error
from kvtier.planning.hardware.predictors import Curve, HostAttention
from kvtier.transfer.copies import TensorCopy

#: Bytes of blocks that calls go around in, more than caches hold; the largest call reads a quarter.
ARENA = 256 * 2**20
#: Blocks that have to fit: two in the largest call.
_LEAST_BLOCKS = 8
#: Queries per sequence that are measured.
QUERIES = (1, 2, 4, 8, MAX_HOST_QUERIES)
#: Places in the arena that a call goes around in.
_PLACES = 64
#: Times that the host is measured with the link idle and with it busy, one next to the other.
_PAIRS = 4
#: The most that a busy link is taken to cost the host.
_MOST_LOST = 0.9
#: Of the time for all, the shares for queries, for a busy link, and for the way of a query to the host and back.
_QUERIES, _BUSY, _TRIP = 0.2, 0.15, 0.05

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What was measured.

    Attributes:
        threads: for each number of threads, (bytes, seconds) with one query.
        queries: (queries, seconds as a multiple of those of one query).
        lost: share of the rate that is lost while copies go on.
        round_trip: seconds for a query to the host and the result back.
    """

    threads: dict[int, Points]
    queries: list[tuple[float, float]]
    lost: float
    round_trip: float

    def fitted(self) -> HostAttention:
        """As a predictor."""
        curves = tuple((n, Curve.fit(points)) for n, points in sorted(self.threads.items()))
        return HostAttention(curves, tuple(self.queries), self.lost, self.round_trip)

    def error(self) -> float | None:
        """The mean absolute relative error for sizes left out of the fit, over all numbers of threads."""
        found = [x for points in self.threads.values() if (x := link.error_of(points)) is not None]
        return sum(found) / len(found) if found else None


class Blocks:
    """Blocks of random keys and values in host memory, and calls over them.

    Args:
        layout: of a block.
        group: query heads of a KV head.
        nbytes: of all blocks.
    """

    def __init__(self, layout: BlockLayout, group: int, nbytes: int) -> None:
        self.layout, self.group = layout, group
        self.pool = BlockPool(layout, SlabAllocator(torch.device("cpu"), Budget("host", nbytes)))
        self.pool.grow(nbytes // layout.nbytes)
        numbers = self.pool.slabs[0].data.view(layout.dtype)
        some = torch.randn(2**16, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(layout.dtype)
        for part in numbers.split(2**16):
            part.copy_(some[: part.numel()])
        self.shape = native.Shape(layout.dtype, layout.k_heads, layout.k_dim, layout.v_dim, layout.block_size)
        self.params = AttentionParams(layout.k_dim**-0.5)

    @property
    def count(self) -> int:
        """Of all blocks."""
        return self.pool.slots

    def call(self, blocks: int, threads: int, queries: int = 1) -> Callable[[], None]:
        """Attention over so many blocks, each time others."""
        layout, slots = self.layout, self.pool
        most, base = self.count - blocks, slots.slabs[0].base
        tables = []
        # Calls of other sizes go elsewhere: none finds what another one has just read.
        places = random.Random(blocks * 1009 + threads * 31 + queries)
        for _ in range(_PLACES):
            table = native.Sequences(1, layout.nbytes, keep=slots.slabs[0].data)
            table.set_runs(0, [(slots.address(base + places.randint(0, most)), 0, blocks)])
            table.set_length(blocks * layout.block_size)
            tables.append(table)
        sizes = (1, layout.k_heads * self.group, queries, layout.k_dim)
        generator = torch.Generator("cpu").manual_seed(1)
        query = torch.randn(sizes, generator=generator, device="cpu").to(layout.dtype)
        turn = itertools.cycle(tables)
        params = self.params if queries == 1 else AttentionParams(self.params.scale, causal=True)

        def attend() -> None:
            native.attend(self.shape, query, next(turn), params, threads=threads)

        return attend

    def sizes(self, most: int) -> list[int]:
        """Blocks to measure, rising by about the square root of two, to at most so many."""
        found = {max(round(2 ** (i / 2)), 1) for i in range(2 * math.ceil(math.log2(max(most, 2))) + 1)}
        return sorted(x for x in found if x <= max(most, 2))

    def close(self) -> None:
        """Give the memory back."""
        self.pool.close()


def thread_counts() -> list[int]:
    """Numbers of threads to measure: powers of two, and what torch uses, which is what a cache uses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(torch.get_num_threads(), 1)
    return sorted({*(2**i for i in range(cores.bit_length()) if 2**i <= most), most})


def layout_of(shape: Shape, block_size: int) -> BlockLayout:
    """The layout of a shape's blocks."""
    return BlockLayout(shape.kv_heads, shape.kv_heads, shape.k_dim, shape.v_dim, block_size, shape.dtype)


def measure_host(
    layout: BlockLayout, group: int, device: torch.device, seconds: float, *, nbytes: int | None = None
) -> HostTimes:
    """Time attention on the host.

    Args:
        layout: of blocks.
        group: query heads of a KV head.
        device: where queries come from.
        seconds: for all of it, about.
        nbytes: of the blocks that calls go around in; None: more than caches hold.

    Raises:
        KVTierError: there is no native library, it does not serve such blocks, or they are too large to be measured.
    """
    if not native.available():
        raise KVTierError("the native library is not used here, and torch in its place is not measured")
    room = ARENA if nbytes is None else nbytes
    if room < _LEAST_BLOCKS * layout.nbytes:
        raise KVTierError(
            f"blocks of {layout.block_size} tokens are too large to be measured: {_LEAST_BLOCKS} of them take more "
            f"than {format_size(room)}"
        )
    blocks = Blocks(layout, group, room)
    before = torch.get_num_threads()  # calls borrow torch's threads: it has to use as many
    try:
        rest = 1 - _QUERIES - _BUSY - _TRIP
        counts, sizes = thread_counts(), blocks.sizes(blocks.count // 4)
        cases = [(n, size) for n in counts for size in sizes]
        times = in_turn([_with_threads(blocks.call(size, n), n) for n, size in cases], rest * seconds)
        threads: dict[int, Points] = {n: [] for n in counts}
        for (n, size), x in zip(cases, times, strict=True):
            threads[n].append((float(size * layout.nbytes), x))
        queries = _queries(blocks, counts[-1], _QUERIES * seconds)
        lost = _lost(blocks, device, counts, _BUSY * seconds)
        trip = _round_trip(layout, group, device, _TRIP * seconds)
    finally:
        torch.set_num_threads(before)
        blocks.close()
    return HostTimes(threads, queries, lost, trip)


def _with_threads(call: Callable[[], None], threads: int) -> Callable[[], None]:
    def attend() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call()

    return attend


def _queries(blocks: Blocks, threads: int, seconds: float) -> list[tuple[float, float]]:
    """The multiple of one query's seconds, the mean over a smaller and a larger call."""
    sizes = sorted({max(blocks.count // 64, 1), max(blocks.count // 8, 1)})
    calls = [_with_threads(blocks.call(size, threads, n), threads) for size in sizes for n in QUERIES]
    times = in_turn(calls, seconds)
    rows = [times[i : i + len(QUERIES)] for i in range(0, len(times), len(QUERIES))]
    return [(float(n), sum(row[i] / row[0] for row in rows) / len(rows)) for i, n in enumerate(QUERIES)]


def _lost(blocks: Blocks, device: torch.device, counts: Sequence[int], seconds: float) -> float:
    """The share of the rate that copies in the background take.

    A copy on a CPU takes a core besides memory: there one thread less attends.
    """
    threads = counts[-1] if device.type != "cpu" else max(1, counts[-1] - 1)
    arena = link.Arena(device, min(link.ARENA, blocks.pool.nbytes))
    call = _with_threads(blocks.call(max(blocks.count // 8, 1), threads), threads)

    def timed(busy: bool) -> float:
        begin, end = link.busy_copies(arena, arena.slots * 4096 // 4)
        if busy:
            begin()
        try:
            return in_turn([call], seconds / (2 * _PAIRS))[0]
        finally:
            end()

    try:
        # Either comes first as often: what the machine's speed does meanwhile is in both.
        pairs = [{busy: timed(busy) for busy in (i % 2 == 1, i % 2 == 0)} for i in range(_PAIRS)]
    finally:
        arena.close()
    kept = statistics.median(pair[False] / pair[True] for pair in pairs)
    return min(max(1 - kept, 0.0), _MOST_LOST)


def _round_trip(layout: BlockLayout, group: int, device: torch.device, seconds: float) -> float:
    """Seconds for a query to the host and the result, in fp32, back to the device; 0.0 where that is the host."""
    if device.type != "cuda":
        return 0.0
    heads = layout.k_heads * group
    query = torch.zeros((1, heads, 1, layout.k_dim), dtype=layout.dtype, device=device)
    down = torch.empty_like(query, device="cpu", pin_memory=True)
    result = torch.zeros((1, heads, 1, layout.v_dim), dtype=torch.float32, device="cpu", pin_memory=True)
    up = torch.empty_like(result, device=device)

    def trip() -> None:
        TensorCopy(query, down).run(non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        TensorCopy(result, up).run(non_blocking=True)
        torch.cuda.current_stream(device).synchronize()

    return in_turn([trip], seconds)[0]


def measure_device(shape: Shape, block_size: int, device: torch.device) -> Points:
    """(bytes, seconds) of one query's attention on a CUDA device over blocks in no order, by the device's own clock.

    Raises:
        torch.OutOfMemoryError: an eighth of the free memory is too little to measure on.
    """
    layout = layout_of(shape, block_size)
    nbytes = min(ARENA, tiles.free_bytes(device) // 8)
    count = nbytes // layout.nbytes
    if count < 8:
        raise torch.OutOfMemoryError(f"{nbytes} bytes are too few to measure on.")
    generator = torch.Generator(device).manual_seed(0)
    memory = torch.empty(count * layout.nbytes // layout.dtype.itemsize, dtype=layout.dtype, device=device)
    memory.normal_(generator=generator)
    query = torch.empty((1, layout.k_heads * shape.group, 1, layout.k_dim), dtype=layout.dtype, device=device)
    query.normal_(generator=generator)
    params = AttentionParams(layout.k_dim**-0.5)
    order = torch.arange(count, device=device).view(1, count).flip(1) * layout.nbytes + memory.data_ptr()
    attend = paged.Prepared(layout)
    points: Points = []
    size = 1
    while size <= count:
        table = AddressTable(order[:, :size].contiguous())

        def call(table: AddressTable = table, size: int = size) -> None:
            attend(query, table, size * layout.block_size, params)

        call()
        times = sorted(tiles.device_seconds(call, 4) for _ in range(7))
        points.append((float(size * layout.nbytes), times[2]))
        size *= 2
    return points


def device_error(points: Points) -> float | None:
    """The mean absolute relative error of a curve for sizes left out of it."""
    return held_out_error(lambda some: Curve.fit(some).seconds, points)
