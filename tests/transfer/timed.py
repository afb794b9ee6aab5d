"""Streams with a simulated clock, in plain Python: when work begins and ends as on a CUDA device, and no time passes.

The CPU runs ahead of the device, at most by its lead, until it waits for it. What is submitted to a stream begins when
all before it in that stream has ended, and when the events that it waits for have come by. Bytes move when they are
submitted: whether the order is right is the question of `stream_model`, here it is how long somebody waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvtier.transfer.engine import Direction, Event, Transfer, TransferEngine


class Moment(Event):
    """A point of the compute stream, which the device comes by at a known time."""

    def __init__(self, engine: TimedTransfers, at: float) -> None:
        self._engine = engine
        self.at = at

    def passed(self) -> bool:
        """Whether the CPU's clock is there."""
        return self.at <= self._engine.now

    def settle(self) -> None:
        """Let the CPU wait until then."""
        self._engine.now = max(self._engine.now, self.at)


class TimedTransfers(TransferEngine):
    """Copies over a link of a given speed, one stream for each direction.

    Args:
        device: as for every engine.
        seconds_per_byte: of the link, each way.
        lead: seconds of work that the compute stream may have been given and not have done. 0: the CPU takes as long to
            submit a layer as the device to compute it.

    Attributes:
        now: the CPU's clock, seconds.
        compute_ends: when all that the compute stream was given has ended.
        stalls: seconds that the compute stream waited for a fetch.
        busy: seconds in which blocks were fetched.
        began: for each fetch, when it began.
    """

    asynchronous = True

    def __init__(self, device: torch.device, seconds_per_byte: float = 0.0, lead: float = math.inf) -> None:
        super().__init__(device)
        self.seconds_per_byte = seconds_per_byte
        self.lead = lead
        self.now = 0.0
        self.compute_ends = 0.0
        self.stalls = 0.0
        self.busy = 0.0
        self.began: list[float] = []
        self._ends = dict.fromkeys(Direction, 0.0)
        self._pending: list[Transfer] = []

    def compute(self, seconds: float) -> None:
        """The compute stream is given some work."""
        self.compute_ends = max(self.compute_ends, self.now) + seconds
        self.now = max(self.now, self.compute_ends - self.lead)

    def catch_up(self) -> None:
        """The CPU waits for the compute stream, as it does for the next token."""
        self.now = max(self.now, self.compute_ends)

    def mark(self) -> Moment:
        return Moment(self, self.compute_ends)

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        for copy in transfer.copies:
            copy.run()
        waits = [self.compute_ends] if behind is None else [x.at for x in behind if isinstance(x, Moment)]
        waits += [earlier.ticket for earlier in transfer.after]
        began = max(self.now, self._ends[transfer.direction], *waits)
        seconds = transfer.nbytes * self.seconds_per_byte
        transfer.ticket = self._ends[transfer.direction] = began + seconds
        self._pending.append(transfer)
        if transfer.direction is Direction.FETCH:
            self.busy += seconds
            self.began.append(began)

    def _wait(self, transfer: Transfer) -> None:
        waited = max(transfer.ticket - max(self.compute_ends, self.now), 0.0)
        self.compute(waited)
        if transfer.direction is Direction.FETCH:
            self.stalls += waited
            transfer.counters.stall_seconds += waited

    def _synchronize(self, transfer: Transfer) -> None:
        self.now = max(self.now, transfer.ticket)
        self.poll()

    def poll(self) -> None:
        ended = [transfer for transfer in self._pending if transfer.ticket <= self.now]
        self._pending = [transfer for transfer in self._pending if transfer.ticket > self.now]
        for transfer in ended:
            transfer.settle()

    def in_flight(self) -> Sequence[Transfer]:
        return tuple(self._pending)

    def drain(self) -> None:
        self.now = max([self.now, *(transfer.ticket for transfer in self._pending)])
        self.poll()

    def close(self) -> None:
        self.drain()
