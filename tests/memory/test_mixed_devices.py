"""One memory, layers on several devices: each has the budget that the options give it, and nobody gets memory that no
budget counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier import ConfigError, TieredMemory
from kvtier.memory.storage import system
from kvtier.transfer.engine import InlineTransfers

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes memories on a machine whose accelerators are there, as far as budgets are concerned."""
    monkeypatch.setattr(system, "free_device_memory", lambda device: 64 * MIB)
    monkeypatch.setattr(system, "total_device_memory", lambda device: 64 * MIB)
    monkeypatch.setattr(system, "is_there", lambda name: True)

    def make(**options: Any) -> TieredMemory:
        memory = TieredMemory(host_budget="1MiB", **options)
        memory.set_up(InlineTransfers)
        return memory

    return make


def limit(memory: TieredMemory, device: torch.device) -> int | None:
    """Bytes of a device's own tier; None: it has none."""
    with memory.lock:
        slabs = memory.on(device).slabs
    return None if slabs is None else slabs.budget.limit


@pytest.mark.parametrize("budget", [4 * MIB, "4MiB", 1 / 16])
def test_beside_an_accelerator_layers_on_the_cpu_are_in_the_host_tier(memory_of: Any, budget: Any) -> None:
    memory = memory_of(device_budget=budget)
    assert limit(memory, CUDA) == 4 * MIB
    assert limit(memory, CPU) is None
    assert memory.stats.device.budget == 4 * MIB
    assert memory.stats.host.budget == MIB


def test_an_emulated_device_and_a_real_one_do_not_share_a_number(memory_of: Any) -> None:
    memory = memory_of(device_budget="4MiB")
    assert limit(memory, CPU) == 4 * MIB
    with pytest.raises(ConfigError, match=r"device_budget=\{'cuda:0': 4194304\}"):
        limit(memory, CUDA)
    assert [str(x.device) for x in memory.devices] == ["cpu"]


def test_where_devices_are_named_each_has_its_own_whoever_comes_first(memory_of: Any) -> None:
    for order in ((CPU, CUDA), (CUDA, CPU)):
        memory = memory_of(device_budget={"cuda": "4MiB"})
        assert {str(x): limit(memory, x) for x in order} == {"cpu": None, "cuda:0": 4 * MIB}
        memory = memory_of(device_budget={"cuda:0": "4MiB", "cpu": "2MiB"})
        assert {str(x): limit(memory, x) for x in order} == {"cpu": 2 * MIB, "cuda:0": 4 * MIB}


def test_without_a_budget_an_accelerator_takes_what_is_free_and_the_cpu_emulates_none(memory_of: Any) -> None:
    memory = memory_of(device_budget={"cuda": 0.5})
    assert (limit(memory, CPU), limit(memory, CUDA)) == (None, 32 * MIB)
    with pytest.raises(ConfigError, match="leaves nothing"):  # less than the reserve
        limit(memory_of(), CUDA)


def test_a_budget_for_a_device_that_is_not_there_is_refused_and_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [system.is_there(x) for x in ("cpu", "cuda", "cuda:1", "cuda:2", "npu")] == [True, True, True, False, False]
    for name, there in (("cuda:1", True), ("cuda:2", False)):
        memory = TieredMemory(device_budget={name: "1MiB"}, host_budget="1MiB")
        memory.set_up(InlineTransfers)
        if there:
            assert limit(memory, CPU) is None
        else:
            with pytest.raises(ConfigError, match=f"names '{name}', and torch finds no such device"):
                limit(memory, CPU)


@pytest.mark.parametrize(("device", "count", "expected"), [(CUDA, 1, False), (CUDA, 2, True), (CPU, 8, False)], ids=str)
def test_layers_may_be_elsewhere_where_there_are_more_devices_of_the_kind(
    device: torch.device, count: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert system.has_alternatives(device) is expected
