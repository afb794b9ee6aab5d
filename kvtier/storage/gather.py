"""The KV of one layer as one dense tensor: resident blocks in place, missing ones by way of staging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from kvtier.storage.block import Block
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore

Place = tuple[int, int]  # (row, block index)


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the blocks of one layer go in one pair of destination tensors. Valid while `key` is.

    Attributes:
        key: what it was made for.
        resident: (destination, source) views of everything in the near tier.
        missing: blocks to fetch, in table order, with the places they go to.
        blocks: distinct near blocks.
    """

    key: tuple
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
    key = (layer.version, tiers.workspace_version, count, keys.shape, keys.data_ptr())
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


def _plan(layer: LayerStore, count: int, keys: torch.Tensor, values: torch.Tensor, key: tuple) -> GatherPlan:
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
    prefetched = tiers.staged.pop(layer, None)
    while waiting:
        staging = prefetched if prefetched is not None else tiers.stage(layer, waiting, ahead=False)
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
            tiers.unstage(layer, staging)
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


