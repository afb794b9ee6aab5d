"""`Fetching`: blocks come from the host to a device, ahead of their use or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from kvtier.errors import TransferError
from kvtier.memory.blocks import reclaim, residency
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.tiers.room import Room
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.planning import sizing
from kvtier.stats import Counters
from kvtier.transfer.engine import Event
from kvtier.transfer.engine import State as TransferState

#: Blocks that move at one fetch to bring together what is free, and fetches until that is looked at again.
PACKED_BLOCKS, PACK_INTERVAL = 8, 64


class Fetching:
    """The way up. The caller of every method holds the memory's lock.

    Args:
        tier: where blocks go.
        room: finds slots for them.
    """

    def __init__(self, tier: DeviceTier, room: Room) -> None:
        self._tier = tier
        self._room = room
        self._scattered = False
        self._until_pack = 0

    def fetch(
        self, runs: Sequence[Run], most: int, keep: BlockSet | None, *, evict: bool, counters: Counters | None = None
    ) -> list[Run]:
        """Begin to fetch runs of one set that are on the host only, as many of the first blocks as there is room for.

        Args:
            runs: in the order of use.
            most: blocks, at the most.
            keep: blocks that are not evicted for it.
            evict: make room for one block if there is none; else only what is free or may be allocated.
            counters: of who asks; None: of who owns the set.

        Returns:
            What is on its way, possibly nothing.

        Raises:
            BudgetError, TransferError: `evict`, and there is no room for one block, or the copy failed at once.
        """
        if not runs:
            return []
        pools = runs[0].blocks.pools
        self._tier.poll()
        self._pack(pools, keep)
        behind: list[Event] = []
        chosen = self._slots_for(pools, runs, most, keep, behind, evict=evict)
        if not chosen:
            return []
        if self._tier.poison:
            self._tier.note_writes()  # free slots were filled
        written = self._tier.written
        if written is not None:
            behind.append(written)
        # Slots in rising order: neighbours at both ends are one copy.
        self._scattered = sizing.scattered(len(chosen), sum(run.count for run, _ in chosen))
        transfer = residency.fetch(chosen, behind if self._tier.engine.asynchronous else None, counters)
        if transfer.state is TransferState.FAILED:
            if evict:
                transfer.wait()  # raises
            return []
        return [run for run, _ in chosen]

    def _slots_for(
        self, pools: Pools, runs: Sequence[Run], most: int, keep: BlockSet | None, behind: list[Event], *, evict: bool
    ) -> list[tuple[Run, int]]:
        """Take device slots for the first `most` blocks of runs, or for as many as there is room for.

        Args:
            behind: gets what a copy into these slots waits for.
            pools, runs, most, keep, evict: see `fetch`.

        Returns:
            Parts of the runs, and where the slots of each begin.
        """
        assert pools.device is not None
        chosen: list[tuple[Run, int]] = []
        try:
            last: int | None = None
            for run in runs:
                rest: Run | None = run
                while rest is not None and most > 0:
                    wanted = min(rest.count, most)
                    if evict and not chosen:
                        start, n = self._room.take(pools, wanted, last, keep=keep, behind=behind)
                    else:
                        found = self._room.take_free(pools.device, wanted, last, behind)
                        if found is None:
                            most = 0
                            break
                        start, n = found
                    if rest.parts is not None or rest.state is not State.HOST:  # making room has brought it
                        pools.device.give(start, n, self._tier.fence())
                        break
                    part, rest = residency.cut(rest, n) if n < rest.count else (rest, None)
                    chosen.append((part, start))
                    last = start + n - 1
                    most -= n
            if self._tier.audit is not None:
                self._tier.audit.moved([run for run, _ in chosen])
        except BaseException:
            for run, start in chosen:
                pools.device.give(start, run.count, self._tier.fence())
            raise
        return chosen

    def _pack(self, pools: Pools, keep: BlockSet | None) -> None:
        """Before a fetch: where the last ones found free slots scattered, move a few blocks to bring them together."""
        self._until_pack -= 1
        if not self._scattered or self._until_pack > 0 or pools.device is None:
            return
        self._until_pack = PACK_INTERVAL
        if not self._tier.readers.others():
            movable = [
                x
                for x in self._tier.placed(pools.device)
                if x.run.blocks is not keep and residency.can_move(x.run) and x.run.sealed
            ]
            reclaim.pack(pools.device, movable, PACKED_BLOCKS, self._tier.fence)
            self._tier.note_writes()

    def promote(self, layout: BlockLayout | None) -> bool:
        """Bring a block from the host to a free slot and give up its host slot. Whether there was one."""
        if self._room.reclaiming:
            return False  # free slots are what is wanted: blocks would go up and down for ever
        for each in self._tier.sets:
            pools = each.pools
            if pools.device is None or not each.counts[State.HOST] or layout not in (None, pools.layout):
                continue
            if self._room.slot_without_eviction(pools.device):
                run = next(run for run in each.runs if run.state is State.HOST)
                with contextlib.suppress(TransferError):
                    for part in self.fetch([run], 1, None, evict=False):
                        residency.arrive(part)
                        residency.drop_copy(part, self._tier.readers.fence())
                        self._tier.host.poll()
                        return True
        return False
