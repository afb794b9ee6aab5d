"""What arguments of several commands are read by."""

from __future__ import annotations

import argparse
import re


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
