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
from kvtier.storage.links import Batch, Copy, Launches, TensorCopy, join
from kvtier.storage.pool import BlockPool
from kvtier.types import Direction

__all__ = [
    "Copy",
    "CudaTransfers",
    "InlineTransfers",
    "State",
    "TensorCopy",
    "Transfer",
    "TransferEngine",
    "join",
]


class State(enum.Enum):
    """Life of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Ticket:
    """Where a transfer is on a device.

    Attributes:
        ended: recorded behind its last copy.
        batches: what it launched; their addresses are read until then.
    """

    ended: torch.cuda.Event
    batches: list[Batch]


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
        self.ticket: Ticket | None = None  # what a CUDA engine needs to find its copies again

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
    written back for later (Pensieve, section 5.1). Events, streams and the memory of addresses are made once and
    re-used; nothing here blocks the CPU but `synchronize`, `drain` and what `Launches.divide` measures once.
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
        self._launches = Launches(device)

    def _start(self, transfer: Transfer) -> None:
        stream = self._streams[transfer.direction]
        began, ended = self._event(), self._event()
        ticket = transfer.ticket = Ticket(ended, [])
        self._in_flight.append(transfer)  # first: whatever cuts this short, `drain` still waits for the copies
        try:
            alone, together = self._launches.divide(transfer.copies, transfer.direction)
            for copies in together:
                ticket.batches.append(self._launches.prepare(copies))
            began.record(torch.cuda.current_stream(self.device))
            stream.wait_event(began)
            for earlier in transfer.after:
                stream.wait_event(_ended(earlier))
            with torch.cuda.stream(stream):
                for copy in alone:
                    copy.run(non_blocking=True)
                for batch in ticket.batches:
                    self._launches.launch(batch)
            ended.record(stream)
        except Exception as error:
            # Copies before the failing one may still run: their slots must not be re-used under them.
            self._in_flight.remove(transfer)
            try:
                stream.synchronize()
                self._launches.release(ticket.batches)
            finally:
                transfer.settle(error)
        except BaseException:
            # An interrupt. What was begun goes on, and ends before this: `poll` must not take it to have ended.
            ended.record(stream)
            raise
        finally:
            # An event may be recorded anew as soon as the waits on it are enqueued.
            self._spare.append(began)

    def _wait(self, transfer: Transfer) -> None:
        torch.cuda.current_stream(self.device).wait_event(_ended(transfer))

    def _synchronize(self, transfer: Transfer) -> None:
        _ended(transfer).synchronize()
        self._in_flight.remove(transfer)
        self._end(transfer)

    def poll(self) -> None:
        """Settle what has ended. Within a stream, transfers end in the order of submission."""
        still: deque[Transfer] = deque()
        blocked: set[Direction] = set()
        try:
            while self._in_flight:
                transfer = self._in_flight[0]
                ended = transfer.direction not in blocked and _ended(transfer).query()
                self._in_flight.popleft()
                if ended:
                    self._end(transfer)
                else:
                    blocked.add(transfer.direction)
                    still.append(transfer)
        finally:
            # A device that has failed may refuse to say: nothing is forgotten for that.
            still.extend(self._in_flight)
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
        """Drain; streams, events and the memory of addresses go with this object."""
        self.drain()
        self._spare.clear()
        self._launches.close()

    def _end(self, transfer: Transfer, error: Exception | None = None) -> None:
        ticket, transfer.ticket = transfer.ticket, None
        assert ticket is not None
        self._spare.append(ticket.ended)
        self._launches.release(ticket.batches)
        transfer.settle(error)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event()


def _ended(transfer: Transfer) -> torch.cuda.Event:
    assert transfer.ticket is not None, "it was not submitted, or has been seen to end"
    return transfer.ticket.ended
