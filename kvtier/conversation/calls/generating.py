"""`Generating`: one call of `generate`, by what it may re-use: a prefix, what an encoder gave, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

from kvtier.conversation.caches import Caches
from kvtier.conversation.calls.call import Calls
from kvtier.conversation.calls.encoder import EncoderReuse
from kvtier.conversation.calls.prefix_reuse import PrefixReuse
from kvtier.conversation.calls.reuse import ReuseCounts, RowReuse, StoreStats
from kvtier.conversation.disk.disk import Disk
from kvtier.conversation.kept.kept import Kept
from kvtier.conversation.kept.ranks import naming_who_is_pinned
from kvtier.conversation.saved.disk_tier import DiskTier
from kvtier.conversation.saved.wake import Waker
from kvtier.hf.models import generation as of
from kvtier.hf.models.identity import dependence
from kvtier.memory.tiered import TieredMemory


class Generating:
    """Generates for a store.

    Args:
        model, memory, kept, caches, calls, disk_tier, waker: of the store.
        encoder_budget: bytes of what the encoder of an encoder-decoder gave.

    Attributes:
        prefixes: re-uses what is kept of tokens.
        encoder: re-uses what an encoder gave.
        counts: what calls began with.
    """

    def __init__(
        self,
        model: Any,
        memory: TieredMemory,
        kept: Kept,
        caches: Caches,
        calls: Calls,
        disk_tier: DiskTier | None,
        waker: Waker,
        encoder_budget: int,
    ) -> None:
        self.prefixes = PrefixReuse(model, calls, memory, kept, caches.new, disk_tier)
        self.encoder = EncoderReuse(model, memory, kept, encoder_budget)
        self.counts = ReuseCounts(memory)
        self._model = model
        self._memory = memory
        self._kept = kept
        self._caches = caches
        self._calls = calls
        self._waker = waker

    def generate(
        self,
        ids: Any,
        kwargs: dict[str, Any],
        named: bool,
        salt: Hashable,
        depends: dependence.Depends,
        turn_of: str | None,
    ) -> Any:
        """What `model.generate` gives; if that is a dict, with what each row began with.

        Args:
            named: whether the ids were given by name.
            depends: what the model is now.
            turn_of: the name of the conversation that this is a turn of; None: of none.
        """
        epoch = self._kept.epoch
        call, why = self._calls.read(ids, kwargs, salt, depends)
        with naming_who_is_pinned(self._memory, self._kept.ranks):
            if call is not None:
                call.name, call.epoch = turn_of, epoch
                for row in call.rows:
                    self._waker.turn(call.key, row)
                out, rows = self.prefixes.generate(call, kwargs)
            elif self._model.config.is_encoder_decoder:
                out, rows = self.encoder.generate(ids, kwargs, named, salt, depends, epoch)
            else:
                out, rows = self._plain(ids, kwargs, named, why)
        return self.counts.add(out, rows)

    def _plain(self, ids: Any, kwargs: dict[str, Any], named: bool, why: str) -> tuple[Any, tuple[RowReuse, ...]]:
        """A call that re-uses nothing."""
        rows = tuple(RowReuse(tokens, 0, tokens, why) for tokens in self._calls.prompts(ids, kwargs))
        with contextlib.ExitStack() as stack:
            if self._calls.takes_cache and of.setting("use_cache", self._model, kwargs) is not False:
                kwargs[of.cache_argument(self._model)] = stack.enter_context(self._caches.plain())
            return of.generate(self._model, ids, kwargs, named), rows

    def stats(self, disk: Disk | None) -> StoreStats:
        """What is kept and what that was good for, now.

        Args:
            disk: where it is saved; None: nowhere.
        """
        parts = (self.prefixes, self.encoder, self._waker, *(() if disk is None else (disk,)))
        with self._memory.lock, self._memory.change:
            return StoreStats(
                self.counts.calls,
                self.counts.prompt_tokens,
                self.counts.cached_tokens,
                len(self._kept.entries),
                sum(x.sequence.length for x in self._kept.entries.values()),
                self._kept.state_bytes + self.encoder.nbytes,
                self._kept.dropped,
                *((0, 0) if disk is None else (disk.room.nbytes + disk.room.rest, disk.damaged)),
                next(filter(None, (x.problem for x in parts)), ""),
            )
