"""Whether keys and values that are kept are those of their tokens: recomputed, and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from kvtier.conversation.index import unpacked
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.kept.kept import Kept
from kvtier.errors import CorruptionError
from kvtier.hf.models import generation as of
from kvtier.hf.models import trials
from kvtier.memory.tiered import TieredMemory

#: Tokens that are compared together.
_TOKENS = 64
#: What the keys or the values of so many tokens may differ by from those that are computed again, as a share of their
#: norm: a prompt is computed in other portions then, and rounds otherwise. Of other tokens it is about 1.
_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-6}
_LIMIT = 0.1

Pair = tuple[torch.Tensor, torch.Tensor]


def difference(kept: Mapping[int, Pair], computed: Mapping[int, Pair]) -> str:
    """Where keys and values of one sequence differ by more than rounding; "" if they do not.

    Args:
        kept, computed: by layer, keys `[1, heads, tokens, k_dim]` and values `[1, heads, tokens, v_dim]`.
    """
    for layer, pair in kept.items():
        for name, mine, again in zip(("keys", "values"), pair, computed[layer], strict=True):
            if mine.shape != again.shape:
                return f"{name} of layer {layer} are {tuple(mine.shape)} and should be {tuple(again.shape)}"
            limit = _LIMITS.get(mine.dtype, _LIMIT)
            for start in range(0, mine.shape[2], _TOKENS):
                a, b = (x[:, :, start : start + _TOKENS].double() for x in (mine, again))
                off = float((a - b).norm() / b.norm().clamp(min=1e-12))
                if not off <= limit:  # also what is no number
                    stop = min(start + _TOKENS, mine.shape[2])
                    return f"{name} of layer {layer}, tokens {start} to {stop}, differ by {off:.2g} of their norm"
    return ""


def verify(
    model: Any,
    memory: TieredMemory,
    kept: Kept,
    new_cache: Callable[[Hashable], JournalledCache],
    keeps: Callable[[Hashable], bool],
    sequences: int,
) -> int:
    """Compute some sequences that are kept again, chosen at random, and compare.

    Args:
        memory, kept: of the store.
        new_cache: gives one for what is kept under a key.
        keeps: whether what is under a key is what the model computes now.
        sequences: how many, at the most.

    Returns:
        The tokens that were compared.

    Raises:
        CorruptionError: some differ by more than rounding. That sequence is not kept any more.
    """
    with memory.lock, memory.change:
        entries = [x for x in kept.entries.values() if keeps(x.key) and not x.sequence.start]
    compared = 0
    for entry in random.sample(entries, min(sequences, len(entries))):
        with new_cache(entry.key) as cache:
            try:
                length = cache._forward.follow(kept.parked, [entry.sequence], 1 << 60)
                compared += compare(model, cache, entry.ids, length)
            except CorruptionError:
                with memory.lock, memory.change:
                    kept.drop_corrupt([entry])
                raise
    return compared


def compare(model: Any, cache: JournalledCache, ids: bytes, length: int) -> int:
    """Compute the tokens of a cache of one row again, and compare.

    Args:
        cache: holds the first of these tokens, in its tiered layers.
        ids: packed.
        length: tokens that it holds.

    Returns:
        The tokens that were compared.

    Raises:
        CorruptionError: they differ by more than rounding, or were damaged.
    """
    kept = {i: cache.layers[i].dense("verify") for i in cache._forward.readers}
    if not length or not kept:
        return 0
    tokens = torch.tensor([unpacked(ids)[:length]], device=of.device_of(model))
    found = difference(kept, trials.recomputed(model, tokens, kept))
    if found:
        raise CorruptionError(
            f"Of a sequence of {length} tokens, {found}, when they are computed again. It is not kept any more."
        )
    return length
