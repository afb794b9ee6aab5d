"""Attention over a layer's KV: where its blocks lie, or streamed, or else dense with torch's own kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kvtier.attention import split, streamed
from kvtier.errors import UnsupportedError
from kvtier.kernels.params import AttentionParams
from kvtier.storage.gather import dense_kv, own_kv
from kvtier.storage.store import LayerStore


def attend(
    layer: LayerStore, length: int, repeats: int, query: torch.Tensor, options: dict[str, Any], *, host: bool
) -> torch.Tensor:
    """`scaled_dot_product_attention` of `query` over the first `length` tokens of a layer.

    Args:
        layer: whose KV.
        length: tokens.
        repeats: each KV head stands for so many query heads already (`repeat_kv` was applied to the views).
        query: `[batch, heads, queries, k_dim]`.
        options: `attn_mask`, `dropout_p`, `is_causal`, `scale`, `enable_gqa` as the model gave them.
        host: whether host threads may serve.

    Returns:
        `[batch, heads, queries, v_dim]`; where host threads do not serve, bitwise what torch's kernel gives on dense
        keys and values.
    """
    if host:
        params = _params(layer, length, repeats, query, options)
        if params is not None and split.serves(layer, query, params):
            return split.attend(layer, length, query, params)
        if params is not None and streamed.serves(layer, length, query, params):
            return streamed.attend(layer, length, query, params)
    keys, values = _dense(layer, length, query, host)
    return F.scaled_dot_product_attention(query, repeat(keys, repeats), repeat(values, repeats), **options)


def under_autocast(layer: LayerStore, query: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """A query as its keys are kept, where autocast would narrow both, and the dtype of the answer."""
    wide, kind = layer.layout.dtype, query.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (wide, query.dtype):
        return query, query.dtype
    return query.to(wide), torch.get_autocast_dtype(kind)


def attend_with(
    layer: LayerStore, length: int, query: torch.Tensor, params: AttentionParams, *, host: bool
) -> torch.Tensor:
    """Attention with softcap, sinks, windows and biases, which torch's own kernel does not have.

    Args:
        layer: whose KV.
        length: tokens.
        query: `[batch, heads, queries, k_dim]`.
        params: scale, masks and biases.
        host: whether host threads may serve.

    Returns:
        `[batch, heads, queries, v_dim]` in the query's dtype.
    """
    if host and split.serves(layer, query, params):
        return split.attend(layer, length, query, params)
    if host and streamed.serves(layer, length, query, params):
        return streamed.attend(layer, length, query, params)
    keys, values = _dense(layer, length, query, host)
    heads = query.shape[1]
    bare = (params.causal, params.window, params.softcap, params.first_valid, params.sinks, params.slopes) == (
        False,
        0,
        0,
        *[None] * 3,
    )
    if bare and (params.mask is None or params.mask.dtype in (torch.bool, query.dtype)):
        repeats = heads // keys.shape[1]
        return F.scaled_dot_product_attention(
            query, repeat(keys, repeats), repeat(values, repeats), attn_mask=params.mask, scale=params.scale
        )
    return streamed.in_plain_torch(query, keys, values, params, 0, length)[0].to(query.dtype)


def _dense(layer: LayerStore, length: int, query: torch.Tensor, host: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and query.requires_grad and not layer.carries_graph:
        # The query's gradient is right as long as nobody writes into what its graph remembers.
        return own_kv(layer, length)
    # Where host threads serve, this is an exception (a short past, all on the device): no room is kept for the next;
    # but what takes more than a step is admitted for has to be counted from now on.
    counted = layer.workspace_bytes(length) <= streamed.workspace_bytes(layer, length, layer.batch)
    lasting = not (host and split.able(layer) and counted)
    return without_gradient(layer, *dense_kv(layer, length, lasting=lasting))


def _params(
    layer: LayerStore, length: int, repeats: int, query: torch.Tensor, options: dict[str, Any]
) -> AttentionParams | None:
    """What a call of `scaled_dot_product_attention` asks for; None where torch alone knows."""
    queries = query.shape[2]
    if query.dim() != 4 or query.shape[0] != layer.batch or options.get("dropout_p"):
        return None
    heads = layer.layout.k_heads * repeats
    if query.shape[1] != heads and heads != 1 and not options.get("enable_gqa"):
        return None
    causal = bool(options.get("is_causal"))
    if causal and queries != length:
        return None  # torch aligns such a mask to the first token, not to the last
    mask = options.get("attn_mask")
    if mask is not None:
        if mask.dim() > 4 or mask.shape[-1] != length:
            return None
        mask = mask[(None,) * (4 - mask.dim())]
    scale = options.get("scale")
    return AttentionParams(query.shape[3] ** -0.5 if scale is None else scale, causal=causal and queries > 1, mask=mask)


def repeat(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` -> `[batch, heads * repeats, tokens, dim]`, each head repeated in place."""
    if repeats == 1:
        return x
    batch, heads, tokens, dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, tokens, dim).reshape(batch, heads * repeats, tokens, dim)


def without_gradient(layer: LayerStore, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a backward pass that would need the graph of cached keys and values raise instead of being wrong."""
    if not (torch.is_grad_enabled() and layer.carries_graph):
        return keys, values
    keys, values = NoGradientThroughCache.apply(torch.zeros((), device=keys.device, requires_grad=True), keys, values)
    return keys, values


class NoGradientThroughCache(torch.autograd.Function):
    """Cached keys and values carry no graph. Forward passes are right; a backward pass would be wrong, so it raises."""

    @staticmethod
    def forward(ctx: Any, hook: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass keys and values through, tied to the graph of `hook`."""
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Always raises `UnsupportedError`."""
        raise UnsupportedError(
            "A backward pass reached the KV cache. TieredKVCache stores keys and values without their graph: train "
            "without a cache, or with DynamicCache."
        )
