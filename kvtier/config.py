"""Options, read and checked. No torch here."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from kvtier.errors import ConfigError, UnknownOptionError

Size = int | float | str

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Bytes of a unit. A bare letter is a power of 1024, as for docker, SLURM, systemd and the JVM; a letter with "B" is a
#: power of 1000, as for accelerate.
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
} | {f"{letter}{end}": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1) for end in ("", "i", "ib")}
_SIZE = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-z%]*)", re.IGNORECASE)
#: Bytes of a budget, and tokens of a block or a sequence: more would be no number for torch.
_MOST = 2**63 - 1
#: Characters of a size.
_LONGEST = 100
#: The one rule of how sizes are written, for every message: of a budget that may be a share, and of one that may not.
_UNITS_SAID = "as an int or a string ('4GiB' and '4G' are powers of 1024, '4GB' of 1000)"
_HOW = f"give bytes {_UNITS_SAID}, a share of what is free (0.5 or '50%'), or 'auto'"
_HOW_BYTES = f"give bytes {_UNITS_SAID}"

#: Types of devices that a mapping of budgets may name, as torch spells them.
_DEVICE = re.compile(r"cpu|(cuda|xpu|mps|hpu|npu|mlu|musa|mtia|privateuseone)(:(0|[1-9]\d*))?")

AUTO = "auto"

#: Blocks in host memory of which one is compared with what was written, by the name of an audit; 0: none.
AUDITS = {"off": 0, "sampled": 64, "full": 1}
FULL_AUDIT = AUDITS["full"]

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


def parse_size(name: str, value: Any) -> int | float | str:
    """Read a budget as a user, a command line or a YAML file writes it.

    Args:
        name: the option's name, for the message.
        value: bytes as an integer of any kind; a real number in (0, 1], a share of what is free; or a string:
            `"4GiB"`, `"4G"` and `"4Gi"` (powers of 1024), `"500 MB"` (powers of 1000), `"4000000"` and `"4_000_000"`
            (bytes), `"0.5"` and `"50%"` (shares), `"auto"` (what is free less a reserve).

    Returns:
        Bytes (`int`), a share (`float`), or `"auto"`.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, bool):
        pass  # an Integral for Python
    elif isinstance(value, Integral):
        return _bytes(name, value, int(value))
    elif isinstance(value, Real):
        return _share(name, value, float(value))
    elif isinstance(value, str):
        if value.strip().lower() == AUTO:
            return AUTO
        match = _SIZE.fullmatch(value.strip()) if len(value) < _LONGEST else None
        if match:
            number, unit = match[1].replace("_", ""), match[2].lower()
            if unit == "%":
                return _share(name, value, float(number) / 100)
            if not unit:
                return _share(name, value, float(number)) if "." in number else _bytes(name, value, int(number))
            if unit in _UNITS:
                whole, _, fraction = number.partition(".")
                scale = 10 ** len(fraction)
                return _bytes(name, value, int(whole + fraction) * _UNITS[unit] // scale)
    raise ConfigError(f"{name}={value!r} is not a size: {_HOW}.")


def parse_bytes(name: str, value: Any, *, zero: bool = False) -> int:
    """Read a size where there is nothing to take a share of: the same rule, but for shares and `"auto"`; `zero`: 0 is
    one, too.

    Raises:
        ConfigError: anything else.
    """
    if zero and isinstance(value, (Integral, str)) and str(value) == "0":  # no truth value, which has a name
        return 0
    try:
        size = parse_size(name, value)
    except ConfigError:
        size = AUTO
    if not isinstance(size, int):
        raise ConfigError(f"{name}={value!r} is not a positive number of bytes: {_HOW_BYTES}.")
    return size


def _bytes(name: str, value: object, size: int) -> int:
    if size <= 0:
        raise ConfigError(f"{name}={value!r} is {size} bytes, and a budget is positive: {_HOW}.")
    if size > _MOST:
        raise ConfigError(f"{name} is more than {_MOST} bytes, which no machine has: {_HOW}.")
    return size


def _share(name: str, value: object, share: float) -> float:
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{name}={value!r} is not a share in (0, 1]: {_HOW}.")
    return share


def format_size(size: int) -> str:
    """Bytes for a reader, rounded to three digits: `"17 bytes"`, `"2.5 KiB"`, `"1.25 GiB"`."""
    if abs(size) < 1024:
        return f"{size} byte{'' if size == 1 else 's'}"
    if abs(size) > _MOST:
        return f"more than {_MOST >> 40} TiB"
    number, units = size / 1024, ["TiB", "GiB", "MiB", "KiB"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1024
        units.pop()
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{round(number, digits):g} {units[-1]}"


def warn_caller(message: str) -> None:
    """Warn of the line that called kvtier, so that Python shows a message once for each of these."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "kvtier":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_if_beyond(name: str, size: int, total: int, where: str) -> None:
    """Warn that a budget of `size` bytes cannot be used up: `where` (the host, a device) has `total` bytes in all."""
    if size > total:
        warn_caller(
            f"{name} is {size} bytes ({format_size(size)}), but {where} has only {total} bytes ({format_size(total)}) "
            "in total: memory may run out before the budget does."
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
            f"{name}='auto' leaves nothing: {format_size(free)} are free, and {format_size(reserve)} stay in reserve. "
            f"Give {name} in bytes."
        )
    return left


def _by_device(budgets: Mapping[Any, Any]) -> dict[str, int | float | str]:
    """A mapping of budgets with its keys as torch spells devices."""
    if not budgets:
        raise ConfigError("device_budget={} names no device: give a size, or None for the default.")
    parsed: dict[str, int | float | str] = {}
    for key, value in budgets.items():
        # An index alone is that of a CUDA device, as in accelerate's `max_memory`.
        index = type(key) is not bool and isinstance(key, Integral)
        name = f"cuda:{key}" if index else str(key).strip().lower()
        name = "cpu" if name == "cpu:0" else name
        if not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"device_budget names {key!r}, which is no device of torch: write 'cuda' (all of that type), 'cuda:0', "
                "torch.device('cuda', 0) or 0 (an index is a CUDA device's). On a machine without accelerators, leave "
                "device_budget away."
            )
        if name in parsed:
            raise ConfigError(f"device_budget names {name!r} twice.")
        parsed[name] = parse_size(f"device_budget[{name!r}]", value)
    return parsed


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The budgets of a `TieredMemory`, checked.

    Attributes:
        device_budget: for the device tier, or None for the default: `"auto"` on an accelerator; on a CPU model no
            device tier at all. A mapping gives each device (`"cuda:0"`) its own.
        host_budget: for the host tier.
        audit: of so many blocks one is compared; see `AUDITS`.
    """

    device_budget: int | float | str | Mapping[str, int | float | str] | None
    host_budget: int | float | str
    audit: int = AUDITS["sampled"]

    @classmethod
    def parse(
        cls, device_budget: Size | Mapping[Any, Size] | None, host_budget: Size, audit: str = "sampled"
    ) -> MemoryOptions:
        """Check what the user gave. Raises `ConfigError`."""
        device: int | float | str | dict[str, int | float | str] | None
        if isinstance(device_budget, Mapping):
            device = _by_device(device_budget)
        else:
            device = None if device_budget is None else parse_size("device_budget", device_budget)
        if not isinstance(audit, str) or audit not in AUDITS:
            raise ConfigError(f"audit={audit!r}: give one of {', '.join(map(repr, AUDITS))}.")
        return cls(device, parse_size("host_budget", host_budget), AUDITS[audit])

    def with_budgets(self, device_budget: Size | Mapping[str, Size] | None, host_budget: Size | None) -> MemoryOptions:
        """These options with other budgets; None: as it is. Raises `ConfigError`."""
        new = MemoryOptions.parse(device_budget, "auto" if host_budget is None else host_budget)
        return MemoryOptions(
            self.device_budget if device_budget is None else new.device_budget,
            self.host_budget if host_budget is None else new.host_budget,
            self.audit,
        )

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

    def device_bytes(self) -> int:
        """What is known of the device budget before there is a device: bytes, or 0."""
        given = self.device_budget
        sizes = given.values() if isinstance(given, Mapping) else (given,)
        return sum(size for size in sizes if isinstance(size, int))

    def host_bytes(self) -> int:
        """What is known of the host budget before it is used: bytes, or 0."""
        return self.host_budget if isinstance(self.host_budget, int) else 0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The options of a `TieredKVCache` that are not its memory's, checked.

    Attributes:
        block_size: tokens per block; None: `HOST_BLOCK` where there is no device tier, else `DEVICE_BLOCK`.
        host_attention: whether host threads attend to blocks in host memory.
        max_tokens: tokens per row that the cache will hold at the most, where the user says so.
    """

    block_size: int | None
    host_attention: bool = True
    max_tokens: int | None = None

    @property
    def whole_blocks(self) -> int:
        """Tokens that are whole blocks in every layer, on whatever device it is."""
        return self.block_size or math.lcm(HOST_BLOCK, DEVICE_BLOCK)

    @classmethod
    def parse(cls, block_size: Any, host_attention: Any = True, max_tokens: Any = None) -> CacheOptions:
        """Check what the user gave. Raises `ConfigError`."""
        if isinstance(block_size, str) and block_size == AUTO:
            size = None
        elif isinstance(block_size, bool) or not isinstance(block_size, Integral) or not 1 <= int(block_size) <= _MOST:
            raise ConfigError(f"block_size={block_size!r}: give a number of tokens, at least 1, or 'auto'.")
        else:
            size = int(block_size)
        if not isinstance(host_attention, bool):
            raise ConfigError(f"host_attention={host_attention!r}: give True or False.")
        if max_tokens is not None and (
            isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or not 1 <= int(max_tokens) <= _MOST
        ):
            raise ConfigError(f"max_tokens={max_tokens!r}: give a number of tokens per row, at least 1, or None.")
        return cls(size, host_attention, None if max_tokens is None else int(max_tokens))


def parse_share(name: str, value: Any) -> float:
    """A share in [0, 1]. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ConfigError(f"{name}={value!r}: give a share in [0, 1].")
    return float(value)


def parse_number(name: str, value: Any, what: str) -> float:
    """A number of at least 0, and finite. Raises `ConfigError`.

    Args:
        name: of the option, for the message.
        value: what the user gave.
        what: is counted, such as "seconds".
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigError(f"{name}={value!r}: give a finite number of {what}, at least 0.")
    return float(value)


def parse_rate(name: str, value: Any) -> float:
    """Bytes per second: a number above 0, infinity included, or a string such as "2GB". Raises `ConfigError`."""
    if isinstance(value, str):
        with contextlib.suppress(ConfigError):
            return float(parse_bytes(name, value))
    elif not isinstance(value, bool) and isinstance(value, Real) and float(value) > 0:
        return float(value)
    raise ConfigError(f"{name}={value!r}: give bytes per second, above 0, such as 2e9 or '2GB'.")


def parse_count(name: str, value: Any, least: int, what: str) -> int:
    """A whole number. Raises `ConfigError`.

    Args:
        name: of the option, for the message.
        value: what the user gave.
        least: the smallest that is allowed.
        what: is counted, such as "tokens".
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= _MOST:
        raise ConfigError(f"{name}={value!r}: give a whole number of {what}, at least {least}.")
    return int(value)


# Names of options

#: What other libraries call the tiers.
_TIERS = {"gpu": "device", "cuda": "device", "vram": "device", "cpu": "host", "ram": "host"}
#: What is said of an option of Transformers' caches, which code of Transformers gives.
_OF_DYNAMIC_CACHE = {
    "offloading": " It offloads as its budgets say. A model that makes the cache of its cross-attention itself "
    "(T5Gemma) gives this to the class of the one that it was given: let it have "
    "EncoderDecoderCache(TieredKVCache(model.config), DynamicCache()), or call `generate` within "
    "`kvtier.tiered(model)`, which tiers both."
}


def checks_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function refuse an option that it does not have, or without its name, with an `UnknownOptionError`."""
    parameters = inspect.signature(function).parameters
    keywords = {name: each.kind for name, each in parameters.items() if each.kind != each.POSITIONAL_ONLY}
    named = [name for name, each in parameters.items() if each.kind == each.KEYWORD_ONLY]
    kinds = [each.kind for each in parameters.values()]
    most = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else len(parameters) - len(named)
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for option in kwargs:
            if option not in keywords:
                raise UnknownOptionError(_unknown(name, option, list(keywords)))
        if len(args) > most:
            raise UnknownOptionError(f"{name}: give options by their names, {', '.join(named)}.")
        return function(*args, **kwargs)

    return checked


def _unknown(function: str, option: str, known: list[str]) -> str:
    known = [name for name in known if name != "self"]
    words = "_".join(_TIERS.get(word, word) for word in option.lower().split("_"))
    nearest = difflib.get_close_matches(words, known, 1)
    meant = f" Did you mean {nearest[0]}?" if nearest else ""
    if function == "TieredKVCache":
        meant += _OF_DYNAMIC_CACHE.get(option, "")
    return f"{function} has no option {option!r}.{meant} Its options are {', '.join(known)}."
