"""What a model's config says about its cache: which layers there are, and whether a model fits a cache."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvtier.errors import ConfigError, MismatchError, UnsupportedError
from kvtier.hf.names import CACHE


def transformers_layers(config: PretrainedConfig | None) -> list[Any]:
    """The layers that Transformers itself would use for a model, by its own mapping from layer types.

    Raises:
        ConfigError: it knows none for this config.
    """
    if config is None:
        return []
    try:
        decoder_layers = getattr(config, "num_decoder_layers", None)
        if config.is_encoder_decoder and decoder_layers not in (None, getattr(config, "num_hidden_layers", None)):
            # T5 and its like: Transformers counts the layers of the encoder.
            config = copy.copy(config)
            config.num_hidden_layers = decoder_layers
        try:
            return DynamicCache(config=config).layers
        except KeyError:
            # A layer type registers itself when its model file is imported.
            importlib.import_module(type(own_config(config)).__module__.replace(".configuration_", ".modeling_"))
            return DynamicCache(config=config).layers
    except Exception as error:
        reason = f"it knows no cache layer of type {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"Transformers makes no cache for {type(config).__name__}: {reason}. Pass the config of a model that "
            "generates text (`model.config`); where its code is not part of Transformers, import its class first."
        ) from error


#: Seconds for the hub to answer.
_HUB_SECONDS = 10.0
#: Layers with keys and values that hold no more than a window of them. Classes that build on these may hold more.
_BOUNDED = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)


def grows_untiered(layer: Any) -> bool:
    """Whether a layer of Transformers' holds something of every token and stays with the model: keys and values next to
    a recurrent state, or next to what an indexer keeps."""
    return isinstance(layer, CacheLayerMixin) and type(layer) is not DynamicLayer and type(layer) not in _BOUNDED


def _kind(layer: Any) -> str:
    """What a layer of a cache keeps, as `layer_types` of a config says it."""
    if type(layer) is DynamicLayer:
        return "full_attention"
    recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
    if grows_untiered(layer):
        return "hybrid" if recurrent else "other_attention"
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "hybrid_sliding" if recurrent else "sliding_attention"
    return "linear_attention" if recurrent else "dummy"


def text_config(config: Mapping[str, Any]) -> PretrainedConfig:
    """The config object of the decoder that a file describes, with the defaults of its model type.

    Args:
        config: as a file has it.

    Raises:
        ConfigError: this version of Transformers knows no decoder of that type, or refuses the config.
    """
    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ConfigError(f"this version of Transformers knows no decoder of type {kind!r}")
    try:
        made: PretrainedConfig = AutoConfig.for_model(**_decoded(config)).get_text_config(decoder=True)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Transformers refuses the config of type {kind!r}: {reason}") from error
    return made


def _decoded(value: Any) -> Any:
    """A config with the floats that JSON has no number for: Transformers writes `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _decoded(x) for key, x in value.items()}
    return [_decoded(x) for x in value] if isinstance(value, list) else value


def completed(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A decoder's config with the defaults of its model type, and `layer_types` as the cache takes them.

    Files leave out defaults, and older ones say by a window or a pattern which layers have full attention.

    Args:
        config: as a file has it.

    Returns:
        The config; and why it could not be completed, in which case it is as it was given ("": it was).
    """
    try:
        made = text_config(config)
        layers = transformers_layers(made)
        whole = made.to_dict()
    except ConfigError as error:
        return dict(config), str(error).rstrip(".")
    except Exception as error:  # sizes that are none: whoever reads those says which
        return dict(config), f"Transformers cannot write its config down: {error}"
    windows = [x.sliding_window for x in layers if isinstance(x, DynamicSlidingWindowLayer)]
    found = {**whole, "model_type": made.model_type or config.get("model_type")}
    found |= {"layer_types": [_kind(x) for x in layers]}
    found |= {"sliding_window": max(windows)} if windows else {}
    # Of the whole model, which a text part does not repeat.
    found |= {name: config[name] for name in ("quantization_config",) if config.get(name)}
    return found | {"dtype": config.get("dtype") or config.get("torch_dtype")}, ""


def config_by_name(name: str) -> dict[str, Any]:
    """The config of a model on the hub or in its local cache, as its file has it.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        found, _ = PretrainedConfig.get_config_dict(name, local_files_only=not _hub_answers(name))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"There is no file or folder {name!r}, and the hub gives no config by that name: {reason} "
            "Check the name; without a network, give the folder of a model."
        ) from error
    if not found:
        raise ConfigError(
            f"There is no file or folder {name!r}, and the hub has no config by that name. Check the name."
        )
    return dict(found)


def _hub_answers(name: str) -> bool:
    """Whether the hub can be reached: asked once, where reading a file asks five times with growing pauses."""
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except (HfHubHTTPError, ValueError):
        return True  # whoever reads the file says what is wrong
    except Exception:
        return False
    return True


def own_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that a model's decoder holds: the same object, which says its attention implementation."""
    text: PretrainedConfig = config.get_text_config(decoder=True)
    # Of old encoder-decoders, Transformers gives a copy in which names are changed.
    return text if any(text is part for part in vars(config).values()) else config


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


def updated_by_every_forward(layers: Sequence[Any]) -> frozenset[int] | None:
    """The attention layers of a model, if each of them is part of every forward; None where that is not known."""
    if not layers or any(type(layer).__name__ not in _PLAIN for layer in layers):
        return None
    return frozenset(i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))


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
