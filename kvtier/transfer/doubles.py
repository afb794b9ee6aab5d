"""Test doubles: transfers that come as late, as wildly or as badly as allowed.

A missing wait, a slot re-used too early or freed too soon then gives wrong numbers on a CPU, every time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from kvtier.transfer.engine import Event, InlineTransfers, Transfer, TransferEngine

_POISON = 0xFF


class HeldTransfers(TransferEngine):
    """Runs a transfer only when somebody waits for it, and fills its destination with NaN until then.

    Args:
        device: as for every engine.
        seed: of the order.
        eagerness: probability that other pending transfers run at any call, in any order that `after` allows. 0: as
            late as can be; 1: everything at once, in a shuffled order.
        late: waiting runs a transfer but does not settle it, as on a CUDA stream: its slots stay in use until `poll`.
    """

    asynchronous = True  # queries and results pass between the tiers as if the device were apart

    def __init__(self, device: torch.device, seed: int = 0, eagerness: float = 0.25, late: bool = False) -> None:
        super().__init__(device)
        self._late = late
        self._ran: list[Transfer] = []
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._pending: list[Transfer] = []

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        for copy in transfer.copies:
            copy.destination().view(torch.uint8).fill_(_POISON)
        self._pending.append(transfer)
        self._run_some()

    def _wait(self, transfer: Transfer) -> None:
        self._run_some()
        self._run(transfer)

    def _synchronize(self, transfer: Transfer) -> None:
        self._run(transfer)
        if transfer in self._ran:
            self._ran.remove(transfer)
            transfer.settle()

    def poll(self) -> None:
        """Run some, or none; settle what ran."""
        self._run_some()
        self._settle_all()

    def in_flight(self) -> Sequence[Transfer]:
        """Everything not settled."""
        return (*self._pending, *self._ran)

    def drain(self) -> None:
        """Run all, in a shuffled order."""
        while self._pending:
            self._run(self._random.choice(self._pending))
        self._settle_all()

    def _settle_all(self) -> None:
        while self._ran:
            self._ran.pop().settle()

    def close(self) -> None:
        """Run what is left."""
        self.drain()

    def _run_some(self) -> None:
        for transfer in self._random.sample(self._pending, len(self._pending)):
            if self._random.random() < self._eagerness:
                self._run(transfer)

    def _run(self, transfer: Transfer) -> None:
        if transfer not in self._pending:
            return
        for earlier in transfer.after:
            self._run(earlier)
        self._pending.remove(transfer)
        began = time.perf_counter()
        for copy in transfer.copies:
            copy.run()
        transfer.span = (began, time.perf_counter())
        if self._late:
            self._ran.append(transfer)
        else:
            transfer.settle()


class FailingTransfers(InlineTransfers):
    """Inline copies, some of which fail before they move anything.

    Args:
        device: as for every engine.
        fails: asked for every transfer.
    """

    def __init__(self, device: torch.device, fails: Callable[[Transfer], bool]) -> None:
        super().__init__(device)
        self._fails = fails

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        if not self._fails(transfer):
            super()._start(transfer, behind)
            return
        for copy in transfer.copies:
            copy.destination().view(torch.uint8).fill_(_POISON)
        transfer.settle(RuntimeError("this transfer was made to fail"))
