"""Test doubles, shipped for those who extend kvtier: transfers that come as late, as wildly or as badly as allowed.

A missing wait, a slot re-used too early or a reference dropped too soon then gives wrong numbers on a CPU, every time.

    cache = with_doubles(TieredKVCache(config, device_budget=...), held(seed=0))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvtier.metrics import Counters
from kvtier.runtime import EngineFactory
from kvtier.storage.transfer import InlineTransfers, Transfer, TransferEngine

if TYPE_CHECKING:
    from kvtier.hf.cache import TieredKVCache

__all__ = ["FailingTransfers", "HeldTransfers", "failing", "held", "with_doubles"]

_POISON = 0xFF


class HeldTransfers(TransferEngine):
    """Runs a transfer only when somebody waits for it, and fills its destination with NaN until then.

    Args:
        counters: as for every engine.
        seed: of the order.
        late: waiting runs a transfer but does not settle it, as on a CUDA stream: its slots stay in use until `poll`.
        eagerness: probability that other pending transfers run at any call, in any order that `after` allows. 0: as
            late as can be; 1: everything at once, in a shuffled order.
    """

    def __init__(self, counters: Counters, seed: int = 0, eagerness: float = 0.25, late: bool = False) -> None:
        super().__init__(counters)
        self._late = late
        self._ran: list[Transfer] = []
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._pending: list[Transfer] = []

    def _start(self, transfer: Transfer) -> None:
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
        for copy in transfer.copies:
            copy.run()
        if self._late:
            self._ran.append(transfer)
        else:
            transfer.settle()


class FailingTransfers(InlineTransfers):
    """Inline copies, some of which fail before they move anything.

    Args:
        counters: as for every engine.
        fails: asked for every transfer.
    """

    def __init__(self, counters: Counters, fails: Callable[[Transfer], bool]) -> None:
        super().__init__(counters)
        self._fails = fails

    def _start(self, transfer: Transfer) -> None:
        if not self._fails(transfer):
            super()._start(transfer)
            return
        for copy in transfer.copies:
            copy.destination().view(torch.uint8).fill_(_POISON)
        transfer.settle(RuntimeError("this transfer was made to fail"))


def held(seed: int = 0, eagerness: float = 0.25, *, late: bool = False) -> EngineFactory:
    """A factory of `HeldTransfers`."""

    def make(device: torch.device, counters: Counters) -> TransferEngine:
        return HeldTransfers(counters, seed, eagerness, late)

    return make


def failing(fails: Callable[[Transfer], bool] | float, seed: int = 0) -> EngineFactory:
    """A factory of `FailingTransfers` that fail where `fails` says so, or with that probability."""
    generator = random.Random(seed)
    decide = fails if callable(fails) else (lambda transfer: generator.random() < fails)

    def make(device: torch.device, counters: Counters) -> TransferEngine:
        return FailingTransfers(counters, decide)

    return make


def with_doubles(cache: TieredKVCache, engine: EngineFactory, *, poison: bool = True) -> TieredKVCache:
    """Give an empty cache another transfer engine, and NaN in all memory that nobody owns."""
    cache._finalizer()
    cache._setup(engine, poison=poison)
    return cache
