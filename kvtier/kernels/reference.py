"""Attention in plain torch, with the log-sum-exp: what kernels are tested against, and where they cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.kernels.params import AttentionParams


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    *,
    length: int | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of the tokens of each sequence, in fp32 whatever the dtype (fp64 stays fp64).

    Args:
        query: `[batch, heads, queries, k_dim]`, the last tokens of each sequence.
        keys: `[batch, kv_heads, tokens, k_dim]`; heads is a multiple of kv_heads.
        values: `[batch, kv_heads, tokens, v_dim]`.
        params: scale, masks and biases.
        length: tokens of the whole sequence; None: as many as there are keys.
        positions: `[tokens]` int64, where in the sequence the keys stand; None: 0, 1, 2, ...

    Returns:
        out `[batch, heads, queries, v_dim]` in the query's dtype, zeros where a query sees nothing; lse
        `[batch, heads, queries]`, natural log of the sum of exp, -inf where a query sees nothing.
    """
    # Autocast would round the scores, and with them the shares of parts that are merged.
    with torch.autocast(query.device.type, enabled=False):
        return _attend(query, keys, values, params, length, positions)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    length: int | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, k_dim = query.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    length = tokens if length is None else length
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    # The query heads of a KV head stand in one matrix: keys and values are not repeated.
    grouped = query.to(wide).reshape(batch, kv_heads, heads // kv_heads * queries, k_dim)
    scores = (grouped @ keys.to(wide).transpose(2, 3)).view(batch, heads, queries, tokens) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if positions is None:
        positions = torch.arange(tokens, device=query.device)
    at = torch.arange(length - queries, length, device=query.device)[:, None]
    if params.slopes is not None:
        scores = scores + params.slopes.to(wide)[:, None, None] * (positions - at)
    if params.mask is not None:
        mask = params.mask[..., positions]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    seen = torch.ones((queries, tokens), dtype=torch.bool, device=query.device)
    if params.causal:
        seen = seen & (positions <= at)
    if params.window:
        seen = seen & (positions > at - params.window)
    if params.first_valid is not None:
        seen = seen & (positions >= params.first_valid.to(query.device)[:, None, None, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    highest = scores.amax(-1, keepdim=True) if tokens else scores.new_full((batch, heads, queries, 1), -torch.inf)
    if params.sinks is not None:
        highest = torch.maximum(highest, params.sinks.to(wide)[:, None, None])
    nothing = highest == -torch.inf
    highest = highest.masked_fill(nothing, 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if params.sinks is not None:
        total = total + torch.exp(params.sinks.to(wide)[:, None, None] - highest)
    lse = (highest + total.log()).squeeze(-1)
    weights = (weights / total.masked_fill(total == 0, 1.0)).view(*grouped.shape[:3], tokens)
    out = (weights @ values.to(wide)).view(batch, heads, queries, values.shape[3])
    return out.to(query.dtype), lse


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint parts of the tokens (log-sum-exp; FlashAttention, flash-decoding).

    Args:
        parts: (out `[..., queries, v_dim]`, lse `[..., queries]`) of each part, out in fp32 for full precision.

    Returns:
        out and lse of all parts together; zeros and -inf where no part saw anything.
    """
    if len(parts) == 1:
        return parts[0]
    wide = torch.promote_types(parts[0][1].dtype, torch.float32)
    return merge_stacked(torch.stack([out.to(wide) for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def merge_stacked(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` of parts stacked in one tensor each: `[parts, ..., queries, v_dim]` and `[parts, ..., queries]`."""
    lses = lses.to(torch.promote_types(lses.dtype, torch.float32))
    lse = torch.logsumexp(lses, 0)
    shares = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    # Scores at the lowest number swallow the logarithm of their count: shares are made to add up.
    shares = shares / shares.sum(0).clamp(min=torch.finfo(shares.dtype).tiny)
    return (outs.to(shares.dtype) * shares).sum(0), lse
