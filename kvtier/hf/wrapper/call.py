"""`Call`: one call of `generate`, from the cache that Transformers prepares for it to its end."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.models.names import CACHE
from kvtier.stats import CacheStats, Counters

#: Why a call had a tiered cache and was not tiered.
UNUSED = "the model put another cache in its place"


class Server(Protocol):
    """What makes caches for calls, and counts them: a `Tiered`."""

    def caches(self, config: Any, made: Any) -> Any:
        """What takes the place of the cache that Transformers made; None, where there is nothing to tier.

        Args:
            config: the model's.
            made: by Transformers, with the layers that it would use.
        """

    def begin_call(self, call: Call) -> None:
        """A call has caches."""

    def end_call(self, call: Call, found: CacheStats | None, reason: str) -> None:
        """A call has ended: its statistics, or why there are none."""

    def over(self, call: Call) -> None:
        """A call is over that nobody wrapped. Takes no lock."""


class Call:
    """One call of `generate`: the caches that were made for it, and what becomes of them.

    Args:
        tiered: that serves it.
        model: whose call it is.

    Attributes:
        caches: that were made, until the call ends.
        counters: of those of a call that was found over.
        reason: why there are none.
    """

    def __init__(self, tiered: Server, model: nn.Module) -> None:
        self.tiered = tiered
        self.model = model
        self.caches: list[TieredKVCache] = []
        self.counters: list[Counters] = []
        self.reason = "`generate` asked for no cache"
        self._returned = False

    def serve(self, generation_config: Any, model_kwargs: dict[str, Any], given: bool) -> None:
        """Transformers has prepared a cache, or was given one: put a tiered one in its place.

        Asked once for each class that has a say in it: what is in its place already stays there.
        """
        made = model_kwargs.get(CACHE)
        self.reason = why_left(generation_config, made, given)
        if self.reason:
            return
        cache = self.tiered.caches(self.model.config, made)
        if cache is None:
            self.reason = "no layer of the model keeps its whole past"
            return
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[CACHE] = cache
        self._returned = bool(generation_config.return_dict_in_generate)
        if not self.caches:
            self.tiered.begin_call(self)
        halves = (
            [cache.self_attention_cache, cache.cross_attention_cache]
            if isinstance(cache, EncoderDecoderCache)
            else [cache]
        )
        self.caches = [x for x in halves if isinstance(x, TieredKVCache)]

    def end(self, *, failed: bool = False) -> None:
        """The call is over: count it, and close what it does not return."""
        caches, self.caches = self.caches, []
        found = None
        for cache in caches:
            stats = cache.stats
            if found is None:
                found = stats
            else:
                found.add(stats)
                found.resident_bytes += stats.resident_bytes
        if failed or not self._returned:
            for cache in caches:
                cache.close()
        del caches
        if found is not None or not failed:
            used = found is not None and (failed or found.steps > 0)
            self.tiered.end_call(self, found if used else None, self.reason or UNUSED)

    def let_go(self) -> None:
        """The call is over, and garbage may be collected just now: no lock is taken."""
        self.counters = [cache._forward.counters for cache in self.caches]
        self.caches = []
        self.tiered.over(self)


def why_left(generation_config: Any, made: Any, given: bool) -> str:
    """Why a call is left as it is; an empty string where it is not."""
    if given:
        return "the caller gave a cache"
    if generation_config.use_cache is False:
        return "use_cache=False"
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic"):
        return f"cache_implementation={implementation!r}"
    if not isinstance(made, (DynamicCache, EncoderDecoderCache)):
        return "the model makes its state itself"
    return ""
