"""`kvtier bench`: an engine under load, on a virtual clock and a stated machine."""

from __future__ import annotations

import argparse
import json
import math

from kvtier.cli.arguments import positive, tokens
from kvtier.cli.plan.plot import check
from kvtier.config import format_size, parse_bytes
from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import MACHINES, machine
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.simulation.loads import azure, conversations, lognormal, mooncake, poisson
from kvtier.scheduling.simulation.outcome import Outcome, Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import simulate
from kvtier.scheduling.simulation.trials import MODELS

#: The most tokens of a generated prompt or answer, unless their mean is above 512: then 16 times that.
_MOST = 8192
#: Options that not every load has, by the load that has them, with what they are unless they are given.
_OF_LOADS: dict[str, dict[str, float]] = {
    "a generated load": {"rate": 4.0, "prompt": 512, "output": 128, "seed": 0},
    "generated requests without --turns": {"tenants": 1},
    "a trace": {"rate_scale": 1.0},
}
_COLUMNS = {
    "TTFT mean s": "ttft_mean",
    "p50": "ttft_p50",
    "p99": "ttft_p99",
    "per token s": "tpot_mean",
    "tokens/s": "tokens_per_second",
    "normalised s": "normalised_mean",
    "turnaround": "turnaround",
    "fairness": "fairness",
    "re-used": "reused",
    "swapped": "swapped",
    "recomputed": "recomputed",
}
_EXAMPLES = """\
examples:
  kvtier bench --rate 8 --scheduler fcfs fair
  kvtier bench --azure AzureLLMInferenceTrace_conv.csv --count 1000 --rate-scale 0.5 --device a100
  kvtier bench --mooncake conversation_trace.jsonl --count 1000 --stateful --json
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "bench",
        help="latencies and throughput of an engine under load, simulated",
        description="Serve a load on a virtual clock, with the schedulers that the engine has, on a machine whose "
        "numbers are those of datasheets. Nothing is measured. Without a trace, requests are generated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--azure", metavar="FILE.csv", help="an Azure LLM inference trace")
    what.add_argument("--mooncake", metavar="FILE.jsonl", help="a Mooncake trace, with prefixes in common")
    what.add_argument("--turns", type=_turns, help="generate conversations of so many turns on average, 2 or more")
    parser.add_argument("--rate", type=_rate, help="generated requests, or conversations, per second (4)")
    parser.add_argument("--rate-scale", type=_rate, help="a trace's arrivals, so many times as fast (1)")
    parser.add_argument("--count", type=positive, default=300, help="requests (300)")
    parser.add_argument("--prompt", type=tokens, help="mean tokens of generated prompts (512)")
    parser.add_argument("--output", type=tokens, help="mean tokens generated (128)")
    parser.add_argument("--tenants", type=positive, help="of generated requests (1)")
    parser.add_argument("--seed", type=int, help="of generated requests (0)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(MACHINES)} (h100)")
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS, help="(llama-3.1-8b)")
    parser.add_argument("--device-budget", default="16GiB", help="for KV (16GiB)")
    parser.add_argument("--host-budget", default="64GiB", help="for KV (64GiB)")
    parser.add_argument("--scheduler", nargs="+", default=["fcfs", "fair"], help="fcfs, fair (both)")
    parser.add_argument("--preempt", choices=("price", "swap", "recompute"), default="price", help="way back (price)")
    parser.add_argument("--stateful", action="store_true", help="keep what was computed for later requests")
    parser.add_argument("--max-batch-tokens", type=positive, default=2048, help="of a step (2048)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw times to the first token")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _turns(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 2 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 2 or more")
    return value


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    _complete(args)
    if args.plot is not None:
        check(args.plot)
    model = MODELS[args.model]
    size = 512 if args.mooncake else 16
    block = size * model.layers * model.kv_bytes
    device = parse_bytes("--device-budget", args.device_budget) // block
    host = parse_bytes("--host-budget", args.host_budget) // block
    where = machine(args.device)
    if device * block + model.weight_bytes > where.device_bytes:
        raise ConfigError(
            f"--device-budget {args.device_budget} and the weights of {args.model}, {format_size(model.weight_bytes)}, "
            f"are more than the {format_size(where.device_bytes)} of the {args.device}."
        )
    profile = Profile(where, model, device, host, size, overhead=2e-3, write_through=host > 0)
    requests, load = _load(args, size)
    ways = None if args.preempt == "price" else args.preempt
    found: dict[str, Outcome] = {}
    for name in args.scheduler:
        options = {"ways": ways, "stateful": args.stateful, "max_tokens": args.max_batch_tokens}
        found[name] = simulate(requests, profile, scheduler_of(name), **options)
    if args.json:
        common = {"simulated": True, "load": load, "requests": len(requests), "device": args.device}
        common |= {"model": args.model, "device_blocks": device, "host_blocks": host, "block_size": size}
        print(json.dumps(common | {"schedulers": {name: _as_json(x) for name, x in found.items()}}, indent=1))
    else:
        print(f"Simulated: {args.model} on {args.device} by its datasheet; {len(requests)} requests, {load}.")
        print(f"KV: {device:,} blocks of {size} tokens on the device, {host:,} on the host.\n")
        print(_table(found))
    if args.plot is not None:
        _draw(args.plot, found)
    return 0


def _complete(args: argparse.Namespace) -> None:
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


def _load(args: argparse.Namespace, size: int) -> tuple[list[Request], str]:
    """Requests, and what they are."""
    if args.azure:
        found = azure(args.azure, scale=args.rate_scale, count=args.count)
        return found, f"Azure trace at {args.rate_scale:g} x its rate"
    if args.mooncake:
        found = mooncake(args.mooncake, block_size=size, scale=args.rate_scale, count=args.count)
        return found, f"Mooncake trace at {args.rate_scale:g} x its rate"
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
            block_size=size,
            seed=args.seed,
        )
        return found, f"generated: {count} conversations, {args.rate:g} begin in a second"
    found = poisson(args.count, args.rate, prompt, output, seed=args.seed, tenants=args.tenants)
    return found, f"generated: {args.rate:g} in a second"


def _as_json(outcome: Outcome) -> dict[str, float | None]:
    """Figures by name; None, for JSON has no NaN: nothing has one, as the seconds per token of answers of one token."""
    return {name: x if math.isfinite(x) else None for name, x in outcome.figures().items()}


def _table(found: dict[str, Outcome]) -> str:
    lines = [["scheduler", *_COLUMNS]]
    for name, outcome in found.items():
        figures = outcome.figures()
        lines.append([name, *(f"{figures[column]:.4g}" for column in _COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _draw(path: str, found: dict[str, Outcome]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, outcome in found.items():
        waits = sorted(x.first - x.arrived for x in outcome.requests)
        axes.plot(waits, [(i + 1) / len(waits) for i in range(len(waits))], drawstyle="steps-post", label=name)
    axes.set(title="simulated", xlabel="time to the first token (s)", ylabel="share of requests", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=144)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path!r}: {error}") from error
