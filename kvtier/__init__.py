"""kvtier: a tiered KV cache for Hugging Face Transformers.

    model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB"))

Importing this package does nothing else: names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.errors import (
        BudgetError,
        ClosedError,
        ConcurrentUseError,
        ConfigError,
        InterruptedStepError,
        KVTierError,
        MismatchError,
        StaleViewError,
        TransferError,
        UnsupportedError,
    )
    from kvtier.hf.attention import register_attention
    from kvtier.hf.cache import TieredKVCache
    from kvtier.hf.enable import Enabled, disable, enable
    from kvtier.hf.view import KVView
    from kvtier.metrics import CacheStats, TierStats
    from kvtier.types import LayerResidency, Residency, Tier

__version__ = "0.1.0"

_HOME = {
    "BudgetError": "errors",
    "CacheStats": "metrics",
    "ClosedError": "errors",
    "ConcurrentUseError": "errors",
    "ConfigError": "errors",
    "Enabled": "hf.enable",
    "InterruptedStepError": "errors",
    "KVTierError": "errors",
    "KVView": "hf.view",
    "LayerResidency": "types",
    "MismatchError": "errors",
    "Residency": "types",
    "StaleViewError": "errors",
    "Tier": "types",
    "TierStats": "metrics",
    "TieredKVCache": "hf.cache",
    "TransferError": "errors",
    "UnsupportedError": "errors",
    "disable": "hf.enable",
    "enable": "hf.enable",
    "register_attention": "hf.attention",
}

__all__ = [
    "BudgetError",
    "CacheStats",
    "ClosedError",
    "ConcurrentUseError",
    "ConfigError",
    "Enabled",
    "InterruptedStepError",
    "KVTierError",
    "KVView",
    "LayerResidency",
    "MismatchError",
    "Residency",
    "StaleViewError",
    "Tier",
    "TierStats",
    "TieredKVCache",
    "TransferError",
    "UnsupportedError",
    "disable",
    "enable",
    "register_attention",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
