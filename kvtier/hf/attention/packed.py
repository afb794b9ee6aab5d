"""Attention of a packed step: a mask that names the step, and what is attended under it."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import FrameType

import torch

from kvtier.errors import UnsupportedError
from kvtier.forward.sub_batch import SubBatch
from kvtier.frames import is_running
from kvtier.hf.attention.view import KVView
from kvtier.kernels.params import AttentionParams

#: Of the forward under way, and the call that runs it. A variable of the context: forwards that take turns in a thread
#: have one each.
_under_way: ContextVar[tuple[SubBatch, FrameType] | None] = ContextVar("kvtier.packed", default=None)


class PackedMask(torch.Tensor):
    """What stands for the mask of a packed forward: what it computes, and how far a token sees. It has no elements.

    Attributes:
        batch: that the forward computes.
        window: tokens that a token sees, itself included; 0: all.
    """

    batch: SubBatch
    window: int

    def to(self, *args: object, **kwargs: object) -> PackedMask:
        """Itself: without elements it is on every device. Accelerate's hooks take it to that of each layer."""
        return self


def packed_mask(local_size: int | None) -> PackedMask | None:
    """The mask of the packed forward under way; None: there is none."""
    found = _under_way.get()
    if found is None:
        return None
    batch, call = found
    if not is_running(call):  # an interrupt came between its end and `packing`'s: this is a forward of another's
        _under_way.set(None)
        return None
    made = torch.empty(0).as_subclass(PackedMask)
    made.batch, made.window = batch, local_size or 0
    return made


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PackedMask,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention of a packed step: `[1, heads, tokens, v_dim]`.

    Raises:
        UnsupportedError: a kind of attention that cannot be packed.
    """
    rows = query.shape[0]
    if rows > 1:  # a ragged step: a row for each segment
        return by_rows(attend_packed(module, end_to_end(query), key, value, mask, params), rows)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types and "chunk" in types[module.layer_idx]:
        raise UnsupportedError("chunked attention is not packed")
    if params.mask is not None:
        raise UnsupportedError("biases of positions are not packed")
    if isinstance(key, KVView) and isinstance(value, KVView) and key.snapshot is value.snapshot:
        at = key.snapshot
        plain = key.form == value.form == 0 and key.repeats == value.repeats and at._dense is None
        if plain and (key.part, value.part) == (0, 1):
            return at.forward.attend(at.reader, at.length, at.epoch, query, params)
    key, value = (x.dense("attention") if isinstance(x, KVView) else x for x in (key, value))
    return mask.batch.attend_dense(query, key, value, params)


def end_to_end(x: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, tokens, dim]` -> `[1, heads, rows * tokens, dim]`."""
    return x if x.shape[0] == 1 else x.transpose(0, 1).flatten(1, 2)[None]


def by_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The opposite: `[1, heads, rows * tokens, dim]` -> `[rows, heads, tokens, dim]`."""
    return x if rows == 1 else x[0].unflatten(1, (rows, -1)).transpose(0, 1)


class packing:
    """Within the block, the forward under way is that of a sub-batch."""

    def __init__(self, batch: SubBatch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        self._before = _under_way.set((self._batch, sys._getframe(1)))

    def __exit__(self, *error: object) -> None:
        _under_way.reset(self._before)
