"""A layer's KV as tensors: gathered from its blocks, resident and fetched. The way of torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.storage.block import Block
from kvtier.storage.store import LayerStore

Place = tuple[int, int]  # (row, block index)


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
            plan = layer.plan = _plan(layer, count, _workspace_parts(layer, count, data), key)
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
    _gather(layer, _plan(layer, -(-length // layout.block_size), parts, ()))
    return keys, values


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
    """

    key: tuple[object, ...]
    parts: tuple[Part, ...]
    resident: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    missing: tuple[tuple[Block, tuple[Place, ...]], ...]
    blocks: int


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


def _gather(layer: LayerStore, plan: GatherPlan) -> None:
    """Write a layer's KV into the plan's tensors.

    Raises:
        TransferError: a fetch failed. BudgetError: there is no room to stage even one block.
    """
    for destination, source in plan.resident:
        destination.copy_(source)
    layer.tiers.counters.block_hits += plan.blocks
    if plan.missing:
        _fetch(layer, plan)


def _plan(layer: LayerStore, count: int, parts: tuple[Part, ...], key: tuple[object, ...]) -> GatherPlan:
    resident: list[tuple[torch.Tensor, torch.Tensor]] = []
    missing: dict[Block, list[Place]] = {}
    near: set[Block] = set()
    size = layer.layout.block_size
    for row, table in enumerate(layer.rows):
        here = []
        for index, block in enumerate(table.blocks[:count]):
            if block.near is None:
                missing.setdefault(block, []).append((row, index))
            else:
                near.add(block)
                here.append((row, index, block.near))
        resident += _views(parts, size, here)
    frozen = tuple((block, tuple(places)) for block, places in missing.items())
    return GatherPlan(key, parts, tuple(resident), frozen, len(near))


def _fetch(layer: LayerStore, plan: GatherPlan) -> None:
    """Bring the missing blocks through staging, as many at a time as it holds; the first may be on their way."""
    staging_area = layer.tiers.staging
    places = dict(plan.missing)
    waiting = [block for block, _ in plan.missing]
    staging = staging_area.staged.pop(layer, None)
    while waiting:
        if staging is None:
            staging = staging_area.fetch(layer, waiting, ahead=False)
        assert staging is not None
        try:
            staging.transfer.wait()
            used = [
                (row, index, slot)
                for block, slot in zip(staging.blocks, staging.slots, strict=True)
                for row, index in places.pop(block, ())
            ]
            for destination, source in _views(plan.parts, layer.layout.block_size, sorted(used)):
                destination.copy_(source)
        finally:
            staging_area.finish(layer, staging)
        staging = None
        waiting = [block for block in waiting if block in places]


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
