"""`Runner`: what computes a step. All of its tokens in one forward, or each sequence's in one of its own."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.config import CacheOptions
from kvtier.conversation.states import States, joined, row_of
from kvtier.errors import BudgetError
from kvtier.forward.packed import PackedForward
from kvtier.forward.sub_batch import PackedSequence, SubBatch
from kvtier.hf.attention.packed import packing
from kvtier.hf.cache.cache import TieredKVCache
from kvtier.hf.engine.packed import PackedCache
from kvtier.hf.engine.ragged import RaggedCache, state_layers
from kvtier.hf.models import generation as of
from kvtier.hf.models.names import CACHE
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.rates import Rates
from kvtier.serving.sub_batches import SubBatches
from kvtier.serving.turns import Turns

#: Blocks that may be had where nothing counts them.
_NO_LIMIT = 1 << 40


@dataclass(slots=True)
class Work:
    """A part of a step.

    Attributes:
        sequence: of the runner.
        ids: all tokens of the sequence, those to compute at the end of what is cached.
        cached: tokens whose keys and values are there.
        tokens: to compute behind them.
        wanted: whether the scores of the token behind are.
    """

    sequence: Any
    ids: Sequence[int]
    cached: int
    tokens: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where what is preempted may go.

    Attributes:
        host_blocks: of the blocks that may be had, those that are on the host only; 0: there is one tier.
        block_bytes: of one, of all layers.
        overlaps: whether copies between the tiers go on while the device computes.
        rates: what is stored of the machine; None: nothing.
    """

    host_blocks: int = 0
    block_bytes: int = 0
    overlaps: bool = False
    rates: Rates | None = None


class Runner(abc.ABC):
    """Computes steps. One thread at a time.

    Attributes:
        name: "packed", "ragged", "single", "uncached".
        chunked: whether a prompt may be computed in parts.
    """

    name: str
    chunked: bool

    @abc.abstractmethod
    def add(self) -> Any:
        """A sequence without tokens."""

    @abc.abstractmethod
    def fork(self, sequence: Any) -> Any:
        """A second sequence with the same tokens; None: that cannot be had, its tokens are computed again."""

    def kv(self, sequence: Any) -> PackedSequence:
        """The keys and values of a sequence, where a runner's sequences can be continued by others."""
        raise NotImplementedError

    def states(self, sequence: Any) -> States:
        """A sequence's recurrent states behind the tokens that are cached, which nobody changes; empty: the model has
        none."""
        return {}

    def go_on(self, kv: PackedSequence, states: States) -> Any:
        """A sequence that goes on with keys and values, and with the states behind their last token."""
        raise NotImplementedError

    @abc.abstractmethod
    def remove(self, sequence: Any) -> None:
        """A sequence ends, and gives up what it holds."""

    @abc.abstractmethod
    def forwards(self, work: Sequence[Work]) -> list[list[int]]:
        """Which parts of a step are computed together, by number. One that is not named waits for a later step."""

    def took(self, seconds: float) -> None:  # noqa: B027 - for those that learn from it
        """What the parts took that `forwards` has named last, until their tokens were there."""

    @abc.abstractmethod
    def step(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """Compute what is computed together: of each part the scores `[vocabulary]` of the next token, where they are
        wanted.

        Raises:
            BudgetError: there is no room; nothing was changed.
        """

    @abc.abstractmethod
    def blocks(self) -> tuple[int, int, int]:
        """Blocks that may be had, blocks that are held, and tokens of one; a block is of all layers."""

    def tiers(self) -> Tiers:
        """Where what is preempted may go."""
        return Tiers()

    @abc.abstractmethod
    def check_fits(self, length: int) -> None:
        """Raise `BudgetError` where a sequence of so many tokens would not fit, were it alone."""

    @abc.abstractmethod
    def cached(self, sequence: Any) -> int:
        """Tokens of a sequence whose keys and values are there."""

    @abc.abstractmethod
    def held(self, sequence: Any) -> int:
        """Blocks that a sequence holds."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop every sequence. After an interrupt, too."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees. For tests and debugging."""


class _OnPackedForward(Runner):
    """What runners on a `PackedForward` have in common.

    Attributes:
        forward: that holds the sequences' keys and values.
    """

    forward: PackedForward

    def tiers(self) -> Tiers:
        """See `Runner`."""
        forward = self.forward
        return Tiers(forward.host_blocks(), forward.block_bytes(), forward.overlaps(), forward.rates())


class PackedRunner(_OnPackedForward):
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
        self.sub_batches = SubBatches(self.forward, int(self._config.num_hidden_layers))

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
            forward.undo()
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
            if each.wanted:
                wanting.append(each)
                last.append(segment.stop - 1)
        index = torch.tensor(last or [len(ids) - 1], device=device)
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

    def reset(self) -> None:
        """See `Runner`."""
        self.forward.reset()

    def close(self) -> None:
        """See `Runner`."""
        self.forward.close()

    def check_integrity(self) -> None:
        """See `Runner`."""
        self.forward.check_integrity()


class RaggedRunner(_OnPackedForward):
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
        self.chunked = of.states_go_on(self._model)
        self.forward = PackedForward(memory, options, int(self._config.num_hidden_layers))
        #: Layers that keep a state: their types.
        self.state_layers = {i: type(layer) for i, layer in state_layers(self._config).items()}
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
        (batch,) = forward.begin([(row.kv, each.tokens) for row, each in zip(rows, work, strict=True)])
        try:
            states = self._stack(rows)
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
        except BaseException:
            # States were changed in part, and cannot go back: these sequences begin again.
            forward.undo()
            for row in rows:
                forward.crop(row.kv, 0)
                row.states = {}
            self._rows, self._stacked = [], {}
            raise
        forward.end()
        return [out.logits[i, -1] if each.wanted else None for i, each in enumerate(work)]

    def _stack(self, rows: list[_Ragged]) -> States:
        """The states of these sequences, a row for each."""
        if rows != self._rows:
            self._part()
            fresh = [row for row in rows if not row.states]
            assert not fresh or len(rows) == 1, "a sequence without states decodes"
            self._stacked = state_layers(self._config) if fresh else joined([row.states for row in rows])
            self._rows = rows
        return self._stacked

    def _part(self) -> None:
        """Give each sequence its own states again."""
        for i, row in enumerate(self._rows):
            if not row.removed:
                row.states = row_of(self._stacked, i)
        self._rows, self._stacked = [], {}

    def blocks(self) -> tuple[int, int, int]:
        """See `Runner`. Without a layer that keeps keys and values nothing takes room that is counted."""
        return self.forward.blocks() if self.forward.readers else (_NO_LIMIT, 0, self._size)

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
        self.forward.reset()

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
        states: its own, while they are not stacked with those of others. Nobody changes them: the stack is a copy.
        removed: it has ended.
    """

    def __init__(self, kv: PackedSequence) -> None:
        self.kv = kv
        self.states: States = {}
        self.removed = False


class SingleRunner(Runner):
    """Each sequence in forwards of its own, as `generate` runs them, with a cache of its own.

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
        assert each.wanted, "a prompt in parts"
        try:
            scores, sequence.cache = of.next_scores(self._model, each.ids, sequence.cache)
        except BaseException:
            # Whatever is there of it: the sequence begins again.
            sequence.begin_again()
            raise
        sequence.tokens = len(each.ids)
        return [scores]

    def blocks(self) -> tuple[int, int, int]:
        """See `Runner`. Layers of other kinds take what they take: only the memory itself can refuse."""
        return _NO_LIMIT, 0, self._options.block_size or 1

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
