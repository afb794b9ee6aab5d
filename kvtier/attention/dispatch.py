"""What a model asks for, and which way it goes: in place, streamed, or as one tensor with torch's own kernel."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from kvtier.attention import split, streaming
from kvtier.attention.dense import own_kv, workspace_kv
from kvtier.attention.reader import LayerReader
from kvtier.attention.tangents import has_tangent, level
from kvtier.errors import UnsupportedError
from kvtier.kernels.params import AttentionParams
from kvtier.tables.layer import LayerKV

_BARE = AttentionParams(0.0)


def attend(
    reader: LayerReader,
    length: int,
    query: torch.Tensor,
    params: AttentionParams | None,
    options: dict[str, Any] | None = None,
    repeats: int = 1,
    *,
    room: int = 0,
) -> torch.Tensor:
    """Attention of `query` over the first `length` tokens of a layer.

    Args:
        reader: of the layer.
        length: tokens.
        query: `[batch, heads, queries, k_dim]`.
        params: scale, masks and biases; None where only torch's kernel knows what `options` mean.
        options: of `scaled_dot_product_attention`, if that was called: what torch's own kernel is given.
        repeats: each KV head stands for so many query heads already (`repeat_kv` was applied to the views).
        room: bytes of workspace that the step was admitted with.

    Returns:
        `[batch, heads, queries, v_dim]` in the query's dtype; where host threads do not serve and `options` are given,
        bitwise what torch's kernel gives on dense keys and values. One row of queries, or of keys, stands for all.
    """
    layer = reader.layer
    if level._current_level >= 0 and has_tangent(query, *_given(params, options)):
        # Right, as its gradient below is; by torch alone, which says so where a kernel cannot.
        return _torch(*own_kv(reader, length), length, query, params, options, repeats)
    if reader.host_attention and params is not None and query.shape[0] == layer.batch:
        if split.serves(reader, query, params):
            return split.attend(reader, length, query, params)
        if streaming.serves(reader, length, query, params):
            return streaming.attend(reader, length, query, params, room=room)
    if torch.is_grad_enabled() and query.requires_grad and not layer.carries_graph:
        # The query's gradient is right as long as nobody writes into what its graph holds.
        return _torch(*own_kv(reader, length), length, query, params, options, repeats)
    if layer.workspace_bytes(length) > room:
        # The step was not admitted for it: as any operation on a view, it takes an activation.
        keys, values = own_kv(reader, length)
        reader.counters.count_dense("attention", keys.nbytes + values.nbytes)
        return _torch(*without_gradient(layer, keys, values), length, query, params, options, repeats)
    with workspace_kv(reader, length) as dense:
        return _torch(*without_gradient(layer, *dense), length, query, params, options, repeats)


def _given(params: AttentionParams | None, options: dict[str, Any] | None) -> tuple[torch.Tensor | None, ...]:
    """What else may be differentiated."""
    if params is None:
        return ((options or {}).get("attn_mask"),)
    return params.mask, params.sinks, params.slopes


def _torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    query: torch.Tensor,
    params: AttentionParams | None,
    options: dict[str, Any] | None,
    repeats: int,
) -> torch.Tensor:
    """The same on dense keys and values, by torch's kernel where that has what is asked for."""
    if options is not None:
        return F.scaled_dot_product_attention(query, repeat(keys, repeats), repeat(values, repeats), **options)
    assert params is not None
    extras = (params.causal, params.window, params.softcap, params.first_valid, params.sinks, params.slopes)
    bare = extras == (False, 0, 0, None, None, None)
    if bare and (params.mask is None or params.mask.dtype in (torch.bool, query.dtype)):
        group = query.shape[1] // keys.shape[1]
        return F.scaled_dot_product_attention(
            query, repeat(keys, group), repeat(values, group), attn_mask=params.mask, scale=params.scale
        )
    rows = max(query.shape[0], keys.shape[0])
    query, keys, values = (x if x.shape[0] == rows else x.expand(rows, -1, -1, -1) for x in (query, keys, values))
    return streaming.attend_part(query, keys, values, params, 0, length)[0].to(query.dtype)


def attend_dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attention over tensors: `[batch, heads, queries, k_dim]` over `[batch, kv_heads, tokens, k_dim]`, the queries
    being the last of the tokens."""
    if params.causal and query.shape[2] == keys.shape[2] and replace(params, causal=False, scale=0.0) == _BARE:
        group = query.shape[1] // keys.shape[1]
        return F.scaled_dot_product_attention(
            query, repeat(keys, group), repeat(values, group), is_causal=True, scale=params.scale
        )
    return _torch(keys, values, keys.shape[2], query, params, None, 1)


def under_autocast(layer: LayerKV, query: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """A query as its keys are kept, where autocast would narrow both, and the dtype of the answer."""
    wide, kind = layer.layout.dtype, query.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (wide, query.dtype):
        return query, query.dtype
    return query.to(wide), torch.get_autocast_dtype(kind)


def params_of(
    layer: LayerKV, length: int, repeats: int, query: torch.Tensor, options: dict[str, Any]
) -> AttentionParams | None:
    """What a call of `scaled_dot_product_attention` asks for; None where torch alone knows."""
    if options.get("dropout_p") or len(query.shape) != 4:
        return None
    _, heads, queries, k_dim = query.shape
    given = layer.layout.k_heads * repeats
    if heads != given and given != 1 and not options.get("enable_gqa"):
        return None
    causal = bool(options.get("is_causal"))
    if causal and queries != length:
        return None  # torch aligns such a mask to the first token, not to the last
    scale = options.get("scale")
    if scale is None:
        scale = k_dim**-0.5
    mask = options.get("attn_mask")
    if mask is None and type(scale) is float:
        return plain(scale, causal and queries > 1)
    if mask is not None:
        if mask.dim() > 4 or mask.shape[-1] != length or not is_mask(mask):
            return None
        mask = mask[(None,) * (4 - mask.dim())]
    return AttentionParams(scale, causal=causal and queries > 1, mask=mask)


def is_mask(mask: torch.Tensor) -> bool:
    """Whether it says what is seen, or what is added to the scores. Integers may be meant as either."""
    return mask.dtype is torch.bool or mask.is_floating_point()


@functools.lru_cache(maxsize=64)
def plain(scale: float, causal: bool) -> AttentionParams:
    """Nothing besides these: the same object for all layers and steps, which native calls recognise."""
    return AttentionParams(scale, causal=causal)


def room_for(
    layer: LayerKV, tokens: int, length: int, batch: int, *, host_attention: bool, dense: bool, limit: int
) -> int:
    """Bytes of workspace in which a layer is read by a step, as far as that is known before it.

    Args:
        layer: of the cache.
        tokens: new tokens per row.
        length: tokens per row after the step.
        batch: rows.
        host_attention: whether host threads may serve.
        dense: whether attention asks for tensors at all; else the model makes its own of each view.
        limit: bytes of the tier where attention works.
    """
    if not dense:
        return 0
    if not host_attention or not streaming.can_stream(layer):
        return layer.workspace_bytes(length, batch)
    if split.can_attend(layer, tokens):
        return 0
    return streaming.workspace_bytes(layer, length, batch, limit)


def repeat(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` -> `[batch, heads * repeats, tokens, dim]`, each head repeated in place."""
    if repeats == 1:
        return x
    batch, heads, tokens, dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, tokens, dim).reshape(batch, heads * repeats, tokens, dim)


def without_gradient(layer: LayerKV, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
