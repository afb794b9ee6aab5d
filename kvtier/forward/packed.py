"""`PackedForward`: forwards over any tokens of any sequences, packed end to end, on a memory that others may use."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from kvtier.attention import split
from kvtier.attention.reader import LayerReader
from kvtier.config import CacheOptions
from kvtier.errors import ClosedError, UnsupportedError
from kvtier.forward import admission
from kvtier.forward.held import layout_for
from kvtier.forward.planned import PlannedForward
from kvtier.forward.schedule import Schedule
from kvtier.forward.sub_batch import MAX_SHORT, PackedSequence, Segment, SubBatch, pack
from kvtier.memory.blocks.block import State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.shortage import too_small
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.admission import Claim
from kvtier.planning.rates import Rates
from kvtier.tables.layer import LayerKV
from kvtier.tables.packed import PackedLayerKV
from kvtier.tables.parked.sequence import ParkedLayer, ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences
from kvtier.tables.table import BlockTable


class PackedForward(PlannedForward):
    """Keys and values of sequences in tiers, and attention over those of a step. One thread at a time.

    A step is `begin`, then for each layer `append` and `attend` of each sub-batch, then `end`; or `undo`, and nothing
    has happened.

    Args:
        memory: that the blocks are in.
        options: of a cache.
        tiered: layers that there will be, as far as that is known before a step has shown it.

    Attributes:
        sequences: that have not ended.
        under_way: the sub-batches of the step under way.
    """

    def __init__(self, memory: TieredMemory, options: CacheOptions, tiered: int) -> None:
        super().__init__(memory, options)
        self._tiered = tiered
        self.sequences: dict[PackedSequence, None] = {}
        self.under_way: list[SubBatch] = []
        self.closed = False
        #: Readers of the layers with the rows of one of several sub-batches, which have buffers of their own.
        self._apart: list[dict[int, LayerReader]] = []
        #: Layers that have tokens of the step under way.
        self._seen: set[int] = set()

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

        def layer_of(index: int, like: ParkedLayer) -> LayerKV:
            if index not in layers:  # all were given back, as after an interrupt
                others = [each for each in self.sequences if each is not made]
                layers[index] = self._empty_layer(index, like.device, like.parked.pools.layout, others)
                before[index] = len(others)
            return layers[index]

        with self.memory.lock, self.memory.change:
            before = {index: len(layer.tables) for index, layer in layers.items()}
            self.sequences[made] = None
            try:
                made.length = parked.follow([found], length, layer_of)
            finally:
                # A layer that was made for it and then interrupted has the others' tables, too.
                for index, layer in self._layers().items():
                    if len(layer.tables) > before.get(index, len(self.sequences) - 1):
                        made.tables[index] = layer.tables[-1]
                    else:  # it was cut short, or is empty
                        self._enter(made, index, layer, BlockTable())
                if not made.length:
                    self._remove(made)
                    parked.relax()
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
        assert not self.under_way, "a step is under way"
        with self.memory.lock, self.memory.change:
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
        """End a sequence, if it has not ended. The caller holds the lock."""
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
            size, nbytes = max(layer.layout.block_size for layer in layers), self.block_bytes()
            total = self.memory.host.slabs.budget.lasting
            for device in self._held.devices():
                room = self._held.owner.claims.get(device, Claim()).room
                if device.slabs is not None:
                    slot = max(layer.layout.nbytes for layer in self._held.layers_on(device))
                    total += max(device.slabs.budget.lasting - room - slot, 0)
                else:
                    total -= room
            others = [owner for owner in self.memory.owners if owner is not self._held.owner]
            total -= sum(claim.held + claim.room for owner in others for claim in owner.claims.values())
            used = max((layer.blocks.blocks * layer.layout.block_size for layer in layers), default=0)
            return max(total // nbytes, 0), -(-used // size), size

    def host_blocks(self) -> int:
        """Of the blocks that may be had, those that are on the host only, where every device has a tier; else 0."""
        with self.memory.lock:
            if any(device.slabs is None for device in self._held.devices()):
                return 0
            return self.memory.host.slabs.budget.lasting // max(self.block_bytes(), 1)

    def block_bytes(self) -> int:
        """Bytes of a block of all layers, as `blocks` counts them."""
        layouts = [layer.layout for layer in self._layers().values()]
        size = max((layout.block_size for layout in layouts), default=1)
        return sum(layout.nbytes * (size // layout.block_size) for layout in layouts)

    def rates(self) -> Rates | None:
        """What is stored of the machine, or of the one that is emulated; None: nothing."""
        return next((x for device in self._held.devices() if (x := self.memory.rates.get(device.name))), None)

    def token_bytes(self) -> int:
        """Bytes of a token, all layers."""
        return sum(layer.layout.nbytes // layer.layout.block_size for layer in self._layers().values())

    def overlaps(self) -> bool:
        """Whether copies go on while devices compute."""
        return all(device.engine.asynchronous for device in self._held.devices())

    def shared(self, found: ParkedSequence) -> int:
        """Of the first tokens of a parked sequence, those in blocks that sequences here hold. Holds the lock."""
        counts = []
        for index, layer in self._layers().items():
            if index in found.tables:
                held = {run for table in layer.tables for run in table.resolve()}
                mine = itertools.takewhile(held.__contains__, found.tables[index].resolve())
                counts.append(sum([run.count for run in mine]) * layer.layout.block_size)
        return min(counts, default=0)

    # A step

    def begin(
        self, *batches: Sequence[tuple[PackedSequence, int]], pause: Callable[[], None] | None = None
    ) -> list[SubBatch]:
        """A step over some sequences, all different, each with at least one new token.

        Args:
            batches: one, whose tokens one forward computes; or two, whose forwards take turns in one thread.
            pause: of two, see `SubBatch.pause`.

        Returns:
            A sub-batch for each: it has the order in which its tokens are packed.

        Raises:
            BudgetError: there is no room; names the smallest budget that works. Nothing was changed.
        """
        assert not self.under_way, "a step is under way"
        self.check_open()
        self.count_step()
        batch = [each for some in batches for each in some]
        segments = pack(batch)
        with self.memory.lock, self.memory.change:
            for device in self._held.devices():
                self._admit(device, segments, 0)
            # As a policy takes it, a step has as many tokens as its longest part.
            tokens = max(each.tokens for each in segments)
            self._begin_record(tokens)
            if len(batches) > 1:
                # Policies and schedules see the layers with the rows of both.
                for index, layer in self._layers().items():
                    layer.choose([each.sequence.tables[index] for each in segments])
            for each, readers in zip(batches, self._readers_of(len(batches)), strict=True):
                self.under_way.append(SubBatch(self, pack(each), readers, pause))
            try:
                for device in self._held.devices():
                    self._plan(device, tokens)
            except Exception:
                self._clear()
                raise
        return list(self.under_way)

    def _readers_of(self, batches: int) -> list[dict[int, LayerReader]]:
        """Of one sub-batch those of the layers; of several each has its own. Holds the lock."""
        if batches == 1:
            return [self.readers]
        while len(self._apart) < batches:
            self._apart.append({})
        for number, readers in enumerate(self._apart):
            for index in self.readers.keys() - readers.keys():
                layer = self.readers[index].layer
                assert isinstance(layer, PackedLayerKV)
                readers[index] = LayerReader(
                    layer.divide(),
                    self.memory,
                    self._held.owner,
                    host_attention=self.options.host_attention,
                    number=number,
                )
        return self._apart[:batches]

    def reader_for(self, batch: SubBatch, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        """Of a layer that a sub-batch adds tokens to, which is new in the first step of all. Holds the lock.

        Raises:
            BudgetError: there is no room for it. UnsupportedError: one of several sub-batches has a new layer.
        """
        if index not in batch.readers:
            if len(self.under_way) > 1:
                raise UnsupportedError(f"Layer {index} is in no step before one of two sub-batches.")
            self._new_layer(index, keys, values)
        return batch.readers[index]

    def count_layer(self, index: int) -> None:
        """A layer has tokens of the step. Holds the lock."""
        self._record.layers += index not in self._seen
        self._seen.add(index)

    def attended(self, index: int) -> None:
        """A layer was attended to by a sub-batch. When it was by all, do what is due behind it."""
        if self._schedules and all(index in each.attended for each in self.under_way):
            self._advance(self.readers[index])

    def room(self, device: ComputeDevice) -> int:
        """Bytes of workspace that the step was admitted with."""
        return self._rooms.get(device, 0)

    def end(self) -> None:
        """The step is over: its tokens count."""
        for segment in self._segments():
            segment.sequence.length += segment.tokens
        self._tiered = len(self._held.readers)  # some models run a layer again, with keys and values of its own
        self._clear()

    def undo(self) -> None:
        """The step did not happen. Nothing, where none is under way."""
        with self.memory.lock, self.memory.change:
            for index, layer in self._layers().items():
                for segment in self._segments():
                    layer.crop_table(segment.sequence.tables[index], segment.sequence.length)
            self._clear()
            self._changed()

    def _segments(self) -> list[Segment]:
        return [segment for each in self.under_way for segment in each.segments]

    def _clear(self) -> None:
        for each in self.under_way:
            each.end()
        self.under_way = []
        self._seen.clear()

    def _in_place(self, schedule: Schedule, tokens: int) -> list[bool]:
        """See `PlannedForward`. What a long part reads is fetched, if any of it is on the host."""
        readers = schedule.readers
        if not self.options.host_attention:
            return [False] * len(readers)
        long = [each.sequence for each in self._segments() if each.tokens > MAX_SHORT]

        def reads_there(index: int) -> bool:
            return any(run.state is State.HOST for each in long for run in each.tables[index].resolve())

        return [split.can_attend(reader.layer) and not reads_there(reader.layer.index) for reader in readers]

    # Layers, room

    def _new_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerReader:
        device = self.memory.on(keys.device)
        layout = layout_for(keys, values, device, self.options)
        layer = self._empty_layer(index, device, layout, list(self.sequences))
        layer.choose([each.sequence.tables[index] for each in self._segments()])
        self._admit(device, self._segments(), max(self._tiered - len(self._held.readers), 0))
        return self._held.readers[index]

    def _empty_layer(
        self, index: int, device: ComputeDevice, layout: BlockLayout, sequences: Sequence[PackedSequence]
    ) -> PackedLayerKV:
        """A layer without tokens, in which these sequences are."""
        memory, owner = self.memory, self._held.owner
        layer = PackedLayerKV(index, layout, device, memory.block_set(owner, device, layout, index), owner.counters)
        self._schedules.pop(device, None)
        for sequence in sequences:
            self._enter(sequence, index, layer, BlockTable())
        # Last: what undoes an interrupted step finds a table in each sequence for each layer that is held.
        self._held.readers[index] = LayerReader(layer, memory, owner, host_attention=self.options.host_attention)
        return layer

    def _admit(self, device: ComputeDevice, segments: Sequence[Segment], to_come: int) -> None:
        """Refuse, before anything changes, a step that will not fit."""
        owner, layers = self._held.owner, self._held.layers_on(device)
        host_attention = self.options.host_attention
        claim = functools.partial(
            admission.claim_packed, layers, self._seen, segments, to_come, host_attention=host_attention
        )
        refused = self.memory.admit(owner, device, functools.cache(claim))
        if refused is not None:
            tokens = sum(each.tokens for each in segments)
            raise too_small(
                *refused,
                f"A step of {tokens} tokens of {len(segments)} sequences needs",
                self.memory.others(self._held.owner),
            )
        self._rooms[device] = owner.claims[device].room

    def check_fits(self, length: int) -> None:
        """Raise `BudgetError`, which names the smallest budget, where a sequence of so many tokens would not fit, were
        it alone and computed token by token."""
        with self.memory.lock, self.memory.change:
            for device in self._held.devices():
                layers, host_attention = self._held.layers_on(device), self.options.host_attention
                claim = functools.partial(admission.claim_alone, layers, length, host_attention=host_attention)
                refused = self.memory.admit(self._held.owner, device, claim, take=False)
                if refused is not None:
                    raise too_small(
                        *refused, f"A sequence of {length} tokens needs", self.memory.others(self._held.owner)
                    )

    def _changed(self) -> None:
        """Fewer blocks are held: claim no more, and give back what is free and much."""
        for device in self._held.devices():
            self._rest(device)
        self.memory.trim()

    # Life

    def reset(self) -> None:
        """Drop every sequence, and whatever step is under way. After an interrupt, too."""
        with self.memory.lock, self.memory.change:
            self._held.release()
            self.sequences.clear()
            self._clear()
            self._apart.clear()
            self._forget_steps()
        self._held.renew()

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        if self.closed:
            return
        with self.memory.lock, self.memory.change:
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
                if not self.under_way:
                    assert all(x.tables[index].length == x.length for x in self.sequences)
            for schedule in self._schedules.values():
                schedule.check_integrity()
