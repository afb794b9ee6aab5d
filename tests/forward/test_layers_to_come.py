"""Layers that nobody has seen yet are admitted with those that have come, where they can only be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvtier import BudgetError, Policy, TieredKVCache
from kvtier.memory.storage import system
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.costs import Prediction

LAYERS, HEADS, DIM, BLOCK_SIZE = 6, 2, 8, 4
BLOCK = BLOCK_SIZE * 2 * HEADS * DIM * 4
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_key_value_heads=HEADS)
CPU = torch.device("cpu")


def make(device: int | None, host: int) -> TieredKVCache:
    """A cache with budgets in blocks."""
    budget = None if device is None else device * BLOCK
    return TieredKVCache(CONFIG, device_budget=budget, host_budget=host * BLOCK, block_size=BLOCK_SIZE)


def forward(cache: TieredKVCache, tokens: int) -> int | None:
    """One forward. The layer that refused it; None if none did."""
    keys = torch.randn(1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(0))
    for i in range(LAYERS):
        try:
            cache.update(keys + i, keys - i, i)
        except BudgetError:
            return i
    return None


def split(cache: TieredKVCache, monkeypatch: pytest.MonkeyPatch, budgets: list[int], at: list[int]) -> None:
    """Let the layers from `at` on be on further devices, each with a tier of so many blocks: all of them emulated."""
    memory = cache._forward.memory
    with memory.lock:
        devices = [memory.on(CPU)]
        for n, blocks in enumerate(budgets):
            engine, policy, readers = memory._engine(CPU), memory.policy, memory.readers
            devices.append(ComputeDevice(CPU, blocks * BLOCK, memory.host, engine, policy, readers))
            memory._devices[torch.device("cpu", n + 1)] = devices[-1]

    def on(device: torch.device) -> ComputeDevice:
        return devices[sum(len(cache._forward.readers) >= first for first in at)]

    monkeypatch.setattr(memory, "on", on)


@pytest.mark.parametrize("device", [None, 8])
def test_on_one_device_a_forward_is_refused_at_its_first_layer(device: int | None) -> None:
    assert forward(make(device, 60), 40) in (None, 0)
    assert forward(make(device, 40), 40) == 0


@pytest.mark.parametrize("device", [8, 20])
def test_with_several_devices_a_forward_is_refused_where_it_does_not_fit_with_a_budget_that_is_enough(
    device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is on one of several devices."""
    monkeypatch.setattr(system, "has_alternatives", lambda device: True)
    cache = make(device, 20)
    keys, error = torch.ones(1, HEADS, 40, DIM), None
    for i in range(LAYERS):
        try:
            cache.update(keys, keys, i)
        except BudgetError as refused:
            error = refused
            break
    assert i > 0
    assert cache.get_seq_length() == 0
    assert cache.stats.device.used_blocks == cache.stats.host.used_blocks == 0
    cache.check_integrity()
    assert error is not None
    assert error.tier == "host"
    cache.resize(host_budget=error.needed)
    assert forward(cache, 40) is None
    cache.check_integrity()


@pytest.mark.parametrize("at", [[1], [3], [2, 4]])
def test_a_model_that_only_several_devices_can_hold_is_not_refused(
    at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 blocks in all: too many for the first device and the host."""
    monkeypatch.setattr(system, "has_alternatives", lambda device: True)
    cache = make(22, 16)
    split(cache, monkeypatch, [42] * len(at), at)
    assert forward(cache, 40) is None
    cache.check_integrity()


def test_what_was_expected_on_one_device_is_not_claimed_there_when_it_comes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make(20, 45)
    split(cache, monkeypatch, [10], [3])
    assert forward(cache, 40) is None
    claims: dict[Any, Any] = cache._forward._held.owner.claims
    assert [claim.held // BLOCK for claim in claims.values()] == [30, 30]
    for _ in range(3):
        assert forward(cache, 1) is None
    cache.check_integrity()


@pytest.mark.parametrize("budgets", [(8, 8), (8, 200), (200, 8)])
def test_a_step_is_predicted_where_all_of_its_devices_are(
    budgets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreseen(Policy):
        def prediction(self, cache: int, device: str) -> Prediction:
            return Prediction(0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0, 0)

    first, second = budgets
    cache = TieredKVCache(
        CONFIG, device_budget=first * BLOCK, host_budget=500 * BLOCK, block_size=BLOCK_SIZE, policy=Foreseen()
    )
    split(cache, monkeypatch, [second], at=[3])
    for tokens in (40, 1, 1):
        assert forward(cache, tokens) is None
    seconds = [x for record, x in cache._forward.history if record.tokens == 1]
    assert seconds == [2.0 if budgets == (8, 8) else None]
