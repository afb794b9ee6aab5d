"""Attention of many queries over KV that need not fit the device: the layer passes through a bounded workspace, some
blocks at a time, and the parts are merged by log-sum-exp (FlashAttention's recurrence, over tiers).

A second prompt on a long conversation, or a prompt given in chunks, reads all that came before. Laid out as one tensor
that would take a layer's KV once more.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch

from kvtier.attention.dense import addresses, stream_kv
from kvtier.attention.reader import LayerReader
from kvtier.kernels import launch, paged, reference
from kvtier.kernels.params import AttentionParams
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning import sizing
from kvtier.tables.layer import LayerKV

#: Scores that attention in plain torch makes at once.
_SCORE_BYTES = 2**28


def can_stream(layer: LayerKV) -> bool:
    """Whether this layer can pass through the workspace in parts, whatever is asked."""
    return layer.layout.k_heads == layer.layout.v_heads and not (torch.is_grad_enabled() and layer.carries_graph)


def serves(reader: LayerReader, length: int, query: torch.Tensor, params: AttentionParams) -> bool:
    """Whether `attend` can take this call, and has to: a layer that is small against the budget is read as a whole."""
    layer = reader.layer
    return (
        can_stream(layer)
        and -(-length // layer.layout.block_size) > blocks_at_once(layer.device, layer.layout, layer.batch)
        and query.dtype is layer.layout.dtype
        and query.shape[1] % layer.layout.k_heads == 0
        and not (torch.is_grad_enabled() and (query.requires_grad or _requires_grad(params)))
    )


def workspace_bytes(layer: LayerKV, tokens: int, batch: int, limit: int) -> int:
    """Bytes through which `tokens` of each of `batch` rows pass, where the tier has `limit` bytes."""
    layout, most = layer.layout, blocks_at_once(layer.device, layer.layout, batch, limit)
    in_place = launch.available(layer.device.device) and layout.dtype in paged.DTYPES
    if in_place and -(-tokens // layout.block_size) > most:
        return 0  # kernels read the blocks in place
    return layer.workspace_bytes(min(tokens, most * layout.block_size), batch)


def blocks_at_once(device: ComputeDevice, layout: BlockLayout, batch: int, limit: int | None = None) -> int:
    """Blocks of each row that pass through the workspace at a time; `limit`: if the tier has so many bytes."""
    limit = device.home.budget.limit if limit is None else limit
    return sizing.stream_blocks(limit, layout.nbytes, batch, device=device.slabs is not None)


def _requires_grad(params: AttentionParams) -> bool:
    return any(x is not None and x.requires_grad for x in (params.mask, params.sinks, params.slopes))


def attend(
    reader: LayerReader, length: int, query: torch.Tensor, params: AttentionParams, *, room: int = 0
) -> torch.Tensor:
    """Attention of `query` over the first `length` tokens of a layer, some blocks at a time.

    Args:
        reader: of the layer.
        length: tokens.
        query: `[batch, heads, queries, k_dim]`, on the layer's device.
        params: scale, masks and biases.
        room: bytes of workspace that the step was admitted with.

    Returns:
        `[batch, heads, queries, v_dim]` in the query's dtype.

    Raises:
        BudgetError: not even one block of each row fits. TransferError: a fetch failed.
    """
    layer = reader.layer
    most = blocks_at_once(layer.device, layer.layout, layer.batch)
    if launch.available(query.device) and query.dtype in paged.DTYPES:
        return _in_place(reader, length, query, params, most)
    batch, heads, queries, _ = query.shape
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    out = torch.zeros((batch, heads, queries, layer.layout.v_dim), dtype=wide, device=query.device)
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=wide, device=query.device)
    with torch.no_grad(), closing(stream_kv(reader, length, most, room)) as parts:
        for start, keys, values in parts:
            # Causal queries before this part see nothing of it.
            first = max(start - (length - queries), 0) if params.causal else 0
            if first < queries:
                some = _of_queries(params, first)
                part = attend_part(query[:, :, first:], keys, values, some, start, length)
                merged = reference.merge([(out[:, :, first:], lse[:, :, first:]), part])
                out[:, :, first:], lse[:, :, first:] = merged
            # Sinks belong to the whole, and are counted with the first part, which every query sees.
            params = _without_sinks(params)
    return out.to(query.dtype)


def _in_place(
    reader: LayerReader, length: int, query: torch.Tensor, params: AttentionParams, most: int
) -> torch.Tensor:
    """The same by the device's kernels, which need no tensor of keys: only what is on the host is fetched."""
    layer = reader.layer
    result: tuple[torch.Tensor, torch.Tensor] | None = None
    count = -(-length // layer.layout.block_size)
    with torch.no_grad(), closing(reader.portions(0, count, most)) as portions:
        for places in portions:
            table = addresses(layer.blocks.pools.home, places, layer.batch).table(query.device)
            part = paged.attend(query, table, layer.layout, length, params)
            result = part if result is None else paged.merge([result, part])
            params = _without_sinks(params)
    assert result is not None
    return result[0].to(query.dtype)


def _without_sinks(params: AttentionParams) -> AttentionParams:
    return params if params.sinks is None else replace(params, sinks=None)


def _of_queries(params: AttentionParams, first: int) -> AttentionParams:
    mask = params.mask
    if not first or mask is None or mask.shape[2] == 1:
        return params
    return replace(params, mask=mask[:, :, first:])


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of queries, the last of `length` tokens, over the tokens from `start` on."""
    special = params.softcap or params.sinks is not None or params.slopes is not None
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3] and not special:
        return _flash_on_cpu(query, keys, values, params, start, length)
    return in_plain_torch(query, keys, values, params, start, length)


def in_plain_torch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attend`, a few queries at a time: all scores of a long prompt would take more memory than the KV.

    Args:
        query: `[batch, heads, queries, k_dim]`, the last of `length` tokens.
        keys, values: `[batch, kv_heads, tokens, k_dim]` and `[..., v_dim]` of the tokens from `start` on.
        params: scale, masks and biases.

    Returns:
        out `[batch, heads, queries, v_dim]` in fp32 (fp64 for fp64) and lse `[batch, heads, queries]`.
    """
    batch, heads, queries, _ = query.shape
    positions = torch.arange(start, start + keys.shape[2], device=query.device)
    rows = max(1, _SCORE_BYTES // (batch * heads * keys.shape[2] * 4))
    outs, lses = [], []
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        mask = params.mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, first:last]
        out, lse = reference.attend(
            query[:, :, first:last].to(torch.promote_types(query.dtype, torch.float32)),
            keys,
            values,
            replace(params, mask=mask),
            length=length - queries + last,
            positions=positions,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _flash_on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, start: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through torch's own kernel, row by row, so that no key is repeated for the query heads that share it."""
    batch, heads, queries, dim = query.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    bias = _bias(query, params, start, tokens, length)
    out = query.new_empty((batch, heads, queries, dim))
    lse = query.new_empty((batch, heads, queries), dtype=torch.promote_types(query.dtype, torch.float32))
    for row in range(batch):
        mask = None
        if bias is not None:
            mask = bias[row if bias.shape[0] > 1 else 0]
            mask = mask.view(kv_heads, group, *mask.shape[1:]) if mask.shape[0] > 1 else mask[None]
        some, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[row].view(kv_heads, group, queries, dim),
            keys[row, :, None].expand(kv_heads, group, tokens, dim),
            values[row, :, None].expand(kv_heads, group, tokens, dim),
            0.0,
            False,
            attn_mask=mask,
            scale=params.scale,
        )
        out[row] = some.reshape(heads, queries, dim)
        lse[row] = weight.reshape(heads, queries)
    if bias is not None:
        # That kernel answers 0 for a query that sees nothing.
        lse.masked_fill_(bias.amax(-1) == -torch.inf, -torch.inf)
    return out, lse


def _bias(query: torch.Tensor, params: AttentionParams, start: int, tokens: int, length: int) -> torch.Tensor | None:
    """What is added to the scores of the tokens from `start` on: `[batch or 1, heads or 1, queries, tokens]`, or None
    if nothing is."""
    queries = query.shape[2]
    mask = params.mask
    bias = None
    if mask is not None:
        bias = mask[..., start : start + tokens]
        bias = bias.expand(-1, -1, queries, -1)
        if bias.dtype == torch.bool:
            bias = query.new_zeros(()).masked_fill(~bias, -torch.inf)
        elif bias.dtype is not query.dtype:
            bias = bias.to(query.dtype)
    at = torch.arange(length - queries, length, device=query.device)[:, None]
    positions = torch.arange(start, start + tokens, device=query.device)
    hidden = query.new_zeros((1, 1, queries, tokens), dtype=torch.bool)
    if params.causal and start + tokens > length - queries + 1:
        hidden = hidden | (positions > at)
    if params.window and start <= length - 1 - params.window:
        hidden = hidden | (positions <= at - params.window)
    if params.first_valid is not None and start < int(params.first_valid.max()):
        hidden = hidden | (positions < params.first_valid[:, None, None, None])
    if not bool(hidden.any()):
        return bias
    bias = query.new_zeros(()) if bias is None else bias
    return bias.masked_fill(hidden, -torch.inf)
