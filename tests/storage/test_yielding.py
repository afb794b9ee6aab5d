"""What queries and results pass through is held in the host budget, and yields to blocks: of any device."""

from __future__ import annotations

import pytest
import torch

from kvtier.errors import BudgetError
from kvtier.metrics import Counters
from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import InlineTransfers

CPU = torch.device("cpu")
LAYOUT = BlockLayout(2, 2, 8, 8, 4, torch.float32)
BLOCK = LAYOUT.nbytes


def tiers_of_two_devices(host_bytes: int) -> tuple[Tiers, Tiers, Memory]:
    """An emulated device whose far tier is the host, and the CPU itself, in one host budget."""
    host, near, counters = Memory(CPU, Budget("host", host_bytes)), Memory(CPU, Budget("device", 8 * BLOCK)), Counters()
    device = Tiers(near, host, InlineTransfers(counters), counters, write_through=0.5)
    return device, Tiers(host, None, InlineTransfers(counters), counters, write_through=0.5), host


def append(tiers: Tiers, tokens: int) -> LayerStore:
    layer = LayerStore(0, LAYOUT, tiers)
    x = torch.randn(1, 2, tokens, 8, device="cpu")
    layer.append(x, x, layer.group(x, x))
    return layer


def test_blocks_of_the_host_itself_take_the_room() -> None:
    device, own, host = tiers_of_two_devices(4 * BLOCK)
    device.handover.take((1, 4, 1, 8, 8), torch.float32)
    assert host.budget.used == device.handover.nbytes > 0
    append(own, 16)
    assert device.handover.nbytes == 0
    assert host.budget.used == 4 * BLOCK


def test_so_does_the_workspace_of_the_host_itself() -> None:
    device, own, host = tiers_of_two_devices(4 * BLOCK)
    append(own, 8)
    device.handover.take((1, 4, 1, 8, 8), torch.float32)
    own.workspace.take(2 * BLOCK)
    assert device.handover.nbytes == 0
    assert host.budget.used == 4 * BLOCK


def test_what_would_not_be_enough_is_not_given_back() -> None:
    device, own, _ = tiers_of_two_devices(4 * BLOCK - 64)
    device.handover.take((1, 4, 1, 8, 8), torch.float32)
    held = device.handover.nbytes
    with pytest.raises(BudgetError):
        append(own, 16)
    assert device.handover.nbytes == held
