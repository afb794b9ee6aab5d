"""A layer's KV as tensors, for torch's own kernels: gathered from its blocks, those on the device and those fetched."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvtier.attention.partition import Part as AddressPart
from kvtier.attention.reader import LayerReader, Place
from kvtier.kernels import copies, launch
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.pool import BlockPool
from kvtier.tables.layer import LayerKV


@contextmanager
def workspace_kv(reader: LayerReader, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `length` tokens of a layer in the workspace, for as long as the context lasts.

    Returns:
        keys `[batch, k_heads, length, k_dim]` and values `[batch, v_heads, length, v_dim]`, slices of whole blocks.

    Raises:
        BudgetError: the budget cannot hold the workspace and one fetched block.
        TransferError: a fetch failed.
    """
    layer, workspace = reader.layer, reader.workspace
    layout = layer.layout
    count = -(-length // layout.block_size)
    with reader.memory.lock:
        reader.memory.mend()
        data = reader.take_workspace(layer.workspace_bytes(length))
    try:
        _gather_all(reader, count, data)
        # Layers of one shape take turns in the same memory: one pair of views serves them all.
        key = (workspace.version, layer.batch, count, length, layout)
        if workspace.views is None or workspace.views[0] != key:
            keys, values = (x.narrow(2, 0, length) for x in _keys_and_values(_lay_out(layer, count, data)))
            workspace.views = (key, keys, values)
        yield workspace.views[1], workspace.views[2]
    finally:
        workspace.in_use = False


class DensePlan(NamedTuple):
    """How a layer that is wholly where attention runs is laid out in the workspace; good while `key` is.

    Attributes:
        key: what it was made for.
        copies: (target, source) views; or none, with
        table: all of it, where the device has a kernel that gathers it in one launch.
    """

    key: tuple[object, ...]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    table: AddressTable | None


def _gather_all(reader: LayerReader, count: int, data: torch.Tensor) -> None:
    """Write the first `count` blocks of every row into the workspace."""
    layer = reader.layer
    with reader.memory.lock:
        reader.memory.mend()
        # What is made of it on the device is of the stream on which it is used.
        stream = reader.device.engine.stream
        key = (layer.blocks.version, layer.shape_version, reader.workspace.version, count, stream)
        plan = reader.workspace.plans.get(layer.index)
        reading, hits = None, 0
        if isinstance(plan, DensePlan) and plan.key == key:
            reading, hits = reader.begin(), layer.count
    dense = _lay_out(layer, count, data)
    if not isinstance(plan, DensePlan) or plan.key != key:
        plan = _gather(reader, dense, 0, count, key)
        # Plans outlive the mode they are made in, and what is made in inference mode could not be written outside it.
        if plan is not None:
            reader.workspace.plans[layer.index] = plan
        return
    try:
        if plan.table is not None:
            copies.gather(plan.table, layer.layout, *_keys_and_values(dense))
        for target, source in plan.copies:
            target.copy_(source)
        reader.counters.block_hits += hits
    finally:
        reader.end(reading)


def own_kv(reader: LayerReader, length: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens `[start, length)` of a layer in tensors of the caller's own, outside the budgets. Blocks before these
    tokens are not read.

    Returns:
        keys `[batch, k_heads, length - start, k_dim]` and values `[batch, v_heads, length - start, v_dim]`; contiguous
        where `start` is a multiple of the block size.
    """
    layer = reader.layer
    layout, pool = layer.layout, layer.blocks.pools.home
    options: dict[str, Any] = {"dtype": layout.dtype, "device": layer.device.device}
    first, skipped = divmod(start, layout.block_size)
    room = length - (start - skipped)
    keys = torch.empty((layer.batch, layout.k_heads, room, layout.k_dim), **options)
    values = torch.empty((layer.batch, layout.v_heads, room, layout.v_dim), **options)
    dense = (Dense(keys, pool.keys), Dense(values, pool.values))
    _gather(reader, dense, first, -(-length // layout.block_size))
    return (keys[:, :, skipped:], values[:, :, skipped:]) if skipped else (keys, values)


def stream_kv(
    reader: LayerReader, length: int, blocks: int, room: int
) -> Generator[tuple[int, torch.Tensor, torch.Tensor], None, None]:
    """The first `length` tokens of a layer in rising order, so many blocks of each row at a time, in the workspace;
    where the step was not admitted for as much of it, in an activation of that size.

    While the reader computes, the blocks that it will miss next are on their way, if there is room for them.

    Args:
        reader: of the layer.
        length: tokens.
        blocks: of each row at a time.
        room: bytes of workspace that the step was admitted with.

    Yields:
        The position of the first token, keys `[batch, k_heads, tokens, k_dim]` and values `[batch, v_heads, tokens,
        v_dim]` of some tokens: valid until the next ones.

    Raises:
        BudgetError, TransferError: as `workspace_kv`.
    """
    layer, workspace, lock = reader.layer, reader.workspace, reader.memory.lock
    size = layer.layout.block_size
    count = -(-length // size)
    nbytes = layer.workspace_bytes(min(blocks, count) * size)
    own: torch.Tensor | None = None
    if nbytes > room:
        # All of the budget may be promised to others, who fill blocks in it: nothing in it can leave.
        own = torch.empty(nbytes, dtype=torch.uint8, device=layer.device.device)
        reader.counters.count_dense("attention", nbytes)
    try:
        for first in range(0, count, blocks):
            last = min(first + blocks, count)
            if own is None:
                with lock:
                    workspace.in_use = False
                    reader.memory.mend()
                    data = reader.take_workspace(nbytes)
            else:
                data = own
            dense = _lay_out(layer, last - first, data)
            _gather(reader, dense, first, last)
            if last < count:
                with lock:
                    reader.memory.mend()
                    reader.fetch_ahead(last, min(last + blocks, count))
            start, stop = first * size, min(last * size, length)
            keys, values = (x.narrow(2, 0, stop - start) for x in _keys_and_values(dense))
            yield start, keys, values
    finally:
        if own is None:
            workspace.in_use = False


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense destination and where its blocks come from.

    Attributes:
        out: `[rows, ..., room, dim]`, with room for the last token at least; what is behind it is undefined.
        source: gives `[count, ..., block_size, dim]` of `count` neighbouring slots.
    """

    out: torch.Tensor
    source: Callable[[int, int], torch.Tensor]


def _lay_out(layer: LayerKV, count: int, data: torch.Tensor) -> tuple[Dense, ...]:
    """Lay `count` blocks per row out in `data`: keys and values of a uniform layout in one tensor, so in one copy."""
    layout, pool, batch = layer.layout, layer.blocks.pools.home, layer.batch
    room = count * layout.block_size
    k_numel, v_numel = batch * layout.k_heads * room * layout.k_dim, batch * layout.v_heads * room * layout.v_dim
    # Plans keep views of it. Another dtype's view that is made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        flat = data.view(layout.dtype)
        if layout.uniform:
            return (Dense(flat[: 2 * k_numel].view(batch, 2, layout.k_heads, room, layout.k_dim), pool.pairs),)
        keys = flat[:k_numel].view(batch, layout.k_heads, room, layout.k_dim)
        values = flat[k_numel : k_numel + v_numel].view(batch, layout.v_heads, room, layout.v_dim)
    return Dense(keys, pool.keys), Dense(values, pool.values)


def _keys_and_values(dense: Sequence[Dense]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(dense) == 1:
        return dense[0].out[:, 0], dense[0].out[:, 1]
    return dense[0].out, dense[1].out


def _gather(
    reader: LayerReader, dense: Sequence[Dense], first: int, last: int, key: tuple[object, ...] = ()
) -> DensePlan | None:
    """Write the blocks `[first, last)` of every row to where they belong, counted from `first`.

    Returns:
        How that is done again, where nothing had to be fetched.

    Raises:
        TransferError: a fetch failed. BudgetError: there is no room to fetch even one block.
    """
    layer = reader.layer
    size, device = layer.layout.block_size, layer.device.device
    plans: list[DensePlan] = []
    with closing(reader.portions(first, last)) as portions:
        for places in portions:
            with torch.inference_mode(False):
                if len(places) > 2 and launch.available(device):  # few copies need no kernel
                    table = addresses(layer.blocks.pools.home, places, layer.batch, first).table(device)
                    plans.append(DensePlan(key, [], table))
                else:
                    plans.append(DensePlan(key, list(_views(dense, size, places, first)), None))
            if plans[-1].table is not None:
                copies.gather(plans[-1].table, layer.layout, *_keys_and_values(dense))
            for target, source in plans[-1].copies:
                target.copy_(source)
    return plans[0] if len(plans) == 1 and not layer.may_be_spilled else None


def addresses(pool: BlockPool, places: Iterable[Place], rows: int, first: int = 0) -> AddressPart:
    """Places as a device's kernels find them; block indices are counted from `first`."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    for place in sorted(places, key=lambda x: x.index):
        for row in place.rows:
            found[row].append((place.index - first, pool.address(place.slot), place.count))
    return AddressPart(found, pool.layout.nbytes, sum(place.count for place in places))


def _views(
    dense: Sequence[Dense], size: int, places: Iterable[Place], first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Destination and source views of places."""
    for place in places:
        start = (place.index - first) * size
        for part in dense:
            room = part.out.shape[-2]
            whole = min(place.count, (room - start) // size)
            for row in place.rows:
                out = part.out[row]
                if whole:
                    span = out.narrow(-2, start, whole * size)
                    yield span.unflatten(-2, (whole, size)).movedim(-3, 0), part.source(place.slot, whole)
                if whole < place.count:
                    # The destination ends within the last block.
                    rest = start + whole * size
                    source = part.source(place.slot + whole, 1)[0].narrow(-2, 0, room - rest)
                    yield out.narrow(-2, rest, room - rest), source
