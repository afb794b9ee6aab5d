"""`Caches`: those of a store, all of one model on one memory."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from kvtier.config import CacheOptions
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.states import copied, has_states
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.memory.tiered import TieredMemory


class Caches:
    """Makes caches, and closes those that calls which were interrupted have left.

    Args:
        config: of the model.
        memory: that they are in.
        block_size, host_attention: as for `TieredKVCache`.

    Raises:
        ConfigError: options that are wrong.
    """

    def __init__(self, config: Any, memory: TieredMemory, block_size: int | str, host_attention: bool) -> None:
        self._config = config
        self._memory = memory
        self._options: dict[str, Any] = {"block_size": block_size, "host_attention": host_attention}
        #: Those that are not garbage yet.
        self._made: weakref.WeakSet[JournalledCache] = weakref.WeakSet()
        self.new().close()

    @property
    def options(self) -> CacheOptions:
        """Of all of them."""
        return CacheOptions.parse(self._options["block_size"], self._options["host_attention"])

    @functools.cached_property
    def state_layers(self) -> dict[int, type]:
        """The layers of which states are copied, for they keep more or less than all keys and values: their types."""
        with self.new() as cache:
            return {i: type(layer) for i, layer in copied(cache.layers).items()}

    def stateful(self) -> bool:
        """Whether there are such layers."""
        with self.new() as cache:
            return has_states(cache.layers)

    def new(self, **options: Any) -> JournalledCache:
        """A cache of which something may be kept, with these options besides."""
        made = JournalledCache(self._config, memory=self._memory, **self._options, **options)
        self._made.add(made)
        return made

    def plain(self) -> TieredKVCache:
        """A cache of which nothing is kept."""
        return TieredKVCache(self._config, memory=self._memory, **self._options)

    def close(self) -> None:
        """Close all that are open. Idempotent."""
        for cache in list(self._made):
            cache.close()
