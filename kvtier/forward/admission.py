"""What the step that begins needs of the memory: a claim for each compute device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvtier.attention import dispatch
from kvtier.memory.blocks.block import State
from kvtier.planning.admission import Claim, ClaimSum
from kvtier.tables import sharing
from kvtier.tables.layer import LayerKV
from kvtier.tables.sharing import Group


def claim(
    layers: Sequence[LayerKV],
    done: Collection[LayerKV],
    first: LayerKV,
    groups: Sequence[Group],
    tokens: int,
    *,
    later: int = 0,
    to_come: int,
    host_attention: bool,
    dense: bool,
    limit: int,
) -> Claim:
    """What the layers of one compute device need for a step, together.

    Args:
        layers: all of them.
        done: those that have had their new tokens.
        first: the layer at hand, which stands for those that have none yet.
        groups: how its rows share tables, see `sharing.group_rows`.
        tokens: new tokens per row.
        later: tokens per row that steps to come will add, each row its own.
        to_come: layers that nobody has seen yet.
        host_attention: whether host threads may attend.
        dense: whether attention asks for tensors.
        limit: bytes of the tier where blocks begin.
    """
    batch = sum(len(group.rows) for group in groups)
    total = first.length + tokens + later
    claimed = ClaimSum()
    reads: list[tuple[LayerKV, int]] = []
    for layer in layers:
        size, nbytes = layer.layout.block_size, layer.layout.nbytes
        open_now = layer.blocks.counts[State.FILLING]
        if layer in done:
            coming, length, open_then = 0, layer.length, open_now
        else:
            mine = groups
            if layer is not first:
                # An empty layer takes any rows, whatever it had before it was cropped.
                rows = layer.rows if layer.length else ()
                alike = len(rows) in (0, batch)
                mine = sharing.same_groups(rows, groups) if alike else sharing.likely_groups(rows, tokens)
            coming = _coming(mine, tokens, later, size)
            length = layer.length + tokens + later
            open_then = _open(mine, batch, length, later, size)
        claimed.add(nbytes, layer.blocks.blocks + coming, max(open_now, open_then), sealed=length >= size)
        reads.append((layer, length))

    def room_at(limit: int) -> int:
        how: Any = {"host_attention": host_attention, "dense": dense, "limit": limit}
        return max((dispatch.room_for(layer, tokens, length, batch, **how) for layer, length in reads), default=0)

    size, nbytes = first.layout.block_size, first.layout.nbytes
    unseen = groups if first.length else sharing.same_groups((), groups)
    coming, open_then = _coming(unseen, tokens, later, size), _open(groups, batch, total, later, size)
    claimed.add(nbytes, coming, open_then, sealed=total >= size, layers=to_come)
    return claimed.claim(room_at(limit), room_at)


def _coming(groups: Sequence[Group], tokens: int, later: int, size: int) -> int:
    """New blocks of a layer."""
    if later:
        return sharing.blocks_needed_apart(groups, tokens, later, size)
    return sharing.blocks_needed(groups, tokens, size)


def _open(groups: Sequence[Group], rows: int, length: int, later: int, size: int) -> int:
    """Blocks that are being filled when a layer has so many tokens, or before."""
    if later:
        return rows if size > 1 else 0
    return len(groups) if length % size else 0


def at_rest(layers: Sequence[LayerKV], room: int = 0, before: Claim | None = None) -> Claim:
    """What the layers of one compute device hold between two steps, parked blocks aside.

    Args:
        layers: all of them.
        room: what is kept for reading them.
        before: what was claimed for the last step, in which that was made.
    """
    claimed = ClaimSum()
    for layer in layers:
        blocks, filling = layer.blocks.blocks, layer.blocks.counts[State.FILLING]
        claimed.add(layer.layout.nbytes, blocks, filling, sealed=blocks > filling)
    return claimed.claim(room, before.room_at if before is not None and room else None)
