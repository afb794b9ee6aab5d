"""What a step needs of the memory, and what is held between two steps: a claim for each compute device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvtier.attention import dispatch, split
from kvtier.forward.sub_batch import MAX_SHORT, Segment
from kvtier.memory.blocks.block import State
from kvtier.planning.admission import Claim, ClaimSum
from kvtier.tables import sharing
from kvtier.tables.layer import LayerKV
from kvtier.tables.sharing import Group
from kvtier.tables.table import BlockTable


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
    """What the layers of one compute device need for a step of a cache, together.

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


def claim_packed(
    layers: Sequence[LayerKV],
    done: Collection[int],
    segments: Sequence[Segment],
    to_come: int,
    limit: int,
    *,
    host_attention: bool,
) -> Claim:
    """What the layers of one compute device need for a packed step, together.

    Args:
        layers: all of them.
        done: the indexes of those that have had their new tokens.
        segments: the tokens of each sequence. Other sequences stay as they are.
        to_come: layers that nobody has seen yet.
        limit: bytes of the tier where blocks begin.
        host_attention: whether host threads may attend.
    """
    claimed, room = ClaimSum(), 0
    for layer in layers:
        size = layer.layout.block_size
        blocks, opened = layer.blocks.blocks, layer.blocks.counts[State.FILLING]
        sealed, then = blocks > opened, opened
        if layer.index not in done:
            for each in segments:
                table = each.sequence.tables[layer.index]
                before, after = table.length % size, (table.length + each.tokens) % size
                own = not before or _is_own(table, layer)
                blocks += -(-(table.length + each.tokens) // size) - -(-table.length // size) + (not own)
                then += bool(after) - (before > 0 and own and table.last().state is State.FILLING)
        claimed.add(layer.layout.nbytes, blocks, max(opened, then), sealed=sealed or blocks > then)
        in_place = host_attention and split.can_attend(layer)
        for each in segments:
            if each.tokens > MAX_SHORT or not in_place:
                room = max(room, _room_of_one(layer, each.tokens, each.length, host_attention, limit))
    if to_come and layers:
        last = layers[-1]
        size, lengths = last.layout.block_size, [each.length for each in segments]
        blocks, then = sum(-(-x // size) for x in lengths), sum(bool(x % size) for x in lengths)
        claimed.add(last.layout.nbytes, blocks, then, sealed=blocks > then, layers=to_come)
    return claimed.claim(room)


def claim_alone(layers: Sequence[LayerKV], length: int, limit: int, *, host_attention: bool) -> Claim:
    """What the layers of one compute device need for a sequence that is alone, at the most until it has so many tokens,
    computed one by one.

    Args:
        layers: all of them.
        length: tokens of the sequence.
        limit, host_attention: as of `claim_packed`.
    """
    claimed, room = ClaimSum(), 0
    for layer in layers:
        size = layer.layout.block_size
        claimed.add(layer.layout.nbytes, -(-length // size), int(size > 1), sealed=length >= size)
        room = max(room, _room_of_one(layer, 1, length, host_attention, limit))
    return claimed.claim(room)


def _is_own(table: BlockTable, layer: LayerKV) -> bool:
    """Whether a sequence's last block is written to as it is, and not copied first."""
    last = table.last()
    return last.refs == 1 and last.blocks is layer.blocks


def _room_of_one(layer: LayerKV, tokens: int, length: int, host_attention: bool, limit: int) -> int:
    """Bytes of workspace through which one sequence of a packed step is attended to."""
    return dispatch.room_for(layer, tokens, length, 1, host_attention=host_attention, dense=True, limit=limit)


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
