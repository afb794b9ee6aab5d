"""What arguments of several commands are read by, and how messages name them."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

#: What a message names as Python does: budgets, but not within a path; and a way that a command line has not.
_BUDGETS = re.compile(r"(?<![\w/.-])(device|host|disk)_budget(?![\w/-])")
_BY_CALL = re.compile(r", as an option or by `[\w.]+`")


def tokens(text: str) -> int:
    """ "128k" as a number of tokens; k is 1024."""
    match = re.fullmatch(r"(\d+)\s*([kKmM]?)", text.strip())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, such as 4096 or 128k")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def names_and_values(text: str) -> dict[str, Any]:
    """An object in JSON, such as `{"enable_thinking": false}`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"""{text!r} is no object in JSON, such as '{{"enable_thinking": false}}'""")
    return found


def with_flags(text: str) -> str:
    """A message of kvtier's that names budgets as a command line does: `--host-budget` for `host_budget`."""
    return _BUDGETS.sub(r"--\1-budget", _BY_CALL.sub("", text))
