"""What a plan is of: a model, a machine, and the budgets that are left or given."""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.cli.config import completed_config, positions_of, raw_config, weights_of
from kvtier.config import AUTO, format_size, parse_bytes, parse_size
from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import MACHINES, Machine, ModelSize, link, machine
from kvtier.planning.hardware.model_size import divided, divisors, model_size
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.simulation.outlook import BLOCK, Demand, Outlook, foresee, kv_bytes, most_tokens

#: Share of a device that activations, the allocator and the driver take, besides weights.
ACTIVATIONS = 0.1
#: What is planned for where the user names no machine, and no context.
DEVICE, CONTEXT = "h100", 32768
#: Tokens and sequences that are planned for at the most: what a model without attention keeps fits for any number.
MOST = 10**15


@dataclass(frozen=True, slots=True)
class Planned:
    """What is planned, for whoever shows it.

    Attributes:
        args: of the command.
        model: the whole one.
        profile, known: of the machine; its datasheet, where it was named.
        demand, outlook: of one device.
        positions: that the model has, where that is known.
        room: bytes of one device that weights, activations and what is not tiered leave; None: nobody knows, or there
            is no device.
        counted: whether the weights were counted in the model.
        notes: for a reader.
    """

    args: argparse.Namespace
    model: ModelSize
    profile: HardwareProfile
    known: Machine | None
    demand: Demand
    outlook: Outlook
    positions: int | None
    room: int | None
    counted: bool
    notes: tuple[str, ...]

    @property
    def of_device(self) -> ModelSize:
        """One device's part of the model."""
        return divided(self.model, self.args.devices)


def planned(args: argparse.Namespace) -> Planned:
    """What the command is asked for. Raises ConfigError: it cannot be."""
    if args.plot is not None:
        from kvtier.cli.plan.plot import check

        check(args.plot)
    raw = raw_config(args.model)
    config, notes = completed_config(raw)
    weights, uncounted = weights_of(raw)
    positions = positions_of(raw)
    if args.context is None:
        args.context = min(CONTEXT, positions or CONTEXT)
    if max(args.context, args.batch) > MOST:
        raise ConfigError(f"--context and --batch are at most {MOST:,}.")
    if args.device is None and args.profile is None:
        others = ", ".join(name for name in MACHINES if name != DEVICE)
        notes += (
            f"No machine was named, so an {DEVICE} is assumed. --device takes {others}; --profile, a measured one.",
        )
    args.device = args.device or DEVICE if args.profile is None else args.device
    whole = model_size(config, weights)
    model = divided(whole, args.devices)
    profile, known = _profile(args, config, model)
    if profile.name.partition(",")[0] == "cpu" and whole.kv_bytes and whole.itemsize < 4:
        notes += (
            "KV is counted in the dtype that the model is saved in. On a CPU `kvtier chat` and `kvtier serve` take "
            f"float32, with {4 // whole.itemsize} x the KV, unless --dtype says otherwise.",
        )
    room = _left(args, model, known) if known is not None and known.overlaps else None
    demand = Demand(args.context, args.batch, *_budgets(args, model, whole, profile, known))
    try:
        outlook = foresee(model, profile, demand)
    except ConfigError as error:
        if args.devices == 1:
            raise
        raise ConfigError(f"Of each of {args.devices} devices: {error}") from error
    if uncounted:
        notes += (f"The weights are estimated from the config's sizes: {uncounted}.",)
    return Planned(args, whole, profile, known, demand, outlook, positions, room, weights is not None, notes)


def _profile(
    args: argparse.Namespace, config: Mapping[str, Any], model: ModelSize
) -> tuple[HardwareProfile, Machine | None]:
    """What is known of the machine; and its datasheet, where it was named.

    Raises:
        ConfigError: no such machine, or a profile that is damaged or of another model.
    """
    if args.profile is not None:
        from kvtier.memory.measured import differing, file_here, model_name, of_file  # imports torch

        if args.devices > 1:
            raise ConfigError("A profile is of a model on one device: --devices takes a machine's name, --device.")
        path = file_here() if args.profile == "this" else Path(args.profile)
        if path.is_dir():
            raise ConfigError(
                f"--profile {args.profile}: this is a folder. Give one of its files, or --profile this, for the one of "
                "this machine."
            )
        content = path.read_bytes()
        try:
            stored = json.loads(content)
        except (ValueError, RecursionError):
            stored = None  # `from_json` says what is wrong
        if isinstance(stored, dict) and "machine" in stored:
            return of_file(stored, model, model_name(_Config(config))), None
        try:
            profile = HardwareProfile.from_json(content)
        except ConfigError as error:
            raise ConfigError(f"--profile {args.profile}: {error}") from error
        other = differing(profile.model, model_name(_Config(config))) if profile.model else ""
        if other:
            raise ConfigError(
                f"The profile was measured with another model than {args.model}: {other}. "
                "`kvtier.calibrate(model).profile.to_json()` makes one of a model."
            )
        return profile, None
    found = HardwareProfile.estimate(args.device, model)
    if args.devices > 1:  # which share the host
        curve = found.host.curve()
        slower = replace(curve, knots=tuple((nbytes, x * args.devices) for nbytes, x in curve.knots))
        where = machine(args.device)
        copies = link(replace(where, link=min(where.link, where.host_memory / args.devices)))
        found = replace(found, up=copies, down=copies, host=replace(found.host, threads=((1, slower),)))
    return found, machine(args.device)


class _Config:
    """A config as an object: its text part, where it has parts."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        text = content.get("text_config")
        self.__dict__.update(content)
        if isinstance(text, Mapping):
            self.__dict__.update(text)


def _budgets(
    args: argparse.Namespace, model: ModelSize, whole: ModelSize, profile: HardwareProfile, known: Machine | None
) -> tuple[int, int]:
    """Bytes for KV of one device, and its part of the host.

    Raises:
        ConfigError: the weights leave no room, or not as much as is asked for, or nobody says how much there is.
    """
    host = parse_bytes("--host-budget", args.host_budget) // args.devices
    on_host = profile.name.partition(",")[0] == "cpu"  # and so is all KV
    size = _device_budget(args)
    if on_host:
        if args.device_budget is not None:
            raise ConfigError("All KV of a cpu is in the host's memory: leave --device-budget away.")
        return 0, host
    if known is None and not isinstance(size, int):
        raise ConfigError("A profile does not say how much memory is left for KV: give --device-budget in bytes.")
    if known is None:
        assert isinstance(size, int)
        return size, host
    if size == AUTO:
        left = _left(args, model, known)
        if left <= 0:
            raise ConfigError(_no_room(args, model, whole, known))
        return left, host
    free = known.device_bytes - model.weight_bytes - args.batch * model.beyond_bytes(args.context)
    if isinstance(size, float) and free > 0:
        size = max(int(free * size), 1)
    if not isinstance(size, int) or size > free:
        raise ConfigError(
            f"--device-budget {args.device_budget} and the weights, {format_size(model.weight_bytes)}"
            f"{_beyond(args, model, ' and ')}, are more than the {format_size(known.device_bytes)} of each device."
        )
    return size, host


def _device_budget(args: argparse.Namespace) -> int | float | str:
    """What is asked for of each device, as `parse_size` reads it."""
    return AUTO if args.device_budget is None else parse_size("--device-budget", args.device_budget)


def _beyond(args: argparse.Namespace, model: ModelSize, joint: str) -> str:
    """What all sequences keep on a device outside every budget, as part of a sentence; "" where that is nothing."""
    parts = {
        "windows and states": model.bounded_bytes(args.context),
        "KV that grows and is not tiered": model.growing_bytes(args.context),
        "one layer's dense keys and values": model.dense_bytes(args.context),
    }
    return "".join(f"{joint}{name}, {format_size(args.batch * x)}" for name, x in parts.items() if x)


def _left(args: argparse.Namespace, model: ModelSize, known: Machine) -> int:
    """Bytes of a device that weights, activations and what is not tiered leave; negative where they take more."""
    return _usable(model, known) - args.batch * model.beyond_bytes(args.context)


def _usable(model: ModelSize, known: Machine) -> int:
    """Bytes of a device that weights and activations leave."""
    return int(known.device_bytes * (1 - ACTIVATIONS)) - model.weight_bytes


def _no_room(args: argparse.Namespace, model: ModelSize, whole: ModelSize, known: Machine) -> str:
    least = next((n for n in divisors(whole) if n > args.devices and _left(args, divided(whole, n), known) > 0), 0)
    return (
        f"The weights take {format_size(model.weight_bytes)} of {format_size(known.device_bytes)} on each device"
        f"{_beyond(args, model, '; ')}; and activations {ACTIVATIONS:.0%}: there is no room for KV. "
        + (f"With --devices {least} there is." if least else "Take smaller weights or larger devices.")
    )


def longest(plan: Planned) -> int | None:
    """The longest context for which there is room; None: nothing grows, or nobody knows how much room there is."""
    args, model, demand, known = plan.args, plan.of_device, plan.demand, plan.known
    block = kv_bytes(model, BLOCK, demand.sequences)
    block += demand.sequences * (model.growing_bytes(BLOCK) + model.dense_bytes(BLOCK))
    if not block:
        return None
    if known is None:
        return most_tokens(model, demand) if model.layers else None

    def too_long(blocks: int) -> bool:
        asked = argparse.Namespace(**(vars(args) | {"context": blocks * BLOCK}))
        try:
            device, host = _budgets(asked, model, plan.model, plan.profile, known)
        except ConfigError:
            return True  # what is not tiered takes the device
        there = replace(demand, device_bytes=device, host_bytes=host)
        return bool(model.layers) and most_tokens(model, there) < asked.context

    most = (known.device_bytes + demand.host_bytes) // block
    return bisect.bisect_left(range(1, most + 1), True, key=too_long) * BLOCK


def unused(plan: Planned) -> int | None:
    """Bytes of a device that the budget leaves; None: nobody knows."""
    return None if plan.room is None else max(plan.room - plan.demand.device_bytes, 0)
