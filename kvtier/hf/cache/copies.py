"""What the layers of a cache hold, for a copy or a pickle of it, and back into a new cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from kvtier.forward.forward import Forward
from kvtier.hf.cache.layer import TieredLayer
from kvtier.tables.sharing import distinct_rows


def pickle_by_value(kind: type) -> None:
    """Let caches of a class be handed to other processes by value. torch hands over the memory of tensors itself, and
    those that a cache makes for its pickle are gone before a process that is spawned asks for them."""
    ForkingPickler.register(kind, _by_value)


def _by_value(cache: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return pickle.loads, (pickle.dumps(cache, pickle.HIGHEST_PROTOCOL),)


def content_of(forward: Forward, layers: Sequence[Any]) -> dict[str, Any]:
    """What a cache holds, as `fill` takes it: `layers`, `rows`, `graphs`, and what `expected` and `even` say of steps.

    Of a tiered layer that is its keys and values, or None before its first update. Others are given as they are.

    Args:
        forward, layers: of the cache. No forward is under way.
    """
    forward.steps.end()
    with forward.memory.lock:
        held = [reader.layer.rows for reader in forward.readers.values() if reader.layer.length]
        distinct, rows = distinct_rows(held)
    contents: list[Any] = []
    for layer in layers:
        content: Any = layer.content() if isinstance(layer, TieredLayer) else layer
        if isinstance(content, tuple) and distinct != rows and len(content[0]) == len(rows):
            content = tuple(part[distinct] for part in content)
        contents.append(content)
    return {
        "layers": contents,
        # Rows of a layer that are alike are written once: which one each row is.
        "rows": None if distinct == rows else rows,
        # A copy that is made without gradients has as little of a graph, and says so.
        "graphs": [i for i, reader in forward.readers.items() if reader.layer.carries_graph],
        "expected": forward.steps.expected,
        "even": forward.steps.even,
    }


def fill(forward: Forward, layers: list[Any], content: Mapping[str, Any]) -> None:
    """Put into a new cache, which has as many layers, what another one held.

    Raises:
        BudgetError, TransferError: some layers are filled.
    """
    for i, held in enumerate(content["layers"]):
        if held is not None and not isinstance(held, tuple):
            layers[i] = held
        elif held is not None:
            forward.restore(i, *held)
    if content.get("rows") is not None:
        for i, reader in forward.readers.items():
            if reader.layer.length:
                forward.pick_rows(i, content["rows"])
    for i in content["graphs"]:
        forward.readers[i].layer.carries_graph = True
    steps = forward.steps
    steps.end()
    steps.even = content.get("even", True)
    if content["expected"] is not None:
        steps.expected = (steps.expected or frozenset()) | content["expected"]
