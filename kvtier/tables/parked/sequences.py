"""`ParkedSequences`: tokens that no cache is adding to, for caches to continue.

A parked sequence has a block table for each tiered layer. Sequences share blocks with each other and with the caches
that continue them; a parked block is never written. What no cache holds is given up when the memory needs the room: it
leaves the device first (its bytes are on the host then), and is dropped when the host is full too. The trailing end of
a sequence goes first, for what precedes it is of use without it and not the other way round (Pensieve, 4.3).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvtier.errors import MismatchError
from kvtier.memory.access.change import undone
from kvtier.memory.blocks import audit
from kvtier.memory.blocks.block import Pools, Run
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.shortage import too_small
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.admission import Claim, ClaimSum
from kvtier.tables.layer import LayerKV
from kvtier.tables.parked.on_device import OnDevice
from kvtier.tables.parked.sequence import ParkedLayer, ParkedSequence
from kvtier.tables.table import BlockTable, distinct

Shortened = Callable[[ParkedSequence], None]
Victims = Callable[[], list[tuple[ParkedSequence, int]]]


class ParkedSequences:
    """The parked sequences of one model in a memory. The caller of every method holds the memory's lock.

    Args:
        memory: that they are in.
        user: without which nobody uses them; None: `abandon` is called by whoever has them.

    Attributes:
        sequences: in the order in which they give up room: the first is the first to.
        shortened: called with a sequence that has given up its end, or all of it.
        victims: says which sequences give up their ends next, and the tokens that each keeps; nothing: none of them.
        recovered: called when a change was cut short, once sequences and tables agree again. Of what was being changed
            some may be dropped, or shorter, of which `shortened` was not called.
    """

    def __init__(self, memory: TieredMemory, user: weakref.ref[Any] | None = None) -> None:
        self.memory = memory
        self.sequences: OrderedDict[ParkedSequence, None] = OrderedDict()
        self._pinned: dict[ParkedSequence, None] = {}
        self.shortened: Shortened = lambda sequence: None
        self.victims: Victims = list
        self.recovered: Callable[[], None] = lambda: None
        self._layers: dict[int, ParkedLayer] = {}
        self._on_device = OnDevice(self._layers)
        self.owner = memory.new_owner()
        if user is not None:
            self.owner.user, self.owner.release = user, self.abandon
        memory.enter(self.owner)  # whatever cuts this short, the memory finds that its user is gone
        memory.parked.append(self)

    # Park, continue, drop

    def park(self, layers: Mapping[int, LayerKV], row: int, length: int, start: int = 0) -> ParkedSequence:
        """Keep the first tokens of a row of a cache.

        Args:
            layers: the cache's tiered layers, by index.
            row: of the batch.
            length: tokens, at least 1.
            start: tokens of the sequence before the cache's first one, whole blocks of every layer.

        Raises:
            MismatchError: other layers, or of another layout or device, than the sequences before. Nothing was changed.
            CorruptionError: a block was found not to hold what was written. Nothing was changed.
        """
        for index, layer in layers.items():
            self._check(index, layer.layout, layer.device)
            for run in layer.rows[row].resolve():
                audit.check(run)
        sequence = ParkedSequence(0, {}, start)
        self.sequences[sequence] = None  # first: a run of a table that nobody lists would be lost
        try:
            for index, layer in layers.items():
                table = layer.park(self._layer(index, layer.layout, layer.device).parked, row, length)
                sequence.tables[index] = table
                if self.memory.audit is not None:
                    sequence.sums[index] = audit.known(table.runs)
        except Exception as error:
            if undone(error):
                self._crop(sequence, 0)
            raise
        self._on_device.add(sequence)
        # The cache goes on with these blocks: they were claimed by it, and are claimed here from now on.
        self.owner.claims = self._used()
        sequence.length = length  # last: what has none is not all there
        return sequence

    def follow(self, rows: Sequence[ParkedSequence], length: int, make: Callable[[int, ParkedLayer], LayerKV]) -> int:
        """Let the empty layers of a cache continue sequences.

        Args:
            rows: the sequence of each row; the same one may be there more than once.
            length: tokens of each; fewer where one of them has fewer by now.
            make: gives the cache's layer of an index, empty, in the device and layout of that parked layer.

        Returns:
            The tokens that the cache continues; 0, and nothing was made, if a sequence has none any more.

        Raises:
            BudgetError: what the caches that use the memory were promised leaves no room for that. Whatever was made
                holds nothing that would be lost.
            CorruptionError: a block does not hold what was written, or is not the sequence's. Likewise.
            MismatchError: layers of another layout or device. Likewise.
        """
        assert not any(sequence.start for sequence in rows), "what precedes it is not there"
        tables: dict[ParkedSequence, dict[int, BlockTable]] = {}
        length = min(length, *(sequence.length for sequence in rows))
        if not length:
            return 0
        for index, layer in self._layers.items():
            if index not in rows[0].tables:
                continue
            kv = make(index, layer)
            self._check(index, kv.layout, kv.device)
            for sequence in dict.fromkeys(rows):
                table = sequence.tables[index].fork()
                table.crop(length, kv.layout.block_size, layer.device.free)
                tables.setdefault(sequence, {})[index] = table
            kv.follow(layer.parked, [tables[sequence][index] for sequence in rows], length)
        if self.memory.audit is not None:
            for sequence in dict.fromkeys(rows):
                sequence.compare(tables.get(sequence, {}), self.memory.audit)
        self._on_device.add(*rows)
        refused = self.claim()
        if refused is not None:
            raise refused
        return length

    def follow_on(self, sequence: ParkedSequence, length: int, layers: Mapping[int, LayerKV]) -> int:
        """Let a cache go on with a sequence that begins where the cache ends, in every row.

        Args:
            sequence: of the same layers.
            length: tokens; fewer where it has fewer by now.
            layers: the cache's tiered layers, by index, each of `sequence.start` tokens.

        Returns:
            The tokens that were added; 0, and nothing was changed, if it has none any more.

        Raises:
            BudgetError, CorruptionError: as `follow`. What the layers have got is to be cropped.
            MismatchError: other layers than the sequence's. Nothing was changed.
        """
        length = min(length, sequence.length)
        if not length:
            return 0
        if layers.keys() != sequence.tables.keys():
            raise MismatchError(f"Layers {sorted(layers)} continue a sequence of layers {sorted(sequence.tables)}.")
        for index, kv in layers.items():
            self._check(index, kv.layout, kv.device)
            assert kv.length == sequence.start, "a gap"
        tables = {}
        for index, kv in layers.items():
            tables[index] = table = sequence.tables[index].fork()
            table.crop(length, kv.layout.block_size, kv.device.free)
            kv.follow_on(self._layers[index].parked, table)
        if self.memory.audit is not None:
            sequence.compare(tables, self.memory.audit)
        self._on_device.add(sequence)
        refused = self.claim()
        if refused is not None:
            raise refused
        return length

    def touch(self, sequence: ParkedSequence) -> None:
        """It was used: it is the last to give up room."""
        if sequence in self.sequences:
            self.sequences.move_to_end(sequence)

    def pin(self, sequence: ParkedSequence, tokens: int) -> None:
        """Let its first tokens stay, whoever needs room; none: they go as others do. `claim` or `relax` count them."""
        sequence.pinned = tokens
        if tokens and sequence in self.sequences:
            self._pinned[sequence] = None
        else:
            self._pinned.pop(sequence, None)

    def drop(self, sequence: ParkedSequence) -> None:
        """It is not kept any more."""
        if sequence in self.sequences:
            self.shorten(sequence, 0)

    def clear(self) -> None:
        """Drop all sequences, and what is known of the layers that no cache continues."""
        for sequence in list(self.sequences):
            self.drop(sequence)
        self.owner.claims = self._used()
        for index, layer in list(self._layers.items()):
            if layer.parked.holders == [layer]:
                self._drop_layer(index, layer)

    def close(self) -> None:
        """Drop all sequences and leave the memory. No cache continues one any more."""
        left = self.abandon()
        assert left, "a cache still continues a parked sequence"

    def abandon(self) -> bool:
        """Drop all sequences and leave the memory, where nobody uses them any more. False, and it is to be done again:
        a cache continues one still, of whose end the memory has not heard yet. Garbage ends in any order."""
        self.clear()
        if self._layers:
            return False
        if self in self.memory.parked:  # else it was cut short behind this
            self.memory.parked.remove(self)
        self.memory.leave(self.owner)
        return True

    def _drop_layer(self, index: int, layer: ParkedLayer) -> None:
        del self._layers[index]
        layer.parked.holders.remove(layer)
        self.memory.drop_set(self.owner, layer.device, layer.parked)

    # Room

    def evict(self, pools: Pools, count: int) -> int:
        """Let up to `count` blocks of one layout that no cache uses leave the device for the host. Returns how many.

        Raises:
            BudgetError: the host is full. TransferError: a copy failed.
        """
        return self._on_device.evict(pools, count)

    def leave(self, sequence: ParkedSequence) -> None:
        """Let a sequence's blocks leave the device, but for those that others hold too. Raises as `evict`."""
        self._on_device.leave(sequence)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes of new blocks make no block leave its device that a cache uses, or no cache is open."""
        parked = {each.owner for each in self.memory.parked if isinstance(each, ParkedSequences)}
        if not any(owner.claims for owner in self.memory.owners if owner not in parked):
            return True
        return all(self._on_device.has_room(x, nbytes) for x in self.memory.devices if x.slabs is not None)

    def promote(self, sequences: Sequence[ParkedSequence], nbytes: int) -> int:
        """Begin to bring blocks of these sequences from the host to the device, as far as they are kept. See
        `OnDevice.promote`."""
        return self._on_device.promote([sequence for sequence in sequences if sequence in self.sequences], nbytes)

    def on_host(self, sequences: Iterable[ParkedSequence]) -> bool:
        """Whether a block of these is on the host only, where there is a device tier."""
        return self._on_device.on_host(sequences)

    def give(self, nbytes: int) -> bool:
        """Drop so many bytes of blocks that no cache uses, from the trailing end of the sequences. Whether any went.

        First as `victims` says; then of those that no cache continues, the first ones of `sequences` first; then of
        all, for a cache holds what it uses itself. What is pinned stays.
        """
        before = self._bytes()
        while before - self._bytes() < nbytes and (chosen := self.victims()):
            for sequence, length in chosen:
                self.shorten(sequence, length)
        for idle in (True, False):
            for sequence in list(self.sequences):
                if idle and sequence.users:
                    continue
                while sequence.length > sequence.pinned:
                    gone = before - self._bytes()
                    if gone >= nbytes:
                        return True
                    left = sequence.length - self._tokens(sequence, nbytes - gone)
                    self.shorten(sequence, max(left, sequence.pinned))
                    if before - self._bytes() == gone and sequence.length > sequence.pinned:
                        self.shorten(sequence, sequence.pinned)  # others hold its end, and keep it
        return self._bytes() < before

    def _tokens(self, sequence: ParkedSequence, nbytes: int) -> int:
        """Tokens at the end of a sequence whose blocks have so many bytes, shared ones included: whole blocks."""
        if not sequence.tables:
            return sequence.length
        layouts = [self._layers[index].parked.pools.layout for index in sequence.tables]
        size = max(layout.block_size for layout in layouts)
        of_one = sum(layout.nbytes * (size // layout.block_size) for layout in layouts)
        whole = -(-nbytes // of_one) * size
        return min(sequence.length, whole - size + (sequence.length % size or size))

    def shorten(self, sequence: ParkedSequence, length: int) -> None:
        """Keep the first tokens of a sequence; none: it is dropped."""
        self._crop(sequence, length)
        self.shortened(sequence)

    def _crop(self, sequence: ParkedSequence, length: int) -> None:
        sequence.length = length  # first: whatever cuts this short, it does not have more
        if not length:
            self.sequences.pop(sequence, None)
            self._on_device.discard(sequence)
            self._pinned.pop(sequence, None)
        for index, table in sequence.tables.items():
            layer = self._layers[index]
            if length:
                table.crop(length, layer.parked.pools.layout.block_size, layer.device.free)
            else:
                table.clear(layer.device.free)

    def cut_out(self, sequence: ParkedSequence, start: int, stop: int) -> ParkedSequence | None:
        """Drop tokens in the middle of a sequence, which keeps those before them.

        Args:
            start, stop: of these tokens, counted from the sequence's own first one.

        Returns:
            A sequence of what is behind them, from the next position on where a block begins in every layer; None where
            nothing is.
        """
        assert 0 <= start < stop
        size = max((self._layers[index].parked.pools.layout.block_size for index in sequence.tables), default=1)
        first = -(-stop // size) * size
        found = None
        if first < sequence.length:
            found, length = ParkedSequence(0, {}, sequence.start + first), sequence.length - first
            self.sequences[found] = None  # first: a run of a table that nobody lists would be lost
            for index, table in sequence.tables.items():
                blocks = first // self._layers[index].parked.pools.layout.block_size
                found.tables[index] = rest = table.tail(blocks)
                rest.length = length
                if index in sequence.sums:
                    found.sums[index] = sequence.sums[index][blocks:]
            self._on_device.add(found)
            found.length = length  # last, as in `park`
        if start < sequence.length:
            self.pin(sequence, min(sequence.pinned, start))
            self.shorten(sequence, start)
        return found

    def _bytes(self) -> int:
        return sum([x.parked.blocks * x.parked.pools.layout.nbytes for x in self._layers.values()])

    # What caches use

    def claim(self, *, concede: bool = True) -> BaseException | None:
        """Claim what is pinned, and what caches continue, once, however many do. Returns the error where there is no
        room for it: claims are those of before, and whoever has undone what it asked for calls `relax`.

        Args:
            concede: as of `TieredMemory.admit`.
        """
        memory = self.memory
        before, error, used = dict(self.owner.claims), None, self._used()
        # What is claimed stays so until the new claim is there: whoever is asked for room may let others in.
        self.owner.claims = {device: claim for device, claim in before.items() if device in used}
        for device, mine in used.items():
            refused = memory.admit(self.owner, device, lambda limit, mine=mine: mine, concede=concede)  # type: ignore[misc]
            if refused is not None:
                error = too_small(*refused, "What is continued or pinned needs")
                self.owner.claims = before
                break
        return error

    def relax(self, without: int | None = None) -> None:
        """Claim what is continued or pinned now: caches have ended since, or dropped what they continued.

        Args:
            without: number of an owner who is taken to continue nothing.
        """
        self.owner.claims = self._used(without)

    def _used(self, without: int | None = None) -> dict[ComputeDevice, Claim]:
        used = dict[ComputeDevice, ClaimSum]()
        for index, layer in self._layers.items():
            layout = layer.parked.pools.layout
            holders = [x for x in layer.parked.holders if isinstance(x, LayerKV) and x.blocks.owner != without]
            tables = [table for x in holders for table in x.tables]
            counts = {run: run.count for run in distinct(tables) if run.blocks is layer.parked}
            for sequence in self._pinned:
                if index in sequence.tables:
                    left = -(-sequence.pinned // layout.block_size)
                    for run in sequence.tables[index].resolve():
                        if left <= 0:
                            break
                        counts[run] = max(counts.get(run, 0), min(run.count, left))
                        left -= run.count
            if counts:
                mine = used.setdefault(layer.device, ClaimSum())
                mine.add(layout.nbytes, sum(counts.values()), 0, sealed=True)
        return {device: mine.claim() for device, mine in used.items()}

    def _check(self, index: int, layout: BlockLayout, device: ComputeDevice) -> None:
        found = self._layers.get(index)
        if found is not None and (found.device is not device or found.parked.pools.layout != layout):
            raise MismatchError(
                f"Layer {index} was parked as {found.parked.pools.layout} on {found.device.name}, and is {layout} on "
                f"{device.name} now: another model, or this one was changed or moved."
            )

    def _layer(self, index: int, layout: BlockLayout, device: ComputeDevice) -> ParkedLayer:
        found = self._layers.get(index)
        if found is None:
            parked = self.memory.block_set(self.owner, device, layout, index)
            found = self._layers[index] = ParkedLayer(device, parked, self.sequences)
        return found

    # After a change was cut short

    def unlist(self) -> None:
        """See `Parked`."""
        for sequence in [x for x in self.sequences if not x.length]:
            del self.sequences[sequence]
            sequence.tables = {}
        self._on_device.keep(self.sequences)
        for sequence in [x for x in self._pinned if x not in self.sequences]:
            del self._pinned[sequence]
        mine = [layer.parked for layer in self._layers.values()]
        self.owner.sets[:] = [blocks for blocks in self.owner.sets if blocks in mine]

    def recover(self) -> None:
        """See `Parked`: a sequence has what every layer has of it."""
        for sequence in list(self.sequences):
            length = sequence.length
            for index, table in sequence.tables.items():
                length = min(length, table.blocks * self._layers[index].parked.pools.layout.block_size)
            self._crop(sequence, length)
        self.owner.claims = self._used()
        self.recovered()

    # For tests

    def check_integrity(self) -> None:
        """Raise AssertionError unless sequences, tables and references agree."""
        refs: dict[Run, int] = {}
        for layer in self._layers.values():
            for holder in layer.parked.holders:
                for run in holder.parked_runs():
                    refs[run] = refs.get(run, 0) + 1
            assert all(run.blocks is layer.parked for run in layer.parked.runs), "a run of another set"
            assert all(run.sealed for run in layer.parked.runs), "a parked block is open"
        listed = {run for layer in self._layers.values() for run in layer.parked.runs}
        assert refs.keys() == listed, "parked runs are listed wrong"
        assert all(run.refs == n for run, n in refs.items()), "a parked run miscounts its tables"
        for sequence in self.sequences:
            assert sequence.length > 0, "an empty sequence is kept"
            assert (sequence.pinned > 0) == (sequence in self._pinned), "pinned sequences are listed wrong"
            for index, table in sequence.tables.items():
                size = self._layers[index].parked.pools.layout.block_size
                assert table.blocks == -(-sequence.length // size), "a table does not match its sequence"
