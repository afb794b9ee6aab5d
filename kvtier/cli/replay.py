"""`kvtier replay`: the decisions of a logged run, decided again by a policy and compared."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from kvtier.errors import ConfigError

_EXAMPLES = """\
examples:
  kvtier replay decisions.jsonl                              # the policy of the log decides as it did
  kvtier replay decisions.jsonl --policy all-fetch           # where another one would decide otherwise
  kvtier replay decisions.jsonl --policy my_policies:Mine    # a class of your own, in my_policies.py

exit status: 0: all decisions are the same; 1: some differ, or the log has none to compare; 2: an error
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "replay",
        help="decide a logged run again, and compare",
        description="Ask a policy what another was asked in a decision log, and compare the answers. The log is "
        "written by kvtier.planning.reports.log.Logged, around the policy of a cache or a simulation.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", metavar="FILE", help="the log")
    parser.add_argument("--policy", help="a name, or module:Class that is made without arguments (the log's own)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    from kvtier.planning.policies.names import POLICIES, policy_of
    from kvtier.planning.reports.log import logged_class, logged_policy, replay

    name = args.policy
    if name is None:
        name = logged_policy(args.log)
        if name not in POLICIES:
            where = logged_class(args.log)
            raise ConfigError(
                f"{args.log} has the decisions of {name or 'no policy'}, which is no name of a policy of kvtier's. "
                f"Give --policy {where or f'module:{name}'}, or call kvtier.planning.reports.log.replay({args.log!r}, "
                f"{name or 'policy'}(...)) with what it was made of."
            )
    found = replay(args.log, _own(name) if ":" in name else policy_of(name))
    print(found)
    return 0 if found.decisions and not found.differences else 1


def _own(name: str) -> Any:
    """A policy that a user wrote, by its module and class. Raises ConfigError: there is none."""
    from kvtier.planning.policy import Policy

    module, _, attribute = name.partition(":")
    sys.path.insert(0, here := os.getcwd())  # as `python -m` has it, for a file of the folder that the user is in
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        policy = found() if isinstance(found, type) else found
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(f"--policy {name}: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(here)
    if not isinstance(policy, Policy):
        raise ConfigError(f"--policy {name}: this is no kvtier.Policy.")
    return policy
