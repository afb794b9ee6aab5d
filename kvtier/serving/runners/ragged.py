"""`RaggedRunner`: for models that keep recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.config import CacheOptions
from kvtier.conversation.states import States, joined, row_of
from kvtier.forward.packed import PackedForward
from kvtier.forward.sub_batch import PackedSequence
from kvtier.hf.attention.packed import packing
from kvtier.hf.engine.ragged import RaggedCache, state_layers
from kvtier.hf.models import generation as of
from kvtier.hf.models import trials
from kvtier.memory.tiered import TieredMemory
from kvtier.serving.runners.packed import OnPackedForward
from kvtier.serving.runners.runner import NO_LIMIT, Work


class RaggedRunner(OnPackedForward):
    """For models that keep recurrent states: those that decode in one forward `[rows, 1]`, their states stacked by row,
    and each prompt in a forward of its own.

    The states of the sequences that decode stay stacked as long as these are the same ones.

    Args: as of `PackedRunner`.
    """

    name = "ragged"

    def __init__(self, model: Any, memory: TieredMemory, options: CacheOptions) -> None:
        self._model = of.inner(model)
        self._config = self._model.config.get_text_config(decoder=True)
        self._keeps = of.takes_logits_to_keep(self._model)
        self._size = options.block_size or 1
        self._positions = of.reads_positions(self._model)
        self._cache = of.cache_argument(self._model)
        self.chunked = trials.tried_states(self._model).go_on
        self.forward = PackedForward(memory, options, int(self._config.num_hidden_layers))
        self._rows: list[_Ragged] = []
        self._stacked: States = {}

    def add(self) -> _Ragged:
        """See `Runner`."""
        return _Ragged(self.forward.add())

    def fork(self, sequence: Any) -> _Ragged:
        """See `Runner`."""
        self._part()
        made = _Ragged(self.forward.fork(sequence.kv))
        made.states = sequence.states
        return made

    def kv(self, sequence: Any) -> PackedSequence:
        """See `Runner`."""
        found: PackedSequence = sequence.kv
        return found

    def states(self, sequence: Any) -> States:
        """See `Runner`."""
        if sequence in self._rows:
            return row_of(self._stacked, self._rows.index(sequence))
        found: States = sequence.states
        return found

    def go_on(self, kv: PackedSequence, states: States) -> _Ragged:
        """See `Runner`."""
        made = _Ragged(kv)
        made.states = states
        return made

    def remove(self, sequence: Any) -> None:
        """See `Runner`."""
        self.forward.remove(sequence.kv)
        sequence.removed = True

    def forwards(self, work: Sequence[Work]) -> list[list[int]]:
        """See `Runner`."""
        decoding = [i for i, each in enumerate(work) if each.tokens == 1 and each.cached]
        return [*([i] for i in range(len(work)) if i not in decoding), *([decoding] if decoding else [])]

    def step(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """See `Runner`."""
        forward, rows, device = self.forward, [each.sequence for each in work], of.device_of(self._model)
        states = self._stack(rows)  # first: where there is no room for it, no sequence has lost anything
        (batch,) = forward.begin([(row.kv, each.tokens) for row, each in zip(rows, work, strict=True)])
        try:
            ids = [list(each.ids[each.cached : each.cached + each.tokens]) for each in work]
            positions = [list(range(each.cached, each.cached + each.tokens)) for each in work]
            with packing(batch), torch.no_grad():
                out = self._model(
                    input_ids=torch.tensor(ids, device=device),
                    use_cache=True,
                    return_dict=True,
                    **{self._cache: RaggedCache(batch, self._config, states)},
                    **({"position_ids": torch.tensor(positions, device=device)} if self._positions else {}),
                    **({"logits_to_keep": 1} if self._keeps else {}),
                )
                found = [out.logits[i, -1] if each.scored else None for i, each in enumerate(work)]
        except BaseException:
            # States were changed in part, and cannot go back: these sequences begin again.
            self.half_done = True
            forward.undo()
            for row in rows:
                forward.crop(row.kv, 0)
                row.states = {}
            self._rows, self._stacked = [], {}
            self.half_done = False
            raise
        forward.end()
        return found

    def _stack(self, rows: list[_Ragged]) -> States:
        """The states of these sequences, a row for each."""
        if rows != self._rows:
            self._part()
            begins = not rows[0].kv.length
            assert all(row.states for row in rows) or (begins and len(rows) == 1), "a sequence without states decodes"
            self._stacked = state_layers(self._config) if begins else joined([row.states for row in rows])
            self._rows = rows
            for row in rows:
                row.states = {}  # of the last step at the latest: nobody may take them for what they are now
        return self._stacked

    def _part(self) -> None:
        """Give each sequence its own states again: all of them, or none."""
        own = [(row, row_of(self._stacked, i)) for i, row in enumerate(self._rows) if not row.removed]
        for row, states in own:
            row.states = states
        self._rows, self._stacked = [], {}

    def blocks(self) -> tuple[int, int, int]:
        """See `Runner`. Without a layer that keeps keys and values nothing takes room that is counted."""
        return self.forward.blocks() if self.forward.readers else (NO_LIMIT, 0, self._size)

    def check_fits(self, length: int) -> None:
        """See `Runner`."""
        self.forward.check_fits(length)

    def cached(self, sequence: Any) -> int:
        """See `Runner`."""
        length: int = sequence.kv.length
        return length

    def held(self, sequence: Any) -> int:
        """See `Runner`."""
        return self.forward.held(sequence.kv)

    def reset(self) -> None:
        """See `Runner`."""
        self._rows, self._stacked = [], {}
        super().reset()

    def close(self) -> None:
        """See `Runner`."""
        self.forward.close()

    def check_integrity(self) -> None:
        """See `Runner`."""
        self.forward.check_integrity()


class _Ragged:
    """A sequence with recurrent states.

    Attributes:
        kv: its keys and values.
        states: its own; empty while they are stacked with those of others. Nobody changes them: the stack is a copy.
        removed: it has ended.
    """

    def __init__(self, kv: PackedSequence) -> None:
        self.kv = kv
        self.states: States = {}
        self.removed = False
