"""What attention reads through: fetched copies of far blocks and one layer's KV as one tensor, both near; and what its
queries and results pass through on their way to host threads and back. All of it counted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvtier.errors import BudgetError, TransferError
from kvtier.planning import placement
from kvtier.storage.block import Block
from kvtier.storage.transfer import Transfer, join
from kvtier.types import Direction

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.tiers import Tiers

#: Masks, sinks and biases are given room in multiples of so many bytes.
_STEP = 16 * 2**10


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

    def arrives(self) -> bool:
        """Order what the compute stream does from now on behind the fetch. False if that failed."""
        try:
            self.transfer.wait()
        except TransferError:
            return False
        return True


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
        tidying = tiers.tidying(layer.layout)
        tidying.step(keep=layer)
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
        tidying.fetched(slots)
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
        good: bool | None = None  # not known before somebody wants to keep one
        tails = sum(len(x.tables()) for x in self._tiers.layers)
        reserve = self._tiers.reserve(layer.layout)
        others = max((x.missing_estimate() for x in self._tiers.layers if x is not layer), default=0)
        for block, slot in zip(staging.blocks, staging.slots, strict=True):
            live = block.refs > 0 and block.near is None and block.sealed
            keep = live and good is not False and self._keeps(layer, reserve, tails, others)
            if keep and good is None:
                # Who reads the block from now on waits for nothing; and if it was fetched ahead in vain, nobody has.
                keep = good = staging.arrives()
            if keep:
                block.near = slot
                pool.owner[slot] = block
                layer.resident[block] = None
                layer.block_moved(block)
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
        near = self._tiers.near
        data = near.allocate(roomy, luxury=True)
        # Each time that the machine does not have what the budget allows, the budget shrinks, and more has to leave.
        while data is None and self._tiers.reclaim(nbytes, None):
            data = near.allocate(nbytes)
        if data is None and (near.make_way(nbytes) or near.insist(near.budget.used + nbytes)):
            data = near.allocate(nbytes)
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


class Handover:
    """Host memory through which a query, its masks and biases come down and a result goes up: page-locked for a CUDA
    device.

    One call after the other uses it; a call's copies have ended when the next one's query has arrived, for that comes
    down behind the compute stream, which waited for them.

    Args:
        data: `uint8`, `nbytes` of the shape at least.
        shape: (batch, heads, queries, k_dim, v_dim) of the call.
        dtype: of the query.

    Attributes:
        query: `[batch, heads, queries, k_dim]`.
        out, lse: `[batch, heads, queries, v_dim]` and `[batch, heads, queries]`, fp32.
        calls: by layer, what its last call was made for and the call, to be repeated.
        last: the last copy from or to it, behind all others.
    """

    __slots__ = ("_end", "_shape", "calls", "data", "last", "lse", "out", "query")

    def __init__(self, data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.data = data
        self.calls: dict[int, tuple[object, Any]] = {}
        self.last: Transfer | None = None
        self._shape: object = None
        self._end = 0
        self.fit(shape, dtype)

    def fit(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Lay the tensors out for another shape."""
        if self._shape == (shape, dtype):
            return
        ends = _ends(shape, dtype)
        with torch.inference_mode(False):  # the next call may be outside it
            self.query = self.data[: ends[0]].view(dtype)[: math.prod(shape[:4])].view(shape[:4])
            out = self.data[ends[0] : ends[1]].view(torch.float32)
            self.out = out[: math.prod(shape[:3]) * shape[4]].view(*shape[:3], shape[4])
            self.lse = self.data[ends[1] : ends[2]].view(torch.float32)[: math.prod(shape[:3])].view(shape[:3])
        self.calls.clear()
        self._shape, self._end = (shape, dtype), ends[2]

    def room_for(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A tensor like each of these, behind query and result, for whom `HandoverArea.take` made `room_of` bytes."""
        found, begin = {}, self._end
        for name, x in tensors.items():
            found[name] = self.data[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
            begin += _aligned(x.nbytes)
        return found


def _ends(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int, int]:
    """Where query, result and its weights end, each begun at a multiple of 64 bytes."""
    batch, heads, queries, k_dim, v_dim = shape
    rows = batch * heads * queries
    query, out, lse = map(_aligned, (rows * k_dim * dtype.itemsize, rows * v_dim * 4, rows * 4))
    return query, query + out, query + out + lse


def room_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that these take on their way; in large steps, for masks grow with every token."""
    return -(-sum(_aligned(x.nbytes) for x in tensors) // _STEP) * _STEP


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class HandoverArea:
    """Keeps one `Handover` for the calls of a device, as large as the largest, in the host budget.

    Blocks come first: it is given back when one of them needs the room, and where there is none, a call gets memory of
    its own, which is as any activation.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._kept: Handover | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the host budget that are kept for it."""
        return 0 if self._kept is None else self._kept.data.numel()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, more: int = 0) -> Handover:
        """What the next call's query, `[batch, heads, queries, k_dim]` of `dtype`, masks and result pass through.

        Args:
            shape: (batch, heads, queries, k_dim, v_dim).
            dtype: of the query.
            more: bytes for what else comes down; see `room_of`.
        """
        nbytes = _ends(shape, dtype)[-1] + more
        if self._kept is not None and self._kept.data.numel() >= nbytes:
            self._kept.fit(shape, dtype)
            return self._kept
        far = self._tiers.far
        assert far is not None, "without a tier below, queries have nowhere to go"
        data = None
        if nbytes <= far.budget.free + self.nbytes:
            self.release()
            with contextlib.suppress(BudgetError):  # the machine has none that could be page-locked
                data = far.allocate(nbytes)
        if data is not None:
            self._kept = Handover(data, shape, dtype)
            return self._kept
        self._tiers.counters.handover_misses += 1
        with torch.inference_mode(False):
            return Handover(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), shape, dtype)

    def release(self) -> None:
        """Give it back, if there is one."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if kept.last is not None:
            with contextlib.suppress(TransferError):
                kept.last.synchronize()  # it is still at work in what is given back
        assert self._tiers.far is not None
        self._tiers.far.release(kept.data)
