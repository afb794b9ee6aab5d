"""Requests by the blocks that they read: from traces of services, and generated ones."""

from __future__ import annotations

import csv
import datetime
import json
import math
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

#: Tokens of a block in Mooncake's trace.
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        time: of its arrival, seconds.
        keys: of the blocks of its prompt from the beginning, the last one perhaps partial. Two requests have a key in
            common if their prompts are alike up to the end of that block.
        tokens: of the prompt.
        output: tokens generated.
        block: tokens of a whole block.
    """

    time: float
    keys: tuple[Hashable, ...]
    tokens: int
    output: int
    block: int


def mooncake(path: str | Path) -> list[Request]:
    """Mooncake's trace of conversations (FAST 2025): blocks of 512 tokens by hash, an hour of arrivals.

    Raises:
        ConfigError: not such a file.
    """
    found = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            keys = tuple(row["hash_ids"])
            found.append(
                Request(row["timestamp"] / 1000, keys, row["input_length"], row["output_length"], MOONCAKE_BLOCK)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a request of a Mooncake trace, which has timestamp, input_length, "
                "output_length and hash_ids."
            ) from error
    return found


def azure(path: str | Path, *, conversations: int, seed: int = 0, block: int = 512) -> list[Request]:
    """Arrivals and lengths of the Azure LLM inference trace (Splitwise, ISCA 2024), dealt out to conversations.

    The trace does not say which requests belong together. Here each one is the next turn of one of `conversations`
    that are open, drawn at random; a conversation is replaced by a new one when it reaches the longest prompt of the
    trace. A turn's prompt is the whole conversation, and its new tokens are as many as the trace's prompt has, less
    what the conversation already is.

    Args:
        path: of the file.
        conversations: that are open at once.
        seed: which of them are drawn.
        block: tokens.

    Raises:
        ConfigError: not such a file.
    """
    rows = []
    reader = csv.DictReader(_lines(path))
    if reader.fieldnames is None or "TIMESTAMP" not in reader.fieldnames:
        raise ConfigError(f"{path}: not an Azure LLM inference trace, whose first line names TIMESTAMP.")
    for row in reader:
        try:
            rows.append((seconds_of(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {reader.line_num}: not a request of an Azure LLM inference trace, which has TIMESTAMP, "
                "ContextTokens and GeneratedTokens."
            ) from error
    rows.sort()
    longest = max((tokens for _, tokens, _ in rows), default=0)
    draw = random.Random(seed)
    open_ = [_Conversation(i, block) for i in range(conversations)]
    made, found = conversations, []
    for time, tokens, output in rows:
        i = draw.randrange(conversations)
        if open_[i].tokens + tokens > longest:
            open_[i] = _Conversation(made, block)
            made += 1
        found.append(open_[i].turn(time - rows[0][0], tokens, output))
    return found


def agents(
    *,
    count: int = 300,
    per_second: float = 0.25,
    turns: int = 43,
    turn_tokens: int = 2200,
    median: float = 5.0,
    p99: float = 80.0,
    output: int = 200,
    shared: int = 8192,
    kinds: int = 4,
    block: int = 512,
    seed: int = 0,
) -> list[Request]:
    """Agents at work: each turn is the whole history and a tool's result, and the next one follows within seconds.

    Args:
        count, per_second: of agents, and how many begin in a second: arrivals are Poisson's.
        turns: of an agent on the average, from half as many to one and a half times as many.
        turn_tokens: that a turn adds, its `output` included.
        median, p99: of the seconds between a turn's arrival and the next one's: log-normal.
        output: tokens generated in a turn.
        shared: tokens of the instructions that agents of one of `kinds` begin with.
        block: tokens.
        seed: of everything drawn.
    """
    draw = random.Random(seed)
    spread = math.log(p99 / median) / 2.3263
    found, start = [], 0.0
    for i in range(count):
        start += draw.expovariate(per_second)
        conversation = _Conversation(i, block)
        conversation.begin(draw.randrange(kinds), shared)
        time = start
        for _ in range(draw.randint(turns - turns // 2, turns + turns // 2)):
            found.append(conversation.turn(time, turn_tokens - output, output))
            time += draw.lognormvariate(math.log(median), spread)
    found.sort(key=lambda request: request.time)
    return found


class _Conversation:
    """One that grows. Its whole blocks have names; a partial one has a name that no later prompt has."""

    def __init__(self, name: int, block: int) -> None:
        self.name, self.block = name, block
        self.tokens = 0
        self._keys: list[Hashable] = []

    def begin(self, kind: int, tokens: int) -> None:
        """With whole blocks that others of this kind have too."""
        self._keys = [f"kind {kind}, {i}" for i in range(tokens // self.block)]
        self.tokens = len(self._keys) * self.block

    def turn(self, time: float, new: int, output: int) -> Request:
        """The next request."""
        self.tokens += new
        whole = self.tokens // self.block
        while len(self._keys) < whole:
            self._keys.append(f"{self.name}, {len(self._keys)}")
        keys = tuple(self._keys[:whole])
        if self.tokens % self.block:
            keys = (*keys, f"{self.name}, up to {self.tokens}")
        found = Request(time, keys, self.tokens, output, self.block)
        self.tokens += output
        return found


def seconds_of(timestamp: str) -> float:
    """Seconds since 1970. A time without a zone is of UTC, as those of the traces with one are: this machine's zone
    changes no arrival.

    Raises:
        ValueError, TypeError: it is no time.
    """
    time = datetime.datetime.fromisoformat(timestamp)
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _lines(path: str | Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as stream:
            yield from stream
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} is no text: {error}.") from error
