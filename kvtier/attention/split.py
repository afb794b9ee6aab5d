"""Split attention: each block is attended where it lies, and the parts are merged by log-sum-exp (Neo, section 3).

What lies in host memory is read there by CPU threads, through block tables; what lies on the device is read by the
device, at the same time. On a CPU model without a device tier there is one part, and it is the whole.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any

import torch

from kvtier.attention import plans
from kvtier.attention.plans import Plan
from kvtier.cpu import fallback, native
from kvtier.kernels import launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.storage.block import BlockLayout
from kvtier.storage.gather import Slots
from kvtier.storage.pool import BlockPool
from kvtier.storage.staging import Handover, room_of
from kvtier.storage.store import LayerStore
from kvtier.storage.tiers import Tiers
from kvtier.storage.transfer import TensorCopy
from kvtier.types import Direction

#: Queries per sequence up to which host threads serve. With more, arithmetic counts and not memory: see `streamed`.
MOST_QUERIES = 16


#: Caches whose calls may have threads of the library's own at work or asleep.
_employers: weakref.WeakSet[Tiers] = weakref.WeakSet()


def dismiss(tiers: Tiers) -> None:
    """Told that `tiers` is given up: with the last of them, the library's threads end."""
    if tiers in _employers:
        _employers.discard(tiers)
        if not _employers:
            native.library().kvtier_shutdown()


def able(layer: LayerStore) -> bool:
    """Whether host threads serve this layer's decoding, whatever is asked, so that it needs no workspace for it."""
    layout = layer.layout
    graph = torch.is_grad_enabled() and layer.carries_graph
    return not graph and layout.dtype in native.DTYPES and layout.k_heads == layout.v_heads and native.available()


def serves(layer: LayerStore, query: torch.Tensor, params: AttentionParams) -> bool:
    """Whether `attend` can take this call. What it cannot take is streamed, or read as one tensor."""
    layout = layer.layout
    heads, queries = query.shape[1], query.shape[2]
    if (
        queries > MOST_QUERIES
        or query.dtype is not layout.dtype
        or layout.dtype not in native.DTYPES
        or layout.k_heads != layout.v_heads
        or heads % layout.k_heads
        or (torch.is_grad_enabled() and (query.requires_grad or layer.carries_graph))
    ):
        return False
    mask = params.mask
    if mask is not None and (mask.dtype not in native.MASKS or mask.requires_grad):
        return False
    tiers = layer.tiers
    if tiers.device.type != "cpu" and not layer.missing_count():
        if launch.available(tiers.device):
            return True
        # Without Triton torch's own kernel is the best there is, if one tensor of the layer fits as well.
        if layer.workspace_bytes(layer.length) <= tiers.near.budget.free + tiers.workspace.nbytes:
            return False
    return native.available() or fallback.serves(queries, layout.k_dim, layout.v_dim, params)


def attend(layer: LayerStore, length: int, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Attention of `query` over the first `length` tokens of a layer, where they lie.

    Args:
        layer: whose KV.
        length: tokens.
        query: `[batch, heads, queries, k_dim]`, on the layer's device.
        params: scale, masks and biases, of which `serves` approved.

    Returns:
        `[batch, heads, queries, v_dim]` in the query's dtype.
    """
    plan = plans.of(layer, length)
    workspace = layer.tiers.workspace
    if workspace.nbytes and not any(x.dense for x in layer.tiers.layers):
        workspace.release()  # left over from a long prefill
    counters = layer.tiers.counters
    if layer.tiers.far is None:
        counters.host_attended += 1
        counters.host_blocks += plan.distinct
        if plan.blocks is not None:
            return _native(layer, length, query, params, plan.blocks)
        return fallback.attend(query, _runs(layer, layer.pool, plan.slots(layer)[0], length), params)[0].to(query.dtype)
    if not len(plan.far):
        counters.block_hits += len(layer.resident)
        return _on_device(layer, length, query, params, plan, out_dtype=query.dtype)[0]
    counters.host_attended += 1
    counters.host_blocks += plan.distinct
    counters.block_hits += len(layer.resident)
    return _both(layer, length, query, params, plan)


def _both(layer: LayerStore, length: int, query: torch.Tensor, params: AttentionParams, plan: Plan) -> torch.Tensor:
    """Device and host at once: the query goes down, both attend, the host's part comes up, the two are merged."""
    engine = layer.tiers.engine
    batch, heads, queries, k_dim = query.shape
    shape = (batch, heads, queries, k_dim, layer.layout.v_dim)
    # Masks, sinks and biases come down with the query: a copy of their own would wait for all the device has to do.
    here = {name: x.detach().to(query.device).contiguous() for name, x in _tensors(params).items()}
    hand = layer.tiers.handover.take(shape, layer.layout.dtype, room_of(here.values()))
    others: dict[str, Any] = hand.room_for(here)
    copies = [TensorCopy(query, hand.query), *(TensorCopy(here[name], x) for name, x in others.items())]
    down = hand.last = engine.submit(copies, Direction.QUERY)
    # Sinks belong to the whole, and are counted in one part only.
    own = replace(params, **(here | {"sinks": None}))
    part = None
    if layer.tiers.device.type != "cpu":
        part = _on_device(layer, length, query, own, plan)  # launched before the CPU waits for the query
    # Also the end of the last call's use of these tensors; see `Handover`.
    down.synchronize()
    engine.poll()  # so what the last result's copy held on to is let go of now, not at the next new block
    if plan.blocks is not None:
        _set_length(plan.blocks, length)
        _employers.add(layer.tiers)
        call = _call(layer, hand, plan.blocks, replace(params, **others) if others else params)
        # This thread goes on to launch the device's part, and helps when it waits.
        future = call.submit(max(torch.get_num_threads() - 1, 1))
        try:
            if part is None:
                part = _on_device(layer, length, query, own, plan)
        finally:
            # Whatever happens, nobody gives memory back while threads still read it.
            future.wait()
    else:
        pool = layer.tiers.far_pools[layer.layout]
        result = fallback.attend(
            hand.query, _runs(layer, pool, plan.slots(layer)[1], length), replace(params, **others)
        )
        hand.out.copy_(result[0])
        hand.lse.copy_(result[1])
        part = part or _on_device(layer, length, query, own, plan)
    up = [torch.empty_like(x, device=query.device) for x in (hand.out, hand.lse)]
    back = hand.last = engine.submit([TensorCopy(hand.out, up[0]), TensorCopy(hand.lse, up[1])], Direction.RESULT)
    back.wait()
    return paged.merge([part, (up[0], up[1])], dtype=query.dtype)[0]


def _call(layer: LayerStore, hand: Handover, blocks: native.BlockList, params: AttentionParams) -> native.Call:
    """The call over a layer's blocks, made once for as long as nothing but the numbers changes."""
    key = (blocks, params.scale, params.causal, params.window)
    found = hand.calls.get(layer.index)
    if params.plain and found is not None and found[0] == key:
        return found[1]
    call = native.Call(_shape(layer.layout), hand.query, blocks, params, hand.out, hand.lse)
    if params.plain:
        hand.calls[layer.index] = (key, call)
    return call


def _on_device(
    layer: LayerStore,
    length: int,
    query: torch.Tensor,
    params: AttentionParams,
    plan: Plan,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's part: (out, lse)."""
    batch, heads, queries, _ = query.shape
    out = torch.empty((batch, heads, queries, layer.layout.v_dim), dtype=out_dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    if plan.device is not None:
        return _native(layer, length, query, params, plan.device, out, lse), lse
    return paged.attend(
        query, plan.table(layer), layer.layout, length, _params_on(params, query.device), out=out, lse=lse
    )


def _tensors(params: AttentionParams) -> dict[str, Any]:
    found = {name: getattr(params, name) for name in ("mask", "first_valid", "sinks", "slopes")}
    return {name: x for name, x in found.items() if x is not None}


def _params_on(params: AttentionParams, device: torch.device) -> AttentionParams:
    moved = {name: x.to(device) for name, x in _tensors(params).items() if x.device != device}
    return replace(params, **moved) if moved else params


@functools.lru_cache(maxsize=64)
def _shape(layout: BlockLayout) -> native.Shape:
    return native.Shape(layout.dtype, layout.k_heads, layout.k_dim, layout.v_dim, layout.block_size)


def _set_length(blocks: native.BlockList, length: int) -> None:
    if blocks.length != length:
        blocks.lengths.fill_(length)
        blocks.length = length


def _native(
    layer: LayerStore,
    length: int,
    query: torch.Tensor,
    params: AttentionParams,
    blocks: native.BlockList,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    _set_length(blocks, length)
    _employers.add(layer.tiers)  # without an OpenMP team to borrow, this too is work for the library's threads
    return native.attend(_shape(layer.layout), query, blocks, params, threads=torch.get_num_threads(), out=out, lse=lse)


def _runs(layer: LayerStore, pool: BlockPool, slots: Slots, length: int) -> list[list[fallback.Run]]:
    """For each row, neighbouring whole blocks joined; the last block by itself if it is not full."""
    size = layer.layout.block_size
    rows = []
    for row in slots:
        runs: list[fallback.Run] = []
        for index, slot in row:
            n = min(size, length - index * size)
            last = runs[-1] if runs else None
            if last is not None and n == size and last.tokens == size and slot == last.slot + last.count:
                last.count += 1
            else:
                runs.append(fallback.Run(slot, n))
        for run in runs:
            run.keys = pool.keys(run.slot, run.count)[:, :, : run.tokens]
            run.values = pool.values(run.slot, run.count)[:, :, : run.tokens]
        rows.append(runs)
    return rows
