"""Attention over a layer's KV. For now one way: dense, through the workspace, with torch's own kernel, bit for bit.

The seam for others: whoever can attend blocks where they lie (Triton kernels on the device, CPU threads on the host,
merged by log-sum-exp) is asked before `dense`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kvtier.storage.gather import gather
from kvtier.storage.store import LayerStore


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
    data = layer.tiers.workspace(layer.workspace_bytes(length))
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
        from kvtier.errors import UnsupportedError

        raise UnsupportedError(
            "A backward pass reached the KV cache. TieredKVCache stores keys and values without their graph: train without "
            "a cache, or with DynamicCache."
        )
