"""Tangents of forward-mode AD: those of queries are right, and cached keys and values carry none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from kvtier.errors import UnsupportedError

#: `level._current_level` is below 0 where no level is open, so that no tensor has a tangent: what a decode step can ask
#: in each layer. The name is torch's own; without it, each tensor is asked.
level: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether any of these carries a tangent."""
    if level._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def refuse_tangents(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise `UnsupportedError` where a cache would drop the tangent of keys or values."""
    if has_tangent(keys, values):
        raise UnsupportedError(
            "Keys or values with a tangent of forward-mode AD reached the KV cache. TieredKVCache stores them without "
            "it: differentiate without a cache, or with DynamicCache."
        )
