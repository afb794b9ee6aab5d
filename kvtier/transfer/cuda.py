"""Copies on CUDA streams, one for each direction, ordered by events."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier import tracing
from kvtier.errors import TransferError
from kvtier.kernels import launch
from kvtier.stats import Counters
from kvtier.transfer.engine import Direction, Event, Transfer, TransferEngine
from kvtier.transfer.launches import Batch, Launches

#: Seconds after which the clocks of the device and the CPU are compared again, for a trace.
COMPARE = 5.0


@dataclass(frozen=True, slots=True)
class Clock:
    """When the device came by an event, on the clock of the CPU: for a trace. Right to some 10 us.

    Attributes:
        event: recorded on a stream that had nothing else to do.
        at: `time.perf_counter` then.
    """

    event: torch.cuda.Event
    at: float

    def seconds(self, point: torch.cuda.Event) -> float | None:
        """When the device came by another event; None: it has not come by both."""
        if not (point.query() and self.event.query()):
            return None
        return self.at + self.event.elapsed_time(point) / 1e3


@dataclass(frozen=True, slots=True)
class Stamp:
    """A point of the compute stream, for a trace."""

    event: torch.cuda.Event
    clock: Clock

    def seconds(self) -> float | None:
        """See `tracing.Stamp`."""
        return self.clock.seconds(self.event)

    def settle(self) -> None:
        """See `tracing.Stamp`."""
        self.event.synchronize()
        self.clock.event.synchronize()


@dataclass(slots=True)
class Ticket:
    """Where a transfer is on a device.

    Attributes:
        began: recorded before its first copy, behind all that it waits for.
        ended: recorded behind its last copy.
        batches: what it launched; their addresses are read until then.
        timed: whether both events were recorded in their places.
        whole: whether all its copies are on the stream: an interrupt may have come before the last one.
        clock: for a trace.
    """

    began: torch.cuda.Event
    ended: torch.cuda.Event
    batches: list[Batch]
    timed: bool = False
    whole: bool = False
    clock: Clock | None = None


class Mark(Event):
    """An event recorded on the compute stream. Its CUDA event is used again when nobody holds the mark."""

    __slots__ = ("_spare", "recorded")

    def __init__(self, recorded: torch.cuda.Event, spare: list[torch.cuda.Event]) -> None:
        self.recorded = recorded
        self._spare = spare

    def passed(self) -> bool:
        """Whether the device has come by."""
        return self.recorded.query()

    def settle(self) -> None:
        """Block the CPU until the device has come by."""
        self.recorded.synchronize()

    def __del__(self) -> None:
        # A wait that was enqueued keeps what the event stood for then: it may be recorded again.
        self._spare.append(self.recorded)


class CudaTransfers(TransferEngine):
    """A stream for each direction, for one device.

    Ordering, both ways: copies begin behind events of the compute stream (`behind`: the last readers of what they
    write; else all its work so far), so that they see what was written and do not overwrite what is still being read;
    whoever reads the copy makes the compute stream wait for the copy's event. The fetch stream has the higher priority:
    what a layer needs soon goes before what is written back for later (Pensieve, section 5.1).

    The compute stream is the one that is current for the thread that calls. Where that is another one than at the last
    call, it waits for that one first (`follow`): so an event of it is behind all that was done before, on any stream.

    Events, streams and the memory of addresses are made once and re-used; nothing here blocks the CPU but
    `synchronize` and `drain`.

    Seconds are those of the device: timed events around each transfer and around each wait of the compute stream, read
    when a later `poll` finds them passed.
    """

    asynchronous = True
    has_own_clock = True
    pageable_copies_block = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        with torch.cuda.device(device):
            lowest, highest = 0, -1
            self._streams = {
                Direction.FETCH: torch.cuda.Stream(device, priority=highest),
                Direction.WRITE_BACK: torch.cuda.Stream(device, priority=lowest),
                Direction.QUERY: torch.cuda.Stream(device, priority=highest),
                Direction.RESULT: torch.cuda.Stream(device, priority=highest),
            }
        self._in_flight: deque[Transfer] = deque()
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event, Counters]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._spare_marks: list[torch.cuda.Event] = []
        self._launches = Launches(device)
        self._clock: Clock | None = None
        self._idle: torch.cuda.Stream | None = None
        self.stream: torch.cuda.Stream | None = None
        self._number: int | None = None  # of that
        self._inherited = False

    def forked(self) -> None:
        """See `TransferEngine`."""
        self._inherited = True

    def follow(self) -> None:
        """See `TransferEngine`. A CUDA graph that is captured depends on nothing outside of it: it changes nothing."""
        if self._inherited:
            return
        number = launch.stream_number(self.device)
        if number is not None and number == self._number:  # asked some times for each layer and token
            return
        stream, last = torch.cuda.current_stream(self.device), self.stream
        if stream == last or launch.capturing(self.device):
            return
        if last is not None:
            stream.wait_event(self._recorded(last).recorded)
        self.stream, self._number = stream, number

    def give_back(self, memory: torch.Tensor) -> None:
        """See `TransferEngine`."""
        self.follow()
        if memory.is_cuda and self.stream is not None and not self._inherited:
            memory.record_stream(self.stream)

    def mark(self) -> Mark:
        """The end of the compute stream's work so far."""
        self.follow()
        return self._recorded(torch.cuda.current_stream(self.device))

    def _recorded(self, stream: torch.cuda.Stream) -> Mark:
        """The end of a stream's work so far."""
        event = self._spare_marks.pop() if self._spare_marks else torch.cuda.Event()
        event.record(stream)
        return Mark(event, self._spare_marks)

    def stamp(self) -> Stamp:
        """The end of the compute stream's work so far, for a trace."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Stamp(event, self._compared())

    def _compared(self) -> Clock:
        """The clocks of the device and the CPU, compared a short while ago."""
        if self._idle is None:
            self._idle = torch.cuda.Stream(self.device)
        if self._clock is None or time.perf_counter() - self._clock.at > COMPARE:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._idle)
            self._clock = Clock(event, time.perf_counter())
        return self._clock

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        stream = self._streams[transfer.direction]
        ticket = transfer.ticket = Ticket(self._event(), self._event(), [])
        if transfer.submitted is not None:
            ticket.clock = self._compared()
        self._in_flight.append(transfer)  # first: whatever cuts this short, `drain` still waits for the copies
        try:
            # First: who waits for this stream, as below where anything fails, waits for what it waits for.
            for mark in (self.mark(),) if behind is None else behind:
                stream.wait_event(mark.recorded)  # type: ignore[attr-defined]
            for earlier in transfer.after:
                stream.wait_event(earlier.ticket.ended)
            alone, together = self._launches.divide(transfer.copies, transfer.direction)
            for copies in together:
                ticket.batches.append(self._launches.prepare(copies))
            ticket.began.record(stream)
            ticket.timed = True
            with torch.cuda.stream(stream):
                for copy in alone:
                    copy.run(non_blocking=True)
                for batch in ticket.batches:
                    self._launches.launch(batch)
            ticket.ended.record(stream)
            ticket.whole = True
        except Exception as error:
            # Copies before the failing one may still run: their slots must not be re-used under them.
            self._in_flight.remove(transfer)
            try:
                stream.synchronize()
                self._launches.release(ticket.batches)
            finally:
                transfer.settle(error)
            if isinstance(error, TimeoutError):
                raise  # of a signal handler: no copy raises it
        except BaseException:
            # An interrupt. What was begun goes on, and ends before this. `drain` fails it.
            ticket.ended.record(stream)
            raise

    def _wait(self, transfer: Transfer) -> None:
        ended: torch.cuda.Event = transfer.ticket.ended
        stream = torch.cuda.current_stream(self.device)
        if transfer.direction is not Direction.FETCH or ended.query():
            stream.wait_event(ended)
            return
        before, after = self._event(), self._event()
        tracer = tracing.active
        began = None if tracer is None else self.stamp()
        before.record(stream)
        stream.wait_event(ended)
        after.record(stream)
        self._stalls.append((before, after, transfer.counters))
        if tracer is not None and began is not None:
            tracer.stall(transfer.counters, str(self.device), began, self.stamp(), transfer.traced, cuts=True)

    def _block(self, transfer: Transfer) -> None:
        ticket = transfer.ticket
        if ticket is not None:  # another thread may have seen the end meanwhile
            ticket.ended.synchronize()

    def _synchronize(self, transfer: Transfer) -> None:
        ticket: Ticket | None = transfer.ticket
        if ticket is not None:
            ticket.ended.synchronize()
        self._end(transfer)
        with contextlib.suppress(ValueError):  # an interrupt came just behind this the last time
            self._in_flight.remove(transfer)

    def poll(self) -> None:
        """Settle what has ended. Within a stream, transfers end in the order of submission."""
        still: deque[Transfer] = deque()
        blocked: set[Direction] = set()
        try:
            while self._in_flight:
                transfer = self._in_flight[0]
                ticket: Ticket | None = transfer.ticket
                if ticket is None or (transfer.direction not in blocked and ticket.whole and ticket.ended.query()):
                    self._end(transfer)
                else:
                    blocked.add(transfer.direction)
                    still.append(transfer)
                self._in_flight.popleft()  # last: an interrupt loses none
        finally:
            # A device that has failed may refuse to say: nothing is dropped for that.
            still.extend(self._in_flight)
            self._in_flight = still
        while self._stalls and self._stalls[0][1].query():
            before, after, counters = self._stalls.popleft()
            counters.stall_seconds += before.elapsed_time(after) / 1e3
            self._spare += (before, after)

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
            self._end(self._in_flight[0], error)
            self._in_flight.popleft()

    def close(self) -> None:
        """Drain; streams, events and the memory of addresses go with this object."""
        self.drain()
        self._stalls.clear()
        self._spare.clear()
        self._launches.close()

    def _end(self, transfer: Transfer, error: Exception | None = None) -> None:
        """Its copies have ended, or never will. May be done again where it was cut short."""
        ticket: Ticket | None = transfer.ticket
        if ticket is not None and not ticket.whole:
            error = error or TransferError("it was cut short")
        transfer.ticket = None
        try:
            if ticket is not None:
                self._count(transfer, ticket, timed=error is None and ticket.timed)
        except Exception as failure:  # of a device that has failed: nobody knows what it has copied
            transfer.settle(error or failure)
            raise
        finally:
            transfer.settle(error)

    def _count(self, transfer: Transfer, ticket: Ticket, *, timed: bool) -> None:
        if timed:
            seconds = ticket.began.elapsed_time(ticket.ended) / 1e3
            began = None if ticket.clock is None else ticket.clock.seconds(ticket.began)
            if began is not None:
                transfer.span = (began, began + seconds)
            if transfer.direction is Direction.FETCH:
                transfer.counters.seconds_up += seconds
            elif transfer.direction is Direction.WRITE_BACK:
                transfer.counters.seconds_down += seconds
        self._spare += (ticket.began, ticket.ended)
        self._launches.release(ticket.batches)

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
