"""What attention reads through: fetched copies of far blocks, and one layer's KV as one tensor. Both near, both
counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvtier.errors import BudgetError, TransferError
from kvtier.planning import placement
from kvtier.storage.block import Block
from kvtier.storage.transfer import State, Transfer, join
from kvtier.types import Direction

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.tiers import Tiers


class Staging:
    """Fetched blocks of one layer: near slots that hold copies of far blocks, for one use.

    Attributes:
        blocks: in the order of the slots.
        slots: near slots, one reference each.
        transfer: the fetch that fills them.
    """

    __slots__ = ("blocks", "slots", "transfer")

    def __init__(self, blocks: list[Block], slots: list[int], transfer: Transfer) -> None:
        self.blocks = blocks
        self.slots = slots
        self.transfer = transfer


class StagingArea:
    """Fetches far blocks into near slots, ahead of need where there is room.

    Attributes:
        staged: what was fetched ahead and not used yet, by layer.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.staged: dict[LayerStore, Staging] = {}

    def fetch(self, layer: LayerStore, blocks: Sequence[Block], *, ahead: bool) -> Staging | None:
        """Fetch far blocks of one layer, as many of the first of `blocks` as staging has room for.

        Args:
            layer: whose blocks.
            blocks: without near slots, in the order of use.
            ahead: a prefetch: give up rather than raise, and evict nobody.

        Returns:
            What is on its way; None if `ahead` and there is no room.
        """
        pool, far = self._tiers.near_pool(layer.layout), self._tiers.far_pool(layer.layout)
        assert far is not None
        tiers, slots = self._tiers, list[int]()
        tiers.engine.poll()
        try:
            slots.append(self._first_slot(layer, ahead))
            while len(slots) < len(blocks) and tiers.obtainable(layer.layout):
                slots.append(tiers.take(layer, slots[-1], None, keep=layer))
        except (BudgetError, TransferError):
            if not slots and not ahead:
                raise
        except BaseException:
            for slot in slots:
                pool.release(slot)
            raise
        if not slots:
            return None
        slots.sort()  # neighbours at both ends are one copy
        chosen = list(blocks[: len(slots)])
        after = [b.pending for b in chosen if b.pending is not None]
        sources = [b.far for b in chosen if b.far is not None]
        transfer = self._tiers.engine.submit(join(far, sources, pool, slots), Direction.FETCH, after=after)
        self._tiers.counters.block_fetches += len(chosen)
        if ahead:
            self._tiers.counters.prefetched += len(chosen)
        return Staging(chosen, slots, transfer)

    def _first_slot(self, layer: LayerStore, ahead: bool) -> int:
        if ahead and not self._tiers.obtainable(layer.layout):
            raise self._tiers.near_shortage(layer.layout.nbytes)
        try:
            return self._tiers.take(layer, None, None, keep=layer)
        except BudgetError:
            if ahead:
                raise
        # All that is left are this layer's own blocks; the reader has copied those that were resident.
        return self._tiers.take(layer, None, None)

    def prefetch(self, layer: LayerStore) -> None:
        """Begin to fetch what the next use of `layer` will miss, if nothing of it is on its way yet."""
        if self._tiers.far is None or layer in self.staged:
            return
        missing = layer.missing()
        if missing:
            staging = self.fetch(layer, missing, ahead=True)
            if staging is not None:
                self.staged[layer] = staging

    def finish(self, layer: LayerStore, staging: Staging) -> None:
        """After the last use of staged blocks: keep them on the device if there is ample room, else free the slots."""
        pool = self._tiers.near_pool(layer.layout)
        good = staging.transfer.state is not State.FAILED
        tails = sum(len(x.tables()) for x in self._tiers.layers)
        reserve = self._tiers.reserve(layer.layout)
        others = max((x.missing_estimate() for x in self._tiers.layers if x is not layer), default=0)
        for block, slot in zip(staging.blocks, staging.slots, strict=True):
            live = good and block.refs > 0 and block.near is None and block.sealed
            if live and self._keeps(layer, reserve, tails, others):
                block.near = slot
                pool.owner[slot] = block
                layer.resident[block] = None
                layer.version += 1
                self._tiers.counters.promotions += 1
            else:
                pool.release(slot)

    def _keeps(self, layer: LayerStore, reserve: int, tails: int, others: int) -> bool:
        free = self._tiers.obtainable(layer.layout)
        return placement.keep_fetched(free, reserve, tails, layer.missing_estimate(), others)

    def drop(self, layer: LayerStore | None = None) -> bool:
        """Forget the prefetches of one layer, or of all. True if there were any. Copies in flight keep their slots."""
        layers = list(self.staged) if layer is None else [layer] if layer in self.staged else []
        for each in layers:
            pool = self._tiers.near_pool(each.layout)
            for slot in self.staged.pop(each).slots:
                pool.release(slot)
        return bool(layers)


class Workspace:
    """Near memory in which one layer's KV is laid out as one tensor. Grows by being replaced: its contents do not last.

    Attributes:
        version: changes when the memory does.
        views: keys and values of the last reader, kept for the next one of the same shape.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._data: torch.Tensor | None = None
        self.version = 0
        self.views: tuple[tuple[object, ...], torch.Tensor, torch.Tensor] | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        """At least `nbytes` of near memory for one layer's KV as one tensor; contents are not kept between calls.

        Raises:
            BudgetError: the near budget cannot hold it beside what cannot move.
        """
        if self._data is not None and self._data.numel() >= nbytes:
            return self._data
        self.release()
        # A sixteenth more than asked, if it is free for the taking, saves re-making it at every block.
        roomy = nbytes + nbytes // 16 // 64 * 64
        if roomy > self._tiers.near.budget.free:
            roomy = nbytes
            self._tiers.reclaim(nbytes, None)
        data = self._tiers.near.allocate(roomy)
        if data is None:
            raise self._tiers.near_shortage(nbytes - self._tiers.near.budget.free)
        self._data = data
        return data

    def release_surplus(self, factor: int = 1) -> bool:
        """Cut the workspace down to what the next token needs if it is more than `factor` times that.

        Not while a reader uses it.

        Returns:
            Whether it was.
        """
        needed = max((x.workspace_bytes(x.length + 1) for x in self._tiers.layers if x.dense), default=0)
        if self.nbytes <= factor * needed:
            return False
        self.release()
        self._data = self._tiers.near.allocate(needed) if needed else None
        return True

    @property
    def nbytes(self) -> int:
        """Bytes the workspace has now."""
        return 0 if self._data is None else self._data.numel()

    def release(self) -> None:
        """Give the workspace back."""
        if self._data is not None:
            data, self._data = self._data, None
            self.views = None
            self.version += 1
            for layer in self._tiers.layers:
                layer.forget_plan()
            self._tiers.near.release(data)
