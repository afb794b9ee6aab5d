"""`Caches`: those of a store, all of one model on one memory."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Literal, cast

from kvtier.config import CacheOptions
from kvtier.conversation.journal import JournalledCache
from kvtier.conversation.states import States, copied
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.engine.ragged import state_layers
from kvtier.hf.models import generation as of
from kvtier.hf.models.layers import has_attention
from kvtier.memory.tiered import TieredMemory

#: In a key, behind what else keys and values depend on: see `Caches.forms`.
_WHOLE = "whole"


class WholeCache(JournalledCache):
    """A cache of which all layers with attention have all their tokens in blocks: those with windows, too, and those
    that keep a state next to keys and values."""

    _is_tiered = staticmethod(has_attention)


class Caches:
    """Makes caches, and closes those that calls which were interrupted have left.

    Args:
        config: of the model.
        memory: that they are in.
        block_size, host_attention: as for `TieredKVCache`.

    Raises:
        ConfigError: options that are wrong.
    """

    def __init__(
        self, config: Any, memory: TieredMemory, block_size: int | Literal["auto"], host_attention: bool
    ) -> None:
        self._config = config
        self._memory = memory
        self._options: dict[str, Any] = {"block_size": block_size, "host_attention": host_attention}
        #: Those that are not garbage yet.
        self._made: weakref.WeakSet[JournalledCache] = weakref.WeakSet()
        with self.new() as cache:
            mine = {i: type(layer) for i, layer in copied(cache.layers).items()}
        whole = {i: type(layer) for i, layer in state_layers(config).items()}
        #: Whether what a call of `generate` keeps of a sequence is what an engine keeps; see `forms`.
        self.has_one_form = mine == whole and not of.keeps_both(mine)
        # Whether states are copied, in either form.
        self._stateful = bool(mine), bool(whole)

    @property
    def options(self) -> CacheOptions:
        """Of all of them."""
        return CacheOptions.parse(self._options["block_size"], self._options["host_attention"])

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

    # Two forms

    def forms(self, key: Hashable) -> tuple[Hashable, ...]:
        """The keys under which tokens of a key may be kept: as calls of `generate` keep them, which copy windows as
        states; and, where that is not the same, whole, as engines do, whose sequences have all tokens in blocks."""
        computed_as, salt = _parts(key)
        if self.has_one_form:
            return (key,)
        computed_as = computed_as[:-1] if _is_whole(key) else computed_as
        return (computed_as, salt), ((*computed_as, _WHOLE), salt)

    def new_for(self, key: Hashable, **options: Any) -> JournalledCache:
        """A cache for what is kept under a key, with these options besides."""
        if not _is_whole(key):
            return self.new(**options)
        made = WholeCache(self._config, memory=self._memory, **self._options, **options)
        self._made.add(made)
        return made

    def new_states(self, key: Hashable) -> States:
        """New layers, those of which states are copied under a key."""
        if _is_whole(key):
            return state_layers(self._config)
        with self.new() as cache:
            return copied(cache.layers)

    @property
    def has_states(self) -> bool:
        """Whether there are, in some form, layers of which states are copied."""
        return any(self._stateful)

    def stateful(self, key: Hashable) -> bool:
        """Whether there are such layers."""
        return self._stateful[_is_whole(key)]


def _parts(key: Hashable) -> tuple[tuple[Any, ...], Any]:
    return cast(tuple[tuple[Any, ...], Any], key)


def _is_whole(key: Hashable) -> bool:
    return _parts(key)[0][-1:] == (_WHOLE,)
