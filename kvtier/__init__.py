"""kvtier: a tiered KV cache for Hugging Face Transformers.

    model.generate(**inputs, past_key_values=TieredKVCache(model.config, device_budget="4GiB"))

Importing this package does nothing else: names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.calibration.run import Calibration, calibrate
    from kvtier.conversation.calls.reuse import RowReuse, StoreStats
    from kvtier.conversation.conversation import Conversation
    from kvtier.conversation.store import ConversationStore
    from kvtier.errors import (
        BudgetError,
        ClosedError,
        ConcurrentUseError,
        ConfigError,
        CorruptionError,
        InterruptedStepError,
        KVTierError,
        MemoryInUseError,
        MismatchError,
        QueueFullError,
        StaleViewError,
        StoreInUseError,
        TransferError,
        UnknownOptionError,
        UnsupportedError,
    )
    from kvtier.eviction.policy import EvictionPolicy
    from kvtier.hf.attention.enable import Enabled, disable, enable
    from kvtier.hf.attention.interface import register_attention
    from kvtier.hf.attention.view import KVView
    from kvtier.hf.cache.cache import TieredKVCache
    from kvtier.hf.wrapper.tiering import Tiered, tier, tiered, untier
    from kvtier.memory.tiered import TieredMemory
    from kvtier.planning.hardware.profile import HardwareProfile
    from kvtier.planning.policy import Candidate, Policy, Victims
    from kvtier.planning.reports.explain import Explanation
    from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState
    from kvtier.scheduling.scheduler import Scheduler
    from kvtier.serving.engine import Engine
    from kvtier.serving.request import EngineLoad, RequestOutput
    from kvtier.stats import CacheStats, LayerResidency, Progress, Residency, Tier, TierStats
    from kvtier.tracing import trace

__version__ = "0.1.0"

_HOME = {
    "BudgetError": "errors",
    "CacheStats": "stats",
    "Calibration": "calibration.run",
    "Candidate": "planning.policy",
    "ClosedError": "errors",
    "ConcurrentUseError": "errors",
    "ConfigError": "errors",
    "Conversation": "conversation.conversation",
    "ConversationStore": "conversation.store",
    "CorruptionError": "errors",
    "Enabled": "hf.attention.enable",
    "Engine": "serving.engine",
    "EngineLoad": "serving.request",
    "EvictionPolicy": "eviction.policy",
    "Explanation": "planning.reports.explain",
    "HardwareProfile": "planning.hardware.profile",
    "InterruptedStepError": "errors",
    "KVTierError": "errors",
    "KVView": "hf.attention.view",
    "LayerPlan": "planning.step",
    "LayerResidency": "stats",
    "LayerState": "planning.step",
    "MemoryInUseError": "errors",
    "MismatchError": "errors",
    "Policy": "planning.policy",
    "Progress": "stats",
    "QueueFullError": "errors",
    "RequestOutput": "serving.request",
    "Residency": "stats",
    "RowReuse": "conversation.calls.reuse",
    "Scheduler": "scheduling.scheduler",
    "StaleViewError": "errors",
    "StepPlan": "planning.step",
    "StepRecord": "planning.step",
    "StepState": "planning.step",
    "StoreInUseError": "errors",
    "StoreStats": "conversation.calls.reuse",
    "Tier": "stats",
    "TierStats": "stats",
    "Tiered": "hf.wrapper.tiering",
    "TieredKVCache": "hf.cache.cache",
    "TieredMemory": "memory.tiered",
    "TransferError": "errors",
    "UnknownOptionError": "errors",
    "UnsupportedError": "errors",
    "Victims": "planning.policy",
    "calibrate": "calibration.run",
    "disable": "hf.attention.enable",
    "enable": "hf.attention.enable",
    "register_attention": "hf.attention.interface",
    "tier": "hf.wrapper.tiering",
    "tiered": "hf.wrapper.tiering",
    "trace": "tracing",
    "untier": "hf.wrapper.tiering",
}

__all__ = [
    "BudgetError",
    "CacheStats",
    "Calibration",
    "Candidate",
    "ClosedError",
    "ConcurrentUseError",
    "ConfigError",
    "Conversation",
    "ConversationStore",
    "CorruptionError",
    "Enabled",
    "Engine",
    "EngineLoad",
    "EvictionPolicy",
    "Explanation",
    "HardwareProfile",
    "InterruptedStepError",
    "KVTierError",
    "KVView",
    "LayerPlan",
    "LayerResidency",
    "LayerState",
    "MemoryInUseError",
    "MismatchError",
    "Policy",
    "Progress",
    "QueueFullError",
    "RequestOutput",
    "Residency",
    "RowReuse",
    "Scheduler",
    "StaleViewError",
    "StepPlan",
    "StepRecord",
    "StepState",
    "StoreInUseError",
    "StoreStats",
    "Tier",
    "TierStats",
    "Tiered",
    "TieredKVCache",
    "TieredMemory",
    "TransferError",
    "UnknownOptionError",
    "UnsupportedError",
    "Victims",
    "calibrate",
    "disable",
    "enable",
    "register_attention",
    "tier",
    "tiered",
    "trace",
    "untier",
]


# A type checker has the imports above; a name that is not among them is an error to it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _HOME:
            import importlib

            value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_HOME, "__version__"})
