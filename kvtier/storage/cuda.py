"""Transfers over CUDA streams and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from kvtier.metrics import Counters
from kvtier.storage.transfer import Transfer, TransferEngine
from kvtier.types import Direction


class CudaTransfers(TransferEngine):
    """One stream for fetches and one for write-backs, for one device.

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
            }
        self._in_flight: deque[Transfer] = deque()
        self._spare: list[torch.cuda.Event] = []

    def _start(self, transfer: Transfer) -> None:
        stream = self._streams[transfer.direction]
        began, ended = self._event(), self._event()
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
            stream.synchronize()
            transfer.settle(error)
            return
        finally:
            # An event may be recorded anew as soon as the waits on it are enqueued.
            self._spare.append(began)
        transfer.ticket = ended
        self._in_flight.append(transfer)

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
        """Block until nothing is in flight."""
        while self._in_flight:
            transfer = self._in_flight.popleft()
            try:
                transfer.ticket.synchronize()  # type: ignore[attr-defined]
            except Exception as error:
                transfer.settle(error)
            else:
                self._end(transfer)

    def close(self) -> None:
        """Drain; streams and events go with this object."""
        self.drain()
        self._spare.clear()

    def _end(self, transfer: Transfer) -> None:
        self._spare.append(transfer.ticket)  # type: ignore[arg-type]
        transfer.ticket = None
        transfer.settle()

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event()
