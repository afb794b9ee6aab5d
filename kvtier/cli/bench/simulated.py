"""A load on a virtual clock, on a machine whose numbers are those of datasheets."""

from __future__ import annotations

import argparse

from kvtier.cli.bench.loads import block_of, load_of
from kvtier.cli.bench.report import Found
from kvtier.config import format_size, parse_bytes
from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import machine
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import simulate
from kvtier.scheduling.simulation.trials import MODELS


def simulated(args: argparse.Namespace) -> Found:
    """Simulate. Raises ConfigError: what is asked for cannot be."""
    model, where = MODELS[args.model], machine(args.device)
    size = block_of(args)
    block = size * model.layers * model.kv_bytes
    device = parse_bytes("--device-budget", args.device_budget) // block
    host = parse_bytes("--host-budget", args.host_budget) // block
    if device * block + model.weight_bytes > where.device_bytes:
        raise ConfigError(
            f"--device-budget {args.device_budget} and the weights of {args.model}, {format_size(model.weight_bytes)}, "
            f"are more than the {format_size(where.device_bytes)} of the {args.device}."
        )
    profile = Profile(where, model, device, host, size, overhead=2e-3, write_through=host > 0)
    requests, load = load_of(args)
    options = {
        "ways": None if args.preempt == "price" else args.preempt,
        "stateful": args.stateful,
        "max_tokens": args.max_batch_tokens,
    }
    outcomes = {name: simulate(requests, profile, scheduler_of(name), **options) for name in args.scheduler}
    heading = [
        f"Simulated: {args.model} on {args.device} by its datasheet; {len(requests)} requests, {load}.",
        f"KV: {device:,} blocks of {size} tokens on the device, {host:,} on the host.",
    ]
    facts = {"simulated": True, "load": load, "requests": len(requests), "device": args.device, "model": args.model}
    return Found(heading, facts | {"device_blocks": device, "host_blocks": host, "block_size": size}, outcomes)
