"""`Audit`: whether blocks in host memory still hold the bytes that were written.

A sealed block never changes. When its bytes are complete in host memory, a checksum of them is noted on its run, which
keeps it wherever the run goes. Later the bytes that a block's slots hold are compared with it: of some of the blocks
that are fetched or continued, and of some of those that host threads read in place. A block that differs (a flipped
bit, a slot that somebody else wrote into, the bytes of an older block, a slot number that is wrong) is marked, and
whoever comes by it gets an error: its bytes reach no token again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

from kvtier.config import FULL_AUDIT
from kvtier.cpu.checksum import checksums
from kvtier.errors import CorruptionError
from kvtier.memory.blocks.block import BlockSet, Run, State
from kvtier.memory.storage.pool import BlockPool

_WORD = (1 << 64) - 1
#: Where the bytes in a run's host slots are those of its blocks.
_VALID = frozenset((State.BOTH, State.ARRIVING, State.HOST))


class Audit:
    """Notes checksums and compares them. The caller of every method holds the memory's lock.

    Args:
        every: of so many blocks that are moved one is compared, and of so many calls that read blocks in place one
            block. 1: all of them, at each call.

    Attributes:
        full: whether nothing is left out.
        calls: attention calls until the next one that is looked at. Counted down without the lock: a call more or less
            does not matter.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.full = every == FULL_AUDIT
        self.calls = 1 if self.full else every
        self._random = random.Random(every)
        self._left = self._draw()  # blocks that move until the next one that is compared
        self._rest = self.every - self._left - 1  # and of the window of `every` blocks behind that one

    def _draw(self) -> int:
        # Anywhere in each window: of a pattern that comes again and again, every block has its turn.
        return self._random.randrange(self.every)

    # Note

    def note(self, run: Run) -> None:
        """The bytes of a sealed run are complete in host memory: note their checksums.

        Where copies go on in the background, their end is noticed by who launches a model's work, and must cost next to
        nothing: there, only some blocks have a checksum, which is compared at each of their moves.
        """
        if run.sums is not None or run.host is None:
            return
        if run.blocks.pools.device is None or self.full or not run.blocks.pools.engine.asynchronous:
            run.sums = _sums(run, 0, run.count)
            return
        chosen = self._chosen(run.count)
        if chosen:
            run.sums = array("Q", bytes(8 * run.count))
            for i in chosen:
                run.sums[i : i + 1] = _sums(run, i, 1)

    # Compare

    def moved(self, runs: Iterable[Run]) -> None:
        """Blocks of host memory go where they are read: compare some of them.

        Raises:
            CorruptionError: bytes differ. The block is marked.
        """
        for run in runs:
            check(run)
            if run.sums is None:
                continue
            if self.full or (run.blocks.pools.engine.asynchronous and run.blocks.pools.device is not None):
                self._compare(run, range(run.count))
            else:
                self._compare(run, self._chosen(run.count))

    def read(self, runs: Iterable[Run]) -> None:
        """Host threads are about to read runs, or may: compare all of them, or one block. Raises as `moved`."""
        self.calls = 0 if self.full else self.every
        known = [run for run in runs if run.sums is not None and run.state in _VALID]
        if self.full:
            for run in known:
                self._compare(run, range(run.count))
        elif known:
            at = self._random.randrange(sum([run.count for run in known]))
            for run in known:
                if at < run.count:
                    self._compare(run, (at,))
                    break
                at -= run.count

    def _chosen(self, count: int) -> list[int]:
        """Which of the next blocks are compared: one in each window of `every`."""
        found, at = [], self._left
        while at < count:
            found.append(at)
            after = self._draw()
            at += self._rest + after + 1
            self._rest = self.every - after - 1
        self._left = at - count
        return found

    def _compare(self, run: Run, indices: Iterable[int]) -> None:
        assert run.sums is not None
        if run.state not in _VALID:
            return
        counters = run.blocks.counters
        for i in indices:
            if not run.sums[i]:
                continue  # it was not chosen
            counters.audited_blocks += 1
            if _sums(run, i, 1)[0] != run.sums[i]:
                counters.corrupt_blocks += 1
                run.corrupt = True
                run.blocks.changed()  # nobody reads it by what was found out before
                check(run)


def check(run: Run) -> None:
    """Raise `CorruptionError` if a run was found to hold other bytes than were written."""
    if run.corrupt:
        raise CorruptionError(
            f"A block of layer {run.blocks.layer} in host memory does not hold the bytes that were written there. "
            "`reset()` the cache and compute its tokens again. If this happens again, suspect the machine's memory, or "
            "native code that writes past its own."
        )


def check_integrity(run: Run) -> None:
    """Raise AssertionError unless a run's checksums are those of its bytes."""
    pools = run.blocks.pools
    assert run.sealed or run.sums is None, "an open block has a checksum"
    assert run.sums is None or len(run.sums) == run.count, "a run has more or fewer checksums than blocks"
    if run.state in _VALID and not run.corrupt:
        assert run.sums is not None or pools.engine.asynchronous, "a block in host memory has no checksum"
        if run.sums is not None:
            found = [n or 1 for n in _sums(run, 0, run.count)]
            assert all(a in (0, b) for a, b in zip(run.sums, found, strict=True)), "a block holds other bytes"


def known(runs: Iterable[Run]) -> array[int]:
    """The checksum of each block of some runs, as they are noted; 0 where there is none."""
    found: array[int] = array("Q")
    for run in runs:
        found += array("Q", bytes(8 * run.count)) if run.sums is None else run.sums
    return found


def agree(a: array[int], b: array[int]) -> bool:
    """Whether two lists of checksums may be of the same blocks, as far as both go."""
    count = min(len(a), len(b))
    return a[:count] == b[:count] or all(x == y or not (x and y) for x, y in zip(a, b, strict=False))


def _sums(run: Run, first: int, count: int) -> array[int]:
    pool = run.blocks.pools.host
    assert run.host is not None
    return _nonzero(checksums(pool.address(run.host + first), count, pool.layout.nbytes, _seed(run.blocks, pool)))


def _nonzero(sums: array[int]) -> array[int]:
    """0 stands for a block without a checksum."""
    return sums if all(sums) else array("Q", [x or 1 for x in sums])


def _seed(blocks: BlockSet, pool: BlockPool) -> int:
    """Of a block's layer and layout: bytes that are right for another one are wrong here."""
    layout = pool.layout
    parts = (blocks.layer, layout.k_heads, layout.v_heads, layout.k_dim, layout.v_dim, layout.block_size)
    seed = layout.nbytes
    for part in parts:
        seed = (seed * 0x9E3779B97F4A7C15 + part + 1) & _WORD
    return seed
