"""The config of a decoder, by a model's name or as a file has it, with what files leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvtier.errors import ConfigError
from kvtier.hf.models.layers import grows_untiered, transformers_layers

#: Sizes that config objects have under these names, whatever a file calls them.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
#: Seconds for the hub to answer.
_HUB_SECONDS = 10.0


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
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not isinstance(kind, str) or not any(kind in names for names in known):
        raise ConfigError(f"this version of Transformers knows no decoder of type {kind!r}")
    try:
        made = AutoConfig.for_model(**_decoded(config)).get_text_config(decoder=True)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Transformers refuses the config of type {kind!r}: {reason}") from error
    if not isinstance(made, PretrainedConfig):
        raise ConfigError(f"the text part of the config of type {kind!r} is {made!r}, which is no config")
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
    # Some types write sizes under names of their own, or a pattern in place of their number.
    sizes = {name: getattr(made, name, None) for name in _SIZES if whole.get(name) is None}
    found = {**whole, **sizes, "model_type": made.model_type or config.get("model_type")}
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
