"""What budgets are in bytes, here and now: an option may name a share of what is free, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtier.config import (
    DEVICE_RESERVE,
    DEVICE_RESERVE_SHARE,
    HOST_RESERVE,
    HOST_RESERVE_SHARE,
    MemoryOptions,
    resolve_size,
    warn_if_beyond,
)
from kvtier.errors import ConfigError
from kvtier.memory.storage import system
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice

Devices = Mapping[torch.device, ComputeDevice]


def warn_if_beyond_the_host(options: MemoryOptions) -> None:
    """At once, and not at the first forward: the host is there already. Which device is meant is not known yet."""
    if options.host_bytes():
        warn_if_beyond("host_budget", options.host_bytes(), system.total_host_memory(), "this machine")


def of_device(device: torch.device, options: MemoryOptions, others: Devices) -> int | None:
    """The budget of a device that is not in use yet; None: layers on it are in the host tier.

    Args:
        others: the devices in use.

    Raises:
        ConfigError: the options have no budget for it, or one number for an emulated device and a real one.
    """
    if isinstance(options.device_budget, Mapping):
        _check_devices(options.device_budget)
    size = _device_size(device, options, others)
    if device.type == "cpu" and size is None:
        return None
    limit = _device_limit(device, "auto" if size is None else size, 0)
    warn_if_beyond("device_budget", limit, system.total_device_memory(device), str(device))
    return limit


def of_devices(options: MemoryOptions, given: object, devices: Devices) -> dict[SlabAllocator, int]:
    """Other budgets of the devices in use, by their memory.

    Args:
        given: the budget as the user wrote it, for the message.

    Raises:
        ConfigError: as `of_device`; or a device would get or lose its emulated tier.
    """
    limits: dict[SlabAllocator, int] = {}
    for device in devices.values():
        size = _device_size(device.device, options, devices)
        if (device.slabs is None) != (size is None):
            how = "would get" if size is not None else "would lose"
            raise ConfigError(
                f"device_budget={given!r}: {device.device} {how} an emulated device tier. Whether "
                "there is one is settled at the first forward: make a new cache, or a new TieredMemory."
            )
        if device.slabs is not None and size is not None:
            limits[device.slabs] = _device_limit(device.device, size, device.slabs.budget.used)
    return limits


def of_host(options: MemoryOptions, used: int) -> int:
    """The host budget, `used` bytes of which are taken already."""
    free = system.free_host_memory() + used
    return resolve_size("host_budget", options.host_budget, free, HOST_RESERVE, HOST_RESERVE_SHARE)


def _check_devices(budgets: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a budget of a device that is not there: it would be ignored silently."""
    missing = [name for name in budgets if not system.is_there(name)]
    if missing:
        raise ConfigError(
            f"device_budget names {missing[0]!r}, and torch finds no such device here. Give budgets to devices of this "
            "machine; where the model runs on the CPU, leave device_budget away."
        )


def _device_size(device: torch.device, options: MemoryOptions, devices: Devices) -> int | float | str | None:
    """The budget of a device tier on `device`, as parsed; None: the default.

    A budget that names no device is that of accelerators. On the CPU it emulates one, only where none is in use:
    with an accelerator (a mixed `device_map`), layers on the CPU are in the host tier, within `host_budget`.
    """
    size = options.device_size(str(device))
    if isinstance(options.device_budget, Mapping):
        return size
    if device.type == "cpu":
        return None if any(each.type != "cpu" for each in devices) else size
    if any(each.type == "cpu" and found.slabs is not None for each, found in devices.items()):
        raise ConfigError(
            f"device_budget={options.device_budget!r} emulates a device for layers on the CPU, but a layer is on "
            f"{device}. Name the devices: device_budget={{{str(device)!r}: {options.device_budget!r}}} leaves the "
            "layers on the CPU in the host tier."
        )
    return size


def _device_limit(device: torch.device, size: int | float | str, used: int) -> int:
    free = system.free_device_memory(device) + used
    return resolve_size("device_budget", size, free, DEVICE_RESERVE, DEVICE_RESERVE_SHARE)
