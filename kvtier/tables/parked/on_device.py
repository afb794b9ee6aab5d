"""`OnDevice`: which parked sequences have blocks on a device, who of them leaves it, and who comes back."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.blocks.block import RESIDENT, Pools, State
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.tables.parked.sequence import ParkedLayer, ParkedSequence


class OnDevice:
    """The parked sequences that may have blocks on a device, in the order of their use: the first leaves first.

    It drops nothing: a block that leaves is on the host. The caller of every method holds the memory's lock.

    Args:
        layers: the parked layers, by index.
    """

    def __init__(self, layers: Mapping[int, ParkedLayer]) -> None:
        self._layers = layers
        self._sequences: OrderedDict[ParkedSequence, None] = OrderedDict()

    def add(self, *sequences: ParkedSequence) -> None:
        """They may have blocks there: the last to leave, but for those that are listed already."""
        self._sequences |= dict.fromkeys(sequences)

    def discard(self, sequence: ParkedSequence) -> None:
        """It has none there."""
        self._sequences.pop(sequence, None)

    def keep(self, kept: Collection[ParkedSequence]) -> None:
        """Forget all others."""
        for sequence in [x for x in self._sequences if x not in kept]:
            del self._sequences[sequence]

    def evict(self, pools: Pools, count: int) -> int:
        """Let up to `count` blocks of one layout that no cache uses leave the device for the host. Returns how many.

        Raises:
            BudgetError: the host is full. TransferError: a copy failed.
        """
        left = 0
        if not any(x.parked.evictable for x in self._layers.values() if x.parked.pools is pools):
            return left
        for sequence in list(self._sequences):
            if sequence.users:
                continue
            if not any(run.device is not None for table in sequence.tables.values() for run in table.resolve()):
                self._sequences.pop(sequence, None)
                sequence.note()
                continue
            for index, table in sequence.tables.items():
                layer = self._layers[index]
                if layer.parked.pools is not pools or not layer.parked.evictable:
                    continue
                for run in reversed(list(table.resolve())):
                    if left >= count:
                        return left
                    # What sequences share is used more often than each of them.
                    if run.state in RESIDENT and run.parts is None and run.refs == 1:
                        left += layer.device.evict_end(run, count - left)
        return left

    def leave(self, sequence: ParkedSequence) -> None:
        """Let a sequence's blocks leave the device, but for those that others hold too. Raises as `evict`."""
        for index, table in sequence.tables.items():
            layer = self._layers[index]
            for run in list(table.resolve()):
                if run.state in RESIDENT and run.parts is None and run.refs == 1:
                    layer.device.evict_end(run, run.count)
        sequence.note()

    def has_room(self, device: ComputeDevice, nbytes: int) -> bool:
        """Whether so many bytes of new blocks take no more from a device than what is free and what no cache uses."""
        free = device.free_bytes
        for sequence in self._sequences:
            if free >= nbytes:
                break
            if not sequence.users:
                free += self._evictable(sequence, device)
        return free >= nbytes

    def _evictable(self, sequence: ParkedSequence, device: ComputeDevice) -> int:
        """Bytes that it has on a device, and nobody else has."""
        found = 0
        for index, table in sequence.tables.items():
            if self._layers[index].device is device:
                runs = [run for run in table.resolve() if run.state in RESIDENT and run.refs == 1]
                found += sum([run.count for run in runs]) * self._layers[index].parked.pools.layout.nbytes
        return found

    def promote(self, sequences: Sequence[ParkedSequence], nbytes: int) -> int:
        """Begin to bring up to so many bytes of blocks from the host to the device, evenly over layers: of the first of
        these sequences that has any there and gets room. Where there is none, other parked blocks leave that no cache
        uses, the longest unused first, and then those of the last of these. Waits for nothing.

        Returns:
            Bytes that are on their way.

        Raises:
            CorruptionError: a block does not hold what was written.
        """
        for sequence in reversed(sequences):
            self._sequences.pop(sequence, None)
            self._sequences[sequence] = None  # the last to leave
        return next((came for came in (self._promote(sequence, nbytes) for sequence in sequences) if came), 0)

    def _promote(self, sequence: ParkedSequence, nbytes: int) -> int:
        of_each = sum([self._layers[index].parked.pools.layout.nbytes for index in sequence.tables])
        share, came = max(nbytes // max(of_each, 1), 1), 0
        for index, table in sequence.tables.items():
            layer = self._layers[index]
            pools = layer.parked.pools
            runs = [run for run in table.resolve() if run.state is State.HOST and not run.corrupt]
            if pools.device is None or not runs:
                continue
            count = min(share, sum([run.count for run in runs]))
            missing = count - layer.device.obtainable(pools, ordered=True)
            if missing > 0:
                self._evict_others(sequence, pools, missing)
            with contextlib.suppress(BudgetError, TransferError):
                found = layer.device.fetch(runs, count, None, evict=False)
                came += sum([run.count for run in found]) * pools.layout.nbytes
        return came

    def on_host(self, sequences: Iterable[ParkedSequence]) -> bool:
        """Whether a block of these is on the host only, where there is a device tier."""
        return any(
            run.state is State.HOST
            for sequence in sequences
            for index, table in sequence.tables.items()
            if self._layers[index].parked.pools.device is not None
            for run in table.resolve()
        )

    def _evict_others(self, but: ParkedSequence, pools: Pools, count: int) -> None:
        """Let up to `count` blocks of others that no cache uses leave the device, without waiting."""
        for sequence in list(self._sequences):
            if sequence is but:
                return  # what is behind it was woken later
            if sequence.users:
                continue
            for index, table in sequence.tables.items():
                layer = self._layers[index]
                if layer.parked.pools is not pools:
                    continue
                for run in reversed(list(table.resolve())):
                    if count <= 0:
                        return
                    if run.state in RESIDENT and run.parts is None and run.refs == 1:
                        count -= layer.device.leave([run], count)
