"""The parser of all commands. Each command is a module with `add(parsers)`, and imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvtier.cli import bench, chat, env, plan, serve, store
from kvtier.errors import KVTierError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1: the answer is no; 2: an error, told in a sentence on stderr; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="kvtier", description="A tiered KV cache for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"kvtier {sys.modules['kvtier'].__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    plan.add(commands)
    chat.add(commands)
    serve.add(commands)
    store.add(commands)
    env.add(commands)
    bench.add(commands)
    _add_calibrate(commands)
    _add_replay(commands)
    args = parser.parse_args(argv)
    if "run" not in args:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(args.run(args))
    except (KVTierError, OSError) as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="measure this machine, and store its profile")
    parser.add_argument("--device", help="such as cuda:1 (default: the current CUDA device)")
    parser.add_argument("--block-size", type=int, help="tokens per block (default: the cache's)")
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from kvtier.calibration.__main__ import main as calibrate

    options = {"--device": args.device, "--block-size": args.block_size}
    return calibrate([f"{name}={value}" for name, value in options.items() if value is not None])


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="decide a logged run again, and compare",
        description="Ask a policy what another was asked in a decision log (kvtier.planning.reports.log). 0: all "
        "decisions are the same; 1: some differ.",
    )
    parser.add_argument("log", help="written by kvtier.planning.reports.log.Logged")
    parser.add_argument("--policy", help="by name (default: the one in the log)")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    from kvtier.planning.policies.names import policy_of
    from kvtier.planning.reports.log import logged_policy, replay

    found = replay(args.log, policy_of(args.policy or logged_policy(args.log)))
    print(found)
    return 1 if found.differences else 0
