"""What a cache says of itself: where each layer is, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from kvtier.config import format_size
from kvtier.forward.forward import Forward
from kvtier.hf.cache.layer import TieredLayer
from kvtier.hf.cache.resident import resident_bytes
from kvtier.hf.models.layers import grows_untiered
from kvtier.planning.policies.names import name_of
from kvtier.planning.reports.analysis import analyse, decoded
from kvtier.planning.reports.explain import Explanation
from kvtier.planning.reports.log import Logged
from kvtier.stats import CacheStats, LayerResidency, Residency


def residency(forward: Forward, layers: Sequence[Any]) -> Residency:
    """Where the KV of each layer is.

    Args:
        forward: of the cache.
        layers: of the cache, tiered ones and Transformers' own.
    """
    lines = []
    for i, layer in enumerate(layers):
        tiered = forward.residency(i) if isinstance(layer, TieredLayer) else None
        if tiered is not None:
            lines.append(tiered)
            continue
        tokens = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
        kind = "tiered" if isinstance(layer, TieredLayer) else type(layer).__name__
        grows = kind != "tiered" and grows_untiered(layer)
        lines.append(LayerResidency(i, kind, tokens, 0, 0, 0, resident_bytes(layer), grows=grows))
    return Residency(tuple(lines))


def explanation(forward: Forward, layers: Sequence[Any], stats: CacheStats) -> Explanation:
    """What is where and why; see `TieredKVCache.explain`.

    Args:
        forward, layers: as above.
        stats: of the cache, now.
    """
    policy = forward.memory.policy
    lines = () if forward.closed else residency(forward, layers).layers
    states = [] if forward.closed else forward.states()
    number = forward.number
    if forward.closed:
        condition = "closed"
    elif not any(x.tokens for x in lines) and not any(map(_has_state, layers)):
        condition = "unused"
    elif not states:
        condition = "one tier"
    else:
        condition = "spilled" if any(x.spilled for state in states for x in state.layers) else "resident"
    history = decoded(list(forward.history))
    records = [record for record, _ in history]
    with forward.memory.lock:  # a policy is called by one at a time: others may plan with it meanwhile
        decisions = policy.decisions(number)
        known = forward.memory.rates
        analysis = tuple(analyse(x, policy, records, rates=known.get(x.device)) for x in states)
    return Explanation(
        condition,
        stats.device,
        stats.host,
        lines,
        stats.resident_bytes,
        name_of(policy.policy if isinstance(policy, Logged) else policy),
        decisions[-1] if decisions else None,
        analysis,
        history,
        stats.native_missing,
    )


def summary(forward: Forward, layers: Sequence[Any], stats: CacheStats) -> str:
    """How many layers there are, what they hold, and where, in a line.

    Args:
        forward, layers, stats: as above.
    """
    first = next((x.layer for x in forward.readers.values() if x.layer.length), None)
    tiered = sum(isinstance(layer, TieredLayer) for layer in layers)
    if first is None:
        others = f"{tiered} tiered, {format_size(stats.resident_bytes)} in layers that are not"
        return f"{len(layers) or 'any number of'} layers, {others if stats.resident_bytes else 'empty'}"
    held = f"{tiered} tiered, {first.batch} x {first.length} tokens"
    return ", ".join([f"{len(layers)} layers", held, *stats.tiers()])


def _has_state(layer: Any) -> bool:
    """Whether a layer has the recurrent state of some tokens, which it does not count."""
    return any(getattr(layer, "has_previous_state", {}).values())
