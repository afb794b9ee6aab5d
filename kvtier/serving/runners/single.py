"""`SingleRunner`: each sequence in forwards of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.config import CacheOptions
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.models import generation as of
from kvtier.hf.models import trials
from kvtier.hf.models.rotary import Stretched
from kvtier.memory.tiered import TieredMemory
from kvtier.serving.runners.runner import NO_LIMIT, Runner, Work


class SingleRunner(Runner):
    """Each sequence in forwards of its own, as `generate` runs them, with a cache of its own. The frequencies of
    rotary embeddings that are stretched with the length are those of its own length.

    Args:
        model, memory, options: as of `PackedRunner`.
        cached: whether a sequence has a cache. Without one, each step computes all of its tokens.
    """

    chunked = False

    def __init__(self, model: Any, memory: TieredMemory, options: CacheOptions, *, cached: bool = True) -> None:
        self.name = "single" if cached else "uncached"
        self._model = model
        self._cached = cached
        self._memory = memory
        self._options = options
        self._config = of.inner(model).config
        #: Tokens up to which keys are the same however a sequence is divided into forwards; None: they always are.
        self._constant = of.length_of_constant_positions(self._config)
        self._stretched = Stretched(of.inner(model))
        #: What else calls the model between two steps changes the positions that it goes on from.
        self._told = of.goes_on_from_other_calls(model)
        self._live: dict[_Alone, None] = {}

    def add(self) -> _Alone:
        """See `Runner`."""
        made = _Alone(self._new_cache() if self._cached else None)
        self._live[made] = None
        return made

    def _new_cache(self) -> TieredKVCache:
        options = self._options
        return _Cache(
            self._config,
            memory=self._memory,
            block_size=options.block_size or "auto",
            host_attention=options.host_attention,
        )

    def fork(self, sequence: Any) -> None:
        """See `Runner`."""
        return

    def remove(self, sequence: Any) -> None:
        """See `Runner`."""
        if self._live.pop(sequence, self) is None:
            sequence.close()

    def forwards(self, work: Sequence[Work]) -> list[list[int]]:
        """See `Runner`."""
        return [[i] for i in range(len(work))]

    def step(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """See `Runner`."""
        (each,) = work
        sequence = each.sequence
        assert each.scored, "a prompt in parts"
        try:
            with self._stretched.turn:
                try:
                    self._stretched.begin()
                    for length in self._lengths(each):
                        scores, sequence.cache = trials.next_scores(
                            self._model, each.ids[:length], sequence.cache, told=self._told
                        )
                finally:
                    self._stretched.give_back()
        except BaseException:
            # Whatever is there of it: the sequence begins again.
            sequence.begin_again()
            raise
        sequence.tokens = len(each.ids)
        return [scores]

    def _lengths(self, work: Work) -> range:
        """Tokens at the end of each forward of a step: one forward, but where a sequence begins again whose keys depend
        on how it was divided. Its tokens that were generated are then computed one by one, as they were before."""
        last = len(work.ids)
        if self._constant is None or work.sequence.tokens:
            return range(last, last + 1)
        return range(min(max(work.prompt, self._constant), last), last + 1)

    def blocks(self) -> tuple[int, int, int]:
        """See `Runner`. Layers of other kinds take what they take: only the memory itself can refuse."""
        return NO_LIMIT, 0, self._options.block_size or 1

    def check_fits(self, length: int) -> None:
        """See `Runner`: not known before it is tried."""

    def cached(self, sequence: Any) -> int:
        """See `Runner`."""
        return sequence.tokens

    def held(self, sequence: Any) -> int:
        """See `Runner`."""
        return 0

    def reset(self) -> None:
        """See `Runner`."""
        self._stretched.give_back()
        for each in list(self._live):
            each.close()
        self._live.clear()

    def close(self) -> None:
        """See `Runner`."""
        self.reset()

    def check_integrity(self) -> None:
        """See `Runner`."""
        self._memory.check_integrity()


class _Cache(TieredKVCache):
    """Of one sequence, which may end before it was computed."""

    _tells_unused = False


class _Alone:
    """A sequence with a cache of its own.

    Attributes:
        ours: that is tiered; None: it has none.
        cache: that the model goes on with: some models replace the one that they are given.
        tokens: that it holds.
    """

    def __init__(self, ours: TieredKVCache | None) -> None:
        self.ours = ours
        self.cache: Any = ours
        self.tokens = 0

    def begin_again(self) -> None:
        """It holds no token."""
        if self.ours is not None:
            self.ours.reset()
        self.cache, self.tokens = self.ours, 0

    def close(self) -> None:
        """It ends."""
        if self.ours is not None:
            self.ours.close()
        self.cache = None
