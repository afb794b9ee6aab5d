"""Where the tokens of many conversations of many salts are is found in work that grows as their number does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvtier.conversation.disk.chunks import Chunks
from kvtier.conversation.disk.keys import key_of
from kvtier.conversation.disk.order import Order
from kvtier.conversation.disk.ranked import Ranked
from kvtier.conversation.disk.rows.manifest import Row
from kvtier.conversation.disk.tools.contents import Contents
from kvtier.conversation.index import packed
from kvtier.eviction.rank import Rank


def lines_of(call: Callable[[], Any]) -> int:
    """Lines of Python that run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def rows(count: int) -> list[Row]:
    """Sequences, each under two keys of a salt of its own."""
    keys = [key_of("transformers 5", (adapter,), f"t{i}") for i in range(count) for adapter in (None, "a")]
    return [Row.of(n, key, None, 0, packed([n // 2, n % 7]), 10, b"1") for n, key in enumerate(keys)]


def room(count: int) -> Callable[[], Any]:
    """To choose what goes, where every conversation has a rank."""
    chunks = Chunks()
    order = Order(chunks)
    for row in rows(count):
        chunks.add(row, None)
    for i in range(count):
        order.put(f"{i}", Ranked(Rank(priority=1 + i % 2), 0.0, next(chunks.tips([(f"t{i}", packed([i]))]))[0]))

    def call() -> None:
        gone, _ = order.first(chunks.nbytes, chunks.nbytes - 1, None, lambda: 1.0)
        assert [x.number for x in gone] == [0]

    return call


def refers(count: int) -> Callable[[], Any]:
    """To say which conversation refers to which chunks."""
    found = Contents(Path("x"), {}, rows={x.number: x for x in rows(count)})
    found.conversations = {f"{i}": {"ids": [i], "salt": f"t{i}"} for i in range(count)}

    def call() -> None:
        assert found.referred() == {f"{i}": {2 * i, 2 * i + 1} for i in range(count)}

    return call


@pytest.mark.parametrize("made", [room, refers])
def test_the_work_grows_as_the_number_of_salts_does(made: Callable[[int], Callable[[], Any]]) -> None:
    some, twice = lines_of(made(100)), lines_of(made(200))
    assert twice < 2.5 * some
