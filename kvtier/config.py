"""Options, read and checked. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.errors import ConfigError

Size = int | float | str

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)

AUTO = "auto"

#: Tokens per block where blocks move and are shared: little is moved or wasted with one.
DEVICE_BLOCK = 64
#: Tokens per block where they stay in the host and are read there: the longer a run in memory, the faster
#: (docs/design/host-attention.md).
HOST_BLOCK = 256

#: Bytes of host memory that `host_budget="auto"` leaves to everything else, at the least.
HOST_RESERVE = 2 * 2**30
#: Share of the free host memory that `host_budget="auto"` leaves, when that is more.
HOST_RESERVE_SHARE = 0.2
#: Share of the free device memory that `device_budget="auto"` leaves to weights not yet loaded and to activations.
DEVICE_RESERVE_SHARE = 0.2
#: Bytes of device memory that `device_budget="auto"` leaves, at the least.
DEVICE_RESERVE = 2**30


def parse_size(name: str, value: Size) -> int | float | str:
    """Read a budget as a user writes it.

    Args:
        name: the option's name, for the message.
        value: bytes as an `int`; `"4GiB"`, `"500 MB"` and the like; a `float` in (0, 1], a share of what is free;
            or `"auto"`, what is free less a reserve.

    Returns:
        Bytes (`int`), a share (`float`), or `"auto"`.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: give bytes, a text such as '4GiB', a share in (0, 1], or 'auto'.")
    if isinstance(value, int):
        if value <= 0:
            raise ConfigError(f"{name}={value}: a budget in bytes must be positive.")
        return value
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ConfigError(f"{name}={value}: a float is a share of the free memory and lies in (0, 1].")
        return value
    if isinstance(value, str):
        if value.strip().lower() == AUTO:
            return AUTO
        match = _SIZE.fullmatch(value)
        if match and match[2].lower() in _UNITS:
            size = int(float(match[1]) * _UNITS[match[2].lower()])
            if size > 0:
                return size
    raise ConfigError(
        f"{name}={value!r} is not a size: give bytes, a text such as '4GiB' or '500MB', a share in (0, 1], or 'auto'."
    )


def resolve_size(name: str, size: int | float | str, free: int, reserve: int, reserve_share: float) -> int:
    """Turn a parsed size into bytes.

    Args:
        name: the option's name, for the message.
        size: what `parse_size` returned.
        free: bytes free at this moment.
        reserve: bytes that `"auto"` leaves at the least.
        reserve_share: share of `free` that `"auto"` leaves when that is more.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, float):
        return max(int(free * size), 1)
    left = free - max(reserve, int(free * reserve_share))
    if left <= 0:
        raise ConfigError(
            f"{name}='auto' leaves nothing: {free} bytes are free, and {reserve} stay in reserve. Give {name} in bytes."
        )
    return left


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of a `TieredKVCache`, checked.

    Attributes:
        device_budget: for the device tier, or None for the default: `"auto"` on an accelerator; on a CPU model no
            device tier at all. A mapping gives each device (`"cuda:0"`) its own.
        host_budget: for the host tier.
        block_size: tokens per block; None: `HOST_BLOCK` where there is no device tier, else `DEVICE_BLOCK`.
        write_through: share of the device budget in use from which sealed blocks are copied to the host.
        host_attention: whether host threads attend to blocks where they lie.
    """

    device_budget: int | float | str | Mapping[str, int | float | str] | None
    host_budget: int | float | str
    block_size: int | None
    write_through: float
    host_attention: bool = True

    @classmethod
    def parse(
        cls,
        device_budget: Size | Mapping[str, Size] | None,
        host_budget: Size,
        block_size: int | str,
        write_through: float,
        host_attention: bool = True,
    ) -> CacheOptions:
        """Check what the user gave. Raises `ConfigError`."""
        device: int | float | str | dict[str, int | float | str] | None
        if isinstance(device_budget, Mapping):
            device = {str(k): parse_size(f"device_budget[{str(k)!r}]", v) for k, v in device_budget.items()}
        else:
            device = None if device_budget is None else parse_size("device_budget", device_budget)
        if block_size == AUTO:
            size = None
        elif isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size={block_size!r}: give a number of tokens, at least 1, or 'auto'.")
        else:
            size = block_size
        if not isinstance(host_attention, bool):
            raise ConfigError(f"host_attention={host_attention!r}: give True or False.")
        if isinstance(write_through, bool) or not isinstance(write_through, int | float):
            raise ConfigError(f"write_through={write_through!r}: give a share in [0, 1].")
        if not 0.0 <= write_through <= 1.0:
            raise ConfigError(f"write_through={write_through!r}: give a share in [0, 1].")
        return cls(device, parse_size("host_budget", host_budget), size, float(write_through), host_attention)

    def device_size(self, device: str) -> int | float | str | None:
        """The device budget for one device, as parsed. Raises `ConfigError` if a mapping does not name it."""
        if not isinstance(self.device_budget, Mapping):
            return self.device_budget
        for key in (device, device.split(":")[0]):
            if key in self.device_budget:
                return self.device_budget[key]
        if device == "cpu":
            return None  # the mapping is about accelerators: layers on the CPU stay in the host tier
        raise ConfigError(
            f"The model has a layer on {device!r}, but device_budget names only {sorted(self.device_budget)}."
        )
