"""The load that a command line asks for."""

from __future__ import annotations

import argparse

from kvtier.errors import ConfigError
from kvtier.scheduling.simulation.loads import azure, conversations, lognormal, mooncake, poisson, scaled_block
from kvtier.scheduling.simulation.outcome import Request

#: The most tokens of a generated prompt or answer, unless their mean is above 512: then 16 times that.
_MOST = 8192
#: Tokens of a block of keys, where no trace says.
_BLOCK = 16
#: Options that not every load has, by the load that has them, with what they are unless they are given.
_OF_LOADS: dict[str, dict[str, float]] = {
    "a generated load": {"rate": 4.0, "prompt": 512, "output": 128, "seed": 0},
    "generated requests without --turns": {"tenants": 1},
    "a trace": {"rate_scale": 1.0, "length_scale": 1.0},
}


def complete(args: argparse.Namespace) -> None:
    """Give options that were left away their values. Raises ConfigError: one is given that the load does not have."""
    trace = "--azure" if args.azure else "--mooncake" if args.mooncake else ""
    for load, options in _OF_LOADS.items():
        fits = bool(trace) == (load == "a trace") and not ("tenants" in options and args.turns)
        for name, value in options.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
            elif not fits:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is of {load}: leave it away{f' with {trace}' if trace else ''}.")


def block_of(args: argparse.Namespace) -> int:
    """Tokens of a block of the load's keys."""
    return scaled_block(args.length_scale) if args.mooncake else _BLOCK


def load_of(args: argparse.Namespace) -> tuple[list[Request], str]:
    """Requests, and what they are."""
    if args.azure or args.mooncake:
        scales = {"scale": args.rate_scale, "lengths": args.length_scale, "count": args.count}
        shorter = "" if args.length_scale == 1 else f", lengths x {args.length_scale:g}"
        if args.azure:
            return azure(args.azure, **scales), f"Azure trace at {args.rate_scale:g} x its rate{shorter}"
        found = mooncake(args.mooncake, block_size=block_of(args), **scales)
        return found, f"Mooncake trace at {args.rate_scale:g} x its rate{shorter}"
    most = max(_MOST, 16 * max(args.prompt, args.output))  # one near a mean would lower that mean
    prompt, output = lognormal(args.prompt, 0.8, most), lognormal(args.output, 0.8, most)
    if args.turns:
        count = max(round(args.count / args.turns), 1)
        found = conversations(
            count,
            args.rate,
            turns=args.turns,
            prompt=prompt,
            output=output,
            think=10.0,
            most=2 * most,
            block_size=block_of(args),
            seed=args.seed,
        )
        return found, f"generated: {count} conversations, {args.rate:g} begin in a second"
    found = poisson(args.count, args.rate, prompt, output, seed=args.seed, tenants=args.tenants)
    return found, f"generated: {args.rate:g} in a second"
