"""Memory that attention passes through, counted in the budgets: workspaces, and pinned I/O buffers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from kvtier.errors import TransferError
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.transfer.engine import Transfer

#: Masks, sinks and biases are given room in multiples of so many bytes.
_STEP = 16 * 2**10


class Reclaimable(Protocol):
    """Memory that can be given back between two uses."""

    def release_idle(self) -> int:
        """Give it back unless it is in use. Returns the bytes."""


class Workspace:
    """Memory in which one layer's KV is laid out as one tensor. Its contents do not last from one use to the next.

    Args:
        slabs: where it is allocated.
        make_room: frees so many bytes of the budget, or raises `BudgetError`.

    Attributes:
        version: changes when the memory does.
        in_use: a reader holds tensors over it.
        views: keys and values of the last reader, for the next one of the same shape.
        plans: by layer, how its blocks are copied to here: views of this memory and of slabs; see `attention.dense`.
    """

    def __init__(self, slabs: SlabAllocator, make_room: Callable[[int], None]) -> None:
        self._slabs = slabs
        self._make_room = make_room
        self._data: torch.Tensor | None = None
        self.version = 0
        self.in_use = False
        self.views: tuple[tuple[object, ...], torch.Tensor, torch.Tensor] | None = None
        self.plans: dict[int, object] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it has now."""
        return 0 if self._data is None else self._data.numel()

    @property
    def slabs(self) -> list[torch.Tensor]:
        """What it has of `slabs`."""
        return [] if self._data is None else [self._data]

    def take(self, nbytes: int, most: int | None = None) -> torch.Tensor:
        """At least `nbytes`, for one layer's KV as one tensor.

        Args:
            nbytes: a multiple of 64.
            most: what was promised, where other threads may need the rest while this is in use; None: nobody else does.

        Raises:
            BudgetError: the budget cannot hold it and what cannot move.
        """
        most = None if most is None else max(most, nbytes)
        if self._data is not None and self.nbytes >= nbytes and (most is None or self.nbytes <= most):
            return self._data
        self.release()
        # A sixteenth more than asked, if it is free, saves replacing it at every block.
        more = nbytes // 16 if most is None else min(nbytes // 16, most - nbytes)
        data = self._slabs.allocate(nbytes + more // 64 * 64, optional=True)
        while data is None:
            # Each time that the machine lacks what the budget allows, the budget shrinks, and more has to leave.
            self._make_room(nbytes)
            data = self._slabs.allocate(nbytes)
        self._data = data
        return data

    def shrink(self, nbytes: int) -> None:
        """Give it back where it has much more than `nbytes`, which are asked for from now on."""
        if not self.in_use and self.nbytes > 2 * nbytes:
            self.release()

    def release(self) -> None:
        """Give it back."""
        if self._data is not None:
            # First what refers to it: whatever cuts this short, nobody reads memory that is given back.
            self.views = None
            self.plans.clear()
            self.version += 1
            data, self._data = self._data, None
            self._slabs.release(data)

    def release_idle(self) -> int:
        """Give it back unless it is in use."""
        nbytes = 0 if self.in_use else self.nbytes
        if nbytes:
            self.release()
        return nbytes


class IoBuffer:
    """Host memory through which a query, its masks and biases come down and a result goes up: page-locked for a CUDA
    device.

    One call after the other uses it; a call's copies have ended when the next one's query has arrived, for that comes
    down behind the compute stream, which waited for them.

    Args:
        data: `uint8`, `nbytes_for` the shape at least.
        shape: of the query.
        v_dim: of the result.
        dtype: of the query.

    Attributes:
        query: `[rows, heads, queries, k_dim]`, or `[total, heads, k_dim]` of a ragged batch.
        out, lse: the shape of the query with v_dim, and without dim, fp32.
        calls: by layer, what its last call was made for and the call, to be repeated.
        last: the last copy from or to it, behind all others.
    """

    __slots__ = ("_end", "_shape", "calls", "data", "last", "lse", "out", "query")

    def __init__(self, data: torch.Tensor, shape: Sequence[int], v_dim: int, dtype: torch.dtype) -> None:
        self.data = data
        self.calls: dict[int, tuple[object, Any]] = {}
        self.last: Transfer | None = None
        self._shape: object = None
        self._end = 0
        self.fit(shape, v_dim, dtype)

    def fit(self, shape: Sequence[int], v_dim: int, dtype: torch.dtype) -> None:
        """Lay the tensors out for another shape."""
        key = (tuple(shape), v_dim, dtype)
        if self._shape == key:
            return
        ends, rows = _ends(shape, v_dim, dtype), shape[:-1]
        with torch.inference_mode(False):  # the next call may be outside it
            self.query = self.data[: ends[0]].view(dtype)[: math.prod(shape)].view(*shape)
            self.out = self.data[ends[0] : ends[1]].view(torch.float32)[: math.prod(rows) * v_dim].view(*rows, v_dim)
            self.lse = self.data[ends[1] : ends[2]].view(torch.float32)[: math.prod(rows)].view(*rows)
        self.calls.clear()
        self._shape, self._end = key, ends[2]

    def room_for(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A tensor like each of these, behind query and result, for whom `IoBuffers.take` made `bytes_of` room."""
        found, begin = {}, self._end
        for name, x in tensors.items():
            found[name] = self.data[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
            begin += _aligned(x.nbytes)
        return found


def _ends(shape: Sequence[int], v_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Where query, result and its weights end, each begun at a multiple of 64 bytes."""
    n = math.prod(shape[:-1])
    query, out, lse = map(_aligned, (n * shape[-1] * dtype.itemsize, n * v_dim * 4, n * 4))
    return query, query + out, query + out + lse


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that these take on their way; in large steps, for masks grow with every token."""
    return -(-sum(_aligned(x.nbytes) for x in tensors) // _STEP) * _STEP


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class IoBuffers:
    """Keeps one `IoBuffer` for the calls of one cache on one device, as large as the largest, in the host budget.

    Blocks come first: it is given back when one of them needs the room, and where there is none, a call gets memory of
    its own, as an activation.

    Attributes:
        in_use: a call is under way.
        misses: calls that got memory of their own.
    """

    def __init__(self, slabs: SlabAllocator) -> None:
        self._slabs = slabs
        self._kept: IoBuffer | None = None
        self.in_use = False
        self.misses = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the host budget that are kept for it."""
        return 0 if self._kept is None else self._kept.data.numel()

    @property
    def slabs(self) -> list[torch.Tensor]:
        """What it has of the host's slabs."""
        return [] if self._kept is None else [self._kept.data]

    def take(self, shape: Sequence[int], v_dim: int, dtype: torch.dtype, more: int = 0) -> IoBuffer:
        """What the next call's query, masks and result pass through.

        Args:
            shape: of the query.
            v_dim: of the result.
            dtype: of the query.
            more: bytes for what else comes down; see `bytes_of`.
        """
        nbytes = _ends(shape, v_dim, dtype)[-1] + more
        if self._kept is not None and self._kept.data.numel() >= nbytes:
            self._kept.fit(shape, v_dim, dtype)
            return self._kept
        data = None
        if nbytes <= self._slabs.budget.free + self.nbytes:
            self.release()
            # The machine may have none that could be page-locked.
            with contextlib.suppress(MemoryError):
                data = self._slabs.allocate(nbytes)
        if data is not None:
            try:
                self._kept = IoBuffer(data, shape, v_dim, dtype)
            except Exception:
                self._slabs.release(data)
                raise
            return self._kept
        self.misses += 1
        with torch.inference_mode(False):
            return IoBuffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), shape, v_dim, dtype)

    def is_pageable(self, buffer: IoBuffer) -> bool:
        """Whether a buffer is not page-locked."""
        return not self._slabs.is_mapped(buffer.data)

    def release(self) -> None:
        """Give it back, if there is one."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        if kept.last is not None:
            with contextlib.suppress(TransferError):
                kept.last.synchronize()  # it is still at work in what is given back
        self._slabs.release(kept.data)

    def release_idle(self) -> int:
        """Give it back unless a call is under way."""
        nbytes = 0 if self.in_use else self.nbytes
        if nbytes:
            self.release()
        return nbytes
