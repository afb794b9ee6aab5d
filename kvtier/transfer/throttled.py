"""`ThrottledTransfers`: copies in the background that take as long as a link of a given speed, in real time.

So planners are compared for real where there is no accelerator: a fetch hides behind compute if there is enough of it,
and else somebody waits. `DeviceClock` is when a device would have done the work that it was given, so that compute
takes a given time as well while the CPU is free; see `kvtier.testing.emulated_device`.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvtier.config import parse_number, parse_rate
from kvtier.errors import TransferError
from kvtier.stats import Counters
from kvtier.transfer.copies import Copy, TensorCopy
from kvtier.transfer.engine import Direction, Event, Transfer, TransferEngine

_POISON = 0xFF
#: A sleeping thread is woken some 60 us late: the last part of a wait is spent looking at the clock.
_SPIN = 150e-6
#: No wait is longer: a condition cannot wait for ever with a timeout.
_LONG = 3600.0
#: Seconds that a process waits at its end for what is under way.
_EXIT = 5.0


def sleep_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` is there, to some microseconds. Others have the GIL meanwhile."""
    while (left := moment - time.perf_counter()) > _SPIN:
        time.sleep(left - _SPIN)
    while time.perf_counter() < moment:
        time.sleep(0)


class Link:
    """How fast bytes cross between the tiers; may be changed at any time, which copies under way follow.

    Args:
        up: bytes per second, host to device; a number, or a string such as "2GB".
        down: bytes per second, device to host.
        latency: seconds that each transfer takes besides.
        host: bytes of KV per second that the host attends to at the most; None: as fast as it really is. What is really
            faster waits, as if memory were slower.

    Raises:
        ConfigError: not above zero; a latency below zero.
    """

    def __init__(
        self, up: float | str, down: float | str, latency: float = 0.0, host: float | str | None = None
    ) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._since = 0.0
        self._rates = {Direction.FETCH: parse_rate("up", up), Direction.WRITE_BACK: parse_rate("down", down)}
        self.host = None if host is None else parse_rate("host", host)
        self.latency = parse_number("latency", latency, "seconds")

    @property
    def up(self) -> float:
        """Bytes per second, host to device."""
        return self._rates[Direction.FETCH]

    @up.setter
    def up(self, rate: float | str) -> None:
        self._change(Direction.FETCH, "up", rate)

    @property
    def down(self) -> float:
        """Bytes per second, device to host."""
        return self._rates[Direction.WRITE_BACK]

    @down.setter
    def down(self, rate: float | str) -> None:
        self._change(Direction.WRITE_BACK, "down", rate)

    def _change(self, direction: Direction, name: str, rate: float | str) -> None:
        found = parse_rate(name, rate)
        with self._changed:
            self._rates[direction] = found
            self._version, self._since = self._version + 1, time.perf_counter()
            self._changed.notify_all()

    def seconds(self, direction: Direction, nbytes: int) -> float:
        """What a transfer takes at the present rate, alone."""
        down = direction is Direction.WRITE_BACK or direction is Direction.QUERY
        return self.latency + nbytes / (self.down if down else self.up)

    def cross(self, direction: Direction, began: float, nbytes: int, lead: float) -> float:
        """Block until a transfer that began at a time will be over within `lead` seconds. Returns when it will be."""
        with self._changed:
            at, left = began + self.latency, float(nbytes)
            while True:
                rate, version = self._rates[direction], self._version
                end = at + left / rate
                pause = end - lead - time.perf_counter()
                if pause <= 0:
                    return end
                self._changed.wait(min(pause, _LONG))
                if self._version != version and self._since > at:
                    left = max(left - rate * (self._since - at), 0.0)
                    at = self._since


class DeviceClock:
    """When a device has done what it was given, in real time: `time.perf_counter()` seconds. One thread gives it work.

    Attributes:
        ends: when all of it has been done; in the past while the device is idle.
        query_ready: when the query of the last attention is there.
        running: whether a device is emulated at all. If not, the CPU has done all that it was given.
        busy: seconds of work that it was given.
        idle: seconds in which it had nothing to do between two pieces of work, waits for copies included.
    """

    def __init__(self) -> None:
        self.ends = self.query_ready = 0.0
        self.running = False
        self.busy = self.idle = 0.0
        self._attends = False

    def run(self, seconds: float) -> None:
        """Give it work behind all that it has."""
        now = time.perf_counter()
        if now > self.ends:
            self.idle += now - self.ends if self.ends else 0.0
            self.ends = now
        self.ends += seconds
        self.busy += seconds

    def attend(self, seconds: float) -> None:
        """Give it a layer's attention, whose query the host may need as well."""
        self.query_ready = max(self.ends, time.perf_counter())
        self.run(seconds)
        self._attends = True

    def point(self) -> float:
        """Where it is after all that it has, for a trace: at first after `attend` where that begins."""
        if not self.running:
            return time.perf_counter()
        attends, self._attends = self._attends, False
        return self.query_ready if attends else max(self.ends, time.perf_counter())

    def wait(self, moment: float) -> None:
        """Let it wait behind all that it has."""
        self.ends = max(self.ends, moment)

    def catch_up(self) -> None:
        """Block the CPU until it has done all."""
        sleep_until(self.ends)


class Moment(Event):
    """A point of the compute stream, which a device comes by at a known time."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    def passed(self) -> bool:
        """Whether it has."""
        return time.perf_counter() >= self.at

    def settle(self) -> None:
        """Sleep until then."""
        sleep_until(self.at)


@dataclass(slots=True, eq=False)
class Ticket:
    """A transfer as the thread of its direction sees it.

    Attributes:
        copies, nbytes: what moves.
        earliest: when it may begin, as far as that is known when it is submitted.
        after: what ends before it begins.
        ended: set when its bytes have moved, or failed to.
        end: when; for queries and results when they arrive.
        seconds: in which the link was busy with it.
        ran: whether the bytes of a query or a result have moved.
        error: why it failed.
    """

    copies: Sequence[Copy | TensorCopy]
    nbytes: int
    earliest: float
    after: list[Ticket] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    end: float = 0.0
    seconds: float = 0.0
    ran: bool = False
    error: BaseException | None = None

    def run(self) -> None:
        """Move the bytes, whatever comes of it."""
        if not self.ran:
            self.ran = True
            try:
                for copy in self.copies:
                    copy.run()
            except Exception as error:
                self.error = error


class Lane:
    """The thread of one direction: one transfer after the other, in the order of submission.

    It refers to no engine, so that one that nobody closed can be garbage.
    """

    def __init__(self, direction: Direction, link: Link) -> None:
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_carry, args=(self._queue, direction, link), name=f"kvtier {direction}", daemon=True
        )
        self._thread.start()
        if not _running:
            atexit.register(_end_all)
        _running.add(self)

    def submit(self, ticket: Ticket) -> None:
        """Behind all that was submitted. All or nothing, whatever cuts this short."""
        self._queue.put(ticket)

    def flush(self) -> None:
        """Block until all that was submitted has ended."""
        last = Ticket((), 0, 0.0)
        self._queue.put(last)
        last.ended.wait()

    def stop(self) -> None:
        """Let the thread end behind all that was submitted."""
        self._queue.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread; None: as long as it takes."""
        self._thread.join(seconds)


_running: weakref.WeakSet[Lane] = weakref.WeakSet()


def _end_all() -> None:
    """The process ends: a thread that came back from torch after that would abort it."""
    lanes = list(_running)
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        lane.join(_EXIT)


@torch.inference_mode()
def _carry(tickets: queue.SimpleQueue[Ticket | None], direction: Direction, link: Link) -> None:
    free = over = 0.0  # when the last transfer was to end, and when it did
    per_byte = 0.0
    while (ticket := tickets.get()) is not None:
        if not ticket.copies:
            ticket.ended.set()
            continue
        for earlier in ticket.after:
            earlier.ended.wait()
        began = max([free, ticket.earliest, *(earlier.end for earlier in ticket.after)])
        # The bytes move in the last moments. What that takes belongs to the time that the transfer is given.
        free = link.cross(direction, began, ticket.nbytes, per_byte * ticket.nbytes + _SPIN)
        at = time.perf_counter()
        ticket.run()
        per_byte += 0.2 * ((time.perf_counter() - at) / max(ticket.nbytes, 1) - per_byte)
        sleep_until(free)
        ticket.end = time.perf_counter()
        ticket.seconds = ticket.end - max(began, over)
        over = ticket.end
        ticket.ended.set()
        del ticket  # it refers to memory


class ThrottledTransfers(TransferEngine):
    """Blocks cross a link of a given speed, a thread for each direction; waiting for them takes real time.

    Transfers of a direction end in the order of submission, each no sooner than its bytes take behind the one before,
    behind what it comes after and behind the points of the compute stream that it is ordered behind. Bytes are at their
    targets when it has ended, not before. Queries and results of attention on the host have a way of their own.

    Not modelled: that both directions, queries and results share a link; that the device's and the host's memory get
    slower by copies, beyond what they really do here.

    Args:
        device: as for every engine.
        link: its speed.
        clock: of an emulated device; None: it computes on the CPU.
        poison: fill the target of a transfer of blocks with NaN until it has ended.
    """

    asynchronous = True

    def __init__(
        self, device: torch.device, link: Link, clock: DeviceClock | None = None, *, poison: bool = False
    ) -> None:
        super().__init__(device)
        self.link = link
        self.clock = DeviceClock() if clock is None else clock
        self._poison = poison
        self._in_flight: list[Transfer] = []
        # For each call under way, known by its cache and buffer, when its query arrives and what the host attends to.
        self._hosted: dict[tuple[int, int], tuple[float, int]] = {}
        # For each cache, what the host was asked to attend to, and the seconds that it took until its last result.
        self._of_cache: dict[int, tuple[Counters, int, float]] = {}
        self._host_free = 0.0
        self._lanes: dict[Direction, Lane] = {}
        self._finalizer = weakref.finalize(self, _stop, self._lanes.values())
        for direction in (Direction.FETCH, Direction.WRITE_BACK):
            self._lanes[direction] = Lane(direction, link)

    def mark(self) -> Moment | None:
        """The end of what the device was given; None if it has done that."""
        ends = self.clock.ends
        return Moment(ends) if self.clock.running and ends > time.perf_counter() else None

    def stamp(self) -> float:
        """The end of what the device was given, for a trace."""
        return self.clock.point()

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        now = time.perf_counter()
        lane = self._lanes.get(transfer.direction)
        ticket = transfer.ticket = Ticket(transfer.copies, transfer.nbytes, now)
        if lane is None:
            arrives = self._result_at(transfer, now) if transfer.direction is Direction.RESULT else self._query_at(now)
            ticket.end = arrives + self.link.seconds(transfer.direction, transfer.nbytes)
            if transfer.direction is Direction.QUERY:
                self._asked(transfer, ticket.end)
            self._in_flight.append(transfer)
            return
        assert self._finalizer.alive, "a closed engine"
        if self._poison:
            for copy in transfer.copies:
                copy.destination().view(torch.uint8).fill_(_POISON)
        if behind is None:
            behind = [x for x in (self.mark(),) if x is not None]
        # A point of the stream is where the device will be: known when it is marked.
        ticket.earliest = max([now, *(x.at for x in behind if isinstance(x, Moment))])
        ticket.after = [earlier.ticket for earlier in transfer.after]
        self._in_flight.append(transfer)  # first: whatever cuts this short, `drain` finds it
        lane.submit(ticket)

    def _query_at(self, now: float) -> float:
        """When a query is there to be copied."""
        return max(now, self.clock.query_ready) if self.clock.running else now

    def _asked(self, transfer: Transfer, arrived: float) -> None:
        """The host gets a query at a time. What it attends to for it is counted already."""
        counters = transfer.counters
        _, done, seconds = self._of_cache.get(id(counters), (counters, 0, counters.host_seconds))
        if done > counters.host_bytes:  # another cache
            done, seconds = 0, counters.host_seconds
        self._of_cache[id(counters)] = (counters, counters.host_bytes, seconds)
        self._hosted[id(counters), _buffer(transfer.copies[0].destination())] = (arrived, counters.host_bytes - done)

    def _result_at(self, transfer: Transfer, now: float) -> float:
        """When the host has its result: now, unless it is to be slower than it is. It does one call after the other."""
        counters, host, copy = transfer.counters, self.link.host, transfer.copies[0]
        assert isinstance(copy, TensorCopy)
        key = (id(counters), _buffer(copy.source))
        if key not in self._hosted:  # not the buffer of its query: then the oldest call of the cache
            key = next((x for x in self._hosted if x[0] == id(counters)), key)
        if key not in self._hosted:
            return now
        arrived, nbytes = self._hosted.pop(key)
        _, asked, before = self._of_cache[id(counters)]
        ends = now
        if host is not None:
            given = nbytes / host
            counters.host_seconds += max(given - (counters.host_seconds - before), 0.0)
            ends = max(now, max(arrived, self._host_free) + given)
        self._host_free = ends
        self._of_cache[id(counters)] = (counters, asked, counters.host_seconds)
        return ends

    def _wait(self, transfer: Transfer) -> None:
        ticket: Ticket = transfer.ticket
        if transfer.direction in self._lanes:
            if not ticket.ended.is_set():
                # An emulated device has work until `ends`; what it waits then is a stall.
                began = max(time.perf_counter(), self.clock.ends if self.clock.running else 0.0)
                ticket.ended.wait()
                ended = time.perf_counter()
                if transfer.direction is Direction.FETCH and ended > began:
                    transfer.stalled(began, ended)
            self._settle(transfer)
        elif self.clock.running:
            # The device waits until it arrives. The CPU, which computes in its place, has the bytes at once.
            self.clock.wait(ticket.end)
            ticket.run()
            if ticket.error is not None:
                self._settle(transfer)
        else:
            self._synchronize(transfer)

    def _block(self, transfer: Transfer) -> None:
        ticket: Ticket | None = transfer.ticket
        if ticket is None:  # another thread has settled it meanwhile
            return
        if transfer.direction in self._lanes:
            ticket.ended.wait()
        else:
            sleep_until(ticket.end)

    def _is_over(self, transfer: Transfer) -> bool:
        ticket: Ticket | None = transfer.ticket
        return ticket is None or (transfer.direction in self._lanes and ticket.ended.is_set())

    def _synchronize(self, transfer: Transfer) -> None:
        self._block(transfer)
        self._settle(transfer)

    def poll(self) -> None:
        """Settle what has ended."""
        now = time.perf_counter()
        for transfer in list(self._in_flight):
            ticket = transfer.ticket
            if ticket.ended.is_set() if transfer.direction in self._lanes else ticket.end <= now:
                self._settle(transfer)

    def in_flight(self) -> Sequence[Transfer]:
        """Submitted and not yet seen to end."""
        return tuple(self._in_flight)

    def drain(self) -> None:
        """Block until nothing is in flight. What was cut short before it was submitted fails."""
        if self._finalizer.alive:
            for lane in self._lanes.values():
                lane.flush()
        for transfer in list(self._in_flight):
            ticket: Ticket = transfer.ticket
            if transfer.direction not in self._lanes:
                self._block(transfer)
            elif not ticket.ended.is_set():
                ticket.error = TransferError("it was cut short")
            self._settle(transfer)

    def close(self) -> None:
        """Drain and end the threads."""
        if self._finalizer.alive:
            self.drain()
            lanes = list(self._lanes.values())
            self._finalizer()
            for lane in lanes:
                lane.join()

    def _settle(self, transfer: Transfer) -> None:
        """A transfer has ended: count it and call back."""
        if transfer not in self._in_flight:
            return
        ticket: Ticket = transfer.ticket
        if ticket.ended.is_set():
            transfer.span = (ticket.end - ticket.seconds, ticket.end)
        if transfer.direction is Direction.FETCH:
            transfer.counters.seconds_up += ticket.seconds
        elif transfer.direction is Direction.WRITE_BACK:
            transfer.counters.seconds_down += ticket.seconds
        else:
            ticket.run()
        try:
            transfer.settle(ticket.error)
        finally:
            self._in_flight.remove(transfer)
            transfer.ticket = None


def _buffer(x: torch.Tensor) -> int:
    """What a tensor is a part of."""
    return x.untyped_storage().data_ptr()


def _stop(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.stop()
