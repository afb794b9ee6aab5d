"""`LayerReader`: how attention reads one layer's KV, and what it keeps from call to call."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.attention.partition import Partition
from kvtier.cpu import native
from kvtier.errors import BudgetError
from kvtier.kernels import launch, paged
from kvtier.memory.access.readers import Reading
from kvtier.memory.blocks import audit, residency
from kvtier.memory.blocks.block import Run, State
from kvtier.memory.owner import Owner
from kvtier.memory.storage.buffers import IoBuffers, Workspace
from kvtier.memory.tiered import TieredMemory
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable
from kvtier.transfer.engine import Event


@dataclass(frozen=True, slots=True)
class Place:
    """A run where attention runs, and where it belongs.

    Attributes:
        slot: its first slot in the home pool.
        count: blocks.
        index: of its first block in its sequences.
        rows: the rows of the batch that hold it.
    """

    slot: int
    count: int
    index: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """A run that is not on the device, or on its way there, and where it belongs."""

    run: Run
    index: int
    rows: tuple[int, ...]


class LayerReader:
    """Reads one layer of one cache. Made under the memory's lock.

    Args:
        layer: its rows and tables.
        memory: that it is in.
        owner: the cache's part of that.
        host_attention: whether host threads may attend to what is on the host.
        number: of its buffers, where calls of one cache go on at the same time.

    Attributes:
        workspace: in which one layer's KV is laid out.
        io_buffers: through which queries and results pass.
        fetched: what was fetched to be read next, and is to leave the device again.
        keep: of the blocks that are fetched to be read, how many stay on the device; set by the forward.
        in_one_memory: whether the CPU's kernel reads blocks on the device too, and copies end when they are submitted.
        repeat: the last attention call, where it may come again as it was; see `attention.repeat`.
        shape: of its blocks, as the native library takes it.
    """

    def __init__(
        self, layer: LayerKV, memory: TieredMemory, owner: Owner, *, host_attention: bool, number: int = 0
    ) -> None:
        self.layer = layer
        self.memory = memory
        self.owner = owner
        self.host_attention = host_attention
        self.counters = owner.counters
        self.device = layer.device
        one = layer.device.device.type == "cpu" and not layer.device.engine.asynchronous
        self.in_one_memory = one and not launch.available(layer.device.device)
        self.workspace: Workspace = memory.workspace(owner, layer.device)
        self.io_buffers: IoBuffers = memory.io_buffers(owner, layer.device, number)
        self.fetched: list[Run] = []
        self.keep = 0
        self.repeat: Any = None
        layout = layer.layout
        self.shape = native.Shape(layout.dtype, layout.k_heads, layout.k_dim, layout.v_dim, layout.block_size)
        self._partition: Partition | None = None
        self._partition_of: tuple[object, ...] = ()
        self._prepared: dict[torch.dtype, paged.Prepared] = {}

    def partition(self, lengths: int | Sequence[int]) -> Partition:
        """Where the blocks of the first tokens are: as many of every row, or of each. The caller holds the lock."""
        layer = self.layer
        size = layer.layout.block_size
        counts = -(-lengths // size) if isinstance(lengths, int) else tuple(-(-length // size) for length in lengths)
        key = (layer.blocks.version, layer.shape_version, counts, self.device.engine.stream)
        if self._partition is None or self._partition_of != key:
            before, self._partition = self._partition, None
            if before is not None and self._partition_of[3:] != key[3:]:
                before = None  # its tables are of another stream: torch hands their memory on in the order of that
            each = [counts] * layer.batch if isinstance(counts, int) else counts
            partition = Partition(layer.blocks.pools, layer.rows, each)
            # Looking at tables may cut nothing, but resolves what was cut: the version is the one of the snapshot.
            self._partition = partition.keep(before)
            self._partition_of = key
        return self._partition

    def prepared(self, dtype: torch.dtype) -> paged.Prepared:
        """The device's attention with results in `dtype`, kept from call to call."""
        found = self._prepared.get(dtype)
        if found is None:
            found = self._prepared[dtype] = paged.Prepared(self.layer.layout, dtype)
        return found

    def begin(self) -> Reading | None:
        """What is found under the lock is read from now on without it. The caller holds the lock."""
        memory = self.memory
        self.layer.blocks.last_used = memory.clock
        if self.layer.parked is not None:
            self.layer.parked.last_used = memory.clock
        return None if memory.private else memory.readers.begin()

    def end(self, reading: Reading | None) -> None:
        """It was read, or the kernels that read it were launched."""
        if reading is None:
            blocks, engine = self.layer.blocks, self.device.engine
            if engine.asynchronous:
                # Only a fetch or an eviction that takes the slots of these blocks needs to know when exactly it ends.
                blocks.last_read = engine.mark() if blocks.spilled or blocks.counts[State.ARRIVING] else None
            return
        with self.memory.lock:
            # Other threads may have freed these slots meanwhile.
            event: Event | None = None
            try:
                event = self.device.engine.mark() if self.device.engine.asynchronous else None
                self.layer.blocks.last_read = event
            finally:  # a device that has failed gives no mark, and keeps nobody waiting for this reading
                self.memory.readers.end(reading, event)

    def _places(self, first: int, last: int) -> tuple[list[Place], list[Missing], list[Run]]:
        """The blocks `[first, last)` of every row: those that are where attention runs, and the others.

        Runs that have to be fetched are cut at both ends. The caller holds the lock.

        Returns:
            Places, what is missing, and the runs that nobody reads again once the places were read.
        """
        rows_of: dict[BlockTable, list[int]] = {}
        for row, table in enumerate(self.layer.rows):
            rows_of.setdefault(table, []).append(row)
        one_tier = self.layer.blocks.pools.device is None
        here: dict[tuple[int, int, int], list[int]] = {}
        missing: dict[tuple[Run, int], list[int]] = {}
        done: list[Run] = []
        for table, rows in rows_of.items():
            index = 0
            for run in list(table.resolve()):
                audit.check(run)
                start, stop = max(first - index, 0), min(last - index, run.count)
                if start < stop:
                    if one_tier or (run.device is not None and run.state is not State.ARRIVING):
                        here.setdefault((run.home + start, stop - start, index + start), []).extend(rows)
                        if stop == run.count:
                            done.append(run)
                    else:
                        part = residency.cut(run, stop)[0] if stop < run.count else run
                        part = residency.cut(part, start)[1] if start else part
                        missing.setdefault((part, index + start), []).extend(rows)
                index += run.count
        return (
            [Place(*place, tuple(rows)) for place, rows in here.items()],
            [Missing(run, index, tuple(rows)) for (run, index), rows in missing.items()],
            done,
        )

    def portions(self, first: int, last: int, most: int = 0) -> Generator[list[Place], None, None]:
        """Bring the blocks `[first, last)` of every row where attention runs, in portions.

        Args:
            first, last: block indices.
            most: blocks fetched at a time, the next ones on their way while these are read; 0: as many as there is
                room for.

        Yields:
            Places, good until the next ones are asked for: first what is there already, if anything is, then what had
            to be fetched.

        Raises:
            BudgetError: there is no room for one block. TransferError: a fetch failed.
        """
        lock = self.memory.lock
        with lock:
            self.memory.mend()
            here, missing, read = self._places(first, last)
            reading = self.begin()
        if here:
            self.counters.block_hits += sum(place.count for place in here)
            try:
                yield here
            finally:
                self.end(reading)
        elif reading is not None:
            self.end(reading)
        while missing:
            with lock:
                self.memory.mend()
                self.retire(read)  # what was read gives its slots to what follows
                ready, missing = self._next(missing, most)
                read = [each.run for each in ready]
                self.expect(read)
                places = [Place(each.run.home, each.run.count, each.index, each.rows) for each in ready]
                reading = self.begin()
            try:
                yield places
            finally:
                self.end(reading)
        if self.fetched:
            with lock:
                self.memory.mend()
                self.retire(read)

    def _next(self, missing: list[Missing], most: int) -> tuple[list[Missing], list[Missing]]:
        """Something of `missing` that has arrived for the compute stream, and what is missing then."""
        blocks, every = self.layer.blocks, self.layer.count
        while True:
            missing = list(_whole(missing))
            ready = [each for each in missing if each.run.state is not State.HOST]
            left = [each for each in missing if each.run.state is State.HOST]
            if ready:
                break
            runs = [each.run for each in left]
            try:
                self.device.fetch(runs, most or every, blocks, evict=True, counters=self.counters)
            except BudgetError:
                # All that is left are blocks of this layer; those that were resident have been read.
                self.device.fetch(
                    [each.run for each in _whole(left)], most or every, None, evict=True, counters=self.counters
                )
        for each in ready:
            residency.arrive(each.run)
        if left and most:
            ahead = self.device.fetch([each.run for each in left], most, blocks, evict=False, counters=self.counters)
            self.counters.prefetched += sum(run.count for run in ahead)
        return ready, list(_whole(left))

    def take_workspace(self, nbytes: int) -> torch.Tensor:
        """The workspace, at least `nbytes`, which is in use from now on. Holds the lock.

        A cache with a memory of its own gives what is more than promised up when that is needed. Of a shared one, other
        threads may need it while this one reads: so it is not taken.
        """
        claim = None if self.memory.private else self.owner.claims.get(self.device)
        data = self.workspace.take(nbytes, None if self.memory.private else 0 if claim is None else claim.room)
        self.workspace.in_use = True
        return data

    def fetch_ahead(self, first: int, last: int) -> None:
        """Begin to fetch what of the blocks `[first, last)` is on the host only, if there is room. Holds the lock."""
        if self.layer.spilled:
            _, missing, _ = self._places(first, last)
            ahead = self.device.fetch(
                [each.run for each in missing if each.run.state is State.HOST],
                self.layer.count,
                self.layer.blocks,
                evict=False,
                counters=self.counters,
            )
            self.counters.prefetched += sum(run.count for run in ahead)

    def expect(self, runs: Sequence[Run]) -> None:
        """These were fetched to be read next. Some may be known already."""
        known = {part for run in self.fetched for part in run.leaves()}
        new = [run for run in runs if run not in known]
        self.fetched += new
        blocks = self.layer.blocks
        blocks.set_transient(blocks.transient + sum([run.count for run in new]))

    @property
    def fetched_blocks(self) -> int:
        """Blocks that were fetched to be read next."""
        return self.layer.blocks.transient

    def forget(self) -> None:
        """What was fetched is like any block on the device from now on."""
        self.fetched = []
        self.layer.blocks.set_transient(0)

    def retire(self, read: Sequence[Run] | None = None) -> None:
        """Fetched blocks were read: let them leave the device again, but for those that stay. Holds the lock.

        Args:
            read: these were; None: all.
        """
        over = None if read is None else {part for run in read for part in run.leaves()}
        left: list[Run] = []
        for run in self.fetched:
            for part in list(run.leaves()):
                if part.state is not State.BOTH and part.state is not State.ARRIVING:
                    continue
                if over is not None and part not in over:
                    left.append(part)
                elif self.keep >= part.count:
                    self.keep -= part.count
                    self.counters.promotions += part.count
                else:
                    residency.evict(part, self.device.fence(part.blocks))
        # Those that another reader of the layer has fetched, as one of each row, count on.
        gone = sum([run.count for run in self.fetched]) - sum([run.count for run in left])
        self.fetched = left
        self.layer.blocks.set_transient(max(self.layer.blocks.transient - gone, 0))

    # For tests

    def check_integrity(self) -> None:
        """Raise AssertionError unless the layer's counts agree, and what is kept from call to call is up to date."""
        layer = self.layer
        layer.check_integrity()
        assert self.fetched or not layer.blocks.transient, "blocks that leave again are counted wrong"
        if self._partition is not None and self._partition_of[:2] == (layer.blocks.version, layer.shape_version):
            counts = self._partition_of[2]
            each = [counts] * layer.batch if isinstance(counts, int) else counts
            now = Partition(layer.blocks.pools, layer.rows, each)  # type: ignore[arg-type]
            for name in ("device", "arriving", "host"):
                kept, found = getattr(self._partition, name), getattr(now, name)
                assert kept.rows == found.rows, (
                    f"blocks have moved, and what is kept of the {name} part says where from"
                )
                assert kept.blocks == found.blocks, f"blocks of the {name} part are counted wrong"


def _whole(missing: Sequence[Missing]) -> Iterator[Missing]:
    """The same blocks, in runs that were not cut."""
    for each in missing:
        index = each.index
        for part in each.run.leaves():
            yield Missing(part, index, each.rows)
            index += part.count
