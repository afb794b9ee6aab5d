"""The command: its arguments, and what it does."""

from __future__ import annotations

import argparse
import json

from kvtier.cli.arguments import positive, tokens
from kvtier.cli.plan.planned import DEVICE, planned
from kvtier.cli.plan.report import as_json, curves_of, table, title
from kvtier.planning.hardware.machines import MACHINES
from kvtier.planning.simulation.outlook import on_device

#: Host memory for KV where the user gives none: of a server, on top of what else runs there.
HOST_BUDGET = "256GiB"

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


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    plan = planned(args)
    if args.json:
        print(json.dumps(as_json(plan), indent=1))
    else:
        print(table(plan))
    if args.plot is not None:
        from kvtier.cli.plan.plot import draw

        curves = curves_of(plan.of_device, plan.profile, plan.demand)
        draw(args.plot, title(args, plan.profile), curves, on_device(plan.of_device, plan.demand))
        if not args.json:
            print(f"picture: {args.plot}")
    return 0
