"""The attention implementation named "kvtier": views are attended in place, tensors as Transformers does."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.configuration_utils import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from kvtier.attention.dispatch import is_mask, plain, repeat
from kvtier.errors import UnsupportedError
from kvtier.hf.attention import packed
from kvtier.hf.attention.view import KEYS, VALUES, KVView, Snapshot
from kvtier.kernels.params import AttentionParams

NAME = "kvtier"

# Scores of so many bytes at a time, where they are computed at all.
_CHUNK_BYTES = 256 << 20

# What models hand to attention implementations of their own, and apply themselves only under "eager" and "sdpa": to
# ignore it would be silently wrong.
_FOREIGN = ("indices", "block_indices", "sinks")
#: All that is read of what models pass besides.
_READ = frozenset((*_FOREIGN, "output_attentions", "cache"))


def register_attention() -> None:
    """Make the name "kvtier" known to Transformers, for `from_pretrained(..., attn_implementation="kvtier")`.

    Adds one entry to Transformers' `AttentionInterface` and one to its `AttentionMaskInterface`; models that do not ask
    for the name are not affected. `enable` does it by itself. Harmless when repeated. Transformers has no way to take a
    name back, so it stays for the rest of the process.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers' `AttentionInterface` asks for it.

    Views of a `TieredKVCache` are attended in place. Ordinary tensors (a first prefill, resident layers,
    other caches) take Transformers' own sdpa function; where that cannot say what is asked (softcap, sinks, fewer
    causal queries than keys), the same in chunks of queries.

    Args:
        module: the attention layer; `is_causal` and `training` are read.
        query: `[batch, heads, queries, k_dim]`, the last tokens of each sequence.
        key: `[batch, kv_heads, tokens, k_dim]`; heads is a multiple of kv_heads.
        value: `[batch, kv_heads, tokens, v_dim]`.
        attention_mask: bool (True: seen) or additive, `[batch or 1, heads or 1, queries or 1, tokens or more]`; it says
            all there is to say about causality and windows. With a sliding window, of no more than tokens. None: plain
            causal for a causal layer with several queries, with their last query at the last token; everything else is
            seen.
        scaling: of the scores; None: 1 / sqrt(k_dim).
        dropout: probability, in training only.
        is_causal: over what `module.is_causal` says.
        softcap: scores become cap * tanh(score / cap) (Gemma 2).
        s_aux: `[heads]`, attention sinks: logits that only add to the sum (gpt-oss).
        sliding_window: a query sees so many tokens, itself included. Only read where there is no mask.
        position_bias: `[batch or 1, heads, queries, tokens]`, added to the scaled scores (T5).
        kwargs: what else models pass; nothing in it changes attention, or it is refused.

    Returns:
        `[batch, queries, heads, v_dim]`, contiguous, in the query's dtype, and None for the weights. A query that sees
        nothing gets finite numbers.

    Raises:
        UnsupportedError: attention weights are asked for, or something that only other implementations know; a mask
            of integers, or of more tokens than a layer with a sliding window has.
        StaleViewError, TransferError, BudgetError: from the cache.
    """
    if (
        attention_mask is None
        and softcap is None
        and s_aux is None
        and position_bias is None
        and not dropout
        and _READ.isdisjoint(kwargs)
    ):
        out = _again(query, key, value, scaling, sliding_window)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    _refuse(module, kwargs)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, packed.PackedMask):
        params = AttentionParams(
            scale=scale,
            softcap=softcap or 0.0,
            window=attention_mask.window,
            causal=True,
            mask=position_bias,
            sinks=None if s_aux is None else s_aux.detach().flatten().float(),
        )
        out = packed.attend_packed(module, query, key, value, attention_mask, params)
        return out.transpose(1, 2).contiguous(), None
    queries, tokens = query.shape[2], key.shape[2]
    if attention_mask is not None:
        _check_mask(attention_mask, tokens, sliding_window)
    causal = attention_mask is None and _is_causal(module, is_causal)
    params = AttentionParams(
        scale=scale,
        softcap=softcap or 0.0,
        window=sliding_window if causal and sliding_window is not None and 0 < sliding_window < tokens else 0,
        causal=causal and queries > 1,
        mask=_mask(attention_mask, position_bias, tokens),
        sinks=None if s_aux is None else s_aux.flatten(),
    )
    dropout = dropout if getattr(module, "training", True) else 0.0
    out = None if dropout else _in_place(query, key, value, params, learned=(query, s_aux, position_bias))
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    key, value = (x.dense("attention") if isinstance(x, KVView) else x for x in (key, value))
    if params.softcap or params.sinks is not None or params.window or (params.causal and queries != tokens):
        return _in_chunks(query, key, value, params, dropout).transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(
        _grouped(module, query.shape[1] // key.shape[1]),
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[..., :tokens],
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
    )
    return out, None


def _check_mask(mask: torch.Tensor, tokens: int, window: int | None) -> None:
    if not is_mask(mask):
        raise UnsupportedError(
            f"attention_mask is of {mask.dtype}. A mask of four axes is bool (True: seen) or floating (added to the "
            "scores): give `attention_mask.bool()` if 1 stands for what is seen."
        )
    if window is not None and mask.shape[-1] > tokens:
        raise UnsupportedError(
            f"attention_mask is of {mask.shape[-1]} tokens, and a layer with a sliding window has keys of {tokens}: "
            "nothing says which. Give `[batch, tokens]`, or a mask for each type of layer, as a dict."
        )


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _in_place(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: AttentionParams,
    learned: tuple[torch.Tensor | None, ...],
) -> torch.Tensor | None:
    """Attention to blocks where they are, `[batch, heads, queries, v_dim]`.

    Args:
        query, key, value: as of `attention_forward`.
        params: of the call.
        learned: what a gradient may be asked for.

    Returns:
        None: these are not views of one moment, or a gradient is asked for.
    """
    snapshot = _snapshot(key, value)
    if snapshot is None or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)):
        return None
    if params.plain and not params.window:
        params = plain(params.scale, params.causal)
    elif params.sinks is not None:
        params = replace(params, sinks=params.sinks.float())
    return snapshot.forward.attend(snapshot.reader, snapshot.length, snapshot.epoch, query, params)


def _again(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any, window: int | None
) -> torch.Tensor | None:
    """The call of a step that decodes, where it is like the layer's last one: see `attention/repeat.py`.

    Args:
        query, key, value, scale, window: as of `attention_forward`, where nothing else is asked for.

    Returns:
        `[batch, heads, 1, v_dim]`; None: it is another call.
    """
    if not type(key) is type(value) is KVView:
        return None
    at, length = key.snapshot, key.shape[2]
    again = at.reader.repeat
    if (
        again is None
        or again.schedules
        or at is not value.snapshot
        or at._dense is not None
        or key._what is not KEYS
        or value._what is not VALUES
        or query.shape[2] != 1
        or (window is not None and window < length)
    ):
        return None
    return again(query, length, at.epoch, plain(scale, False), 1)


def _refuse(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    way_out = 'Leave it to the model\'s own attention: `kvtier.disable(model)`, or attn_implementation="eager".'
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f"output_attentions: attention weights are never made as a whole. {way_out}")
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f'{type(module).__name__} passes `{name}`, which "kvtier" does not know. {way_out}')
    if type(kwargs.get("cache")).__name__ == "PagedAttentionCache":
        raise UnsupportedError(f"Continuous batching of Transformers brings a paged cache of its own. {way_out}")


def _snapshot(key: torch.Tensor, value: torch.Tensor) -> Snapshot | None:
    """What a pair of views shows; None where these are not the keys and values of one moment, or are dense already."""
    if not (isinstance(key, KVView) and isinstance(value, KVView)) or key.snapshot is not value.snapshot:
        return None
    # Query heads share KV heads in order, however many of the repeats were made by the model.
    pair = (key.part, value.part) == (0, 1) and key.form == value.form == 0 and key.repeats == value.repeats
    return key.snapshot if pair and key.snapshot._dense is None else None


def _mask(mask: torch.Tensor | None, bias: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """Mask and bias in one, `[batch or 1, heads or 1, queries or 1, tokens]`."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(*mask.shape[:3], tokens) if mask.shape[3] == 1 else mask[..., :tokens]
    if bias is None:
        return mask
    bias = bias[..., :tokens]
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _grouped(module: torch.nn.Module, group: int) -> Any:
    """The module, or one that says how many query heads share a KV head, for a function that reads it from there."""
    if getattr(module, "num_key_value_groups", 1) == group:
        return module
    return SimpleNamespace(num_key_value_groups=group, is_causal=_is_causal(module, None))


def _in_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, dropout: float
) -> torch.Tensor:
    """Attention of a few queries at a time: `[batch, heads, queries, v_dim]`."""
    batch, heads, queries, _ = query.shape
    kv_heads, tokens = key.shape[1], key.shape[2]
    plain = not params.softcap and params.sinks is None
    if plain:
        # torch's kernels fall back to the slowest one where there are both a mask and groups.
        key, value = repeat(key, heads // kv_heads), repeat(value, heads // kv_heads)
    rows = max(1, _CHUNK_BYTES // (batch * heads * tokens * 4))
    parts = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        at = torch.arange(tokens - queries + start, tokens - queries + stop, device=query.device)[:, None]
        first = max(0, tokens - queries + start - params.window + 1) if params.window else 0
        last = tokens - queries + stop if params.causal else tokens
        if last <= 0:  # more queries than keys: the first see nothing
            parts.append(query.new_zeros((batch, heads, stop - start, value.shape[3])))
            continue
        positions = torch.arange(first, last, device=query.device)
        mask = params.mask
        if mask is not None:
            mask = (mask if mask.shape[2] == 1 else mask[:, :, start:stop])[..., first:last]
        if params.causal or params.window:
            seen = positions <= at
            if params.window:
                seen = seen & (positions > at - params.window)
            mask = seen if mask is None else _mask(seen, mask, last - first)
        of = (query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last], mask)
        if plain:
            parts.append(F.scaled_dot_product_attention(*of, dropout_p=dropout, scale=params.scale))
        else:
            parts.append(_chunk(*of, params, dropout))
    return torch.cat(parts, 2)


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    params: AttentionParams,
    dropout: float,
) -> torch.Tensor:
    """Attention as the eager functions of Transformers compute it: products in the model's dtype, softmax in fp32.

    What is masked gets the lowest number, not -inf, so that a row that sees nothing stays finite.
    """
    batch, heads, queries, k_dim = query.shape
    kv_heads, tokens = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, k_dim)
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, queries, tokens)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        scores = torch.where(mask, scores, lowest) if mask.dtype == torch.bool else (scores + mask).clamp(min=lowest)
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = F.softmax(scores, -1)[..., :tokens].to(value.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    weights = weights.reshape(batch, kv_heads, heads // kv_heads * queries, tokens)
    return (weights @ value).view(batch, heads, queries, value.shape[3])


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: PretrainedConfig | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that goes with `attention_forward`, as Transformers' `AttentionMaskInterface` asks for it.

    It is that of sdpa, but for what None means when there are more keys than queries: the last query stands at the last
    key. So a chunk of a prefill on a warm cache needs no mask, and a static cache with room behind the tokens does.

    Args:
        q_length, kv_length, q_offset, kv_offset: where queries and keys stand.
        attention_mask: bool `[batch, tokens]`, False: padding.
        local_size: window or chunk, where attention is local.
        allow_is_causal_skip: whether causality may be left to the attention function.
        config: of the model that asks.
        kwargs: for `transformers.masking_utils.sdpa_mask`.

    Returns:
        bool `[batch, 1, q_length, kv_length]`, True: seen; or None.

    Raises:
        UnsupportedError: the model asks for masks here but attends by itself.
    """
    if config is not None:
        _check_uses_interface(type(config).__module__)
    step = packed.packed_mask(local_size)
    if step is not None:
        return step
    if allow_is_causal_skip and q_length > 1 and kv_length != q_length:
        if _last_tokens_unpadded(q_length, kv_length, q_offset, kv_offset, attention_mask, local_size):
            return None
        allow_is_causal_skip = False
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def _last_tokens_unpadded(
    q_length: int, kv_length: int, q_offset: Any, kv_offset: int, padding: torch.Tensor | None, local_size: int | None
) -> bool:
    if not isinstance(q_offset, int) or torch.compiler.is_compiling():
        return False
    if kv_offset or q_offset + q_length != kv_length or (local_size is not None and kv_length >= local_size):
        return False
    return padding is None or (padding.shape[-1] >= kv_length and bool(padding[:, :kv_length].all()))


@functools.cache
def _check_uses_interface(configuration: str) -> None:
    """A model that attends by itself would add a bool mask to its scores: wrong tokens, no error.

    Transformers does not check this when it is asked for a registered name at loading.
    """
    modeling = configuration.replace(".configuration_", ".modeling_")
    for found in list(vars(sys.modules.get(modeling, object)).values()):
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.__module__ == modeling:
            if not uses_interface(found):
                raise bypasses(found)
            return


def uses_interface(model: Any) -> bool:
    """Whether a model, or its class, takes its attention function from Transformers' `AttentionInterface`."""
    return bool(model._can_set_attn_implementation())


def bypasses(model: type) -> UnsupportedError:
    """The error for a model class that computes attention by itself."""
    return UnsupportedError(
        f"{model.__name__} computes attention by itself, past Transformers' AttentionInterface, so that no "
        'implementation can be set. A TieredKVCache works with it anyway: use it with attn_implementation="eager" or '
        '"sdpa".'
    )
