"""`kvtier replay`: the decisions of a logged run, decided again and compared."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Container, Mapping
from typing import Any

from kvtier.errors import ConfigError

_EXAMPLES = """\
examples:
  kvtier replay decisions.jsonl                              # the policy of the log decides as it did
  kvtier replay decisions.jsonl --policy all-fetch           # where another one would decide otherwise
  kvtier replay decisions.jsonl --policy my_policies:Mine    # a class of your own, in my_policies.py
  kvtier replay schedule.jsonl --scheduler fcfs              # of an engine: who is computed, who gives up blocks

exit status: 0: all decisions are the same; 1: some differ, or the log has none to compare; 2: an error
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "replay",
        help="decide a logged run again, and compare",
        description="Ask a policy or a scheduler what another was asked in a log, and compare the answers. The log is "
        "written by kvtier.planning.reports.log.Logged, around the policy of a cache or a simulation, or by "
        "kvtier.scheduling.log.LoggedScheduler, around the scheduler of an engine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", metavar="FILE", help="the log")
    which = parser.add_mutually_exclusive_group()
    for decides in ("policy", "scheduler"):
        which.add_argument(
            f"--{decides}", help="a name, or module:Class that is made without arguments (the log's own)"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    from kvtier.planning.policies.names import POLICIES, policy_of
    from kvtier.planning.policy import Policy
    from kvtier.planning.reports import log as decisions
    from kvtier.planning.reports.log_file import SCHEDULE, Replay, header
    from kvtier.scheduling import log as schedule
    from kvtier.scheduling.names import SCHEDULERS, scheduler_of
    from kvtier.scheduling.scheduler import Scheduler

    first = header(args.log)
    found: Replay
    if first.get("log") == SCHEDULE:
        name = _named(args, "scheduler", first, SCHEDULERS)
        found = schedule.replay(args.log, _own(name, "scheduler", Scheduler) if ":" in name else scheduler_of(name))
    else:
        name = _named(args, "policy", first, POLICIES)
        found = decisions.replay(args.log, _own(name, "policy", Policy) if ":" in name else policy_of(name))
    print(found)
    return 0 if found.decisions and not found.differences else 1


def _named(args: argparse.Namespace, decides: str, first: Mapping[str, Any], known: Container[str]) -> str:
    """Who is to decide again. Raises ConfigError: nobody says who, or who decides something else."""
    name, other = args.policy, args.scheduler
    if decides == "scheduler":
        name, other = other, name
    if other is not None:
        raise ConfigError(f"{args.log} has the decisions of a {decides}: give --{decides}, or nothing.")
    if name is not None:
        return str(name)
    own = str(first.get(decides, ""))
    if own not in known:
        where = first.get("class") or f"module:{own}"
        module = "planning.reports.log" if decides == "policy" else "scheduling.log"
        raise ConfigError(
            f"{args.log} has the decisions of {own or f'no {decides}'}, which is no name of a {decides} of kvtier's. "
            f"Give --{decides} {where}, or call kvtier.{module}.replay({args.log!r}, {own or decides}(...)) with what "
            "it was made of."
        )
    return own


def _own(name: str, decides: str, kind: type) -> Any:
    """A policy or a scheduler that a user wrote, by its module and class. Raises ConfigError: there is none."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, here := os.getcwd())  # as `python -m` has it, for a file of the folder that the user is in
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        made = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"--{decides} {name}: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(here)
    if not isinstance(made, kind):
        raise ConfigError(f"--{decides} {name}: this is no kvtier.{kind.__name__}.")
    return made
