"""A layer's KV as tensors: gathered from its blocks, resident and fetched. The way of torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.errors import BudgetError
from kvtier.kernels import copies, launch
from kvtier.kernels.tables import AddressTable
from kvtier.storage.addresses import Addresses
from kvtier.storage.block import Block
from kvtier.storage.staging import Staging
from kvtier.storage.store import LayerStore

Place = tuple[int, int]  # (row, block index)
Slots = list[list[tuple[int, int]]]  # for each row: (block index, slot), rising


def dense_kv(layer: LayerStore, length: int, *, lasting: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of a layer in the workspace: valid until the next call on the same device.

    Args:
        layer: whose KV.
        length: tokens.
        lasting: whether the next steps are taken to need it too.

    Returns:
        keys `[batch, k_heads, length, k_dim]` and values `[batch, v_heads, length, v_dim]`, slices of whole blocks.

    Raises:
        BudgetError: the budget cannot hold the workspace, or one staged block beside it.
        TransferError: a fetch failed.
    """
    layer.attended = True
    layer.dense |= lasting
    layout, workspace = layer.layout, layer.tiers.workspace
    count = -(-length // layout.block_size)
    data = workspace.take(layer.workspace_bytes(length))
    key = (layer.version, workspace.version, count)
    plan = layer.plan
    if not isinstance(plan, GatherPlan) or plan.key != key:
        # Plans outlive the mode they are made in, and what is made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            plan = layer.plan = _plan(layer, 0, count, _workspace_parts(layer, count, data), key)
    _gather(layer, plan)
    # Layers of one shape take turns in the same memory: one pair of views serves them all.
    kv_key = (workspace.version, layer.batch, count, length, layout)
    if workspace.views is None or workspace.views[0] != kv_key:
        keys, values = (x.narrow(2, 0, length) for x in _keys_and_values(plan.parts))
        workspace.views = (kv_key, keys, values)
    return workspace.views[1], workspace.views[2]


def own_kv(layer: LayerStore, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of a layer in tensors of the caller's own, contiguous, outside the budgets."""
    layout = layer.layout
    options: dict[str, Any] = {"dtype": layout.dtype, "device": layer.tiers.device}
    keys = torch.empty((layer.batch, layout.k_heads, length, layout.k_dim), **options)
    values = torch.empty((layer.batch, layout.v_heads, length, layout.v_dim), **options)
    parts = (Part(keys, layer.pool.keys), Part(values, layer.pool.values))
    _gather(layer, _plan(layer, 0, -(-length // layout.block_size), parts, ()))
    return keys, values


def stream_kv(
    layer: LayerStore, length: int, blocks: int
) -> Generator[tuple[int, torch.Tensor, torch.Tensor], None, None]:
    """The first `length` tokens of a layer in rising order, so many blocks of each row at a time, in the workspace.

    While the reader computes, the blocks that it will miss next are on their way, if there is room to stage them.

    Args:
        layer: whose KV.
        length: tokens.
        blocks: of each row at a time.

    Yields:
        The position of the first token, keys `[batch, k_heads, tokens, k_dim]` and values `[batch, v_heads, tokens,
        v_dim]` of some tokens: valid until the next ones.

    Raises:
        BudgetError, TransferError: as `dense_kv`.
    """
    layer.attended = True
    size, workspace = layer.layout.block_size, layer.tiers.workspace
    count = -(-length // size)
    room = layer.workspace_bytes(min(blocks, count) * size)
    workspace.take(room)  # before anybody holds on to what was fetched ahead: it may have to make way
    reader = Reader(layer)
    try:
        for first in range(0, count, blocks):
            last = min(first + blocks, count)
            data = workspace.take(room)
            plan = _plan(layer, first, last, _workspace_parts(layer, last - first, data), ())
            _gather(layer, plan, reader)
            reader.ahead(last, min(last + blocks, count))
            start, stop = first * size, min(last * size, length)
            keys, values = (x.narrow(2, 0, stop - start) for x in _keys_and_values(plan.parts))
            yield start, keys, values
    finally:
        reader.close()


def stream_slots(layer: LayerStore, length: int, blocks: int) -> Generator[Slots, None, None]:
    """Near slots of a layer's blocks, for a reader that finds tokens through a block table: nothing is copied near.

    Args:
        layer: whose KV.
        length: tokens.
        blocks: fetched at a time.

    Yields:
        For each row (block index, slot), rising: first of what is resident, then of what had to be fetched, good until
        the next ones.

    Raises:
        BudgetError, TransferError: as `dense_kv`.
    """
    layer.attended = True
    count = -(-length // layer.layout.block_size)
    near: Slots = [[] for _ in layer.rows]
    missing: dict[Block, list[Place]] = {}
    for row, table in enumerate(layer.rows):
        for index, block in enumerate(table.blocks[:count]):
            if block.near is None:
                missing.setdefault(block, []).append((row, index))
            else:
                near[row].append((index, block.near))
    layer.tiers.counters.block_hits += len({slot for row in near for _, slot in row})
    reader = Reader(layer)
    try:
        if any(near):
            yield near
        for used in reader.fetched({block: tuple(places) for block, places in missing.items()}, blocks):
            fetched: Slots = [[] for _ in layer.rows]
            for row, index, slot in used:
                fetched[row].append((index, slot))
            yield fetched
    finally:
        reader.close()


@dataclass(frozen=True, slots=True)
class Part:
    """A dense destination and where its blocks come from.

    Attributes:
        out: `[rows, ..., room, dim]`, with room for the last token at least; what lies behind it is undefined.
        source: gives `[count, ..., block_size, dim]` of `count` neighbouring slots.
    """

    out: torch.Tensor
    source: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the blocks of one layer go. Valid while `key` is.

    Attributes:
        key: what it was made for.
        parts: keys and values, or both in one.
        resident: (destination, source) views of everything in the near tier.
        missing: blocks to fetch, in table order, with the places they go to.
        blocks: distinct near blocks.
        table: everything in the near tier, where the device has a kernel that gathers it in one launch.
    """

    key: tuple[object, ...]
    parts: tuple[Part, ...]
    resident: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    missing: tuple[tuple[Block, tuple[Place, ...]], ...]
    blocks: int
    table: AddressTable | None = None


def _workspace_parts(layer: LayerStore, count: int, data: torch.Tensor) -> tuple[Part, ...]:
    """Lay `count` blocks per row out in `data`: keys and values of a uniform layout in one tensor, so in one copy."""
    layout, pool, batch = layer.layout, layer.pool, layer.batch
    room = count * layout.block_size
    flat = data.view(layout.dtype)
    k_numel, v_numel = batch * layout.k_heads * room * layout.k_dim, batch * layout.v_heads * room * layout.v_dim
    if layout.uniform:
        return (Part(flat[: 2 * k_numel].view(batch, 2, layout.k_heads, room, layout.k_dim), pool.pairs),)
    keys = flat[:k_numel].view(batch, layout.k_heads, room, layout.k_dim)
    values = flat[k_numel : k_numel + v_numel].view(batch, layout.v_heads, room, layout.v_dim)
    return Part(keys, pool.keys), Part(values, pool.values)


def _keys_and_values(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(parts) == 1:
        return parts[0].out[:, 0], parts[0].out[:, 1]
    return parts[0].out, parts[1].out


def _gather(layer: LayerStore, plan: GatherPlan, reader: Reader | None = None) -> None:
    """Write what a plan names into its tensors.

    Raises:
        TransferError: a fetch failed. BudgetError: there is no room to stage even one block.
    """
    if plan.table is not None:
        copies.gather(plan.table, layer.layout, *_keys_and_values(plan.parts))
    else:
        for destination, source in plan.resident:
            destination.copy_(source)
    layer.tiers.counters.block_hits += plan.blocks
    if reader is not None:
        reader.read(plan)
    elif plan.missing:
        reader = Reader(layer)
        try:
            reader.read(plan)
        finally:
            reader.close()


def _plan(layer: LayerStore, first: int, last: int, parts: tuple[Part, ...], key: tuple[object, ...]) -> GatherPlan:
    """Where the blocks `[first, last)` of every row go; places are counted from `first`."""
    resident: list[tuple[torch.Tensor, torch.Tensor]] = []
    missing: dict[Block, list[Place]] = {}
    near: set[Block] = set()
    slots: Slots = []
    size = layer.layout.block_size
    for row, table in enumerate(layer.rows):
        here = []
        for index, block in enumerate(table.blocks[first:last]):
            if block.near is None:
                missing.setdefault(block, []).append((row, index))
            else:
                near.add(block)
                here.append((row, index, block.near))
        resident += _views(parts, size, here)
        slots.append([(index, slot) for _, index, slot in here])
    frozen = tuple((block, tuple(places)) for block, places in missing.items())
    # Few copies need no kernel.
    gathered = address_table(layer, slots) if len(resident) > 2 and launch.available(layer.tiers.device) else None
    return GatherPlan(key, parts, tuple(resident), frozen, len(near), gathered)


def address_table(layer: LayerStore, slots: Slots) -> AddressTable:
    """Near slots of each row as a device's kernels find them."""
    pool = layer.pool
    rows = [([index for index, _ in row], pool.addresses([slot for _, slot in row])) for row in slots]
    return Addresses(rows).table(layer.tiers.device)


class Reader:
    """Brings blocks that a layer misses through staging, as many at a time as it holds.

    What was fetched ahead for the layer is taken over. `close` gives back whatever is left.
    """

    def __init__(self, layer: LayerStore) -> None:
        self._layer = layer
        self._area = layer.tiers.staging
        self._open: list[tuple[Staging, set[Block]]] = []  # with the blocks that nobody has read yet
        staging = self._area.staged.pop(layer, None)
        if staging is not None:
            self._open.append((staging, set(staging.blocks)))

    def read(self, plan: GatherPlan) -> None:
        """Copy everything that `plan` misses to its places."""
        for used in self.fetched(dict(plan.missing)):
            for destination, source in _views(plan.parts, self._layer.layout.block_size, used):
                destination.copy_(source)

    def fetched(
        self, places: dict[Block, tuple[Place, ...]], most: int = 0
    ) -> Generator[list[tuple[int, int, int]], None, None]:
        """Bring blocks near, in the order of `places`, which is emptied.

        Args:
            places: (row, block index) pairs of each block.
            most: blocks at a time, the next ones on their way while these are used; 0: as many as staging holds.

        Yields:
            (row, block index, slot) of some of them, rising; the slots are good until the next ones are asked for.
        """
        while places:
            if all(unread.isdisjoint(places) for _, unread in self._open):
                self._open.append(self._fetch(list(places)[: most or None]))
            for entry in [x for x in self._open if not x[1].isdisjoint(places)]:
                staging, unread = entry
                staging.transfer.wait()
                used = []
                for block, slot in zip(staging.blocks, staging.slots, strict=True):
                    if block in places:
                        unread.discard(block)
                        used += [(row, index, slot) for row, index in places.pop(block)]
                if most and len(self._open) == 1:
                    self._fetch_ahead([b for b in list(places)[:most] if b not in unread])
                yield sorted(used)
                if not unread:
                    self._open.remove(entry)
                    self._area.finish(self._layer, staging)

    def ahead(self, first: int, last: int) -> None:
        """Begin to fetch what the blocks `[first, last)` of every row will miss, if there is room."""
        if self._layer.tiers.far is not None and not self._open:
            self._fetch_ahead([b for table in self._layer.tables() for b in table.blocks[first:last] if b.near is None])

    def close(self) -> None:
        """Give back what is staged still."""
        while self._open:
            self._area.finish(self._layer, self._open.pop()[0])

    def _fetch(self, blocks: list[Block]) -> tuple[Staging, set[Block]]:
        try:
            staging = self._area.fetch(self._layer, blocks, ahead=False)
        except BudgetError:
            if not self._open:
                raise
            self.close()  # what was fetched for later stands in the way of what is needed now
            staging = self._area.fetch(self._layer, blocks, ahead=False)
        assert staging is not None
        return staging, set(staging.blocks)

    def _fetch_ahead(self, blocks: list[Block]) -> None:
        blocks = list(dict.fromkeys(blocks))
        staging = self._area.fetch(self._layer, blocks, ahead=True) if blocks else None
        if staging is not None:
            self._open.append((staging, set(staging.blocks)))


def _views(
    parts: Sequence[Part], size: int, blocks: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Destination and source views for `(row, block index, slot)`, neighbours joined."""
    for row, index, slot, count in joined(blocks):
        start = index * size
        for part in parts:
            out, room = part.out[row], part.out.shape[-2]
            whole = min(count, (room - start) // size)
            if whole:
                span = out.narrow(-2, start, whole * size)
                yield span.unflatten(-2, (whole, size)).movedim(-3, 0), part.source(slot, whole)
            if whole < count:
                # The destination ends within the last block.
                rest = start + whole * size
                yield out.narrow(-2, rest, room - rest), part.source(slot + whole, 1)[0].narrow(-2, 0, room - rest)


def joined(blocks: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Join `(row, block index, slot)` that are neighbours in both into `(row, block index, slot, count)`."""
    first: tuple[int, int, int] | None = None
    count = 0
    for block in blocks:
        if first is not None and block == (first[0], first[1] + count, first[2] + count):
            count += 1
            continue
        if first is not None:
            yield *first, count
        first, count = block, 1
    if first is not None:
        yield *first, count
