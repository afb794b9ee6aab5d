"""The one seam through which bytes move between tiers.

A transfer has two phases. *Prepare*: the engine takes a reference on every slot at both ends, so that nothing is freed
or re-used under a copy in flight. *Complete* drops them and tells the owner; *failure* drops them too, and the source
still holds the data. Who needs the bytes calls `wait` (the compute stream) or `synchronize` (the CPU) first; who does
not need them calls `poll` now and then.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import TransferError
from kvtier.metrics import Counters
from kvtier.storage.pool import BlockPool
from kvtier.types import Direction


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


class State(enum.Enum):
    """Life of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """A handle on submitted copies.

    Attributes:
        copies: what moves.
        direction: which way.
        after: transfers that end before this one begins.
        state: pending until the engine knows better.
        error: why it failed.
    """

    __slots__ = ("_engine", "_on_done", "_on_failed", "after", "copies", "direction", "error", "state", "ticket")

    def __init__(
        self,
        engine: TransferEngine,
        copies: Sequence[Copy | TensorCopy],
        direction: Direction,
        after: Sequence[Transfer],
        on_done: Callable[[], None] | None,
        on_failed: Callable[[], None] | None,
    ) -> None:
        self._engine = engine
        self.copies = tuple(copies)
        self.direction = direction
        self.after = tuple(after)
        self._on_done = on_done
        self._on_failed = on_failed
        self.state = State.PENDING
        self.error: BaseException | None = None
        self.ticket: object = None  # what the engine needs to find its copy again (an event)

    def wait(self) -> None:
        """Order all later work of the compute stream behind this transfer. Raises `TransferError` if it failed."""
        if self.state is State.PENDING:
            self._engine._wait(self)
        self._raise_if_failed()

    def synchronize(self) -> None:
        """Block the CPU until the transfer is complete. Raises `TransferError` if it failed."""
        if self.state is State.PENDING:
            started = time.perf_counter()
            self._engine._synchronize(self)
            self._engine.counters.stall_seconds += time.perf_counter() - started
        self._raise_if_failed()

    def settle(self, error: BaseException | None = None) -> None:
        """For engines: end the transfer, well or with `error`; drop the protection and tell the owner. Once."""
        if self.state is not State.PENDING:
            return
        self.state = State.DONE if error is None else State.FAILED
        self.error = error
        for copy in self.copies:
            copy.release()
        if error is not None:
            self._engine.counters.failed_transfers += 1
        told = self._on_done if error is None else self._on_failed
        self._on_done = self._on_failed = None
        self.after = ()
        if told is not None:
            told()

    def _raise_if_failed(self) -> None:
        if self.state is State.FAILED:
            raise TransferError(f"A {self.direction} of {len(self.copies)} copies failed: {self.error}") from self.error


class TransferEngine(ABC):
    """Submits copies. Subclasses say when they run."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def submit(
        self,
        copies: Sequence[Copy | TensorCopy],
        direction: Direction,
        *,
        after: Sequence[Transfer] = (),
        on_done: Callable[[], None] | None = None,
        on_failed: Callable[[], None] | None = None,
    ) -> Transfer:
        """Start copies that begin after all work submitted to the compute stream so far, and after `after`.

        The caller holds a reference on every slot named; so does the transfer until it ends.
        `on_done` and `on_failed` are called once, when the engine learns of the end, from the submitting thread.
        """
        transfer = Transfer(self, copies, direction, [t for t in after if t.state is State.PENDING], on_done, on_failed)
        nbytes = 0
        for copy in transfer.copies:
            nbytes += copy.nbytes
            copy.retain()
        if direction is Direction.FETCH:
            self.counters.bytes_up += nbytes
            self.counters.copies_up += len(transfer.copies)
        elif direction is Direction.WRITE_BACK:
            self.counters.bytes_down += nbytes
            self.counters.copies_down += len(transfer.copies)
        else:
            self.counters.attention_bytes += nbytes
        self._start(transfer)
        return transfer

    def poll(self) -> None:  # noqa: B027 - engines without a background have nothing to learn
        """Settle what has ended meanwhile. Never blocks."""

    def in_flight(self) -> Sequence[Transfer]:
        """Transfers that have not ended, as far as the engine knows."""
        return ()

    def pending_slots(self, pool: BlockPool) -> int:
        """References that transfers in flight hold on slots of `pool`."""
        return sum(copy.references(pool) for transfer in self.in_flight() for copy in transfer.copies)

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing is in flight; failures are told to their owners, not raised."""

    @abstractmethod
    def close(self) -> None:
        """Drain and give up streams."""

    @abstractmethod
    def _start(self, transfer: Transfer) -> None: ...

    @abstractmethod
    def _wait(self, transfer: Transfer) -> None: ...

    @abstractmethod
    def _synchronize(self, transfer: Transfer) -> None: ...


class InlineTransfers(TransferEngine):
    """Copies at once, on the calling thread: for machines without an accelerator. Its seconds count as stalls."""

    def _start(self, transfer: Transfer) -> None:
        started = time.perf_counter()
        try:
            for copy in transfer.copies:
                copy.run()
        except BaseException as error:
            transfer.settle(error)
            if not isinstance(error, Exception):
                raise
        else:
            transfer.settle()
        self.counters.stall_seconds += time.perf_counter() - started

    def _wait(self, transfer: Transfer) -> None:
        raise AssertionError("an inline transfer is never pending")

    _synchronize = _wait

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing to give up."""


class CudaTransfers(TransferEngine):
    """A stream for each direction, for one device.

    Ordering, both ways: a copy begins behind an event recorded on the compute stream at submission, so that it sees
    what was written and does not overwrite what is still being read; whoever reads the copy makes the compute stream
    wait for the copy's event. The fetch stream has the higher priority: what a layer needs soon goes before what is
    written back for later (Pensieve, section 5.1). Events and streams are made once and re-used; nothing here blocks
    the CPU but `synchronize` and `drain`.
    """

    def __init__(self, device: torch.device, counters: Counters) -> None:
        super().__init__(counters)
        self.device = device
        with torch.cuda.device(device):
            lowest, highest = 0, -1
            self._streams = {
                Direction.FETCH: torch.cuda.Stream(device, priority=highest),
                Direction.WRITE_BACK: torch.cuda.Stream(device, priority=lowest),
                Direction.QUERY: torch.cuda.Stream(device, priority=highest),
                Direction.RESULT: torch.cuda.Stream(device, priority=highest),
            }
        self._in_flight: deque[Transfer] = deque()
        self._spare: list[torch.cuda.Event] = []

    def _start(self, transfer: Transfer) -> None:
        stream = self._streams[transfer.direction]
        began, ended = self._event(), self._event()
        transfer.ticket = ended
        self._in_flight.append(transfer)  # first: whatever cuts this short, `drain` still waits for the copies
        try:
            began.record(torch.cuda.current_stream(self.device))
            stream.wait_event(began)
            for earlier in transfer.after:
                stream.wait_event(earlier.ticket)  # type: ignore[arg-type]
            with torch.cuda.stream(stream):
                for copy in transfer.copies:
                    copy.run(non_blocking=True)
            ended.record(stream)
        except Exception as error:
            # Copies before the failing one may still run: their slots must not be re-used under them.
            self._in_flight.remove(transfer)
            try:
                stream.synchronize()
            finally:
                transfer.settle(error)
        finally:
            # An event may be recorded anew as soon as the waits on it are enqueued.
            self._spare.append(began)

    def _wait(self, transfer: Transfer) -> None:
        torch.cuda.current_stream(self.device).wait_event(transfer.ticket)  # type: ignore[arg-type]

    def _synchronize(self, transfer: Transfer) -> None:
        transfer.ticket.synchronize()  # type: ignore[attr-defined]
        self._in_flight.remove(transfer)
        self._end(transfer)

    def poll(self) -> None:
        """Settle what has ended. Within a stream, transfers end in the order of submission."""
        still: deque[Transfer] = deque()
        blocked: set[Direction] = set()
        while self._in_flight:
            transfer = self._in_flight.popleft()
            if transfer.direction in blocked or not transfer.ticket.query():  # type: ignore[attr-defined]
                blocked.add(transfer.direction)
                still.append(transfer)
            else:
                self._end(transfer)
        self._in_flight = still

    def in_flight(self) -> Sequence[Transfer]:
        """Submitted and not yet seen to end."""
        return tuple(self._in_flight)

    def drain(self) -> None:
        """Block until nothing is in flight, tracked or not."""
        error: Exception | None = None
        for stream in self._streams.values():
            try:
                stream.synchronize()
            except Exception as failure:
                error = failure
        while self._in_flight:
            self._end(self._in_flight.popleft(), error)

    def close(self) -> None:
        """Drain; streams and events go with this object."""
        self.drain()
        self._spare.clear()

    def _end(self, transfer: Transfer, error: Exception | None = None) -> None:
        self._spare.append(transfer.ticket)  # type: ignore[arg-type]
        transfer.ticket = None
        transfer.settle(error)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event()
