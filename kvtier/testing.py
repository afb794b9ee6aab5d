"""Test doubles, shipped for those who extend kvtier: transfers that come as late, as wildly or as badly as allowed.

A missing wait, a slot re-used too early or freed too soon then gives wrong numbers on a CPU, every time.

    cache = with_doubles(TieredKVCache(config, device_budget=...), held(seed=0))
    memory = with_doubles(TieredMemory(device_budget=...), held(seed=0))
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from kvtier.memory.tiered import EngineFactory, TieredMemory
from kvtier.transfer.doubles import FailingTransfers, HeldTransfers
from kvtier.transfer.engine import Transfer, TransferEngine

if TYPE_CHECKING:
    from kvtier.hf.cache import TieredKVCache

__all__ = ["FailingTransfers", "HeldTransfers", "failing", "held", "with_doubles"]

T = TypeVar("T", "TieredKVCache", TieredMemory)


def held(seed: int = 0, eagerness: float = 0.25, *, late: bool = False) -> EngineFactory:
    """A factory of `HeldTransfers`."""

    def make(device: torch.device) -> TransferEngine:
        return HeldTransfers(device, seed, eagerness, late)

    return make


def failing(fails: Callable[[Transfer], bool] | float, seed: int = 0) -> EngineFactory:
    """A factory of `FailingTransfers` that fail where `fails` says so, or with that probability."""
    generator = random.Random(seed)
    decide = fails if callable(fails) else (lambda transfer: generator.random() < fails)

    def make(device: torch.device) -> TransferEngine:
        return FailingTransfers(device, decide)

    return make


def with_doubles(target: T, engine: EngineFactory, *, poison: bool = True) -> T:
    """Give an unused cache's own memory, or an unused memory, another engine, and NaN in all memory nobody owns."""
    memory = target if isinstance(target, TieredMemory) else target._forward.memory
    memory.set_up(engine, poison=poison)
    return target
