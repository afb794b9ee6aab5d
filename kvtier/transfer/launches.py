"""Which copies of a transfer go by the copy engine one by one, and which go together by one launch.

A copy costs the CPU some microseconds, whatever it moves, and the copy engine goes idle between short ones. So short
runs go together: one launch, on the transfer's own stream, reads and writes page-locked host memory by address. Up to
which size and from how many runs on that pays is read from the machine's profile (`kvtier.calibrate`); without one,
`ESTIMATE` serves.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from kvtier import profile
from kvtier.kernels import copies as kernels
from kvtier.kernels import launch
from kvtier.transfer.copies import Copy, TensorCopy
from kvtier.transfer.engine import Direction

#: Bytes of runs that are measured; a run counts as one of the next size. Longer ones go by the copy engine.
SIZES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20)
#: For each of `SIZES`, the least runs for which a launch pays where nothing is measured; 0: it never does. A copy costs
#: the CPU some 6 us, in which a link of 25 GB/s carries 150 KiB; a launch costs ten times that, whatever it moves.
ESTIMATE = (16, 16, 16, 0, 0)
NEVER = (0,) * len(SIZES)
#: Fewer short runs than this are not looked at: no launch pays for them.
FEWEST = 4


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

    The addresses are in page-locked memory that the device reads while the launch runs. It is kept, and used again when
    the owner of the transfer says by `release` that it has ended: nothing is allocated but for the first transfers.
    """

    def __init__(self, device: torch.device) -> None:
        profile.enabled()  # a wrong setting is an error here, not in the middle of a transfer
        self.device = launch.numbered(device)
        self._least: dict[Direction, Sequence[int]] = {}
        self._spare: list[torch.Tensor] = []

    def divide(
        self, copies: Sequence[Copy | TensorCopy], direction: Direction
    ) -> tuple[list[Copy | TensorCopy], list[list[Copy]]]:
        """Which copies are made one by one, and which together: each list by one launch.

        While a CUDA graph is captured nothing goes together: a replay would read addresses that are no longer there.
        """
        alone: list[Copy | TensorCopy] = list(copies)
        if len(alone) < FEWEST or direction not in (Direction.FETCH, Direction.WRITE_BACK):
            return alone, []
        short = [copy for copy in copies if isinstance(copy, Copy) and copy.nbytes <= SIZES[-1]]
        if len(short) < FEWEST or launch.capturing(self.device):
            return alone, []
        least = self._least.get(direction)
        if least is None:
            least = self._least[direction] = least_runs(self.device, direction)
        alike: dict[int, list[Copy]] = {}
        for copy in short:
            if least[_place(copy.nbytes)] and copy.source.mapped and copy.target.mapped:
                alike.setdefault(copy.source.block, []).append(copy)
        together = [group for group in alike.values() if pays([copy.nbytes for copy in group], least)]
        if together:
            gone = {id(copy) for group in together for copy in group}
            alone = [copy for copy in copies if id(copy) not in gone]
        return alone, together

    def prepare(self, copies: Sequence[Copy]) -> Batch:
        """Write down the addresses of some blocks, all of the same size. The CPU does that, at once."""
        nbytes = copies[0].source.block
        rows: list[list[int]] = [[], []]
        for copy in copies:
            for row, span in zip(rows, (copy.source, copy.target), strict=True):
                first = span.address
                row.extend(range(first, first + span.nbytes, nbytes))
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


def pays(sizes: Sequence[int], least: Sequence[int]) -> bool:
    """Whether a launch pays for runs of these sizes, in bytes, of which each alone could go by one.

    If `n` runs of a size are the least that make up for the fixed cost of a launch, each makes up for an `n`-th of it.
    """
    return sum(1 / least[_place(nbytes)] for nbytes in sizes) >= 1 - 1e-9


def _place(nbytes: int) -> int:
    return bisect.bisect_left(SIZES, nbytes)


def least_runs(device: torch.device, direction: Direction) -> Sequence[int]:
    """For each of `SIZES`, the least runs for which a launch pays on a device; 0: it never does.

    As calibration measured it, else `ESTIMATE`; never without Triton.
    """
    if not launch.available(device):
        return NEVER
    found = profile.lookup(launch.machine(device), profile_name(direction), valid)
    return ESTIMATE if found is None else cast(Sequence[int], found)


def profile_name(direction: Direction) -> str:
    """The name under which the profile holds `least_runs`."""
    return f"block copies, {direction}: least runs of {', '.join(map(str, SIZES))} bytes for a launch"


def valid(value: object) -> bool:
    """Whether something read from a profile is an answer of `least_runs`."""
    return isinstance(value, list) and len(value) == len(SIZES) and all(type(n) is int and n >= 0 for n in value)
