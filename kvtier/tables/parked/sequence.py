"""`ParkedSequence` and `ParkedLayer`: what is parked, by sequence and by layer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping

from kvtier.errors import CorruptionError
from kvtier.memory.blocks import audit
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import BlockSet, Run
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.tables.table import BlockTable


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

    def compare(self, tables: Mapping[int, BlockTable], memory: Audit) -> None:
        """Compare the blocks that a cache continues with what was parked, as far as the audit of the memory goes.

        Args:
            tables: by layer, what the cache has.

        Raises:
            CorruptionError: a block does not hold what was written, or is not this sequence's.
        """
        for index, table in tables.items():
            runs = table.resolve()
            sums = audit.known(runs)
            if not audit.agree(sums, self.sums[index]):
                raise CorruptionError(
                    f"The blocks of a parked sequence in layer {index} are not those that were parked. This is a fault "
                    "of kvtier: please report it. The sequence has to be computed again."
                )
            memory.moved(runs)
        self.note()

    def note(self) -> None:
        """Note checksums of blocks that were copied to the host since it was parked."""
        for index, sums in self.sums.items():
            for i, each in enumerate(audit.known(self.tables[index].resolve())):
                sums[i] = sums[i] or each


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
