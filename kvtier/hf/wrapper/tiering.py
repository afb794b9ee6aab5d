"""`tiered`, `tier` and `untier`: every `generate` of a model gets a tiered cache, in code that passes none."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin

from kvtier.config import CacheOptions, Size, checks_names
from kvtier.cpu import loader
from kvtier.errors import ConfigError, MemoryInUseError
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.cache.layer import TieredLayer
from kvtier.hf.cache.options import check_hook, memory_of
from kvtier.hf.wrapper import wrapping
from kvtier.hf.wrapper.call import UNUSED, Call
from kvtier.hf.wrapper.wrapping import lock
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.policies.names import PolicyName
from kvtier.planning.policy import Policy
from kvtier.stats import CacheStats, Progress

#: Calls at DEBUG.
log = logging.getLogger("kvtier.tiered")


class Tiered:
    """Gives every `generate` of a model a `TieredKVCache` of its own. Made by `tiered` and `tier`.

    The caches are in one memory, so that the budgets hold for all calls together, whatever threads they run in. Each
    is closed when its call ends, also with an error, unless the call returns it (`return_dict_in_generate=True`): then
    it is the caller's, and given back when dropped.

    Threads: any may generate, enter, leave and read.
    """

    def __init__(
        self,
        model: Any,
        cache_options: Mapping[str, Any],
        memory_options: Mapping[str, Any],
        memory: TieredMemory | None,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            what = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
            inside = getattr(model, "model", None)
            hint = " Give the model inside it, `.model`." if isinstance(inside, nn.Module) else ""
            raise ConfigError(f"tiered takes a loaded model, not {what}.{hint}")
        # Those inside of it, too: an adapter's or a compiled one's, and of a model that generates with a part of it.
        models = [x for x in model.modules() if isinstance(x, GenerationMixin)]
        if not models:
            raise ConfigError(f"{type(model).__name__} holds no Transformers model that generates.")
        CacheOptions.parse(**cache_options)
        check_hook(progress)
        loader.check_environment()
        self._name = type(models[0]).__name__
        self._models = [weakref.ref(x) for x in models]
        self._cache_options = {**cache_options, "progress": progress}
        self._memory_options = dict(memory_options)
        self._given = memory
        self._memory: TieredMemory | None = self._new_memory()
        self._depth = 0
        #: Begun by `tier`: until `untier`, or the end of the first `with` that it is used in.
        self.lasting = False
        self._calls = 0
        self._last: CacheStats | None = None
        self._left: dict[str, int] = {}
        self._ended = CacheStats()
        self._running: list[Call] = []
        #: Calls that were found over while garbage was collected, when no lock may be taken.
        self._over: deque[Call] = deque()

    def _new_memory(self) -> TieredMemory:
        memory = memory_of(self._given, **self._memory_options)
        if self._given is None:
            memory.private = False  # several caches come to use it
        return memory

    # What a user sees

    @property
    def calls(self) -> int:
        """Calls of `generate` that ended and had a tiered cache."""
        with lock:
            self._settle()
            return self._calls

    @property
    def last(self) -> CacheStats | None:
        """Statistics of the call that ended last, in whatever thread; None before the first."""
        with lock:
            self._settle()
            return self._last

    @property
    def left(self) -> dict[str, int]:
        """How many calls were left as they are, by the reason."""
        with lock:
            self._settle()
            return dict(self._left)

    @property
    def stats(self) -> CacheStats:
        """Statistics of all calls together, those under way included. Peaks are the largest; tiers are as they are now.

        What a caller does later with a cache that a call returned is not part of it.
        """
        with lock:
            self._settle()
            total, now = (
                CacheStats(native_missing=loader.missing()),
                None if self._memory is None else self._memory.stats,
            )
            total.add(self._ended)
            for call in self._running:
                for cache in call.caches:
                    total.add(cache._forward.counters)
            total.resident_bytes = self._ended.resident_bytes
            device, host = self._ended.device, self._ended.host
            total.device = (device.empty() if now is None else now.device).with_peak(device.peak_bytes)
            total.host = (host.empty() if now is None else now.host).with_peak(host.peak_bytes)
            return total

    def __repr__(self) -> str:
        state, left = "at work" if self._depth else "not at work", sum(self.left.values())
        return (
            f"Tiered({self._name}, {state}, {self.calls} call{'' if self.calls == 1 else 's'}"
            f"{f', {left} left as they are' if left else ''})"
        )

    def __getstate__(self) -> Any:
        raise ConfigError("What `kvtier.tiered` gives cannot be copied or pickled: call it again.")

    # From begin to end

    def __enter__(self) -> Tiered:
        with lock:
            if self.lasting:
                self.lasting = False  # `with kvtier.tier(model):` ends what `tier` began
            else:
                self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with lock:
            self._end(1)
        if kind is None:
            self._warn_if_unused()

    def untier(self) -> None:
        """End it, however often it was begun. What is under way keeps its cache."""
        with lock:
            self.lasting = False
            self._end(self._depth)

    def begin(self) -> None:
        """Serve the model. The caller holds the lock."""
        if self._memory is None:
            self._memory = self._new_memory()
        wrapping.begin(self._alive(), self)
        self._depth += 1

    def _alive(self) -> list[Any]:
        return [model for model in (ref() for ref in self._models) if model is not None]

    def _end(self, times: int) -> None:
        """Undo so many beginnings, unless they were undone. The caller holds the lock."""
        times = min(times, self._depth)
        self._depth -= times
        wrapping.end(self._alive(), self, times)
        memory = self._memory
        if not self._depth and memory is not None and self._given is None:
            # What calls under way use, and caches that were returned, goes with the last of them.
            with contextlib.suppress(MemoryInUseError):
                memory.close()
            found, self._memory = memory.stats, None
            self._ended.device = found.device.with_peak(self._ended.device.peak_bytes)
            self._ended.host = found.host.with_peak(self._ended.host.peak_bytes)

    def _warn_if_unused(self) -> None:
        if self.calls or self._running:
            return
        why = "; ".join(f"{reason} ({count} x)" for reason, count in self.left.items())
        warnings.warn(
            f"No `generate` of {self._name} had a tiered cache within `kvtier.tiered`. "
            + (
                f"Calls were left as they are: {why}."
                if why
                else "None was called: is it another object that generates, such as a copy of the model?"
            ),
            RuntimeWarning,
            stacklevel=3,
        )

    # Calls

    def caches(self, config: Any, made: Any) -> Any:
        """What takes the place of the cache that Transformers made; None, where there is nothing to tier.

        Args:
            config: the model's.
            made: by Transformers, with the layers that it would use.
        """
        if not isinstance(made, EncoderDecoderCache):
            return self._cache(config, made)
        halves = [made.self_attention_cache, made.cross_attention_cache]
        mine = [self._cache(config, half) for half in halves]
        if mine == [None, None]:
            return None
        return EncoderDecoderCache(*[half if x is None else x for half, x in zip(halves, mine, strict=True)])

    def _cache(self, config: Any, made: Any) -> TieredKVCache | None:
        kinds = [type(x) for x in made.layers]
        if type(made) is not DynamicCache or (kinds and DynamicLayer not in kinds):
            return None
        with lock:
            memory = self._memory
            if memory is None:  # it has just ended
                return None
            cache = self._made(config, memory)
            mine = [DynamicLayer if isinstance(x, TieredLayer) else type(x) for x in cache.layers]
            if any(a is not b for a, b in zip(mine, kinds, strict=False)):  # of T5, Transformers counts other layers
                # The model made a cache of its own kind: cross-attention, say, where its decoder has windows.
                cache.close()
                if any(x is not DynamicLayer for x in kinds):
                    return None
                cache = self._made(None, memory)
            return cache

    def _made(self, config: Any, memory: TieredMemory) -> TieredKVCache:
        cache = TieredKVCache(config, memory=memory, **self._cache_options)
        cache._was_used = True  # `left` says where it was not
        return cache

    def begin_call(self, call: Call) -> None:
        """A call has caches."""
        with lock:
            self._settle()
            self._running.append(call)

    def end_call(self, call: Call, found: CacheStats | None, reason: str) -> None:
        """A call has ended: its statistics, or why there are none."""
        with lock:
            self._settle()
            self._count(call, found, reason)
            if self._memory is not None and self._given is None:
                self._memory.reset_if_unused()
        # Nothing is locked: handlers have locks of their own, and may ask for this.
        if found is None:
            log.debug("a generate of %s is left: %s", self._name, reason)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("a generate of %s has ended: %s", self._name, found.summary())

    def _count(self, call: Call, found: CacheStats | None, reason: str) -> None:
        self._running = [x for x in self._running if x is not call]
        if found is None:
            self._left[reason] = self._left.get(reason, 0) + 1
            return
        self._calls += 1
        self._last, ended = found, self._ended
        ended.add(found)
        ended.device = found.device.with_peak(ended.device.peak_bytes)
        ended.host = found.host.with_peak(ended.host.peak_bytes)
        ended.resident_bytes = max(ended.resident_bytes, found.resident_bytes)

    def over(self, call: Call) -> None:
        """A call is over that nobody wrapped. Takes no lock."""
        self._over.append(call)

    def _settle(self) -> None:
        while self._over:
            call = self._over.popleft()
            found = None
            if any(x.steps for x in call.counters):
                found = CacheStats(native_missing=loader.missing())
                for counters in call.counters:
                    found.add(counters)
                if self._memory is not None:
                    now = self._memory.stats
                    found.device, found.host = now.device, now.host
            self._count(call, found, call.reason or UNUSED)


# The public functions


@checks_names
def tiered(
    model: nn.Module,
    *,
    device_budget: Size | Mapping[str, Size] | None = None,
    host_budget: Size | None = None,
    block_size: int | Literal["auto"] = "auto",
    write_through: float | None = None,
    host_attention: bool = True,
    max_tokens: int | None = None,
    policy: Policy | PolicyName | None = None,
    audit: Literal["off", "sampled", "full"] | None = None,
    memory: TieredMemory | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Tiered:
    """Give every `generate` of a model within a `with` block a tiered cache: for code that one does not write.

        with kvtier.tiered(model, device_budget="8GiB") as used:
            trainer.train()  # or a pipeline, an evaluation, a server
        print(used.stats)

    A call is left as it is, and `used.left` counts it by the reason, where the caller gives a cache, says
    `use_cache=False` or names a `cache_implementation` (other than "dynamic", which is what Transformers does by
    itself), and where no layer of the model keeps its whole past. The tokens are those of before; what `generate`
    returns, too.

    Args:
        model: a loaded Transformers model, or a module that holds some: one with adapters (peft), compiled, parallel.
            Neither it nor its class changes, so that it is copied and saved as ever; a copy is not tiered.
        device_budget, host_budget, block_size, write_through, host_attention, max_tokens, policy: as those of
            `TieredKVCache`, for all calls together. A budget that depends on what is free is found out again at each
            call that finds no other under way.
        audit, memory, progress: likewise.

    Blocks may be nested, the innermost serves; they may end in any order, and in other threads.

    Raises:
        ConfigError: a malformed option; no model, or none that generates.
    """
    return Tiered(
        model,
        {"block_size": block_size, "host_attention": host_attention, "max_tokens": max_tokens},
        {
            "device_budget": device_budget,
            "host_budget": host_budget,
            "write_through": write_through,
            "policy": policy,
            "audit": audit,
        },
        memory,
        progress,
    )


def tier(model: nn.Module, **options: Any) -> Tiered:
    """Give every `generate` of a model a tiered cache from now on, until `untier(model)`.

    A model has one of these: a second call replaces the first. Options are those of `tiered`.

    Returns:
        What `tiered` gives, at work. Its `stats` are there after `untier`, too.

    Raises:
        ConfigError: as `tiered`. Nothing was changed.
    """
    new = tiered(model, **options)
    with lock:
        untier(model)
        new.begin()
        new.lasting = True
    return new


def untier(model: Any) -> None:
    """End what `tier` began; nothing, where it was not called. Blocks of `tiered` end by themselves.

    Raises:
        ConfigError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"untier takes a loaded model, not an object of {type(model).__name__}.")
    with lock:
        by = [each for x in model.modules() for each in wrapping.servers(x)]
        found = {each for each in by if isinstance(each, Tiered) and each.lasting}
        for each in found:
            each.untier()
