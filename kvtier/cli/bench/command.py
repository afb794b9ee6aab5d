"""`kvtier bench`: an engine under load, simulated or measured."""

from __future__ import annotations

import argparse
import math
from typing import Any

from kvtier.cli.arguments import positive, tokens
from kvtier.cli.bench.loads import complete
from kvtier.cli.bench.measured import measured
from kvtier.cli.bench.simulated import simulated
from kvtier.cli.plan.plot import check
from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import MACHINES
from kvtier.scheduling.simulation.trials import MODELS

#: Options that one of the two ways to serve a load has alone, with what they are unless they are given.
_SIMULATED_ALONE: dict[str, Any] = {"model": "llama-3.1-8b"}
_MEASURED_ALONE: dict[str, Any] = {"dtype": None, "block_size": 64}
#: What is simulated unless it is given, and there is what there is where it is measured.
_SIMULATED: dict[str, Any] = {"device": "h100", "device_budget": "16GiB", "host_budget": "64GiB"}
_EXAMPLES = """\
examples:
  kvtier bench --rate 8 --scheduler fcfs fair
  kvtier bench --azure AzureLLMInferenceTrace_conv.csv --count 1000 --rate-scale 0.5 --device a100
  kvtier bench --mooncake conversation_trace.jsonl --count 1000 --stateful --json
  kvtier bench --measure Qwen/Qwen3-0.6B --rate 2 --count 100 --host-budget 8GiB
  kvtier bench --measure Qwen/Qwen3-0.6B --mooncake conversation_trace.jsonl --length-scale 0.0625 --stateful
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "bench",
        help="latencies and throughput of an engine under load, simulated or measured",
        description="Serve a load on a virtual clock, with the schedulers that the engine has, on a machine whose "
        "numbers are those of datasheets; or, with --measure, by an engine of a model on this machine, one scheduler "
        "after the other, in real time. Without a trace, requests are generated.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--azure", metavar="FILE.csv", help="an Azure LLM inference trace")
    what.add_argument("--mooncake", metavar="FILE.jsonl", help="a Mooncake trace, with prefixes in common")
    what.add_argument("--turns", type=_turns, help="generate conversations of so many turns on average, 2 or more")
    parser.add_argument("--rate", type=_rate, help="generated requests, or conversations, per second (4)")
    parser.add_argument("--rate-scale", type=_rate, help="a trace's arrivals, so many times as fast (1)")
    parser.add_argument("--length-scale", type=_rate, help="a trace's lengths, so many times as long (1)")
    parser.add_argument("--count", type=positive, default=300, help="requests (300)")
    parser.add_argument("--prompt", type=tokens, help="mean tokens of generated prompts (512)")
    parser.add_argument("--output", type=tokens, help="mean tokens generated (128)")
    parser.add_argument("--tenants", type=positive, help="of generated requests (1)")
    parser.add_argument("--seed", type=int, help="of generated requests (0)")
    parser.add_argument("--measure", metavar="MODEL", help="a folder, or a name on the hub: serve with it for real")
    parser.add_argument(
        "--device", help=f"{', '.join(MACHINES)} (h100); measured: such as cuda:1 or cpu (a GPU, if there is one)"
    )
    parser.add_argument("--model", choices=MODELS, help="that is simulated (llama-3.1-8b)")
    parser.add_argument("--dtype", help="of a measured model, such as bfloat16 (as of kvtier serve)")
    parser.add_argument("--device-budget", metavar="SIZE", help="for KV (16GiB; measured: what there is)")
    parser.add_argument("--host-budget", metavar="SIZE", help="for KV (64GiB; measured: what there is)")
    parser.add_argument("--block-size", type=positive, metavar="N", help="tokens of a block of a measured engine (64)")
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
    complete(args)
    _complete_engine(args)
    if args.plot is not None:
        check(args.plot)
    found = simulated(args) if args.measure is None else measured(args)
    print(found.as_json() if args.json else found)
    if args.plot is not None:
        found.draw(args.plot)
    return 0


def _complete_engine(args: argparse.Namespace) -> None:
    """Give options that were left away their values. Raises ConfigError: one is given that the engine does not have."""
    measure = args.measure is not None
    for name in _SIMULATED_ALONE if measure else _MEASURED_ALONE:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            if measure:
                raise ConfigError(f"{option} is of a simulated engine: leave it away with --measure.")
            raise ConfigError(f"{option} is of a measured engine: give --measure MODEL, too.")
    for name, value in (_MEASURED_ALONE if measure else _SIMULATED_ALONE | _SIMULATED).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
