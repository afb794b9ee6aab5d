"""Requests to simulate: of traces, of random loads, and of conversations that wait for their answers."""

from __future__ import annotations

import csv
import json
import math
import operator
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.eviction.replay.traces import seconds_of
from kvtier.scheduling.simulation.outcome import Request

#: Tokens of a block of Mooncake's trace.
MOONCAKE_BLOCK = 512


def poisson(
    count: int,
    per_second: float,
    prompt: Callable[[random.Random], int],
    output: Callable[[random.Random], int],
    *,
    seed: int = 0,
    tenants: int = 1,
) -> list[Request]:
    """Requests at random times, with nothing in common. An infinite rate: all of them come at once."""
    draw, time, found = random.Random(seed), 0.0, []
    for i in range(count):
        time += 0.0 if math.isinf(per_second) else draw.expovariate(per_second)
        tenant = f"tenant-{i % tenants}" if tenants > 1 else ""
        found.append(Request(time, max(prompt(draw), 1), max(output(draw), 1), tenant=tenant))
    return found


def lognormal(mean: float, spread: float, most: int = 1_000_000) -> Callable[[random.Random], int]:
    """Lengths with that mean; `spread` is the standard deviation of their logarithm."""
    middle = math.log(mean) - spread**2 / 2
    return lambda draw: min(max(round(draw.lognormvariate(middle, spread)), 1), most)


def uniform(mean: float, part: float = 0.1) -> Callable[[random.Random], int]:
    """Lengths between (1 - part) and (1 + part) times a mean (Neo, section 5.1)."""
    return lambda draw: round(draw.uniform((1 - part) * mean, (1 + part) * mean))


def conversations(
    count: int,
    per_second: float,
    *,
    turns: float,
    prompt: Callable[[random.Random], int],
    output: Callable[[random.Random], int],
    think: float,
    least_think: float = 0.0,
    most: int,
    block_size: int,
    seed: int = 0,
) -> list[Request]:
    """Conversations of several turns: each turn's prompt is all that was said, and comes some time after the answer.

    Args:
        count: conversations.
        per_second: that begin, at random times.
        turns: mean, 2 at the least.
        prompt, output: new tokens of a turn.
        think: mean seconds between an answer and the next turn, exponential.
        least_think: less is taken for so much.
        most: tokens at which a conversation ends.
        block_size: tokens of a block's key.
        seed: of all that is random.
    """
    draw, time, found = random.Random(seed), 0.0, list[Request]()
    for i in range(count):
        time += draw.expovariate(per_second)
        said, before = 0, None
        # Geometric from 2 on.
        for turn in range(2 + int(draw.expovariate(1 / max(turns - 2, 1e-9)) + 0.5)):
            new, answer = max(prompt(draw), 1), max(output(draw), 1)
            if said + new + answer > most:
                break
            keys = tuple((i, j) for j in range((said + new + answer) // block_size))
            wait = time if not turn else max(draw.expovariate(1 / think), least_think)
            found.append(Request(wait, said + new, answer, keys, before))
            said, before = said + new + answer, len(found) - 1
    return found


def azure(path: str | Path, *, scale: float = 1.0, lengths: float = 1.0, count: int | None = None) -> list[Request]:
    """Arrivals and lengths of the Azure LLM inference trace (Splitwise, ISCA 2024).

    Args:
        path: a file with TIMESTAMP, ContextTokens and GeneratedTokens.
        scale: arrivals come so many times as fast.
        lengths: what all lengths are multiplied with.
        count: the first so many requests.

    Raises:
        ConfigError: not such a file.
    """
    rows = []
    try:
        with Path(path).open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                rows.append((seconds_of(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path}: not an Azure LLM inference trace: {_why(error)}.") from error
    if not rows:
        raise ConfigError(f"{path}: not an Azure LLM inference trace: it has no request.")
    rows = sorted(rows)[:count]
    return [Request((time - rows[0][0]) / scale, _scaled(a, lengths), _scaled(b, lengths)) for time, a, b in rows]


def mooncake(
    path: str | Path,
    *,
    block_size: int = MOONCAKE_BLOCK,
    scale: float = 1.0,
    lengths: float = 1.0,
    count: int | None = None,
) -> list[Request]:
    """Mooncake's trace of conversations (FAST 2025), with the keys of its blocks of 512 tokens.

    Args:
        path: a file with timestamp, input_length, output_length and hash_ids.
        block_size: of the keys; it divides 512 x `lengths`.
        scale: arrivals come so many times as fast.
        lengths: what all lengths are multiplied with, those of blocks too.
        count: the first so many requests.

    Raises:
        ConfigError: not such a file, or such a block size.
    """
    whole = scaled_block(lengths)
    if block_size < 1 or whole % block_size:
        raise ConfigError(f"block_size={block_size}: it has to divide {whole}.")
    parts = whole // block_size
    found: list[Request] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for line in lines:
                if count is not None and len(found) == count:
                    break
                row = json.loads(line)
                prompt, output = (
                    _scaled(operator.index(row[name]), lengths) for name in ("input_length", "output_length")
                )
                keys = tuple((x, j) for x in row["hash_ids"] for j in range(parts))
                hash(keys)  # a TypeError, where one is no key
                time = row["timestamp"] / 1000 / scale
                if not math.isfinite(time):
                    raise ValueError(f"the timestamp {row['timestamp']} is no time")
                found.append(Request(time, prompt, output, keys[: prompt // block_size]))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a Mooncake trace: {_why(error)}.") from error
    if not found:
        raise ConfigError(f"{path}: not a Mooncake trace: it has no request.")
    began = min(request.arrived for request in found)
    return [replace(request, arrived=request.arrived - began) for request in found]


def scaled_block(lengths: float) -> int:
    """Tokens of a block of Mooncake's trace whose lengths are multiplied with that. Raises `ConfigError`: no whole
    number."""
    tokens = MOONCAKE_BLOCK * lengths
    if tokens < 1 or tokens != _scaled(MOONCAKE_BLOCK, lengths):
        raise ConfigError(
            f"Lengths x {lengths:g}: the trace's blocks of {MOONCAKE_BLOCK} tokens would have {tokens:g}. Give a "
            "multiple of 1/512, such as 0.25 or 0.03125."
        )
    return round(tokens)


def _scaled(tokens: int, lengths: float) -> int:
    """Tokens whose number is multiplied with that: at least 1. Raises `ConfigError`: more than any number."""
    try:
        return max(round(tokens * lengths), 1)
    except OverflowError:
        raise ConfigError(f"Lengths x {lengths:g} are more than there are numbers for.") from None


def _why(error: Exception) -> str:
    """What is wrong with a file."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str((isinstance(error, OSError) and error.strerror) or error)
