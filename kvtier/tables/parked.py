"""`ParkedSequences`: tokens that no cache is adding to, for caches to continue.

A parked sequence has a block table for each tiered layer. Sequences share blocks with each other and with the caches
that continue them; a parked block is never written. What no cache holds is given up when the memory needs the room: it
leaves the device first (its bytes are on the host then), and is dropped when the host is full too. The trailing end of
a sequence goes first, for what precedes it is of use without it and not the other way round (Pensieve, 4.3).
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvtier.errors import BudgetError, CorruptionError, MismatchError, TransferError
from kvtier.memory.access.change import undone
from kvtier.memory.blocks import audit
from kvtier.memory.blocks.block import RESIDENT, BlockSet, Pools, Run, State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.shortage import too_small
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.admission import Claim
from kvtier.tables.layer import LayerKV
from kvtier.tables.table import BlockTable, distinct

Shortened = Callable[["ParkedSequence"], None]
Victims = Callable[[], list[tuple["ParkedSequence", int]]]


class ParkedSequence:
    """The first tokens of a sequence, in every tiered layer, or some behind those that were dropped. Changed by
    `ParkedSequences` only.

    Attributes:
        start: tokens before its first one; whole blocks of every layer.
        length: tokens; 0: it was dropped.
        pinned: first tokens that are given up by `drop` and `clear` only: they are claimed, as those of a cache.
        tables: by layer.
        sums: by layer, checksums of the blocks as they were parked: a table that came to be another sequence's differs.
        users: what continues it, whatever that is.
    """

    __slots__ = ("length", "pinned", "start", "sums", "tables", "users")

    def __init__(self, length: int, tables: dict[int, BlockTable], start: int = 0) -> None:
        self.start = start
        self.length = length
        self.pinned = 0
        self.tables = tables
        self.sums: dict[int, array[int]] = {}
        self.users: set[object] = set()

    @property
    def corrupt(self) -> bool:
        """Whether a block of it was found not to hold what was written."""
        return any(run.corrupt for table in self.tables.values() for run in table.resolve())


class ParkedLayer:
    """The parked blocks of one layer.

    Attributes:
        device: that attends to them.
        parked: the set that counts them.
    """

    def __init__(self, device: ComputeDevice, parked: BlockSet, sequences: Mapping[ParkedSequence, None]) -> None:
        self.device = device
        self.parked = parked
        self._sequences = sequences
        parked.parked = True
        parked.holders.append(self)

    @property
    def blocks(self) -> None:
        """As a holder of runs: it keeps nothing by version."""
        return None

    def parked_runs(self) -> Iterator[Run]:
        """The runs in the tables of all sequences, as often as they are there."""
        for sequence in self._sequences:
            table = sequence.tables.get(self.parked.layer)
            if table is not None:
                yield from table.resolve()


class ParkedSequences:
    """The parked sequences of one model in a memory. The caller of every method holds the memory's lock.

    Args:
        memory: that they are in.

    Attributes:
        sequences: in the order in which they give up room: the first is the first to.
        shortened: called with a sequence that has given up its end, or all of it.
        victims: says which sequences give up their ends next, and the tokens that each keeps; nothing: none of them.
        recovered: called when a change was cut short, once sequences and tables agree again. Of what was being changed
            some may be dropped, or shorter, of which `shortened` was not called.
    """

    def __init__(self, memory: TieredMemory) -> None:
        self.memory = memory
        self.owner = memory.enter(memory.new_owner())
        self.sequences: OrderedDict[ParkedSequence, None] = OrderedDict()
        # Those that may have blocks on the device, in the order of their use.
        self._on_device: OrderedDict[ParkedSequence, None] = OrderedDict()
        self._pinned: dict[ParkedSequence, None] = {}
        self.shortened: Shortened = lambda sequence: None
        self.victims: Victims = list
        self.recovered: Callable[[], None] = lambda: None
        self._layers: dict[int, ParkedLayer] = {}
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
        self._on_device[sequence] = None
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
            for sequence in dict.fromkeys(rows):
                table = sequence.tables[index].fork()
                table.crop(length, kv.layout.block_size, layer.device.free)
                tables.setdefault(sequence, {})[index] = table
            kv.follow(layer.parked, [tables[sequence][index] for sequence in rows], length)
        for sequence in dict.fromkeys(rows):
            self._compare(sequence, tables.get(sequence, {}))
        self._on_device |= dict.fromkeys(rows)
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
        self._compare(sequence, tables)
        self._on_device[sequence] = None
        refused = self.claim()
        if refused is not None:
            raise refused
        return length

    def _compare(self, sequence: ParkedSequence, tables: Mapping[int, BlockTable]) -> None:
        """Compare the blocks that a cache continues with what was parked, as far as the audit goes."""
        if self.memory.audit is None:
            return
        for index, table in tables.items():
            runs = table.resolve()
            sums = audit.known(runs)
            if not audit.agree(sums, sequence.sums[index]):
                raise CorruptionError(
                    f"The blocks of a parked sequence in layer {index} are not those that were parked. This is a fault "
                    "of kvtier: please report it. The sequence has to be computed again."
                )
            self.memory.audit.moved(runs)
        self._note(sequence)

    def _note(self, sequence: ParkedSequence) -> None:
        """Note checksums of blocks that were copied to the host since the sequence was parked."""
        if self.memory.audit is not None:
            for index, sums in sequence.sums.items():
                for i, each in enumerate(audit.known(sequence.tables[index].resolve())):
                    sums[i] = sums[i] or each

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
        self.clear()
        assert not self._layers, "a cache still continues a parked sequence"
        if self in self.memory.parked:  # else it was cut short behind this
            self.memory.parked.remove(self)
        self.memory.leave(self.owner)

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
        left = 0
        if not any(x.parked.evictable for x in self._layers.values() if x.parked.pools is pools):
            return left
        for sequence in list(self._on_device):
            if sequence.users:
                continue
            if not any(run.device is not None for table in sequence.tables.values() for run in table.resolve()):
                self._on_device.pop(sequence, None)
                self._note(sequence)
                continue
            for index, table in sequence.tables.items():
                layer = self._layers[index]
                if layer.parked.pools is not pools or not layer.parked.evictable:
                    continue
                for run in reversed(list(table.resolve())):
                    if left >= count:
                        return left
                    # What sequences share is used more often than each of them.
                    if run.state in RESIDENT and run.parts is None and run.refs == 1:
                        left += layer.device.evict_end(run, count - left)
        return left

    def leave(self, sequence: ParkedSequence) -> None:
        """Let a sequence's blocks leave the device, but for those that others hold too. Raises as `evict`."""
        for index, table in sequence.tables.items():
            layer = self._layers[index]
            for run in list(table.resolve()):
                if run.state in RESIDENT and run.parts is None and run.refs == 1:
                    layer.device.evict_end(run, run.count)
        self._note(sequence)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes of new blocks make no block leave its device that a cache uses, or no cache is open."""
        parked = {each.owner for each in self.memory.parked if isinstance(each, ParkedSequences)}
        if not any(owner.claims for owner in self.memory.owners if owner not in parked):
            return True
        for device in self.memory.devices:
            if device.slabs is not None:
                free = device.free_bytes
                for sequence in self._on_device:
                    if free >= nbytes:
                        break
                    if not sequence.users:
                        free += self._evictable(sequence, device)
                if free < nbytes:
                    return False
        return True

    def _evictable(self, sequence: ParkedSequence, device: ComputeDevice) -> int:
        """Bytes that it has on a device, and nobody else has."""
        found = 0
        for index, table in sequence.tables.items():
            if self._layers[index].device is device:
                runs = [run for run in table.resolve() if run.state in RESIDENT and run.refs == 1]
                found += sum([run.count for run in runs]) * self._layers[index].parked.pools.layout.nbytes
        return found

    def promote(self, sequences: Sequence[ParkedSequence], nbytes: int) -> int:
        """Begin to bring up to so many bytes of blocks from the host to the device, evenly over layers: of the first of
        these sequences that has any there and gets room. Where there is none, other parked blocks leave that no cache
        uses, the longest unused first, and then those of the last of these. Waits for nothing.

        Returns:
            Bytes that are on their way.

        Raises:
            CorruptionError: a block does not hold what was written.
        """
        kept = [sequence for sequence in sequences if sequence in self.sequences]
        for sequence in reversed(kept):
            self._on_device.pop(sequence, None)
            self._on_device[sequence] = None  # the last to leave
        return next((came for came in (self._promote(sequence, nbytes) for sequence in kept) if came), 0)

    def _promote(self, sequence: ParkedSequence, nbytes: int) -> int:
        of_each = sum([self._layers[index].parked.pools.layout.nbytes for index in sequence.tables])
        share, came = max(nbytes // max(of_each, 1), 1), 0
        for index, table in sequence.tables.items():
            layer = self._layers[index]
            pools = layer.parked.pools
            runs = [run for run in table.resolve() if run.state is State.HOST and not run.corrupt]
            if pools.device is None or not runs:
                continue
            count = min(share, sum([run.count for run in runs]))
            missing = count - layer.device.obtainable(pools, ordered=True)
            if missing > 0:
                self._evict_others(sequence, pools, missing)
            with contextlib.suppress(BudgetError, TransferError):
                found = layer.device.fetch(runs, count, None, evict=False)
                came += sum([run.count for run in found]) * pools.layout.nbytes
        return came

    def on_host(self, sequences: Iterable[ParkedSequence]) -> bool:
        """Whether a block of these is on the host only, where there is a device tier."""
        return any(
            run.state is State.HOST
            for sequence in sequences
            for index, table in sequence.tables.items()
            if self._layers[index].parked.pools.device is not None
            for run in table.resolve()
        )

    def _evict_others(self, but: ParkedSequence, pools: Pools, count: int) -> None:
        """Let up to `count` blocks of others that no cache uses leave the device, without waiting."""
        for sequence in list(self._on_device):
            if sequence is but:
                return  # what is behind it was woken later
            if sequence.users:
                continue
            for index, table in sequence.tables.items():
                layer = self._layers[index]
                if layer.parked.pools is not pools:
                    continue
                for run in reversed(list(table.resolve())):
                    if count <= 0:
                        return
                    if run.state in RESIDENT and run.parts is None and run.refs == 1:
                        count -= layer.device.leave([run], count)

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
            self._on_device.pop(sequence, None)
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
            self._on_device[found] = None
            found.length = length  # last, as in `park`
        if start < sequence.length:
            self.pin(sequence, min(sequence.pinned, start))
            self.shorten(sequence, start)
        return found

    def _bytes(self) -> int:
        return sum([x.parked.blocks * x.parked.pools.layout.nbytes for x in self._layers.values()])

    # What caches use

    def claim(self) -> BaseException | None:
        """Claim what is pinned, and what caches continue, once, however many do. Returns the error where there is no
        room for it."""
        memory = self.memory
        before, error, used = dict(self.owner.claims), None, self._used()
        # What is claimed stays so until the new claim is there: whoever is asked for room may let others in.
        self.owner.claims = {device: claim for device, claim in before.items() if device in used}
        for device, mine in used.items():
            refused = memory.admit(self.owner, device, lambda limit, mine=mine: mine)  # type: ignore[misc]
            if refused is not None:
                error = too_small(*refused, "What is continued or pinned needs")
                self.owner.claims = before
                break
        return error

    def relax(self) -> None:
        """Claim what is continued or pinned now: caches have ended since, or dropped what they continued."""
        self.owner.claims = self._used()

    def _used(self) -> dict[ComputeDevice, Claim]:
        used = dict[ComputeDevice, Claim]()
        for index, layer in self._layers.items():
            layout = layer.parked.pools.layout
            tables = [table for x in layer.parked.holders if isinstance(x, LayerKV) for table in x.tables]
            counts = {run: run.count for run in distinct(tables) if run.blocks is layer.parked}
            for sequence in self._pinned:
                if index in sequence.tables:
                    left = -(-sequence.pinned // layout.block_size)
                    for run in sequence.tables[index].resolve():
                        if left <= 0:
                            break
                        counts[run] = max(counts.get(run, 0), min(run.count, left))
                        left -= run.count
            count = sum(counts.values())
            if count:
                mine = used.get(layer.device, Claim())
                sizes = [x for x in (mine.smallest, layout.nbytes) if x]
                used[layer.device] = Claim(
                    mine.held + count * layout.nbytes,
                    slot=max(mine.slot, layout.nbytes),
                    smallest=min(sizes),
                    largest=max(mine.largest, layout.nbytes),
                )
        return used

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
        for those in (self._on_device, self._pinned):
            for sequence in [x for x in those if x not in self.sequences]:
                del those[sequence]
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
