"""`Eviction`: blocks leave a device for the host, and those that are about to are written back ahead of need."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from kvtier.errors import BudgetError, TransferError
from kvtier.memory.access.change import ask, asked
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.storage import shortage
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.planning.policy import Policy, checked_victims
from kvtier.transfer.engine import State as TransferState


class Eviction:
    """The way down. It knows nobody who wants the room. The caller of every method holds the memory's lock.

    Args:
        tier: whose blocks leave.
        policy: decides which.

    Attributes:
        withheld: blocks that could have left in the last `evict`, and the policy did not name.
    """

    def __init__(self, tier: DeviceTier, policy: Policy) -> None:
        self.policy = policy
        self.withheld = 0
        self._tier = tier

    def write_back(self, blocks: BlockSet, count: int) -> None:
        """Copy up to `count` of the blocks that are on the device only to the host, in the background: the oldest, as
        far as the host has room for them.

        Raises:
            BudgetError: the machine does not have what the host budget allows. TransferError: a copy could not begin.
        """
        chosen: list[tuple[Run, int]] = []
        try:
            while count and len(chosen) < len(blocks.dirty):
                run = blocks.dirty[len(chosen)]
                found = self._tier.host.take(blocks.pools.host, min(run.count, count), blocks.last_host, required=False)
                if found is None:
                    break
                start, n = found
                blocks.last_host = start + n - 1
                if n < run.count:
                    run = residency.cut(run, n)[0]
                chosen.append((run, start))
                count -= n
        except BaseException:
            for run, start in chosen:
                blocks.pools.host.give(start, run.count)
            raise
        if chosen:
            residency.write_back(chosen)

    def evict(self, pools: Pools, count: int, keep: BlockSet | None = None) -> int:
        """Let blocks of one layout leave the device, as the policy says. Returns how many left.

        Args:
            count: slots needed.
            keep: blocks that stay, for they are being read.

        Raises:
            BudgetError: the host is full. TransferError: a copy failed.
        """
        left, self.withheld = 0, 0
        for parked in self._tier.host.parked:
            left += parked.evict(pools, count - left)
        if left >= count:
            return left
        candidates = [each for each in self._tier.sets if each.pools is pools and each is not keep and each.evictable]
        if candidates:
            unnamed = {id(each): each.evictable for each in candidates}
            for candidate, blocks, latest_first in asked(checked_victims(ask(self.policy.victims, candidates, count))):
                if not any(candidate is each for each in candidates):
                    continue  # it was not asked about that: it may be being read
                assert isinstance(candidate, BlockSet)
                unnamed[id(candidate)] = max(unnamed[id(candidate)] - blocks, 0)
                left += self.evict_from(candidate, min(blocks, count - left), latest_first=latest_first)
                if left >= count:
                    break
            else:
                self.withheld = sum(unnamed.values())
        return left

    def evict_from(self, blocks: BlockSet, count: int, *, latest_first: bool = False) -> int:
        """Let up to `count` blocks of a set leave the device. Returns how many left. Raises as `evict`."""
        left = 0
        while left < count and blocks.resident:
            run = blocks.resident[-1 if latest_first else 0]
            if run.count > count - left:
                parts = residency.cut(run, run.count - count + left if latest_first else count - left)
                run = parts[1] if latest_first else parts[0]
            left += run.count
            self.evict_run(run)
        return left

    def evict_end(self, run: Run, most: int) -> int:
        """Let up to `most` of the last blocks of a run leave the device. Returns how many. Raises as `evict`."""
        part = residency.cut(run, run.count - most)[1] if run.count > most else run
        self.evict_run(part)
        return part.count

    def evict_run(self, run: Run) -> None:
        """Let a run on the device leave it. Moves no bytes if its host copy exists; else makes the copy first."""
        while run.state is not State.BOTH:
            if run.parts is not None:
                for part in run.leaves():
                    self.evict_run(part)
                return
            if run.state is State.DEVICE:
                self._write_back_run(run)
            elif run.state is State.LEAVING:
                assert run.move is not None
                assert run.move.transfer is not None
                run.move.transfer.synchronize()
            else:
                return
        residency.evict(run, self._tier.fence(run.blocks))

    def _write_back_run(self, run: Run) -> None:
        """Begin to copy this very run, or a part of it, to the host."""
        blocks = run.blocks
        found = self._tier.host.take(blocks.pools.host, run.count, blocks.last_host, required=True)
        if found is None:
            raise shortage.both_full(self._tier.host.slabs.budget, blocks.pools.layout.nbytes)
        start, n = found
        if run.state is not State.DEVICE or run.parts is not None:  # making room has changed it
            blocks.pools.host.give(start, n)
            return
        blocks.last_host = start + n - 1
        part = residency.cut(run, n)[0] if n < run.count else run
        transfer = residency.write_back([(part, start)])
        if transfer.state is TransferState.FAILED:
            transfer.wait()  # raises

    def leave(self, runs: Collection[Run], most: int) -> int:
        """Let up to `most` blocks of runs leave the device, without waiting for anything. Returns how many left.

        Those without a host copy get one, as far as the host has room, and can leave later.
        """
        left = 0
        if runs:
            self._tier.poll()  # copies that have ended
        for run in runs:
            for part in list(run.leaves()):  # making room on the host may have cut it
                if most <= 0:
                    return left
                if part.state not in (State.DEVICE, State.BOTH):
                    continue
                first = residency.cut(part, most)[0] if part.count > most else part
                most -= first.count
                if first.state is State.DEVICE:
                    with contextlib.suppress(BudgetError, TransferError):
                        self._write_back_run(first)
                for copied in list(first.leaves()):
                    if copied.state is State.BOTH:
                        residency.evict(copied, self._tier.fence(copied.blocks))
                        left += copied.count
        return left

    def cancel(self) -> bool:
        """Give up every fetch that is under way, and wait until no copy is. Whether there was any of either, or slots
        that had become free meanwhile."""
        arriving = [run for each in self._tier.sets for run in each.runs if run.state is State.ARRIVING]
        in_flight, held = bool(self._tier.engine.in_flight()), self._tier.held
        for run in arriving:
            residency.evict(run, self._tier.readers.fence())
        self._tier.engine.drain()
        self._tier.settle()
        self._tier.poll()
        return bool(arriving) or in_flight or self._tier.held < held
