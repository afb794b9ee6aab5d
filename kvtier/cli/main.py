"""The parser of all commands. Each command is a module with `add(parsers)`, and imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections.abc import Sequence

from kvtier.cli import bench, chat, env, plan, serve, store
from kvtier.errors import KVTierError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1: the answer is no; 2: an error, told in a sentence on stderr; 130 after Ctrl-C; 141 where whoever reads
        the output has gone, as of a program that SIGPIPE ends.
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
    args = parser.parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if "run" not in args:
        parser.print_help(sys.stderr)
        return 2
    try:
        status = int(args.run(args))
        sys.stdout.flush()  # here, where its error is caught
        return status
    except BrokenPipeError as error:
        if not _reader_is_gone():
            print(f"kvtier: {error}", file=sys.stderr)
            return 2
        return 141
    except (KVTierError, OSError) as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        return 130


def _joined(argv: Sequence[str]) -> list[str]:
    """Arguments in which a value such as -1GiB belongs to the option before it, as after "=": what is wrong with it is
    then said by whoever reads the value, and not that there is none."""
    found: list[str] = []
    for text in argv:
        if found and re.fullmatch(r"--[a-z][a-z-]*", found[-1]) and re.match(r"-[\d.]", text):
            found[-1] += f"={text}"
        else:
            found.append(text)
    return found


def _reader_is_gone() -> bool:
    """Whether nobody reads what is printed, as after `| head`. What is left to print is then dropped."""
    try:
        number = sys.stdout.fileno()
        asked = select.poll()
        asked.register(number, select.POLLOUT)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0)):
            return False
    except (AttributeError, OSError, ValueError):  # no file, or no such question on this system
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # else Python complains when it ends
    return True


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
