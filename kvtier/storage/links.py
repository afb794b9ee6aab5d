"""What a transfer moves, and how: runs of blocks one by one by the copy engine, or many short ones by one launch.

A copy costs the CPU some microseconds, whatever it moves, and the copy engine goes idle between short ones. So short
runs go together: one launch, on the transfer's own stream, reads and writes page-locked host memory by address. Up to
which size and from how many runs on that pays is measured once for each machine and direction.
"""

from __future__ import annotations

import bisect
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvtier import measured
from kvtier.kernels import copies as kernels
from kvtier.kernels import launch
from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import BlockPool
from kvtier.types import Direction

#: Bytes of runs that are measured; a run counts as one of the next size. Longer ones go by the copy engine.
SIZES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20)
#: For each of `SIZES`, the least runs for which a launch pays where nothing is measured; 0: it never does. A copy costs
#: the CPU some 6 us, in which a link of 25 GB/s carries 150 KiB; a launch costs ten times that, whatever it moves.
ESTIMATE = (16, 16, 16, 0, 0)
NEVER = (0,) * len(SIZES)
#: Fewer short runs than this are not looked at: no launch pays for them.
FEWEST = 4

#: Bytes at each end that a measurement takes, runs of one measured call at most, and seconds for all of it.
_BYTES, _RUNS, _SECONDS = 8 * 2**20, 64, 0.2
#: A launch takes programs of the device from others: it must be faster by this part.
_MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Copy:
    """`count` neighbouring slots from one pool to as many neighbouring slots of another of the same layout."""

    src: BlockPool
    src_slot: int
    dst: BlockPool
    dst_slot: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.count * self.src.layout.nbytes

    def run(self, non_blocking: bool = False) -> None:
        """Move the bytes, on the current stream."""
        self.dst.bytes(self.dst_slot, self.count).copy_(
            self.src.bytes(self.src_slot, self.count), non_blocking=non_blocking
        )

    def retain(self) -> None:
        """Protect both ends."""
        for pool, first in ((self.src, self.src_slot), (self.dst, self.dst_slot)):
            for slot in range(first, first + self.count):
                pool.retain(slot)

    def release(self) -> None:
        """Drop the protection."""
        for pool, first in ((self.src, self.src_slot), (self.dst, self.dst_slot)):
            for slot in range(first, first + self.count):
                pool.release(slot)

    def references(self, pool: BlockPool) -> int:
        """How many references on slots of `pool` this copy holds."""
        return self.count * ((self.src is pool) + (self.dst is pool))

    def destination(self) -> torch.Tensor:
        """The bytes that it writes."""
        return self.dst.bytes(self.dst_slot, self.count)


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One tensor into another of the same shape. The caller keeps both until the transfer has ended."""

    source: torch.Tensor
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.target.nbytes

    def run(self, non_blocking: bool = False) -> None:
        """Move the bytes, on the current stream."""
        self.target.copy_(self.source, non_blocking=non_blocking)

    def retain(self) -> None:
        """Nothing to count: the tensors are the caller's."""

    def release(self) -> None:
        """Nothing to count."""

    def references(self, pool: BlockPool) -> int:
        """None."""
        return 0

    def destination(self) -> torch.Tensor:
        """What it writes."""
        return self.target


def join(src: BlockPool, src_slots: Sequence[int], dst: BlockPool, dst_slots: Sequence[int]) -> list[Copy]:
    """Pair slots one to one and join pairs that are neighbours at both ends into one copy each."""
    copies: list[Copy] = []
    start = 0
    for i in range(1, len(src_slots) + 1):
        if i == len(src_slots) or src_slots[i] != src_slots[i - 1] + 1 or dst_slots[i] != dst_slots[i - 1] + 1:
            copies.append(Copy(src, src_slots[start], dst, dst_slots[start], i - start))
            start = i
    return copies if src_slots else []


# Launches


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks that one launch copies.

    Attributes:
        addresses: `[2, at least count]` int64, sources and targets, where the device can read them.
        count: of blocks.
        nbytes: of each.
    """

    addresses: torch.Tensor
    count: int
    nbytes: int


class Launches:
    """Says which copies of a transfer go together, and launches them.

    The addresses lie in page-locked memory that the device reads while the launch runs. It is kept, and used again when
    the owner of the transfer says by `release` that it has ended: nothing is allocated but for the first transfers.
    """

    def __init__(self, device: torch.device) -> None:
        measured.wanted()  # a wrong setting is told of here, not in the middle of a transfer
        self.device = launch.numbered(device)
        self._least: dict[Direction, Sequence[int]] = {}
        self._spare: list[torch.Tensor] = []

    def divide(
        self, copies: Sequence[Copy | TensorCopy], direction: Direction
    ) -> tuple[list[Copy | TensorCopy], list[list[Copy]]]:
        """Which copies are made one by one, and which together: each list by one launch.

        The first call that might launch measures whether that pays, and waits for the device. While a CUDA graph is
        captured nothing goes together: a replay would read addresses that are no longer there.
        """
        alone: list[Copy | TensorCopy] = list(copies)
        if direction not in (Direction.FETCH, Direction.WRITE_BACK) or launch.capturing(self.device):
            return alone, []
        short = [copy for copy in copies if isinstance(copy, Copy) and copy.nbytes <= SIZES[-1]]
        if len(short) < FEWEST:
            return alone, []
        if direction not in self._least:
            self._least[direction] = least_runs(self.device, direction)
        least = self._least[direction]
        alike: dict[int, list[Copy]] = {}
        for copy in short:
            if least[_place(copy.nbytes)] and self._reaches(copy.src, copy.src_slot, copy.dst, copy.dst_slot):
                alike.setdefault(copy.src.layout.nbytes, []).append(copy)
        together = [group for group in alike.values() if pays([copy.nbytes for copy in group], least)]
        if together:
            gone = {id(copy) for group in together for copy in group}
            alone = [copy for copy in copies if id(copy) not in gone]
        return alone, together

    def prepare(self, copies: Sequence[Copy]) -> Batch:
        """Write down the addresses of some blocks, all of the same size. The CPU does that, at once."""
        nbytes = copies[0].src.layout.nbytes
        rows: list[list[int]] = [[], []]
        for copy in copies:
            for row, first in zip(
                rows, (copy.src.address(copy.src_slot), copy.dst.address(copy.dst_slot)), strict=True
            ):
                row.extend(range(first, first + copy.count * nbytes, nbytes))
        count = len(rows[0])
        addresses = self._take(count)
        addresses[:, :count] = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return Batch(addresses, count, nbytes)

    def launch(self, batch: Batch) -> None:
        """Copy the blocks of a batch, on the current stream."""
        sources, targets = batch.addresses[:, : batch.count].unbind()
        kernels.copy_blocks(sources, targets, batch.nbytes, device=self.device)

    def release(self, batches: Sequence[Batch]) -> None:
        """The launches of some batches have ended, or never begun: nobody reads their addresses any more."""
        self._spare.extend(batch.addresses for batch in batches)

    def close(self) -> None:
        """Give up the memory of addresses. Nothing is under way."""
        self._spare.clear()

    def _take(self, count: int) -> torch.Tensor:
        """Memory for `count` sources and targets that no launch reads, the smallest that there is."""
        self._spare.sort(key=torch.Tensor.numel)
        for i, addresses in enumerate(self._spare):
            if addresses.shape[1] >= count:
                return self._spare.pop(i)
        if self._spare:
            self._spare.pop()  # make room for one that serves them all
        return self._make(max(256, launch.power_of_two(count)))

    def _make(self, count: int) -> torch.Tensor:
        with torch.inference_mode(False):  # later calls may be outside of it
            return torch.empty((2, count), dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")

    def _reaches(self, src: BlockPool, src_slot: int, dst: BlockPool, dst_slot: int) -> bool:
        """Whether a program on the device can use the addresses of both."""
        for pool, slot in ((src, src_slot), (dst, dst_slot)):
            data = pool.slab(slot).data
            if data.device != self.device and not pool.memory.is_locked(data):
                return False
        return True


# When a launch pays


def pays(sizes: Sequence[int], least: Sequence[int]) -> bool:
    """Whether a launch pays for runs of these sizes, in bytes, of which each alone could go by one.

    If `n` runs of a size are the least that make up for the fixed cost of a launch, each makes up for an `n`-th of it.
    """
    return sum(1 / least[_place(nbytes)] for nbytes in sizes) >= 1 - 1e-9


def _place(nbytes: int) -> int:
    return bisect.bisect_left(SIZES, nbytes)


def least_runs(device: torch.device, direction: Direction) -> Sequence[int]:
    """For each of `SIZES`, the least runs for which a launch pays on a device; 0: it never does.

    Measured when this machine is first asked, `ESTIMATE` with KVTIER_MEASURED=off, never without Triton.
    """
    if not launch.available(device):
        return NEVER
    if not measured.wanted():
        return ESTIMATE
    name = f"block copies, {direction}: least runs of {', '.join(map(str, SIZES))} bytes for a launch"
    try:
        return measured.remembered(launch.machine(device), name, _valid, partial(measure, device, direction))
    except Exception as error:  # there is no memory for it, or whatever Triton and its driver raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"kvtier copies scattered blocks one by one, slower: a trial to copy them together failed ({reason[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return NEVER


def _valid(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(SIZES) and all(type(n) is int and n >= 0 for n in value)


def decide(runs: Sequence[int], engine: Sequence[float], one: Sequence[float], many: Sequence[float]) -> list[int]:
    """From times, the least runs of each size for which a launch pays; 0: it never does.

    A launch of `n` runs is taken to cost a fixed time and `n` times one for each. No size gets fewer than a smaller
    one, which makes up for more: so one time that was disturbed does not keep small runs from going together.

    Args:
        runs: for each size, how many were copied; at least 2.
        engine: seconds of as many copies by the copy engine.
        one, many: seconds of a launch of one run, and of as many.

    Returns:
        for each size 0, or a number of at most `runs`: what was not seen to pay does not.
    """
    least = []
    for n, alone, first, together in zip(runs, engine, one, many, strict=True):
        each = max(together - first, 0.0) / (n - 1)
        gain = (1 - _MARGIN) * alone / n - each
        needed = math.ceil(max(first - each, 0.0) / gain) if gain > 0 else 0
        least.append(max(needed, 1) if gain > 0 and needed <= n else 0)
    for i in reversed(range(len(least) - 1)):
        if least[i + 1]:
            least[i] = min(least[i] or least[i + 1], least[i + 1])
    return least


def measure(device: torch.device, direction: Direction) -> list[int]:
    """Time copies between scattered slots of two pools, the Python that issues them included; see `decide`.

    Waits for the compute stream first; takes about a fifth of a second, and 8 MiB at each end meanwhile.

    Raises:
        BudgetError: there is no memory for it.
    """
    torch.cuda.current_stream(device).synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        counts = [min(_RUNS, _BYTES // size) for size in SIZES]
        times = [_times(device, direction, stream, size, n) for size, n in zip(SIZES, counts, strict=True)]
    return decide(counts, *zip(*times, strict=True))


def _times(
    device: torch.device, direction: Direction, stream: torch.cuda.Stream, size: int, count: int
) -> tuple[float, ...]:
    """The shortest of some times: of `count` copies by the copy engine, of a launch of one, of a launch of all."""
    pools = scattered_pools(device, size, _BYTES)
    launches = Launches(device)
    try:
        copies = scattered(*pools, count, direction)

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
        for call in calls:  # what is compiled or allocated at the first time does not count
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
    """Pools of `total` bytes in slots of `nbytes` (a multiple of 64) on a device and, as its copies need it, the host.

    Raises:
        BudgetError: there is no memory for it.
    """
    layout = BlockLayout(1, 1, nbytes // 2, nbytes // 2, 1, torch.uint8)
    near = BlockPool(layout, Memory(device, Budget("device", total)))
    host = Memory(torch.device("cpu"), Budget("host", total), lock_for=device if device.type == "cuda" else None)
    far = BlockPool(layout, host)
    try:
        for pool in (near, far):
            pool.grow(total // nbytes)
    except BaseException:
        near.close()
        raise
    return near, far


def scattered(near: BlockPool, far: BlockPool, count: int, direction: Direction, seed: int = 0) -> list[Copy]:
    """Copies of `count` single slots between two pools of one slab each, in random order at both ends."""
    order = random.Random(seed)
    slots = [[p.slabs[0].base + i for i in order.sample(range(p.slots), count)] for p in (near, far)]
    ends = [(near, slots[0]), (far, slots[1])]
    (src, sources), (dst, targets) = reversed(ends) if direction is Direction.FETCH else ends
    return [Copy(src, a, dst, b, 1) for a, b in zip(sources, targets, strict=True)]
