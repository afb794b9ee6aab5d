"""`HardwareProfile`: seconds of everything that a plan is made of, measured on a machine, or stated estimates.

Plain numbers that go to JSON and back. `kvtier.calibrate` measures them; nothing is measured or read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.hardware import machines
from kvtier.planning.hardware.machines import ModelSize
from kvtier.planning.hardware.predictors import Curve, HostAttention, Linear, Prefill
from kvtier.planning.rates import FASTEST, Rates

#: Of the JSON. A profile of another format is not read.
FORMAT = 2


def _share(value: Any) -> float:
    found = float(value)
    if not 0 < found <= 1:
        raise ValueError("a share in (0, 1]")
    return found


#: Bytes per second below which nothing is.
SLOWEST = 1.0
#: Parts, each measured or estimated by itself, and what reads it from JSON.
PARTS: dict[str, Callable[[Any], Any]] = {
    "up": Curve.from_json,
    "down": Curve.from_json,
    "together": _share,
    "host": HostAttention.from_json,
    "device": Curve.from_json,
    "linear": Linear.from_json,
    "prefill": Prefill.from_json,
}


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """How long things take on a machine, in seconds, and for one model if it was asked about one.

        profile = kvtier.calibrate(model).profile
        profile.up.seconds(2**20)                     # a fetch of 1 MiB
        profile.host.seconds(2**24, threads=8)        # host attention over 16 MiB of one layer's KV
        profile.prefill.seconds(512, past=8192)       # recomputing 512 tokens on 8192 cached ones

    Attributes:
        name: of the machine.
        up, down: copies over the link to the device and from it, by bytes.
        together: share of its rate that each direction keeps while the other is busy too; 1: each its own.
        host: attention on the host, by bytes of one layer's KV.
        device: attention on the device, by bytes of one layer's KV.
        linear, prefill: of a model (AdaptiveLLM, section 3.2); None where none was named.
        model: which; "" for none.
        measured: names of the parts that were measured on this machine. All others are stated estimates.
        errors: of measured parts, the mean absolute relative error of predictions for sizes that were left out of the
            fit.
    """

    name: str
    up: Curve
    down: Curve
    together: float
    host: HostAttention
    device: Curve
    linear: Linear | None = None
    prefill: Prefill | None = None
    model: str = ""
    measured: frozenset[str] = frozenset()
    errors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def estimate(cls, name: str, model: ModelSize | None = None) -> HardwareProfile:
        """From datasheets and the roofline; nothing of it is measured.

        Args:
            name: "h200", "h100", "a100", "l40s", "rtx4090", or "cpu"; see `machines.MACHINES`.
            model: for `linear` and `prefill`.

        Raises:
            ConfigError: no such machine.
        """
        where = machines.machine(name)
        copies = machines.link(where)
        return cls(
            name=name.lower(),
            up=copies,
            down=copies,
            together=1.0 if where.overlaps else 0.5,
            host=machines.host_attention(where),
            device=machines.device_attention(where),
            linear=None if model is None else model.linear(where),
            prefill=None if model is None else model.prefill(where),
        )

    def rates(self, threads: int | None = None) -> Rates:
        """What `Adaptive` begins with: an overhead and a rate for each, the closest to the curves.

        Args:
            threads: of attention on the host; None: as many as were measured.
        """
        (copy_overhead, up), (_, down) = self.up.line(), self.down.line()
        host_overhead, host = self.host.curve(threads).line()
        return Rates(
            up=up,
            down=down,
            host=host,
            device=self.device.line()[1],
            copy_overhead=copy_overhead,
            host_overhead=host_overhead + self.host.round_trip,
            shared=self.host.lost,
            # Of more threads than were measured nothing is known.
            measured={"up", "down", "host"} <= self.measured and (threads or 1) <= self.host.threads[-1][0],
        )

    def with_part(self, part: str, value: Any, error: float | None = None) -> HardwareProfile:
        """This profile with one part as measured.

        Args:
            part: of `PARTS`.
            value: a curve, an object or a share, as the attribute of that name has.
            error: what `errors` says of it; None: nothing is known.
        """
        assert part in PARTS, part
        errors = {name: x for name, x in self.errors.items() if name != part}
        if error is not None:
            errors[part] = error
        return replace(self, **{part: value}, measured=self.measured | {part}, errors=errors)

    def with_stored(self, parts: object) -> HardwareProfile:
        """This profile with parts as `part_as_json` gave them. What is damaged or unknown is left as it is here."""
        found = self
        for part, stored in parts.items() if isinstance(parts, Mapping) else ():
            read = PARTS.get(part) if isinstance(part, str) else None
            if read is None or not isinstance(stored, Mapping):
                continue
            try:
                value, error = read(stored["value"]), _error(stored.get("error"))
                found = found.with_part(part, value, error)._checked()
            except (ValueError, TypeError, KeyError, ArithmeticError):
                continue
        return found

    def _checked(self) -> HardwareProfile:
        """This profile. Raises ValueError: it has rates that no machine has."""
        rates = self.rates()
        if not all(SLOWEST <= x <= FASTEST for x in (rates.up, rates.down, rates.host, rates.device)):
            raise ValueError(f"its rates are those of no machine: {rates}")
        return self

    def part_as_json(self, part: str) -> dict[str, Any]:
        """One part as `with_stored` takes it."""
        value = getattr(self, part)
        return {"value": value if isinstance(value, float) else value.as_json(), "error": self.errors.get(part)}

    def to_json(self) -> str:
        """All of it as text."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "model": self.model,
                "measured": sorted(self.measured),
                "parts": {part: self.part_as_json(part) for part in PARTS if getattr(self, part) is not None},
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> HardwareProfile:
        """What `to_json` gave.

        Raises:
            ConfigError: the string is damaged, or no such profile.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
            stored = content["parts"]
            values = {part: read(stored[part]["value"]) for part, read in PARTS.items() if part in stored}
            errors = {part: _error(stored[part]["error"]) for part in values}
            measured = frozenset(content["measured"])
            if not measured <= values.keys():
                raise ValueError(
                    f"it says that {sorted(measured - values.keys())} were measured, and has none of these"
                )
            name, model = content["name"], content["model"]
            if not isinstance(name, str) or not isinstance(model, str):
                raise TypeError("names are strings")
            known = {part: x for part, x in errors.items() if x is not None}
            return cls(name=name, model=model, measured=measured, errors=known, **values)._checked()
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"This is no hardware profile ({type(error).__name__}: {error}). "
                "`kvtier.calibrate(model).profile.to_json()` makes one."
            ) from error

    def __str__(self) -> str:
        said = []
        for part in PARTS:
            if getattr(self, part) is None:
                continue
            error = self.errors.get(part)
            known = "" if error is None else f", error {error:.1%}"
            said.append(f"{part} {'measured' + known if part in self.measured else 'estimated'}")
        return f"{self.name}: {'; '.join(said)}"


def _error(value: Any) -> float | None:
    if value is None:
        return None
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError("an error is not negative")
    return found
