"""`PackedRunner`: all tokens of a step in one forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.config import CacheOptions
from kvtier.conversation.states import States
from kvtier.errors import BudgetError
from kvtier.forward.packed import PackedForward
from kvtier.forward.sub_batch import PackedSequence, SubBatch
from kvtier.hf.attention.packed import packing
from kvtier.hf.engine.packed import PackedCache
from kvtier.hf.models import generation as of
from kvtier.hf.models.devices import devices_of
from kvtier.hf.models.names import CACHE
from kvtier.memory.tiered import TieredMemory
from kvtier.serving.runners.runner import Runner, Tiers, Work
from kvtier.serving.runners.sub_batches import SubBatches
from kvtier.serving.runners.turns import Turns


class OnPackedForward(Runner):
    """What runners on a `PackedForward` have in common.

    Attributes:
        forward: that holds the sequences' keys and values.
    """

    forward: PackedForward

    def reset(self) -> None:
        """See `Runner`."""
        self.forward.reset()
        self.half_done = False

    def tiers(self) -> Tiers:
        """See `Runner`."""
        forward = self.forward
        return Tiers(forward.host_blocks(), forward.block_bytes(), forward.overlaps(), forward.rates())


class PackedRunner(OnPackedForward):
    """All tokens of a step in one forward `[1, tokens]`, each sequence's attended to over its own blocks.

    Args:
        model: of Transformers, whose attention goes through "kvtier".
        memory, options: as of a cache.

    Attributes:
        sub_batches: decides whether a step is computed by two forwards that take turns; None: it is never.
    """

    name = "packed"
    chunked = True

    def __init__(self, model: Any, memory: TieredMemory, options: CacheOptions) -> None:
        self._model = of.inner(model)
        self._config = self._model.config.get_text_config(decoder=True)
        self._keeps = of.takes_logits_to_keep(self._model)
        where = devices_of(self._model)
        weights = {weight.device for weight in self._model.parameters() if weight.device.type != "meta"}
        self._split = not weights.union(where.layers.values()) <= {where.model}
        self.forward = PackedForward(memory, options, int(self._config.num_hidden_layers))
        self.sub_batches: SubBatches | None = None

    def add(self) -> PackedSequence:
        """See `Runner`."""
        return self.forward.add()

    def fork(self, sequence: Any) -> PackedSequence | None:
        """See `Runner`."""
        return self.forward.fork(sequence)

    def kv(self, sequence: Any) -> PackedSequence:
        """See `Runner`."""
        found: PackedSequence = sequence
        return found

    def go_on(self, kv: PackedSequence, states: States) -> PackedSequence:
        """See `Runner`."""
        assert not states, "a packed row has no states"
        return kv

    def remove(self, sequence: Any) -> None:
        """See `Runner`."""
        self.forward.remove(sequence)

    def forwards(self, work: Sequence[Work]) -> list[list[int]]:
        """See `Runner`."""
        if self.sub_batches is None:
            return [list(range(len(work)))]
        return [self.sub_batches.plan([(each.sequence, each.tokens) for each in work])]

    def allow_sub_batches(self) -> None:
        """A step may be computed by two forwards from now on."""
        self.sub_batches = SubBatches(self.forward, len(self.forward.readers))

    def took(self, seconds: float) -> None:
        """See `Runner`."""
        if self.sub_batches is not None:
            self.sub_batches.took(seconds)

    def step(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """See `Runner`."""
        second = () if self.sub_batches is None else self.sub_batches.second([each.sequence for each in work])
        if second:
            try:
                return self._step([[x for i, x in enumerate(work) if i not in second], [work[i] for i in second]], work)
            except BudgetError:
                pass  # what one of them reads cannot move for the other: together they need less
        return self._step([work], work)

    def _step(self, batches: Sequence[Sequence[Work]], work: Sequence[Work]) -> list[torch.Tensor | None]:
        """A step in one forward, or in several that take turns."""
        forward, turns = self.forward, Turns() if len(batches) > 1 else None
        begun = forward.begin(
            *([(each.sequence, each.tokens) for each in some] for some in batches),
            pause=None if turns is None else turns.pause,
        )
        try:
            with torch.no_grad():
                calls = [
                    functools.partial(self._forward, batch, some) for batch, some in zip(begun, batches, strict=True)
                ]
                scores = [calls[0]()] if turns is None else turns.run(calls, of.device_of(self._model))
        except BaseException:
            self.half_done = True  # until it is undone
            forward.undo()
            self.half_done = False
            raise
        forward.end()
        found = {id(each): row for some in scores for each, row in some}
        return [found.get(id(each)) for each in work]

    def _forward(self, batch: SubBatch, work: Sequence[Work]) -> list[tuple[Work, torch.Tensor]]:
        """One forward of the model. Of each part whose scores are wanted these."""
        device, of_sequence = of.device_of(self._model), {id(each.sequence): each for each in work}
        ids, positions, last = list[int](), list[int](), list[int]()
        wanting: list[Work] = []
        for segment in batch.segments:
            each = of_sequence[id(segment.sequence)]
            stop = each.cached + each.tokens
            ids += each.ids[each.cached : stop]
            positions += range(each.cached, stop)
            if each.scored:
                wanting.append(each)
                last.append(segment.stop - 1)
        last = last or [len(ids) - 1]
        # Accelerate brings a tensor to where the model takes its inputs, and the last layer may be elsewhere.
        index: Any = last if self._split else torch.tensor(last, device=device)
        with packing(batch):
            out = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=True,
                return_dict=True,
                **{CACHE: PackedCache(batch, self._config)},
                **({"logits_to_keep": index} if self._keeps else {}),
            )
        scores = out.logits[0] if self._keeps else out.logits[0, index]
        return list(zip(wanting, scores, strict=False))

    def blocks(self) -> tuple[int, int, int]:
        """See `Runner`."""
        return self.forward.blocks()

    def check_fits(self, length: int) -> None:
        """See `Runner`."""
        self.forward.check_fits(length)

    def cached(self, sequence: Any) -> int:
        """See `Runner`."""
        length: int = sequence.length
        return length

    def held(self, sequence: Any) -> int:
        """See `Runner`."""
        return self.forward.held(sequence)

    def close(self) -> None:
        """See `Runner`."""
        self.forward.close()

    def check_integrity(self) -> None:
        """See `Runner`."""
        self.forward.check_integrity()
