"""The shapes of a model's attention: all that tiles depend on. Read from a config by its attributes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of some layers.

    Attributes:
        group: query heads of a KV head.
        k_dim, v_dim: sizes of a head.
        dtype: of keys and values.
        kv_heads: of keys and values. Tiles do not depend on it: shapes that differ in it alone are equal.
    """

    group: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    kv_heads: int = field(default=8, compare=False)


#: Measured where no model is given: Llama 3, Qwen 3 of 0.6B and 1.7B, and models with heads of 64.
STANDARD = tuple(Shape(group, dim, dim, torch.bfloat16) for group, dim in ((4, 128), (2, 128), (4, 64)))


def shapes_of(model_or_config: object) -> tuple[Shape, ...]:
    """The shapes of a model's attention, that of most layers first.

    Args:
        model_or_config: a Transformers model or config. Of a config with parts, such as vision and text, the text's.

    Raises:
        ConfigError: it is neither, or the config does not say how many heads there are.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if isinstance(model_or_config, type) or not (
        hasattr(config, "get_text_config") or hasattr(config, "num_attention_heads")
    ):
        given = f"the class {model_or_config.__name__}" if isinstance(model_or_config, type) else _name(model_or_config)
        raise ConfigError(f"calibrate takes a model or a model's config, such as model.config, not {given}.")
    whole = config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    dtype = _dtype(model_or_config, config, whole)
    found = Counter(_shape(layer, dtype) for layer in _layers(config))
    return tuple(shape for shape, _ in found.most_common())


def _layers(config: Any) -> list[Any]:
    """Configs of the layers that are tiered, where layers have heads of their own, as Gemma 4's; else the config."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    each = list(config.per_layer_config)
    kinds = getattr(config, "layer_types", None) or []
    return [x for x, kind in zip(each, kinds, strict=False) if kind == "full_attention"] or each


def _shape(config: object, dtype: torch.dtype) -> Shape:
    """The shape of a layer's attention. Raises ConfigError: its config does not say how many heads there are."""
    heads = _positive(config, "num_attention_heads")
    if heads is None:
        raise ConfigError(f"{_name(config)} has no num_attention_heads: there is no attention to calibrate for.")
    kv_heads = _positive(config, "num_key_value_heads") or heads
    nope, rope, v_dim = (_positive(config, x) for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if nope and rope and v_dim:  # MLA: each query head has its own keys and values, as they reach the cache
        return Shape(1, nope + rope, v_dim, dtype, heads)
    dim = _positive(config, "head_dim")
    if dim is None:
        hidden = _positive(config, "hidden_size")
        if hidden is None:
            raise ConfigError(f"{_name(config)} has neither head_dim nor hidden_size: the size of a head is unknown.")
        dim = hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"{_name(config)}: {heads} attention heads are no multiple of {kv_heads} KV heads.")
    return Shape(heads // kv_heads, dim, v_dim or dim, dtype, kv_heads)


def _positive(config: object, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _dtype(*sources: object) -> torch.dtype:
    """The first dtype that one of these names; bf16 if none does."""
    for source in sources:
        for name in ("dtype", "torch_dtype"):
            value = getattr(source, name, None)
            if isinstance(value, str):
                value = getattr(torch, value.removeprefix("torch."), None)
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return value
    return torch.bfloat16


def _name(x: object) -> str:
    return f"a {type(x).__name__}"
