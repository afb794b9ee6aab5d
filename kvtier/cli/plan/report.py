"""What a plan says: to a reader, to a program, and to a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvtier.cli.plan.planned import Planned, longest, unused
from kvtier.cli.store import count
from kvtier.config import format_size
from kvtier.planning.hardware.machines import ModelSize
from kvtier.planning.hardware.model_size import divided
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.simulation.outlook import Demand, foresee, more_memory, on_device


def table(plan: Planned) -> str:
    """The plan for a reader."""
    args, model, profile, demand, outlook = plan.args, plan.model, plan.profile, plan.demand, plan.outlook
    n, each = args.devices, divided(model, args.devices)
    known = "estimates from datasheets" if not profile.measured else f"measured: {', '.join(sorted(profile.measured))}"
    source = "counted" if plan.counted else "estimated"
    weights = f"{millions(model.parameters)} weights ({format_size(model.weight_bytes)}, {source})"
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
        lines.append(f"  prefill           {_time(outlook.prefill_seconds):>10}   of all prompts")
    if plan.positions and demand.context > plan.positions:
        lines.append(f"  Note: {demand.context:,} tokens fit, but the model has only {plan.positions:,} positions.")
    lines += ["", f"{'policy':<20}{'ms / step':>11}{'tokens / s':>12}{'fetched':>12}{'on host':>12}  bound by"]
    for x in outlook.speeds:
        lines.append(
            f"{x.name:<20}{_number(1e3 * x.seconds):>11}{_number(x.tokens):>12}"
            f"{format_size(x.fetched_bytes * n):>12}{format_size(x.host_bytes * n):>12}  {x.binding}"
        )
    if any(x.name == "all-fetch" and x.host_bytes for x in outlook.speeds):
        lines.append("all-fetch: the budget has no room to fetch all of a layer in time; the host attends to the rest.")
    if outlook.changes:
        lines += ["", "adaptive would be, with" + (", for each device" if n > 1 else "")]
        lines += [f"  {what:<34}{times:>5.2f} x as fast" for what, times in outlook.changes]
        left = unused(plan)
        if left is not None and more_memory(demand) > left:
            lines[-len(outlook.changes)] += f"   hypothetical: the device has {format_size(left)} left"
    return "\n".join(lines)


def _layers(plan: Planned) -> str:
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
    if model.attends:
        kinds.append(f"latents of {model.latent}" if model.latent else heads)
    if per_token:
        whole = " on each device" if model.latent and plan.args.devices > 1 else ""
        kinds.append(f"{format_size(per_token)} of KV per token{whole}")
    return ", ".join(kinds)


def _reach(plan: Planned) -> list[str]:
    """A line that says how long a context may be."""
    most, positions, sequences = longest(plan), plan.positions, plan.demand.sequences
    shown = min(x for x in (most, positions) if x is not None) if (most, positions) != (None, None) else None
    if shown is None:
        return []
    each = "1 sequence" if sequences == 1 else f"each of {sequences:,} sequences"
    line = f"  longest context   {shown:>10,}   tokens of {each}"
    if positions and (most is None or positions < most):
        line += ", all positions of the model" + (f"; there is room for {most:,}" if most else "")
    return [line]


def _number(x: float, digits: int = 4) -> str:
    """A number with so many digits, or all that it has before the point: "3.141", "31,416"."""
    return f"{x:.{digits}g}" if x < 10**digits - 0.5 else f"{x:,.0f}"


def _time(seconds: float) -> str:
    """ "298 ms", "43.6 s", "2,187 s"."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def millions(weights: int) -> str:
    """A number of weights: "8.03 billion", "3.54 million"."""
    if weights < 1e6:
        return f"{weights:,}"
    million = _number(weights / 1e6, 3)
    return f"{_number(weights / 1e9, 3)} billion" if "," in million else f"{million} million"


def as_json(plan: Planned) -> dict[str, Any]:
    return {
        "model": plan.args.model,
        "size": asdict(plan.model),
        "weights": "counted" if plan.counted else "estimated",
        "notes": list(plan.notes),
        "positions": plan.positions,
        "longest_context": longest(plan),
        "devices": plan.args.devices,
        "profile": json.loads(plan.profile.to_json()),
        "demand_per_device": asdict(plan.demand),
        "outlook_per_device": asdict(plan.outlook),
        "unused_per_device": unused(plan),
    }


def title(args: argparse.Namespace, profile: HardwareProfile) -> str:
    name = Path(args.model).name if Path(args.model).name != "config.json" else Path(args.model).parent.name
    return f"{name}, {count(args.batch, 'sequence')}, {args.devices} x {profile.name}"


def curves_of(model: ModelSize, profile: HardwareProfile, demand: Demand) -> dict[str, list[tuple[int, float]]]:
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
