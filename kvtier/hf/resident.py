"""The layers that stay resident: Transformers' own, as Transformers would make them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.configuration_utils import PretrainedConfig

from kvtier.errors import ConfigError, MismatchError
from kvtier.hf.layer import TieredLayer


def transformers_layers(config: PretrainedConfig | None) -> list[Any]:
    """The layers that Transformers itself would use for a model, by its own mapping from layer types."""
    if config is None:
        return []
    try:
        return DynamicCache(config=config).layers
    except KeyError as missing:
        # A layer type registers itself when its model file is imported.
        text = config.get_text_config(decoder=True)
        module = type(text).__module__.replace(".configuration_", ".modeling_")
        try:
            importlib.import_module(module)
            return DynamicCache(config=config).layers
        except (ImportError, KeyError):
            raise ConfigError(
                f"Transformers knows no cache layer of type {missing} for {type(config).__name__}. Import the model's "
                "class before making its cache."
            ) from missing


#: What an update of a sliding layer changes.
WINDOW = ("keys", "values", "cumulative_length", "is_initialized")


def check_resident(index: int, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise `MismatchError` where Transformers' own layer would fail after it changed, or not at all."""
    for new, held in ((keys, getattr(layer, "keys", None)), (values, getattr(layer, "values", None))):
        if not isinstance(held, torch.Tensor) or held.dim() != 4 or new.dim() != 4:
            continue
        same = (new.shape[:2], new.shape[3], new.dtype) == (held.shape[:2], held.shape[3], held.dtype)
        if not same or new.device != held.device:
            raise MismatchError(
                f"Layer {index} holds {tuple(held.shape)} in {held.dtype} on {held.device}, but was given "
                f"{tuple(new.shape)} in {new.dtype} on {new.device}. A cache serves one model, dtype and batch; "
                "`reset()` empties it."
            )


def resident_bytes(layer: Any) -> int:
    """Bytes of a layer that Transformers keeps itself."""
    if isinstance(layer, TieredLayer):
        return 0
    total = 0
    for value in vars(layer).values():
        for x in value.values() if isinstance(value, dict) else (value,):
            if isinstance(x, torch.Tensor) and x.numel() > 1:
                total += x.nbytes
    return total
