"""`PackedForward`: forwards over any tokens of any sequences, packed end to end, on a memory that others may use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvtier.attention import dispatch, split
from kvtier.attention.dense import own_kv
from kvtier.attention.reader import LayerReader
from kvtier.config import DEVICE_BLOCK, HOST_BLOCK, CacheOptions
from kvtier.errors import ClosedError, StaleViewError
from kvtier.forward.planned import PlannedForward
from kvtier.kernels.params import AttentionParams
from kvtier.memory.block import State
from kvtier.memory.device import ComputeDevice
from kvtier.memory.layout import BlockLayout, in_one_dtype
from kvtier.memory.tiered import TieredMemory, too_small
from kvtier.planning.admission import Claim
from kvtier.planning.step import StepRecord
from kvtier.tables.layer import LayerKV
from kvtier.tables.packed import PackedLayerKV
from kvtier.tables.parked import ParkedLayer, ParkedSequence, ParkedSequences
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
        start, stop: where they are in the packed batch.
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


class PackedForward(PlannedForward):
    """Keys and values of sequences in tiers, and attention over those of a step. One thread at a time.

    A step is `begin`, then for each layer `append` and `attend`, then `end`; or `undo`, and nothing has happened.

    Args:
        memory: that the blocks are in.
        options: of a cache.
        tiered: layers that there will be.
    """

    def __init__(self, memory: TieredMemory, options: CacheOptions, tiered: int) -> None:
        super().__init__(memory, options)
        self._tiered = tiered
        self.sequences: dict[PackedSequence, None] = {}
        self.segments: list[Segment] = []
        self.closed = False
        self._bounds: list[int] = [0]
        self._short = 0
        self._lengths: list[int] = []
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # Sequences

    def add(self) -> PackedSequence:
        """A sequence without tokens."""
        made = PackedSequence()
        with self.memory.lock, self.memory.change:
            self.sequences[made] = None
            for index, layer in self._layers().items():
                self._enter(made, index, layer, BlockTable())
        return made

    def fork(self, sequence: PackedSequence) -> PackedSequence:
        """A second sequence with the same tokens, which share their blocks."""
        with self.memory.lock, self.memory.change:
            made = PackedSequence(sequence.length)
            self.sequences[made] = None
            for index, layer in self._layers().items():
                self._enter(made, index, layer, sequence.tables[index].fork())
        return made

    def follow(self, parked: ParkedSequences, found: ParkedSequence, length: int) -> PackedSequence | None:
        """A sequence that goes on with the first tokens of a parked one; None: it has none any more.

        Raises:
            BudgetError, CorruptionError: see `ParkedSequences.follow`. There is no such sequence.
        """
        layers = self._layers()
        made = PackedSequence()

        def layer_of(index: int, _: ParkedLayer) -> LayerKV:
            return layers[index]

        with self.memory.lock, self.memory.change:
            self.memory.collect()
            before = {index: len(layer.tables) for index, layer in layers.items()}
            self.sequences[made] = None
            try:
                made.length = parked.follow([found], length, layer_of)
            finally:
                for index, layer in layers.items():
                    if len(layer.tables) > before[index]:
                        made.tables[index] = layer.tables[-1]
                    else:  # it was cut short, or is empty
                        self._enter(made, index, layer, BlockTable())
                if not made.length:
                    self._remove(made)
            self._changed()
        return made if made.length else None

    def park(
        self,
        parked: ParkedSequences,
        then: Callable[[ParkedSequence], None] = lambda sequence: None,
        *,
        sequence: PackedSequence,
    ) -> ParkedSequence:
        """Keep the tokens of a sequence, which may go on. `then`: see `Forward.park`.

        Raises:
            MismatchError, CorruptionError: see `ParkedSequences.park`.
        """
        assert not self.segments, "a step is under way"
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            layers = self._layers()
            for index, layer in layers.items():
                layer.choose([sequence.tables[index]])
            found = parked.park(layers, 0, sequence.length)
            self._changed()
            then(found)
            return found

    def crop(self, sequence: PackedSequence, length: int) -> None:
        """Keep its first tokens."""
        with self.memory.lock, self.memory.change:
            for index, layer in self._layers().items():
                layer.crop_table(sequence.tables[index], length)
            sequence.length = min(sequence.length, length)
            self._changed()

    def remove(self, sequence: PackedSequence) -> None:
        """It ends. Nothing, if it has ended."""
        with self.memory.lock, self.memory.change:
            self._remove(sequence)

    def _remove(self, sequence: PackedSequence) -> None:
        """The same. Holds the lock."""
        if sequence not in self.sequences:
            return
        del self.sequences[sequence]
        for index, layer in self._layers().items():
            layer.leave(sequence.tables.pop(index))
        sequence.length = 0
        self._changed()

    def _enter(self, sequence: PackedSequence, index: int, layer: PackedLayerKV, table: BlockTable) -> None:
        sequence.tables[index] = table
        layer.enter(table)

    def _layers(self) -> dict[int, PackedLayerKV]:
        return {index: reader.layer for index, reader in self._held.readers.items()}  # type: ignore[misc]

    def held(self, sequence: PackedSequence) -> int:
        """Blocks that a sequence holds in each layer, at the most; those that it shares are counted, too."""
        return max((table.blocks for table in sequence.tables.values()), default=0)

    def blocks(self) -> tuple[int, int, int]:
        """Blocks that may be had, blocks that sequences hold, and tokens of one; a block is of all layers.

        What others were promised is not to be had. It is an estimate where layers differ in size: `begin` knows.
        """
        with self.memory.lock, self.memory.change:
            layers = list(self._layers().values())
            if not layers:
                return 0, 0, 1
            size = max(layer.layout.block_size for layer in layers)
            nbytes = sum(layer.layout.nbytes * (size // layer.layout.block_size) for layer in layers)
            total = self.memory.host.slabs.budget.lasting
            for device in self._devices():
                claim = self._held.owner.claims.get(device, Claim())
                if device.slabs is not None:
                    total += max(device.slabs.budget.lasting - claim.room - claim.slot, 0)
                else:
                    total -= claim.room
            others = [owner for owner in self.memory.owners if owner is not self._held.owner]
            total -= sum(claim.held + claim.room for owner in others for claim in owner.claims.values())
            used = max((layer.blocks.blocks * layer.layout.block_size for layer in layers), default=0)
            return max(total // nbytes, 0), -(-used // size), size

    # A step

    def begin(self, batch: Sequence[tuple[PackedSequence, int]]) -> list[Segment]:
        """A step over some sequences, all different, each with at least one new token.

        Returns:
            Where the tokens of each are, in the order of the packed batch: those with at most `MAX_SHORT` tokens first.

        Raises:
            BudgetError: there is no room; names the smallest budget that works. Nothing was changed.
        """
        assert not self.segments, "a step is under way"
        self.check_open()
        self.count_step()
        short = [each for each in batch if each[1] <= MAX_SHORT]
        segments: list[Segment] = []
        for sequence, tokens in [*short, *(each for each in batch if each[1] > MAX_SHORT)]:
            segments.append(Segment(sequence, tokens, segments[-1].stop if segments else 0))
        with self.memory.lock, self.memory.change:
            if self.memory.has_garbage:
                self.memory.collect()
            for device in self._devices():
                self._admit(device, segments, 0)
            # As a policy takes it, a step has as many tokens as its longest part.
            tokens = max(each.tokens for each in segments)
            self._begin_record(tokens)
            self.segments = segments
            self._short = len(short)
            self._bounds = [0, *(each.stop for each in segments)]
            self._lengths = [each.length for each in segments]
            for index, layer in self._layers().items():
                layer.choose([each.sequence.tables[index] for each in segments])
            for device in self._devices():
                self._plan(device, tokens)
        return segments

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        """Add the step's tokens to a layer.

        Args:
            keys: `[1, heads, tokens, k_dim]`, of all segments end to end; copied.
            values: `[1, heads, tokens, v_dim]`.

        Raises:
            MismatchError, BudgetError, TransferError: nothing was added to this layer.
        """
        assert self.segments, "no step is under way"
        keys, values = in_one_dtype(keys.detach(), values.detach())
        with self.memory.lock, self.memory.change:
            reader = self._held.readers.get(index)
            if reader is None:
                reader = self._new_layer(index, keys, values)
            layer = reader.layer
            assert isinstance(layer, PackedLayerKV)
            layer.layout.check(keys, values, index)
            layer.device.poll()
            layer.append_packed(keys, values, self._bounds)
            self._record.layers += 1
        self._new[index] = (keys, values)
        return reader

    def attend(
        self, reader: LayerReader, length: int, epoch: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attention of the step's tokens over their sequences.

        Args:
            reader: of the layer.
            query: `[1, heads, tokens, k_dim]`.
            params: without a mask; causal.

        Returns:
            `[1, heads, tokens, v_dim]`.
        """
        self.check_view(reader, length, epoch)
        out = self._attend(reader, query, params)
        if self._schedules:
            self._advance(reader)
        return out

    def _attend(self, reader: LayerReader, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        self.counters.views_attended += 1
        short, out = self._short, None
        rows = range(len(self.segments))
        if short and self._served(reader, query, params):
            stop = self._bounds[short]
            bounds = self._bounds[: short + 1] + [stop] * (len(rows) - short)
            lengths = self._lengths[:short] + [0] * (len(rows) - short)
            out = split.attend(reader, lengths, query[:, :, :stop], params, cu_queries=bounds)
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
        if not self.options.host_attention:
            return False
        stop = self._bounds[self._short]
        return split.serves(reader, query[:, :, :stop], params, MAX_SHORT)

    def _attend_row(self, reader: LayerReader, row: int, query: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """The same of one segment: `[1, heads, its tokens, v_dim]`."""
        segment, new = self.segments[row], self._new.get(reader.layer.index)
        params = replace(params, causal=params.causal and segment.tokens > 1)
        if not segment.sequence.length and new is not None and segment.tokens > 1:
            # A prompt's first tokens are their own keys and values.
            keys, values = (x[:, :, segment.start : segment.stop] for x in new)
            return dispatch.attend_dense(query, keys, values, params)
        layer = reader.layer
        assert isinstance(layer, PackedLayerKV)
        with self.memory.lock, self.memory.change:
            mine = LayerReader(
                layer.row(row), self.memory, self._held.owner, host_attention=self.options.host_attention
            )
        return dispatch.attend(mine, segment.length, query, params, room=self._rooms.get(layer.device, 0))

    def densify(
        self, reader: LayerReader, length: int, epoch: int, operation: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of the step's sequences, end to end, `[1, heads, all tokens, dim]`."""
        self.check_view(reader, length, epoch)
        layer = reader.layer
        assert isinstance(layer, PackedLayerKV)
        pairs = []
        for row, segment in enumerate(self.segments):
            with self.memory.lock, self.memory.change:
                mine = LayerReader(
                    layer.row(row), self.memory, self._held.owner, host_attention=self.options.host_attention
                )
            pairs.append(own_kv(mine, segment.length))
        keys, values = (torch.cat(parts, 2) for parts in zip(*pairs, strict=True))
        self._after(reader)
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
        return torch.cat(parts, 2)

    def check_view(self, reader: LayerReader, length: int, epoch: int) -> None:
        """Raise `StaleViewError` unless the step that a view belongs to is under way."""
        layer = reader.layer
        if not self.segments or layer.epoch != epoch or length != layer.length:
            raise StaleViewError(f"A view of layer {layer.index} is read after its step.")

    def end(self) -> None:
        """The step is over: its tokens count."""
        for segment in self.segments:
            segment.sequence.length += segment.tokens
        self._clear()

    def undo(self) -> None:
        """The step did not happen. Nothing, where none is under way."""
        with self.memory.lock, self.memory.change:
            for index, layer in self._layers().items():
                for segment in self.segments:
                    layer.crop_table(segment.sequence.tables[index], segment.sequence.length)
            self._clear()
            self._changed()

    def _clear(self) -> None:
        self.segments = []
        self._new.clear()

    def _in_place(self, readers: Sequence[LayerReader], tokens: int) -> list[bool]:
        """See `PlannedForward`. Of a step with a long part, all but that part is attended to where it is."""
        if not self.options.host_attention or tokens > MAX_SHORT:
            return [False] * len(readers)
        return [split.can_attend(reader.layer) for reader in readers]

    # Layers, room

    def _new_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        memory, owner = self.memory, self._held.owner
        device = memory.on(keys.device)
        size = self.options.block_size or (HOST_BLOCK if device.slabs is None else DEVICE_BLOCK)
        layout = BlockLayout.of(keys, values, size)
        layer = PackedLayerKV(index, layout, device, memory.block_set(owner, device, layout, index), owner.counters)
        reader = LayerReader(layer, memory, owner, host_attention=self.options.host_attention)
        self._held.readers[index] = reader
        self._schedules.pop(device, None)
        for sequence in self.sequences:
            self._enter(sequence, index, layer, BlockTable())
        layer.choose([each.sequence.tables[index] for each in self.segments])
        self._admit(device, self.segments, max(self._tiered - len(self._held.readers), 0))
        return reader

    def _devices(self) -> list[ComputeDevice]:
        return list(dict.fromkeys(reader.device for reader in self._held.readers.values()))

    def _admit(self, device: ComputeDevice, segments: Sequence[Segment], to_come: int) -> None:
        """Refuse, before anything changes, a step that will not fit."""
        owner = self._held.owner
        claims: dict[int, Claim] = {}

        def claim(limit: int) -> Claim:
            if limit not in claims:
                claims[limit] = self._claim(device, segments, to_come, limit)
            return claims[limit]

        refused = self.memory.admit(owner, device, claim)
        if refused is not None:
            tokens = sum(each.tokens for each in segments)
            raise too_small(*refused, f"A step of {tokens} tokens of {len(segments)} sequences needs")
        self._rooms[device] = owner.claims[device].room

    def _claim(self, device: ComputeDevice, segments: Sequence[Segment], to_come: int, limit: int) -> Claim:
        """What the layers of one device need for a step."""
        layers = [reader.layer for reader in self._held.readers.values() if reader.device is device]
        held = filling = room = slot = largest = 0
        smallest = layers[0].layout.nbytes if layers else 0
        for layer in layers:
            size, nbytes = layer.layout.block_size, layer.layout.nbytes
            coming, opened = 0, layer.blocks.counts[State.FILLING]
            if layer.index not in self._new:
                # Those of other sequences stay as they are.
                then = opened
                for each in segments:
                    table = each.sequence.tables[layer.index]
                    before, after = table.length % size, (table.length + each.tokens) % size
                    own = not before or _is_own(table, layer)
                    coming += -(-(table.length + each.tokens) // size) - -(-table.length // size) + (not own)
                    then += bool(after) - (before > 0 and own and table.last().state is State.FILLING)
                opened = max(opened, then)
            held += (layer.blocks.blocks + coming) * nbytes
            filling += opened * nbytes
            slot, smallest, largest = max(slot, nbytes), min(smallest, nbytes), max(largest, nbytes)
            in_place = self.options.host_attention and split.can_attend(layer)
            for each in segments:
                if each.tokens > MAX_SHORT or not in_place:
                    room = max(room, self._room_for(layer, each, limit))
        if to_come and layers:
            last = layers[-1]
            size, nbytes = last.layout.block_size, last.layout.nbytes
            held += to_come * sum(-(-each.length // size) for each in segments) * nbytes
            filling += to_come * sum(bool(each.length % size) for each in segments) * nbytes
        return Claim(held, filling, room, slot, smallest, largest)

    def _room_for(self, layer: LayerKV, segment: Segment, limit: int) -> int:
        """Bytes of workspace through which one segment is attended to."""
        return dispatch.room_for(
            layer,
            segment.tokens,
            segment.length,
            1,
            host_attention=self.options.host_attention,
            dense=True,
            limit=limit,
        )

    def check_fits(self, length: int) -> None:
        """Raise `BudgetError`, which names the smallest budget, where a sequence of so many tokens would not fit, were
        it alone and computed token by token."""
        with self.memory.lock, self.memory.change:
            for device in self._devices():
                claims = self._held.owner.claims
                before = claims.get(device)
                refused = self.memory.admit(
                    self._held.owner, device, functools.partial(self._claim_of_one, device, length)
                )
                if refused is not None:
                    raise too_small(*refused, f"A sequence of {length} tokens needs")
                claims.pop(device)
                if before is not None:
                    claims[device] = before

    def _claim_of_one(self, device: ComputeDevice, length: int, limit: int) -> Claim:
        """What the layers of one device need for a sequence that is alone, at the most until it has so many tokens."""
        layers = [reader.layer for reader in self._held.readers.values() if reader.device is device]
        sizes = [layer.layout.nbytes for layer in layers]
        options = self.options
        return Claim(
            held=sum(-(-length // layer.layout.block_size) * layer.layout.nbytes for layer in layers),
            filling=sum(layer.layout.nbytes for layer in layers if layer.layout.block_size > 1),
            room=max(
                dispatch.room_for(layer, 1, length, 1, host_attention=options.host_attention, dense=True, limit=limit)
                for layer in layers
            ),
            slot=max(sizes),
            smallest=min(sizes),
            largest=max(sizes),
        )

    def _changed(self) -> None:
        """Fewer blocks are held: claim no more, and give back what is free and much."""
        for device in self._devices():
            workspace = self._held.owner.workspaces.get(device)
            if workspace is not None:
                workspace.plans.clear()  # they refer to slabs that are given back
            schedule = self._schedules.get(device)
            if schedule is not None:
                schedule.drop()
            claim = self._claim(device, [], 0, device.home.budget.limit)
            self._held.owner.claims[device] = replace(claim, room=self._rooms.get(device, 0))
        self.memory.trim()

    # Life

    def reset(self) -> None:
        """Drop every sequence, and whatever step is under way. After an interrupt, too."""
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            self._held.release()
            self.sequences.clear()
            self._clear()
            self._schedules.clear()
            self._rooms.clear()
            self._record, self._last, self._before = StepRecord(), None, None
            self._expected.clear()
        self._held.renew()

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        if self.closed:
            return
        with self.memory.lock, self.memory.change:
            self.memory.collect()
            self._held.release()
        self.sequences.clear()
        self._clear()
        self._finalizer.detach()
        self.closed = True

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self.closed:
            raise ClosedError("This engine was closed. Make a new one.")
        if self.memory.closed:
            self.memory.check_open()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees with every other. For tests and debugging."""
        self.memory.check_integrity()
        with self.memory.lock, self.memory.change:
            for index, layer in self._layers().items():
                layer.check_integrity()
                assert {id(t) for t in layer.tables} == {id(x.tables[index]) for x in self.sequences}
                if not self.segments:
                    assert all(x.tables[index].length == x.length for x in self.sequences)


def _is_own(table: BlockTable, layer: LayerKV) -> bool:
    """Whether a sequence's last block is written to as it is, and not copied first."""
    last = table.last()
    return last.refs == 1 and last.blocks is layer.blocks
