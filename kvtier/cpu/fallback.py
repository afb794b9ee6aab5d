"""Decode attention on the host without the native library: torch's own kernel, block by block, merged.

Keys and values are read in place, never repeated for the query heads and never concatenated, which is what makes
decoding with torch alone slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.kernels import reference
from kvtier.kernels.params import AttentionParams

#: Keys `[count, heads, tokens, k_dim]` and values `[count, heads, tokens, v_dim]` of neighbouring blocks.
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def serves(queries: int, k_dim: int, v_dim: int, params: AttentionParams) -> bool:
    """Whether `attend` can: one query that sees everything, heads of one size. The rest is read as one tensor."""
    special = params.mask is not None or params.first_valid is not None or params.slopes is not None
    return (
        queries == 1 and k_dim == v_dim and not (special or params.softcap or params.window or params.sinks is not None)
    )


def attend(
    query: torch.Tensor, rows: Sequence[Sequence[KeysAndValues]], params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence.

    Args:
        query: `[batch, heads, 1, k_dim]`.
        rows: for each sequence, its blocks.
        params: its scale.

    Returns:
        out `[batch, heads, 1, v_dim]` fp32, zeros for a row without blocks; lse `[batch, heads, 1]`.
    """
    results = [_row(query[i : i + 1], runs, params.scale) for i, runs in enumerate(rows)]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _row(query: torch.Tensor, runs: Sequence[KeysAndValues], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, _, dim = query.shape
    outs, lses = [], []
    for keys, values in runs:
        kv_heads = keys.shape[1]
        # The query heads of one KV head are so many queries: its keys are read once for all of them.
        grouped = query.reshape(1, kv_heads, heads // kv_heads, dim).expand(keys.shape[0], -1, -1, -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys, values, 0.0, False, scale=scale
        )
        outs.append(out)
        lses.append(lse)
    if not outs:
        return query.new_zeros((1, heads, 1, dim), dtype=torch.float32), query.new_full(
            (1, heads, 1), -torch.inf, dtype=torch.float32
        )
    out, lse = reference.merge_stacked(torch.cat(outs), torch.cat(lses))
    return out.reshape(1, heads, 1, out.shape[-1]), lse.reshape(1, heads, 1)
