"""The layers of a model's cache, by its config: which there are, and whether a cache fits a model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.configuration_utils import PretrainedConfig

from kvtier.errors import ConfigError, MismatchError, UnsupportedError
from kvtier.hf.models.names import CACHE

#: Layers with keys and values that hold no more than a window of them. Classes that build on these may hold more.
_BOUNDED = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
#: What a cache has in the place of a layer that keeps nothing; Transformers 5.17 has no such class.
_EMPTY: Any = getattr(cache_utils, "DummyLayer", ())


def transformers_layers(config: PretrainedConfig | None) -> list[Any]:
    """The layers that Transformers itself would use for a model, by its own mapping from layer types.

    Raises:
        ConfigError: it knows none for this config.
    """
    if config is None:
        return []
    name = type(config).__name__
    try:
        config = own_config(config)  # as `generate` does; it may be that of an encoder-decoder (Florence-2)
        decoder_layers = getattr(config, "num_decoder_layers", None)
        if config.is_encoder_decoder and decoder_layers not in (None, getattr(config, "num_hidden_layers", None)):
            # T5 and its like: Transformers counts the layers of the encoder.
            config = copy.copy(config)
            config.num_hidden_layers = decoder_layers
        try:
            layers = DynamicCache(config=config).layers
        except KeyError:
            # A layer type registers itself when its model file is imported.
            importlib.import_module(type(own_config(config)).__module__.replace(".configuration_", ".modeling_"))
            layers = DynamicCache(config=config).layers
        return layers + [copy.deepcopy(layers[i]) for i in looped(config)]
    except (MemoryError, torch.OutOfMemoryError):  # which says nothing of the config
        raise
    except Exception as error:
        reason = f"it knows no cache layer of type {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"Transformers makes no cache for {name}: {reason}. Pass the config of a model that "
            "generates text (`model.config`); where its code is not part of Transformers, import its class first."
        ) from error


def looped(config: PretrainedConfig | None) -> list[int]:
    """Layers that a model runs again, in their order, each time with keys and values of its own. It would append a copy
    of the cache's layer for each."""
    text: Any = None if config is None else config.get_text_config(decoder=True)
    match getattr(text, "model_type", None):
        case "dory" if text.recurrent_kv_cache_mode == "per_loop":
            begin, end = text.n_input_layers, text.n_input_layers + text.n_recurrent_layers
            times = text.n_recurrent_loops
        case "inkling2_loop_text":
            # It takes a slice of its layers, which ends with them.
            begin, end = text.loop_layer_index_start, min(text.loop_layer_index_end, text.num_hidden_layers)
            times = text.loop_num_passes
        case _:
            return []
    return list(range(begin, end)) * (times - 1)


def is_full_attention(layer: Any) -> bool:
    """Whether a layer of Transformers' keeps all keys and values, and nothing else."""
    return type(layer) is DynamicLayer


def keeps_nothing(layer: Any) -> bool:
    """Whether a layer of Transformers' only takes the place of one that keeps something."""
    return isinstance(layer, _EMPTY)


def has_attention(layer: Any) -> bool:
    """Whether a layer of Transformers' keeps keys and values, all or some, whatever it keeps next to them."""
    return isinstance(layer, CacheLayerMixin)


def grows_untiered(layer: Any) -> bool:
    """Whether a layer of Transformers' holds something of every token and stays with the model: keys and values next to
    a recurrent state, or next to what an indexer keeps."""
    return isinstance(layer, CacheLayerMixin) and type(layer) is not DynamicLayer and type(layer) not in _BOUNDED


def own_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that a model's decoder holds: the same object, which says its attention implementation."""
    text: PretrainedConfig = config.get_text_config(decoder=True)
    # Of old encoder-decoders, Transformers gives a copy in which names are changed.
    return text if any(text is part for part in vars(config).values()) else config


def latent_widths(config: PretrainedConfig) -> frozenset[int]:
    """Widths of the latents in which a model caches KV (multi-head latent attention); empty: it caches KV itself."""
    try:
        ranks = {getattr(config, "kv_lora_rank", None)}
    except Exception:  # it differs from layer to layer, and Transformers does not answer for all
        ranks = {getattr(layer, "kv_lora_rank", None) for layer in config.per_layer_config}
    return frozenset(rank for rank in ranks if rank)


def check_model(made_for: str, kinds: Sequence[type], config: PretrainedConfig) -> None:
    """Raise `MismatchError` where a cache with layers of these `kinds` does not fit the model with this config.

    A full-attention layer fits every attention layer: it keeps more than a window needs.
    """
    try:
        needed = [type(layer) for layer in transformers_layers(config)]
    except ConfigError:
        return
    given = f"This TieredKVCache was made with a {made_for} of {len(kinds)} layers"
    way_out = "Nothing was changed. Make the cache with that model's own config: TieredKVCache(model.config)."
    if len(needed) != len(kinds):
        raise MismatchError(
            f"{given}, but the model that uses it has {len(needed)} ({type(config).__name__}). {way_out}"
        )
    for i, (kind, own) in enumerate(zip(kinds, needed, strict=True)):
        if kind is not own and not (kind is DynamicLayer and issubclass(own, CacheLayerMixin)):
            raise MismatchError(
                f"{given}, in which layer {i} is a {kind.__name__}. In the model that uses it "
                f"({type(config).__name__}) it is a {own.__name__}. {way_out}"
            )


#: Every forward updates the attention of these. Of others that is not known.
_PLAIN = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}


def cross_attention_layers(config: PretrainedConfig | None) -> frozenset[int]:
    """Layers of a decoder that attend to what its model makes of an image (Mllama). A forward that is given one updates
    them; every other forward passes them over."""
    text: Any = None if config is None else config.get_text_config(decoder=True)
    given = getattr(text, "cross_attention_layers", None)
    return frozenset(i for i in given if type(i) is int) if isinstance(given, (list, tuple)) else frozenset()


def updated_by_every_forward(layers: Sequence[Any], sometimes: frozenset[int]) -> frozenset[int] | None:
    """The attention layers of a model that are part of every forward: all but those that are so `sometimes`; None where
    that is not known."""
    if not layers or any(type(layer).__name__ not in _PLAIN for layer in layers):
        return None
    return frozenset(i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)) - sometimes


def not_kept(layer_idx: int, what: str, config: PretrainedConfig | None) -> UnsupportedError:
    """The error for a model that asks a full-attention layer for more than keys and values."""
    if config is None:
        return UnsupportedError(
            f"Layer {layer_idx} of this model keeps {what}, which a cache without a config has no layer for. Tell the "
            "cache what the model is made of: TieredKVCache(model.config)."
        )
    return UnsupportedError(
        f"The model asks layer {layer_idx} for {what}, but the cache was made with a {type(config).__name__}, in which "
        "that layer keeps none: it is not the config of this model. Make the cache with TieredKVCache(model.config)."
    )


def encoder_decoder(with_config: bool) -> UnsupportedError:
    """The error for a cache that a model with self- and cross-attention was given."""
    one = f"TieredKVCache({'model.config' if with_config else ''})"
    return UnsupportedError(
        "This model has self-attention and cross-attention, and each needs a cache of its own. Write "
        f"{CACHE}=EncoderDecoderCache({one}, {one}), with EncoderDecoderCache from transformers and budgets "
        "for each. `reset()` this cache before using it again."
    )
