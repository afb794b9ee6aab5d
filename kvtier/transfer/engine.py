"""The seam through which bytes move between tiers, and inline copies for machines without an accelerator.

A transfer has two phases. *Prepare* is the caller's: it owns both ends and keeps them until the transfer has settled.
*Complete* and *fail* are the engine's: it settles the transfer once, and calls back. A failed transfer leaves its
source. Who needs the bytes calls `wait` (the compute stream) or `synchronize` (the CPU) first; `poll` settles what has
ended without waiting.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier import tracing
from kvtier.errors import TransferError
from kvtier.stats import Counters
from kvtier.transfer.copies import Copy, TensorCopy

__all__ = ["Direction", "InlineTransfers", "State", "Transfer", "TransferEngine"]


class Direction(enum.StrEnum):
    """What a transfer is for. Fetches go before write-backs (Pensieve, section 5.1), and what attention on the host
    waits for before both."""

    FETCH = "fetch"  # blocks, host -> device
    WRITE_BACK = "write_back"  # blocks, device -> host
    QUERY = "query"  # what attention on the host reads, device -> host
    RESULT = "result"  # what it wrote, host -> device


#: What a trace calls the directions in which blocks move.
_LANES = {Direction.FETCH: "up", Direction.WRITE_BACK: "down"}


class State(enum.Enum):
    """Life of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


def nothing() -> None:
    """No callback."""


class Transfer:
    """A handle on submitted copies.

    Attributes:
        copies: what moves.
        direction: which way.
        after: transfers that end before this one begins.
        nbytes: that move.
        state: pending until the engine knows better.
        error: why it failed.
        ticket: what an engine needs to find its copies again.
        layer: whose blocks they are, for a trace; None: nobody said.
        submitted: when, and in which step, if a trace was active.
        span: when the copies began and ended, seconds of `time.perf_counter`, where an engine knows it and a trace is
            active. Without it, a trace shows the time from submission to the end that the engine learned of.
    """

    __slots__ = (
        "_engine",
        "_on_done",
        "_on_failed",
        "after",
        "copies",
        "counters",
        "direction",
        "error",
        "layer",
        "nbytes",
        "span",
        "state",
        "submitted",
        "ticket",
    )

    def __init__(
        self,
        engine: TransferEngine,
        copies: Sequence[Copy | TensorCopy],
        direction: Direction,
        counters: Counters,
        after: Sequence[Transfer],
        on_done: Callable[[], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self.copies = copies
        self.direction = direction
        self.counters = counters
        self.nbytes = sum([copy.nbytes for copy in copies])
        self._on_done = on_done
        self._on_failed = on_failed
        self.state = State.PENDING
        self.after = [earlier for earlier in after if earlier.pending]
        self.error: BaseException | None = None
        self.ticket: Any = None
        self.layer: int | None = None
        self.submitted: tuple[float, int] | None = None
        self.span: tuple[float, float] | None = None

    @property
    def pending(self) -> bool:
        """Whether it may still read its source and write its target."""
        return self.state is State.PENDING

    @property
    def over(self) -> bool:
        """Whether its copies have ended, though nobody may have looked: an engine that cannot tell says no."""
        return self.state is not State.PENDING or self._engine._is_over(self)

    def wait(self) -> None:
        """Order all later work of the compute stream behind this transfer. Raises `TransferError` if it failed."""
        if self.state is State.PENDING:
            self._engine._wait(self)
        self._raise_if_failed()

    def synchronize(self) -> None:
        """Block the CPU until the transfer is complete. Raises `TransferError` if it failed."""
        if self.state is State.PENDING:
            began = time.perf_counter()
            self._engine._synchronize(self)
            if self.direction is Direction.FETCH or self.direction is Direction.WRITE_BACK:
                self.stalled(began, time.perf_counter())
        self._raise_if_failed()

    def block(self) -> None:
        """Block the CPU until the copies have ended. Settles nothing, so that no lock is needed."""
        if self.state is State.PENDING:
            self._engine._block(self)

    def settle(self, error: BaseException | None = None) -> None:
        """For engines: end the transfer, well or with `error`, and call back. Once."""
        if self.state is not State.PENDING:
            return
        self.state = State.DONE if error is None else State.FAILED
        self.error = error
        if error is not None:
            self.counters.failed_transfers += 1
        callback = self._on_done if error is None else self._on_failed
        self._on_done = self._on_failed = nothing
        self.after = []
        if self.submitted is not None:
            self._trace()
        callback()

    def stalled(self, began: float, ended: float) -> None:
        """For engines: the CPU waited for these copies, `time.perf_counter`."""
        self.counters.stall_seconds += ended - began
        tracer = tracing.active
        if tracer is not None:
            engine = self._engine
            tracer.stall(self.counters, str(engine.device), began, ended, self.traced, cuts=not engine.has_own_clock)

    @property
    def traced(self) -> dict[str, Any]:
        """What a trace shows of it."""
        blocks = sum(copy.nbytes // copy.source.block for copy in self.copies if isinstance(copy, Copy))
        found = {"layer": self.layer, "blocks": blocks, "bytes": self.nbytes, "copies": len(self.copies)}
        return {name: x for name, x in found.items() if x is not None}

    def _trace(self) -> None:
        tracer = tracing.active
        if tracer is None or self.submitted is None or self.submitted[0] < tracer.began:
            return
        lane = _LANES.get(self.direction)
        if lane is not None:
            submitted, step = self.submitted
            began, ended = self.span or (submitted, time.perf_counter())
            args = {"step": step} | self.traced | ({} if self.error is None else {"failed": str(self.error)})
            tracer.copied(self.counters, lane, str(self._engine.device), began, ended, args)

    def _raise_if_failed(self) -> None:
        if self.state is State.FAILED:
            raise TransferError(f"A {self.direction} of {len(self.copies)} copies failed: {self.error}") from self.error


class Event(ABC):
    """A point in the work of a compute stream, from `TransferEngine.mark`."""

    @property
    def event(self) -> Event:
        """This point: slots that wait for it may be written by whoever orders the write behind it."""
        return self

    @abstractmethod
    def passed(self) -> bool:
        """Whether the device has come by. Never blocks."""

    @abstractmethod
    def settle(self) -> None:
        """Block the CPU until the device has come by."""


class TransferEngine(ABC):
    """Submits copies for one device. Subclasses say when they run.

    Attributes:
        device: where attention runs.
        asynchronous: whether work goes on behind the CPU's back, so that `mark` has something to say.
        has_own_clock: whether `stamp` gives points of the device's work; else the CPU's time serves.
        pageable_copies_block: whether a copy to or from host memory that is not page-locked blocks the CPU until the
            device has come to it.
        stream: the compute stream that was used last, see `follow`; None where everything runs at once, or none was.
    """

    asynchronous = False
    has_own_clock = False
    pageable_copies_block = False
    stream: object = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def submit(
        self,
        copies: Sequence[Copy | TensorCopy],
        direction: Direction,
        counters: Counters,
        *,
        after: Sequence[Transfer] = (),
        behind: Sequence[Event] | None = None,
        on_done: Callable[[], None] = nothing,
        on_failed: Callable[[], None] = nothing,
        layer: int | None = None,
    ) -> Transfer:
        """Start copies.

        Args:
            copies: the caller keeps both ends until the transfer has settled.
            direction: which way.
            counters: that count it.
            after: transfers that end before these copies begin.
            behind: points of the compute stream that these copies begin behind; None: all its work so far.
            on_done, on_failed: called once, when the engine learns of the end, by the thread that polls or waits.
            layer: whose blocks they are, for a trace.
        """
        transfer = Transfer(self, copies, direction, counters, after, on_done, on_failed)
        tracer = tracing.active
        if tracer is not None:
            transfer.layer, transfer.submitted = layer, (time.perf_counter(), tracer.step_of(counters))
        if direction is Direction.FETCH:
            counters.bytes_up += transfer.nbytes
            counters.copies_up += len(copies)
        elif direction is Direction.WRITE_BACK:
            counters.bytes_down += transfer.nbytes
            counters.copies_down += len(copies)
        else:
            counters.attention_bytes += transfer.nbytes
        self._start(transfer, behind)
        return transfer

    def follow(self) -> None:  # noqa: B027 - engines without a background have no streams
        """Let the caller's compute stream go on behind the one that was used last, where that is another one: so all
        that is done for a device is one sequence, whatever streams threads set."""

    def forked(self) -> None:  # noqa: B027 - likewise
        """As of `Inherited`: in this process no device answers, and none is asked."""

    def give_back(self, memory: torch.Tensor) -> None:  # noqa: B027 - likewise
        """Memory of the device goes back to torch, which hands it on in the order of the stream it was taken on."""

    def mark(self) -> Event | None:
        """The end of the compute stream's work so far; None where everything runs at once."""
        return None

    def stamp(self) -> tracing.Time:
        """The end of the compute stream's work so far, for a trace."""
        return time.perf_counter()

    def poll(self) -> None:  # noqa: B027 - engines without a background have nothing to learn
        """Settle what has ended meanwhile. Never blocks."""

    def in_flight(self) -> Sequence[Transfer]:
        """Transfers that have not settled."""
        return ()

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing is in flight; failures go to the callbacks, and are not raised."""

    @abstractmethod
    def close(self) -> None:
        """Drain and give up streams."""

    def _block(self, transfer: Transfer) -> None:  # noqa: B027 - `synchronize` does it, where nothing takes long
        """Block the CPU until the copies of a transfer have ended, and change nothing. Any thread may call this."""

    def _is_over(self, transfer: Transfer) -> bool:
        """Whether the copies of a transfer that was not seen to end have ended."""
        return False

    @abstractmethod
    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None: ...

    @abstractmethod
    def _wait(self, transfer: Transfer) -> None: ...

    @abstractmethod
    def _synchronize(self, transfer: Transfer) -> None: ...


class InlineTransfers(TransferEngine):
    """Copies at once, on the calling thread: for machines without an accelerator. Copies of blocks are stalls."""

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        blocks = transfer.direction is Direction.FETCH or transfer.direction is Direction.WRITE_BACK
        began = time.perf_counter() if blocks else 0.0
        try:
            for copy in transfer.copies:
                copy.run()
            if transfer.submitted is not None:
                transfer.span = (began, time.perf_counter())
        except Exception as error:
            transfer.settle(error)
            if isinstance(error, TimeoutError):
                raise  # of a signal handler: no copy raises it
        except BaseException:
            # Not by that itself: its frames have the transfer, which would keep all that they refer to.
            transfer.settle(TransferError("it was cut short"))
            raise
        else:
            transfer.settle()
        if blocks:
            ended = time.perf_counter()
            transfer.stalled(began, ended)
            if transfer.direction is Direction.FETCH:
                transfer.counters.seconds_up += ended - began
            else:
                transfer.counters.seconds_down += ended - began

    def _wait(self, transfer: Transfer) -> None:
        raise AssertionError("an inline transfer is never pending")

    _synchronize = _wait

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing to give up."""
