"""The entry "sdpa" among Transformers' attention functions, while there are tiered caches: a shorter way to views."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from kvtier.attention.split import MAX_HOST_QUERIES
from kvtier.hf.attention import dynamo
from kvtier.hf.attention.interface import attention_forward
from kvtier.hf.attention.view import KVView

#: Caches for which the entry "sdpa" is kvtier's, by `id`.
_caches: dict[int, weakref.ref[object]] = {}


def shorten_sdpa(cache: object) -> None:
    """Let models under "sdpa" hand the views of a decode step to kvtier without torch's dispatcher.

    Transformers' entry "sdpa" is `sdpa_forward` until the last cache that asked for it is closed or collected. Dynamo
    traces Transformers' own function in its place, so compiled models stay whole. An entry that is not Transformers'
    own stays: whoever set it wants to see the calls. Views work in any case: torch's `scaled_dot_product_attention`
    takes them.
    """
    number = id(cache)
    _caches[number] = weakref.ref(cache, lambda _: _leave(number))
    _register_sdpa()


def lengthen_sdpa(cache: object) -> None:
    """What `shorten_sdpa` did for a cache is over. Idempotent."""
    _leave(id(cache))


def _register_sdpa() -> None:
    if AttentionInterface._global_mapping.get("sdpa") is sdpa_attention_forward and dynamo.traces(
        sdpa_attention_forward, in_place_of=sdpa_forward
    ):
        AttentionInterface.register("sdpa", sdpa_forward)


def _leave(number: int) -> None:
    _caches.pop(number, None)
    if not _caches and AttentionInterface._global_mapping.get("sdpa") is sdpa_forward:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
        if _caches:  # another thread has made one meanwhile
            _register_sdpa()


def sdpa_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *more: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa_attention_forward`. One query over views takes a shorter way to the same.

    Torch's dispatcher, which otherwise hands a call with a view to kvtier, takes some 8 us a layer (decision 0009).

    Args:
        module, more, options: as Transformers' function takes them.
        query: `[batch, heads, queries, k_dim]`.
        key, value: `[batch, kv_heads, tokens, k_dim or v_dim]`.
        attention_mask: bool or additive; None: everything is seen, or what is causal.

    Returns:
        `[batch, queries, heads, v_dim]`, and None.
    """
    if (
        type(key) is KVView
        and query.shape[2] == 1
        and (attention_mask is None or _packed_too_far(query, key))
        and not more
        and not query.requires_grad
        and not options.get("dropout")
        and options.get("position_bias") is None
        and options.get("softcap") is None
        and not options.get("output_attentions")
    ):
        return attention_forward(module, query, key, value, attention_mask, scaling=options.get("scaling"))
    out: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, *more, **options)
    return out


def _packed_too_far(query: torch.Tensor, key: KVView) -> bool:
    """Whether Transformers (5.24) would make of the heads that share one KV head more queries than host threads attend
    to in place. Where they have no part, what it makes is answered bit for bit."""
    return key.snapshot.reader.host_attention and query.shape[1] > MAX_HOST_QUERIES * key.shape[1]
