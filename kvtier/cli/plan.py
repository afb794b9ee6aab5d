"""`kvtier plan`: what of a model's KV fits where on a machine, and the tokens per second to expect."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.cli.store import count
from kvtier.config import AUTO, format_size, parse_bytes, parse_size
from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import MACHINES, Machine, ModelSize, Weights, link, machine
from kvtier.planning.hardware.model_size import divided, divisors, model_size
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.simulation.outlook import (
    BLOCK,
    Demand,
    Outlook,
    foresee,
    kv_bytes,
    more_memory,
    most_tokens,
    on_device,
)

#: Share of a device that activations, the allocator and the driver take, besides weights.
ACTIVATIONS = 0.1
#: Host memory for KV where the user gives none: of a server, on top of what else runs there.
HOST_BUDGET = "256GiB"
#: What is planned for where the user names no machine, and no context.
DEVICE, CONTEXT = "h100", 32768
#: What of a config says how many positions its model has.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
#: What says how many layers there are, and the most that a model is taken to have.
LAYERS, MOST_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 10_000

_EXAMPLES = """\
examples:
  kvtier plan ./Llama-3.1-8B --context 128k --batch 4 --device h100
  kvtier plan ./Llama-3.1-70B/config.json --context 32k --device h100 --devices 4 --plot plan.png
  kvtier plan Qwen/Qwen3-8B --context 64k --profile profile.json --device-budget 8GiB --json
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "plan",
        help="what fits where, and how fast it decodes, before anything is loaded",
        description="Tell how a model's KV is placed on a machine and the tokens per second to expect. Nothing is "
        "loaded but the model's config. Machines by name are estimates from datasheets; a profile has what was "
        "measured.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a config.json, a folder that holds one, or a name on the model hub")
    parser.add_argument(
        "--context", type=tokens, help="tokens of each sequence, such as 128k (32k, or as many positions as it has)"
    )
    parser.add_argument("--batch", type=positive, default=1, help="sequences decoded together (1)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", help=f"a machine by its datasheet: {', '.join(MACHINES)} ({DEVICE})")
    where.add_argument(
        "--profile",
        metavar="FILE",
        help="what was measured: a file of `kvtier calibrate`, stored or written by --output; or this, for what is "
        "stored of this machine",
    )
    parser.add_argument(
        "--devices", type=positive, default=1, help="devices that heads and weights are divided over (1)"
    )
    parser.add_argument(
        "--device-budget",
        help="of each device, for KV: bytes, a share of what weights leave, or auto: less activations (auto)",
    )
    parser.add_argument("--host-budget", default=HOST_BUDGET, help=f"of the host, for KV, in bytes ({HOST_BUDGET})")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw tokens per second by context")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def tokens(text: str) -> int:
    """ "128k" as a number of tokens; k is 1024."""
    match = re.fullmatch(r"(\d+)\s*([kKmM]?)", text.strip())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 4096 or 128k")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


@dataclass(frozen=True, slots=True)
class _Plan:
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


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    plan = _planned(args)
    if args.json:
        print(json.dumps(_as_json(plan), indent=1))
    else:
        print(table(plan))
    if args.plot is not None:
        from kvtier.cli.plot import draw

        curves = _curves(plan.of_device, plan.profile, plan.demand)
        draw(args.plot, _title(args, plan.profile), curves, on_device(plan.of_device, plan.demand))
        if not args.json:
            print(f"picture: {args.plot}")
    return 0


def _planned(args: argparse.Namespace) -> _Plan:
    """What the command is asked for. Raises ConfigError: it cannot be."""
    if args.plot is not None:
        from kvtier.cli.plot import check

        check(args.plot)
    raw = _raw_config(args.model)
    config, notes = completed_config(raw)
    weights, uncounted = _weights(raw)
    positions = _positions(raw)
    if args.context is None:
        args.context = min(CONTEXT, positions or CONTEXT)
    if args.device is None and args.profile is None:
        others = ", ".join(name for name in MACHINES if name != DEVICE)
        notes += (
            f"No machine was named, so an {DEVICE} is assumed. --device takes {others}; --profile, a measured one.",
        )
    args.device = args.device or DEVICE if args.profile is None else args.device
    whole = model_size(config, weights)
    model = divided(whole, args.devices)
    profile, known = _profile(args, config, model)
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
    return _Plan(args, whole, profile, known, demand, outlook, positions, room, weights is not None, notes)


def read_config(name: str) -> Mapping[str, Any]:
    """The config of a model, from a file, a folder, or the hub, with the defaults of its model type.

    Raises:
        ConfigError: there is none, or it is no config.
    """
    return completed_config(_raw_config(name))[0]


def completed_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config with the defaults of its model type; and what a reader has to know of it."""
    from kvtier.hf.models.config import completed

    found, why = completed(config)
    text = config.get("text_config")
    if not why or "layer_types" in (text if isinstance(text, Mapping) else config):
        return found, ()
    return found, (
        f"Which layers have full attention is not known, and all are taken to have it: {why}. If some have not, less "
        "KV is tiered than this plan says.",
    )


def _weights(config: Mapping[str, Any]) -> tuple[Weights | None, str]:
    """The weights as they are counted in the model; or why they could not be."""
    from kvtier.hf.models.weights import count_weights

    try:
        return count_weights(config), ""
    except ConfigError as error:
        return None, str(error)


def _raw_config(name: str) -> Mapping[str, Any]:
    """The config as it is written, which a model type's defaults are not part of."""
    from kvtier.hf.models.config import config_by_name

    path = Path(name)
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"There is no {name}: {error}") from error
    folder = path.is_dir()
    if folder:
        path /= "config.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no config.")
        return _checked(found)
    if folder:
        raise ConfigError(f"There is no config.json in {name}: give a folder of a model, or a name on the hub.")
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"There is no {name}: give a config.json, a folder that holds one, or a name on the hub.")
    return _checked(config_by_name(name))


def _positions(config: Mapping[str, Any]) -> int | None:
    """Positions that the model has, as its config says; None: it does not."""
    text = config.get("text_config")
    config = {**config, **(text if isinstance(text, Mapping) else {})}
    found = next((x for x in map(config.get, POSITIONS) if isinstance(x, int) and x > 0), None)
    for name in (
        "rope_parameters",
        "rope_scaling",
    ):  # YaRN and others reach further than the model was trained at first
        rope = config.get(name)
        rope = rope if isinstance(rope, Mapping) else {}
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if found and isinstance(factor, (int, float)) and isinstance(original, int) and factor > 1:
            found = max(found, int(factor * original))
    return found


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, unless it has so many layers that to make something of each takes minutes."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in LAYERS:
            count = part.get(name)
            if isinstance(count, int) and count > MOST_LAYERS:
                raise ConfigError(f"{name} is larger than {MOST_LAYERS}: this is no config of a model.")
    return config


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
        profile = HardwareProfile.from_json(content)
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


def _longest(plan: _Plan) -> int | None:
    """The longest context for which there is room; None: nothing grows, or nobody knows how much room there is."""
    model, demand, known = plan.of_device, plan.demand, plan.known
    most = most_tokens(model, demand) if model.layers else None
    grows = demand.sequences * (model.growing_bytes(1) + model.dense_bytes(1))
    if not grows or known is None or not known.overlaps:
        return most
    room = _usable(model, known) - demand.sequences * model.bounded_bytes(demand.context)
    if most is None:
        return room // grows // BLOCK * BLOCK
    if _device_budget(plan.args) != AUTO:  # what grows has the rest, as `_budgets` takes it: with that of activations
        rest = room + int(known.device_bytes * ACTIVATIONS) - demand.device_bytes
        return min(most, rest // grows // BLOCK * BLOCK)
    tiered = kv_bytes(model, BLOCK, demand.sequences) // BLOCK
    return min(room // grows, (room + demand.host_bytes) // (grows + tiered)) // BLOCK * BLOCK


# What is shown


def table(plan: _Plan) -> str:
    """The plan for a reader."""
    args, model, profile, demand, outlook = plan.args, plan.model, plan.profile, plan.demand, plan.outlook
    n, each = args.devices, divided(model, args.devices)
    known = "estimates from datasheets" if not profile.measured else f"measured: {', '.join(sorted(profile.measured))}"
    source = "counted" if plan.counted else "estimated"
    weights = f"{_millions(model.parameters)} weights ({format_size(model.weight_bytes)}, {source})"
    lines = [
        f"{args.model}: {weights}, {_layers(plan)}",
        f"{n} x {profile.name} ({known})" if n > 1 else f"{profile.name} ({known})",
        *(f"  {note}" for note in plan.notes),
        "",
    ]
    sequences = f"{count(demand.sequences, 'sequence')} of {count(demand.context, 'token')}"
    if model.layers:
        lines += [
            f"KV of {sequences}: {format_size(outlook.kv_bytes * n)}",
            f"  on the device     {format_size(outlook.device_kv * n):>10}   of {format_size(demand.device_bytes * n)}",
            f"  on the host only  {format_size(outlook.host_kv * n):>10}   of {format_size(demand.host_bytes * n)}",
        ]
    else:
        lines += [
            "No layer of this model has full attention alone: nothing is tiered, and a TieredKVCache saves no memory.",
            f"What the cache of {sequences} keeps:",
        ]
    place = "host" if profile.name.partition(",")[0] == "cpu" else "device"
    outside = f"on the {place} besides, outside every budget"
    for what, nbytes, where in (
        ("windows, states", each.bounded_bytes(demand.context), outside),
        ("KV not tiered", each.growing_bytes(demand.context), f"{outside}; it grows"),
        ("a layer, dense", each.dense_bytes(demand.context), f"on the {place} while it is expanded from latents"),
    ):
        if nbytes:
            lines.append(f"  {what:<16}  {format_size(demand.sequences * nbytes * n):>10}   {where}")
    lines += _reach(plan)
    if outlook.prefill_seconds is not None:
        seconds = outlook.prefill_seconds
        time = f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
        lines.append(f"  prefill           {time:>10}   of all prompts")
    if plan.positions and demand.context > plan.positions:
        lines.append(f"  Note: {demand.context:,} tokens fit, but the model has only {plan.positions:,} positions.")
    lines += ["", f"{'policy':<20}{'ms / step':>11}{'tokens / s':>12}{'fetched':>12}{'on host':>12}  bound by"]
    for x in outlook.speeds:
        lines.append(
            f"{x.name:<20}{1e3 * x.seconds:>11.4g}{x.tokens:>12.4g}{format_size(x.fetched_bytes * n):>12}"
            f"{format_size(x.host_bytes * n):>12}  {x.binding}"
        )
    if any(x.name == "all-fetch" and x.host_bytes for x in outlook.speeds):
        lines.append("all-fetch: the budget has no room to fetch all of a layer in time; the host attends to the rest.")
    if outlook.changes:
        lines += ["", "adaptive would be, with" + (", for each device" if n > 1 else "")]
        lines += [f"  {what:<34}{times:>5.2f} x as fast" for what, times in outlook.changes]
        left = _unused(plan)
        if left is not None and more_memory(demand) > left:
            lines[-len(outlook.changes)] += f"   hypothetical: the device has {format_size(left)} left"
    return "\n".join(lines)


def _layers(plan: _Plan) -> str:
    """What layers a model has, and the KV of a token."""
    model = plan.model
    kinds = [f"{count(model.layers, 'layer')} with full attention"]
    for number, what in (
        (model.windowed, f"with a window of {model.window:,}"),
        (model.recurrent, "with a recurrent state"),
        (model.growing, "with KV that grows and is not tiered"),
    ):
        kinds += [f"{number} {what}"] if number else []
    heads = f"{count(model.kv_heads, 'KV head')} of {model.head_dim}"
    per_token = (model.layers + model.growing) * model.kv_bytes
    kinds.append(f"latents of {model.latent}" if model.latent else heads)
    if per_token:
        whole = " on each device" if model.latent and plan.args.devices > 1 else ""
        kinds.append(f"{format_size(per_token)} of KV per token{whole}")
    return ", ".join(kinds)


def _reach(plan: _Plan) -> list[str]:
    """A line that says how long a context may be."""
    most, positions, sequences = _longest(plan), plan.positions, plan.demand.sequences
    shown = min(x for x in (most, positions) if x is not None) if (most, positions) != (None, None) else None
    if shown is None:
        return []
    each = "1 sequence" if sequences == 1 else f"each of {sequences:,} sequences"
    line = f"  longest context   {shown:>10,}   tokens of {each}"
    if positions and (most is None or positions < most):
        line += ", all positions of the model" + (f"; there is room for {most:,}" if most else "")
    return [line]


def _unused(plan: _Plan) -> int | None:
    """Bytes of a device that the budget leaves; None: nobody knows."""
    return None if plan.room is None else max(plan.room - plan.demand.device_bytes, 0)


def _millions(weights: int) -> str:
    """A number of weights: "8.03 billion", "3.54 million"."""
    scale, word = next((x for x in ((1e9, "billion"), (1e6, "million")) if weights >= x[0]), (1.0, ""))
    return f"{weights / scale:.3g} {word}" if word else f"{weights:,}"


def _as_json(plan: _Plan) -> dict[str, Any]:
    return {
        "model": plan.args.model,
        "size": asdict(plan.model),
        "weights": "counted" if plan.counted else "estimated",
        "notes": list(plan.notes),
        "positions": plan.positions,
        "longest_context": _longest(plan),
        "devices": plan.args.devices,
        "profile": json.loads(plan.profile.to_json()),
        "demand_per_device": asdict(plan.demand),
        "outlook_per_device": asdict(plan.outlook),
        "unused_per_device": _unused(plan),
    }


def _title(args: argparse.Namespace, profile: HardwareProfile) -> str:
    name = Path(args.model).name if Path(args.model).name != "config.json" else Path(args.model).parent.name
    return f"{name}, {count(args.batch, 'sequence')}, {args.devices} x {profile.name}"


def _curves(model: ModelSize, profile: HardwareProfile, demand: Demand) -> dict[str, list[tuple[int, float]]]:
    """Tokens per second by context for each policy, up to the context that is asked for."""
    found: dict[str, list[tuple[int, float]]] = {}
    full = on_device(model, demand)
    contexts = {max(demand.context * i // 8, 1) for i in range(1, 9)}
    if full < demand.context:
        contexts |= {max(full, 1)} | {full + (demand.context - full) * i // 8 for i in range(1, 9)}
    for context in sorted(contexts):
        for x in foresee(model, profile, replace(demand, context=context), changes=False).speeds:
            found.setdefault(x.name, []).append((context, x.tokens))
    return found
