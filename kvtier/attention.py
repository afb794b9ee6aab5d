"""Attention over a layer's KV. For now one way: dense, through the workspace, with torch's own kernel, bit for bit.

The seam for others: whoever can attend blocks where they lie (Triton kernels on the device, CPU threads on the host,
merged by log-sum-exp) is asked before `dense`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvtier.errors import UnsupportedError
from kvtier.storage.block import Block
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore

Place = tuple[int, int]  # (row, block index)


def dense_kv(layer: LayerStore, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of a layer in the workspace: valid until the next call on the same device.

    Returns:
        keys `[batch, k_heads, length, k_dim]` and values `[batch, v_heads, length, v_dim]`, slices of whole blocks.

    Raises:
        BudgetError: the budget cannot hold the workspace, or one staged block beside it.
        TransferError: a fetch failed.
    """
    layer.dense = True
    layout = layer.layout
    room = -(-length // layout.block_size) * layout.block_size
    data = layer.tiers.workspace.take(layer.workspace_bytes(length))
    flat = data.view(layout.dtype)
    k_shape = (layer.batch, layout.k_heads, room, layout.k_dim)
    v_shape = (layer.batch, layout.v_heads, room, layout.v_dim)
    k_numel = layer.batch * layout.k_heads * room * layout.k_dim
    v_numel = layer.batch * layout.v_heads * room * layout.v_dim
    keys, values = flat[:k_numel].view(k_shape), flat[k_numel : k_numel + v_numel].view(v_shape)
    gather(layer, length, keys, values, remember=True)
    return keys[:, :, :length], values[:, :, :length]


def own_kv(layer: LayerStore, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of a layer in tensors of the caller's own, contiguous, outside the budgets."""
    layout = layer.layout
    options: dict[str, Any] = {"dtype": layout.dtype, "device": layer.tiers.device}
    keys = torch.empty((layer.batch, layout.k_heads, length, layout.k_dim), **options)
    values = torch.empty((layer.batch, layout.v_heads, length, layout.v_dim), **options)
    gather(layer, length, keys, values, remember=False)
    return keys, values


def attend(layer: LayerStore, length: int, repeats: int, query: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """`scaled_dot_product_attention` of `query` over the first `length` tokens of a layer.

    Args:
        layer: whose KV.
        length: tokens.
        repeats: each KV head stands for so many query heads already (`repeat_kv` was applied to the views).
        query: `[batch, heads, queries, k_dim]`.
        options: `attn_mask`, `dropout_p`, `is_causal`, `scale`, `enable_gqa` as the model gave them.

    Returns:
        `[batch, heads, queries, v_dim]`, bitwise what torch's kernel gives on dense keys and values.
    """
    keys, values = dense_kv(layer, length)
    if torch.is_grad_enabled() and query.requires_grad:
        keys, values = NoGradientThroughCache.apply(query, keys, values)
    return F.scaled_dot_product_attention(query, repeat(keys, repeats), repeat(values, repeats), **options)


def repeat(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` -> `[batch, heads * repeats, tokens, dim]`, each head repeated in place."""
    if repeats == 1:
        return x
    batch, heads, tokens, dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, tokens, dim).reshape(batch, heads * repeats, tokens, dim)


class NoGradientThroughCache(torch.autograd.Function):
    """Cached keys and values carry no graph. Forward passes are right; a backward pass would be wrong, so it raises."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass keys and values through, tied to the query's graph."""
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Always raises `UnsupportedError`."""
        raise UnsupportedError(
            "A backward pass reached the KV cache. TieredKVCache stores keys and values without their graph: train "
            "without "
            "a cache, or with DynamicCache."
        )


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the blocks of one layer go in one pair of destination tensors. Valid while `key` is.

    Attributes:
        key: what it was made for.
        resident: (destination, source) views of everything in the near tier.
        missing: blocks to fetch, in table order, with the places they go to.
        blocks: distinct near blocks.
    """

    key: tuple[object, ...]
    resident: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    missing: tuple[tuple[Block, tuple[Place, ...]], ...]
    blocks: int


def gather(layer: LayerStore, length: int, keys: torch.Tensor, values: torch.Tensor, *, remember: bool) -> None:
    """Write the first `length` tokens of every row into dense tensors.

    Args:
        layer: whose KV.
        length: tokens, at most `layer.length`.
        keys: `[rows, k_heads, room, k_dim]`; what lies behind `length` is undefined afterwards.
        values: `[rows, v_heads, room, v_dim]`.
        remember: keep the plan for the next call with the same tensors.

    Raises:
        TransferError: a fetch failed. BudgetError: there is no room to stage even one block.
    """
    tiers = layer.tiers
    count = -(-length // layer.layout.block_size)
    key = (layer.version, tiers.workspace.version, count, keys.shape, keys.data_ptr())
    plan = layer.plan
    if not remember or not isinstance(plan, GatherPlan) or plan.key != key:
        plan = _plan(layer, count, keys, values, key)
        if remember:
            layer.plan = plan
    for destination, source in plan.resident:
        destination.copy_(source)
    tiers.counters.block_hits += plan.blocks
    if plan.missing:
        _fetch(layer, plan, keys, values)


def _plan(
    layer: LayerStore, count: int, keys: torch.Tensor, values: torch.Tensor, key: tuple[object, ...]
) -> GatherPlan:
    resident: list[tuple[torch.Tensor, torch.Tensor]] = []
    missing: dict[Block, list[Place]] = {}
    near: set[Block] = set()
    for row, table in enumerate(layer.rows):
        here = []
        for index, block in enumerate(table.blocks[:count]):
            if block.near is None:
                missing.setdefault(block, []).append((row, index))
            else:
                near.add(block)
                here.append((row, index, block.near))
        resident += _views(layer.pool, here, keys, values)
    frozen = tuple((block, tuple(places)) for block, places in missing.items())
    return GatherPlan(key, tuple(resident), frozen, len(near))


def _fetch(layer: LayerStore, plan: GatherPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Bring the missing blocks through staging, as many at a time as it holds; the first may be on their way."""
    tiers = layer.tiers
    places = dict(plan.missing)
    waiting = [block for block, _ in plan.missing]
    prefetched = tiers.staging.staged.pop(layer, None)
    while waiting:
        staging = prefetched if prefetched is not None else tiers.staging.fetch(layer, waiting, ahead=False)
        prefetched = None
        assert staging is not None
        try:
            staging.transfer.wait()
            used = [
                (row, index, slot)
                for block, slot in zip(staging.blocks, staging.slots, strict=True)
                for row, index in places.pop(block, ())
            ]
            for destination, source in _views(layer.pool, sorted(used), keys, values):
                destination.copy_(source)
        finally:
            tiers.staging.finish(layer, staging)
        waiting = [block for block in waiting if block in places]


def _views(
    pool: BlockPool, blocks: Iterable[tuple[int, int, int]], keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Destination and source views for `(row, block index, slot)`, neighbours joined."""
    size, room = pool.layout.block_size, keys.shape[2]
    for row, index, slot, count in _joined(blocks):
        start = index * size
        whole = min(count, (room - start) // size)
        for out, source in ((keys, pool.keys), (values, pool.values)):
            if whole:
                span = out[row, :, start : start + whole * size]
                yield span.unflatten(1, (whole, size)).transpose(0, 1), source(slot, whole)
            if whole < count:
                # The destination ends within the last block.
                rest = start + whole * size
                yield out[row, :, rest:room], source(slot + whole, 1)[0, :, : room - rest]


def _joined(blocks: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
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
