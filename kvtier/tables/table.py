"""`BlockTable`: the blocks of one sequence in one layer, and its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import Run

#: Runs that a table may have more than after it joined what can be joined last.
_FRAGMENTS = 8


class BlockTable:
    """Block `i` holds the tokens `[i * block_size, (i + 1) * block_size)`, up to `length`.

    All blocks are sealed but possibly the last. A run may be held by several tables, a last block that is not full too,
    until one of them writes to it (copy on write).

    Attributes:
        length: tokens.
        runs: in order. A run that somebody else has cut stands for its parts: `resolve` first.
    """

    __slots__ = ("_joined", "length", "runs")

    def __init__(self, length: int = 0, runs: list[Run] | None = None) -> None:
        self.length = length
        self.runs: list[Run] = [] if runs is None else runs
        self._joined = 0

    @property
    def blocks(self) -> int:
        """Blocks, the last possibly not full."""
        return sum([run.count for run in self.runs])

    def resolve(self) -> list[Run]:
        """The runs, whole: whoever cut one has left its parts in it."""
        runs = self.runs
        for run in runs:
            if run.parts is not None:
                self.runs = runs = [leaf for run in runs for leaf in run.leaves()]
                break
        return runs

    def last(self) -> Run:
        """The run that has the last block."""
        last = self.runs[-1]
        return last if last.parts is None else self.resolve()[-1]

    def fork(self) -> BlockTable:
        """A second table with the same blocks."""
        runs = list(self.resolve())
        for run in runs:
            run.refs += 1
        return BlockTable(self.length, runs)

    def head(self, blocks: int) -> BlockTable:
        """A second table with the first `blocks` blocks, all full."""
        runs, left = list[Run](), blocks
        for run in self.resolve():
            if left <= 0:
                break
            part = residency.cut(run, left)[0] if run.count > left else run
            runs.append(part)
            left -= part.count
        for run in runs:
            run.refs += 1
        self.resolve()
        return BlockTable(0, runs)

    def tail(self, blocks: int) -> BlockTable:
        """A second table with all but the first `blocks` blocks."""
        runs, left = list[Run](), blocks
        for run in self.resolve():
            if left >= run.count:
                left -= run.count
                continue
            runs.append(residency.cut(run, left)[1] if left else run)
            left = 0
        for run in runs:
            run.refs += 1
        self.resolve()
        return BlockTable(0, runs)

    def crop(self, length: int, block_size: int, free: Callable[[Run], None]) -> bool:
        """Keep the first `length` tokens. Blocks that no table holds any more are freed. Whether any block went."""
        keep = -(-length // block_size)
        kept, self.length = 0, length
        for i, run in enumerate(self.resolve()):
            if kept + run.count > keep:
                gone, rest = self.runs[i:], self.runs[:i]
                if keep > kept:
                    left, gone[0] = residency.cut(run, keep - kept)
                    rest.append(left)
                self.runs = rest  # at once: whatever cuts this short, it has all of these tokens
                for each in gone:
                    release(each, free)
                return True
            kept += run.count
        return False

    def clear(self, free: Callable[[Run], None]) -> None:
        """Drop everything."""
        runs, self.runs, self.length = self.resolve(), [], 0
        for run in runs:
            release(run, free)

    def defragment(self) -> None:
        """Join runs that are neighbours in state and slots, now and then: so there are few."""
        if len(self.runs) <= 2 * self._joined + _FRAGMENTS:
            return
        runs: list[Run] = []
        for run in self.resolve():
            if runs and residency.can_join(runs[-1], run):
                residency.join(runs[-1], run)
            else:
                runs.append(run)
        self.runs, self._joined = runs, len(runs)


def release(run: Run, free: Callable[[Run], None]) -> None:
    """One table holds a run no longer."""
    run.refs -= 1
    if run.refs == 0:
        free(run)


def distinct(tables: Sequence[BlockTable]) -> dict[Run, None]:
    """The distinct runs of some tables, in table order."""
    return {run: None for table in tables for run in table.resolve()}
