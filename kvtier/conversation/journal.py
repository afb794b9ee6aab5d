"""`JournalledCache`: a cache that knows which token ids its keys and values are of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.models.names import CACHE

#: Forwards of a call whose time is noted.
_TIMED = 12


class GivenOthers(Exception):
    """`generate` gives the model other tokens than those that are missing of the prompt: it does not expect that there
    are any in the cache, or has changed the prompt."""


@dataclass(frozen=True, slots=True)
class Took:
    """What a forward took, until the next one began: `new` tokens of each of `rows` rows on `past` cached ones."""

    new: int
    past: int
    rows: int
    seconds: float


class JournalledCache(TieredKVCache):
    """A `TieredKVCache` with the token ids of every row, which a hook on the model tells it at each forward.

    What is noted is what the model was given, not what came out of `generate`: so it holds for beams, which change rows
    at every step, and for candidates of assisted decoding, which are dropped again.

    Attributes:
        unknown: the model was given something else than token ids, or keeps more than these: what the cache holds is of
            no use to others.
        prompt: ids, `[rows, tokens]`, of which the next forward is given all that the cache does not hold; None: it may
            be given any.
        took: the forwards so far but the last one: the first few.
        longest: tokens of each row that it has held, and was about to hold, at the most.
    """

    _noted: list[torch.Tensor]
    unknown: bool
    prompt: torch.Tensor | None = None
    took: list[Took]
    longest: int
    _began: tuple[int, int, int, float] | None = None
    _tells_unused = False  # a store makes some that it only looks at

    def begin(self, ids: torch.Tensor) -> None:
        """The cache holds the keys and values of `ids`, `[rows, tokens]`, and no others."""
        self._noted = [ids]
        self.unknown = False
        self.took, self._began = [], None
        self.longest = ids.shape[1]

    def forward_begins(self, inputs: dict[str, Any]) -> None:
        """The model is called with these arguments."""
        ids = inputs.get("input_ids")
        if self.unknown or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            self.unknown = True
            return
        past = self.get_seq_length()
        self.longest = max(self.longest, past + ids.shape[1])
        if len(self.took) < _TIMED:
            now = time.perf_counter()
            # At the same length it is the same forward, of which two stores tell, or one that failed.
            if self._began is not None and self._began[1] != past:
                new, before, rows, began = self._began
                self.took.append(Took(new, before, rows, now - began))
            self._began = (ids.shape[1], past, ids.shape[0], now)
        if self.prompt is not None:
            if not torch.equal(self.prompt[:, past:].to(ids.device), ids):
                raise GivenOthers
            self.prompt = None
        if past != sum(x.shape[1] for x in self._noted):
            self._keep(past)  # tokens were dropped since, or a forward did not finish
        if past:
            self._noted.append(ids.detach().clone())
        else:
            self._noted = [ids.detach().clone()]

    @property
    def ids(self) -> torch.Tensor:
        """The token ids of every row, `[rows, tokens]`; behind the cache's length, what was dropped since."""
        noted = self._noted
        if len(noted) > 1:
            self._noted = noted = [torch.cat(noted, 1)]
        return noted[0]

    def _keep(self, length: int) -> None:
        ids = self.ids
        if ids.shape[1] < length:
            self.unknown = True
        self._noted = [ids[:, :length]]

    @contextlib.contextmanager
    def _rows_change(self) -> Iterator[None]:
        """Rows and their ids change: between the two, and where an interrupt comes there, nobody knows what is what."""
        was, self.unknown = self.unknown, True
        yield
        self.unknown = was

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """As `TieredKVCache.reorder_cache`."""
        with self._rows_change():
            super().reorder_cache(beam_idx)
            self._noted = [self.ids[beam_idx.to(self.ids.device)]]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As `TieredKVCache.batch_repeat_interleave`."""
        with self._rows_change():
            super().batch_repeat_interleave(repeats)
            self._noted = [self.ids.repeat_interleave(repeats, 0)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As `TieredKVCache.batch_select_indices`."""
        with self._rows_change():
            super().batch_select_indices(indices)
            self._noted = [self.ids[indices.to(self.ids.device)]]

    def reset(self) -> None:
        """As `TieredKVCache.reset`."""
        super().reset()
        self._noted = [x[:, :0] for x in self._noted[:1]]


def note_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a model's forward: tell the cache that it is given what it is given."""
    cache = kwargs.get(CACHE)
    if isinstance(cache, JournalledCache):
        cache.forward_begins(kwargs)
