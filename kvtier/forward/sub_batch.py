"""`SubBatch`: the tokens of a step that one forward computes, and attention over their sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvtier import tracing
from kvtier.attention import dispatch, split
from kvtier.attention.dense import own_kv
from kvtier.attention.reader import LayerReader
from kvtier.config import CacheOptions
from kvtier.errors import StaleViewError, UnsupportedError
from kvtier.kernels.params import AttentionParams
from kvtier.memory.storage.layout import in_one_dtype
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.stats import Counters
from kvtier.tables.packed import PackedLayerKV
from kvtier.tables.table import BlockTable

#: New tokens of a sequence up to which it is attended with others, in one call.
MAX_SHORT = split.MAX_HOST_QUERIES


class PackedSequence:
    """The keys and values of one sequence. Changed by `PackedForward` only.

    Attributes:
        tables: by layer.
        length: tokens in every layer; those of a step under way are not counted.
    """

    __slots__ = ("length", "tables")

    def __init__(self, length: int = 0, tables: dict[int, BlockTable] | None = None) -> None:
        self.length = length
        self.tables: dict[int, BlockTable] = {} if tables is None else tables


class Segment:
    """The tokens of one sequence in a step.

    Attributes:
        sequence: whose.
        tokens: new ones.
        start, stop: where they are in the packed batch of their forward.
    """

    __slots__ = ("sequence", "start", "stop", "tokens")

    def __init__(self, sequence: PackedSequence, tokens: int, start: int) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.start = start
        self.stop = start + tokens

    @property
    def length(self) -> int:
        """Tokens of the sequence behind the step."""
        return self.sequence.length + self.tokens


def pack(batch: Sequence[tuple[PackedSequence, int]]) -> list[Segment]:
    """Tokens of some sequences end to end: those with at most `MAX_SHORT` tokens first."""
    short = [each for each in batch if each[1] <= MAX_SHORT]
    segments: list[Segment] = []
    for sequence, tokens in [*short, *(each for each in batch if each[1] > MAX_SHORT)]:
        segments.append(Segment(sequence, tokens, segments[-1].stop if segments else 0))
    return segments


class Step(Protocol):
    """What a sub-batch asks of the step that it is a part of."""

    memory: TieredMemory
    options: CacheOptions

    @property
    def counters(self) -> Counters:
        """What was done for the step's sequences."""

    def reader_for(self, batch: SubBatch, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        """Of a layer to which tokens are added. Holds the lock."""

    def count_layer(self, index: int) -> None:
        """A layer has tokens of the step. Holds the lock."""

    def attended(self, index: int) -> None:
        """A layer was attended to by one sub-batch."""

    def room(self, device: ComputeDevice) -> int:
        """Bytes of workspace that the step was admitted with."""


class SubBatch:
    """Tokens of some sequences, end to end, that one forward of the model computes. A step is one of these, or two.

    The two of a step take turns (`pause`): each has rows of its own in every layer, and buffers of its own on the way
    to the host. Their blocks are in the same sets.

    Args:
        step: that it is a part of.
        segments: whose tokens they are; none when the step is over.
        readers: of the layers, by index.
        pause: called once in each attention call, when the device has its part of it and the host does not yet; None:
            nobody else computes.

    Attributes:
        attended: layers that it has attended to.
    """

    def __init__(
        self,
        step: Step,
        segments: list[Segment],
        readers: dict[int, LayerReader],
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._step = step
        self.memory = step.memory
        self.segments = segments
        self.readers = readers
        self.pause = pause
        self.attended: set[int] = set()
        self._short = sum([each.tokens <= MAX_SHORT for each in segments])
        self._bounds = [0, *(each.stop for each in segments)]
        self._lengths = [each.length for each in segments]
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._paused = False
        self._began: tracing.Time | None = None
        for index in readers:
            self.choose(index)

    @property
    def counters(self) -> Counters:
        """What was done for the engine's sequences."""
        return self._step.counters

    def choose(self, index: int) -> None:
        """Let the rows of a layer be those of its segments. The caller holds the lock."""
        layer = self.readers[index].layer
        assert isinstance(layer, PackedLayerKV)
        layer.choose([each.sequence.tables[index] for each in self.segments])

    def end(self) -> None:
        """The step is over, or did not happen."""
        self.segments, self.pause = [], None
        self._new.clear()

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        """Add its tokens to a layer.

        Args:
            index: of the layer.
            keys: `[1, heads, tokens, k_dim]`, of all segments end to end; copied.
            values: `[1, heads, tokens, v_dim]`.

        Raises:
            MismatchError, BudgetError, TransferError: nothing was added to this layer.
        """
        assert self.segments, "no step is under way"
        keys, values = in_one_dtype(keys.detach(), values.detach())
        with self.memory.lock, self.memory.change:
            reader = self._step.reader_for(self, index, keys, values)
            layer = reader.layer
            assert isinstance(layer, PackedLayerKV)
            keys, values = layer.widened(keys, values)
            layer.check_kind(keys, values)
            layer.device.poll()
            layer.append_packed(keys, values, self._bounds)
            self._step.count_layer(index)
        self._new[index] = (keys, values)
        return reader

    def attend(
        self,
        reader: LayerReader,
        length: int,
        epoch: int,
        query: torch.Tensor,
        params: AttentionParams | None,
        options: object = None,
        repeats: int = 1,
    ) -> torch.Tensor:
        """Attention of its tokens over their sequences.

        Args:
            reader: of the layer.
            length, epoch: of the layer when its tokens were added.
            query: `[1, heads, tokens, k_dim]`.
            params: without a mask; causal. None: the model's attention did not go through kvtier.
            options, repeats: as it called torch then.

        Returns:
            `[1, heads, tokens, v_dim]`.

        Raises:
            UnsupportedError: no params: another implementation knows nothing of several sequences end to end.
        """
        if params is None:
            raise UnsupportedError(
                "The model's attention implementation was changed while an Engine runs it: it is no longer "
                '"kvtier". Close the engine before you change it, and make another one.'
            )
        self.check_view(reader, length, epoch)
        self._paused = False
        self._begin_trace(reader)
        out = self._attend(reader, query, params)
        self._end_trace(reader)
        self._after(reader.layer.index)
        return out

    def _begin_trace(self, reader: LayerReader) -> None:
        """Attention begins, or goes on behind a pause."""
        self._began = None if tracing.active is None else reader.device.engine.stamp()

    def _end_trace(self, reader: LayerReader) -> None:
        """It has ended, or pauses."""
        tracer = tracing.active
        if tracer is not None and self._began is not None:
            queries = max(each.tokens for each in self.segments)
            ended, device = reader.device.engine.stamp(), reader.device.name
            tracer.attention(self.counters, reader.layer.index, device, self._began, ended, queries)

    def _after(self, index: int) -> None:
        """A layer was attended to."""
        if self.pause is not None and not self._paused:
            self._let_others()
        self.attended.add(index)
        self._step.attended(index)

    def _let_others(self) -> None:
        self._paused = True
        if self.pause is not None:
            self.pause()

    def _pause_within(self, reader: LayerReader) -> None:
        """Let others go on in the midst of an attention call; what they do meanwhile is not its own."""
        self._end_trace(reader)
        self._let_others()
        self._begin_trace(reader)

    def _attend(self, reader: LayerReader, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        self.counters.views_attended += 1
        short, out = self._short, None
        rows = range(len(self.segments))
        if short and self._served(reader, query, params):
            stop = self._bounds[short]
            bounds = self._bounds[: short + 1] + [stop] * (len(rows) - short)
            lengths = self._lengths[:short] + [0] * (len(rows) - short)
            pause = None if self.pause is None else functools.partial(self._pause_within, reader)
            out = split.attend(reader, lengths, query[:, :, :stop], params, cu_queries=bounds, pause=pause)
            if stop == query.shape[2]:
                return out
            rows = rows[short:]
        parts = [] if out is None else [out]
        for row in rows:
            segment = self.segments[row]
            parts.append(self._attend_row(reader, row, query[:, :, segment.start : segment.stop], params))
        return torch.cat(parts, 2)

    def _served(self, reader: LayerReader, query: torch.Tensor, params: AttentionParams) -> bool:
        """Whether the short segments are attended in one call."""
        if not self._step.options.host_attention:
            return False
        stop = self._bounds[self._short]
        return split.serves(reader, query[:, :, :stop], params, MAX_SHORT)

    def _attend_row(self, reader: LayerReader, row: int, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attention of one segment's tokens over its sequence: `[1, heads, its tokens, v_dim]`."""
        segment, new = self.segments[row], self._new.get(reader.layer.index)
        params = replace(params, causal=params.causal and segment.tokens > 1)
        if not segment.sequence.length and new is not None and segment.tokens > 1:
            # A prompt's first tokens are their own keys and values.
            keys, values = (x[:, :, segment.start : segment.stop] for x in new)
            return dispatch.attend_dense(query, keys, values, params)
        mine = self._reader_of(reader, row)
        return dispatch.attend(mine, segment.length, query, params, room=self._step.room(reader.device))

    def _reader_of(self, reader: LayerReader, row: int) -> LayerReader:
        """A reader of one sequence."""
        layer, host_attention = reader.layer, self._step.options.host_attention
        assert isinstance(layer, PackedLayerKV)
        with self.memory.lock, self.memory.change:
            return LayerReader(layer.row(row), self.memory, reader.owner, host_attention=host_attention)

    def densify(
        self, reader: LayerReader, length: int, epoch: int, operation: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of its sequences, end to end, `[1, heads, all tokens, dim]`."""
        self.check_view(reader, length, epoch)
        pairs = [own_kv(self._reader_of(reader, row), x.length) for row, x in enumerate(self.segments)]
        keys, values = (torch.cat(parts, 2) for parts in zip(*pairs, strict=True))
        self.attended.add(reader.layer.index)
        self._step.attended(reader.layer.index)
        self.counters.count_dense(operation, keys.nbytes + values.nbytes)
        return keys, values

    def attend_dense(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention over what `densify` gave, or what a model made of it: head sizes and numbers may be others."""
        parts, start = [], 0
        for segment in self.segments:
            own = slice(start, start + segment.length)
            start += segment.length
            part = query[:, :, segment.start : segment.stop]
            mine = replace(params, causal=params.causal and segment.tokens > 1)
            parts.append(dispatch.attend_dense(part, keys[:, :, own], values[:, :, own], mine))
        self._let_others()
        return torch.cat(parts, 2)

    def check_view(self, reader: LayerReader, length: int, epoch: int) -> None:
        """Raise `StaleViewError` unless the step that a view belongs to is under way."""
        layer = reader.layer
        if not self.segments or layer.epoch != epoch or length != layer.length:
            raise StaleViewError(f"A view of layer {layer.index} is read after its step.")
