"""Blocks: their states, the runs in which they move, and the sets in which a memory counts them.

A block is `block_size` tokens of one layer. Neighbouring blocks of a sequence that are in the same state, in
neighbouring slots of each tier, are one `Run`: the unit that is moved and counted, so that Python's work does not grow
with the context. A run is cut where only a part of it moves.

Life of a block, with a device tier and without one (`residency` has the transition table):

    FREE -> FILLING -> DEVICE -> LEAVING -> BOTH -> HOST          FREE -> FILLING -> HOST -> FREE
                                             ^        |
                                             +-- ARRIVING
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvtier.errors import TransferError
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.stats import Counters
from kvtier.transfer.engine import Event, Transfer, TransferEngine

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator


class State(enum.IntEnum):
    """What a block is, and in which tiers its bytes are valid."""

    FREE = 0  # no slots
    FILLING = 1  # one writer, in the tier where blocks begin
    DEVICE = 2  # sealed: full, and never written again; on the device only
    LEAVING = 3  # on the device; a write-back to its host slot is under way
    BOTH = 4  # in both tiers: the device slot can be given up for nothing
    ARRIVING = 5  # on the host; a fetch into its device slot is under way
    HOST = 6  # on the host only


#: Sealed blocks that attention finds on the device, and that may be evicted.
RESIDENT = frozenset((State.DEVICE, State.LEAVING, State.BOTH))


class Auditor(Protocol):
    """Hears of sealed blocks; see `Audit`."""

    def note(self, run: Run) -> None:
        """The bytes of a sealed run are complete in host memory."""


@dataclass(slots=True, eq=False)
class Pools:
    """Where blocks of one layout are, for the layers of one compute device.

    Attributes:
        layout: of the blocks.
        device: slots on the device; None where there is no device tier.
        host: slots in host memory.
        engine: moves blocks between the two.
        spilled: blocks that are on the host only, where there is a device tier.
        audit: compares blocks in host memory with what was written; None: nobody does.
    """

    layout: BlockLayout
    device: BlockPool | None
    host: BlockPool
    engine: TransferEngine
    spilled: int = 0
    audit: Auditor | None = None

    @property
    def home(self) -> BlockPool:
        """Where blocks begin and are written: the device, or the host where there is no device tier."""
        return self.host if self.device is None else self.device


class Holder(Protocol):
    """Whose tables hold runs of a set of parked blocks."""

    @property
    def blocks(self) -> BlockSet | None:
        """The set of its own blocks, whose version changes with that of the parked ones; None: it keeps no version."""

    def parked_runs(self) -> Iterator[Run]:
        """The parked runs in its tables, as often as they are there."""


@dataclass(eq=False, slots=True)
class BlockSet:
    """The blocks of one layer of one owner, as the memory counts, orders and evicts them. Of tables it knows
    what the holders of parked blocks show.

    Attributes:
        layer: index of the layer, for policies.
        owner: a number for the owner, for policies.
        pools: where the blocks are.
        counters: of the owner.
        counts: blocks by `State`.
        runs: all that is not free.
        resident: runs in a state of `RESIDENT`, in the order in which they came to the device.
        dirty: those of them without a host copy, and none under way.
        version: changes whenever a run changes its state or its slots, or is cut.
        transient: blocks that were fetched for one use, and leave the device after it; see `set_transient`.
        stale: where it enters its layer when what a policy is told of it may differ; None: no policy was told anything.
        last_used: the memory's clock at the last attention over them.
        last_host: the last host slot written; the next write-back continues there.
        last_read: the end of the last attention over them, where work goes on behind the CPU's back and it was marked;
            never of a set of parked blocks, which caches of several threads may read.
        parked: whether its blocks are parked: never written, and held by any number of caches.
        holders: who holds runs of a set of parked blocks.
    """

    layer: int
    owner: int
    pools: Pools
    counters: Counters
    counts: list[int] = field(default_factory=lambda: [0] * len(State))
    runs: dict[Run, None] = field(default_factory=dict)
    resident: list[Run] = field(default_factory=list)
    dirty: list[Run] = field(default_factory=list)
    version: int = 0
    transient: int = 0
    stale: dict[int, None] | None = None
    last_used: int = 0
    last_host: int | None = None
    last_read: Event | None = None
    parked: bool = False
    holders: list[Holder] = field(default_factory=list)

    def changed(self) -> None:
        """A run has changed its state or its slots, or was cut."""
        self.version += 1
        self.touch()
        for each in self.holders:
            blocks = each.blocks
            if blocks is not None:
                blocks.version += 1
                blocks.touch()

    def touch(self) -> None:
        """What a policy is told of these blocks may differ from now on."""
        if self.stale is not None:
            self.stale[self.layer] = None

    def set_transient(self, blocks: int) -> None:
        """So many were fetched for one use."""
        self.transient = blocks
        self.touch()

    def recount(self) -> None:
        """After a change was cut short: count again how many tables hold each run of a set of parked blocks."""
        # Of a run that was being cut, the parts count, whether they are listed already or not.
        refs = dict.fromkeys([leaf for run in self.runs for leaf in run.leaves()], 0)
        for each in self.holders:
            for run in each.parked_runs():
                if run in refs:
                    refs[run] += 1
        for run, count in refs.items():
            run.refs = count

    @property
    def blocks(self) -> int:
        """All blocks."""
        return sum(self.counts)

    @property
    def evictable(self) -> int:
        """Blocks that could give up their device slot."""
        counts = self.counts
        return counts[State.DEVICE] + counts[State.LEAVING] + counts[State.BOTH]

    @property
    def spilled(self) -> int:
        """Blocks on the host that are neither on the device nor on their way, where there is a device tier."""
        return self.counts[State.HOST] if self.pools.device is not None else 0


class Move:
    """A fetch or write-back under way: the operation, apart from the blocks that it moves.

    Attributes:
        runs: what it moves, cut as they are cut.
        transfer: the copies; None while they are submitted.
    """

    __slots__ = ("runs", "transfer")

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.transfer: Transfer | None = None

    # As a fence, it holds slots until the engine is done with them.

    @property
    def event(self) -> None:
        """Slots under a copy are not written again before it has settled."""
        return None

    def passed(self) -> bool:
        """Whether the copies have settled."""
        return self.transfer is not None and not self.transfer.pending

    def settle(self) -> None:
        """Let the CPU wait for the end of the copies, however they end."""
        if self.transfer is not None and self.transfer.pending:
            with contextlib.suppress(TransferError):
                self.transfer.synchronize()


class Run:
    """Neighbouring blocks of a sequence in one state: slots `[device, device + count)` and `[host, host + count)`.

    Only `residency` changes its state and its slots. Tables count its references (`tables/table.py`); after a change
    was cut short, `BlockSet.recount` does. The audit notes its checksums and marks what differs. `residency` carries
    all of these over where runs are cut or joined.

    Attributes:
        blocks: the set that counts it.
        count: blocks.
        state: of all of them.
        device: first slot on the device, or None.
        host: first slot on the host, or None; its bytes are valid in the states BOTH, ARRIVING and HOST.
        move: the transfer under way from or to its slots. It may outlast its effect on the state: a fetch that the
            compute stream waits for counts as arrived, and still reads the host slots.
        refs: how many tables hold it.
        parts: the two runs that it was cut into; None as long as it is whole.
        sums: a checksum of each of its blocks, 0 for those that have none; None: no block has one. See `Audit`.
        corrupt: whether a block was found not to hold what was written.
    """

    __slots__ = ("blocks", "corrupt", "count", "device", "host", "move", "parts", "refs", "state", "sums")

    def __init__(self, blocks: BlockSet, count: int, device: int | None, host: int | None) -> None:
        self.blocks = blocks
        self.count = count
        self.device = device
        self.host = host
        self.state = State.FREE
        self.move: Move | None = None
        self.refs = 1
        self.parts: tuple[Run, Run] | None = None
        self.sums: array[int] | None = None
        self.corrupt = False

    @property
    def sealed(self) -> bool:
        """Whether its blocks are full and never written again."""
        return self.state > State.FILLING

    @property
    def home(self) -> int:
        """The first slot in the tier where blocks begin."""
        slot = self.host if self.blocks.pools.device is None else self.device
        assert slot is not None
        return slot

    def leaves(self) -> Iterator[Run]:
        """This run, or in order those that it was cut into."""
        left = [self]  # a stack: who gives up block by block is cut thousands of times before its table is read
        while left:
            run = left.pop()
            if run.parts is None:
                yield run
            else:
                left += reversed(run.parts)

    def __repr__(self) -> str:
        return f"Run({self.count} x {self.state.name}, device={self.device}, host={self.host}, refs={self.refs})"
