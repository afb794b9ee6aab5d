"""Engines whose work goes on behind the CPU's back, without a device that has a back."""

from __future__ import annotations

import torch

from kvtier.memory.tiered import EngineFactory
from kvtier.transfer.engine import Event, TransferEngine


class Marked(Event):
    """A point that the device comes by only when somebody waits for it."""

    def __init__(self) -> None:
        self.over = False

    def passed(self) -> bool:
        """Not before it is waited for."""
        return self.over

    def settle(self) -> None:
        """Wait."""
        self.over = True


def behind_the_cpus_back(make: EngineFactory) -> EngineFactory:
    """The same engines, but work is taken to go on after a call has returned: slots that are given up are held."""

    def made(device: torch.device) -> TransferEngine:
        engine = make(device)
        engine.asynchronous = True
        engine.mark = Marked  # type: ignore[method-assign]
        return engine

    return made
