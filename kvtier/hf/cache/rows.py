"""Arguments of `crop`, `reorder_cache` and the like, checked before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.errors import ConfigError, MismatchError


def whole_number(method: str, value: Any) -> int:
    """A number of tokens or of rows: an int, an integer of numpy, or (Transformers 5.17) a tensor of one integer.

    Raises:
        ConfigError: anything else. A float is not rounded.
    """
    try:
        if not isinstance(value, bool):
            number: Any = value.item() if isinstance(value, torch.Tensor) else value
            return operator.index(number)
    except (TypeError, RuntimeError):
        pass
    raise ConfigError(f"{method}({value!r}): give a whole number.")


def repeats(value: Any) -> int:
    """How often each row is repeated. Raises `ConfigError` unless it is a whole number of at least 1."""
    number = whole_number("batch_repeat_interleave", value)
    if number < 1:
        raise ConfigError(f"batch_repeat_interleave({number}): give a whole number of at least 1.")
    return number


def row_indices(method: str, rows: torch.Tensor | Sequence[int], batch: int | None, *, mask: bool) -> torch.Tensor:
    """Rows to take, as int64 on the host, in [0, batch).

    Args:
        method: for the message.
        rows: `[rows]`, integers; negative ones count from the end.
        batch: rows that there are; None: nobody knows yet.
        mask: whether `[batch]` bools may say which rows to keep.

    Raises:
        ConfigError: not integers (or bools).
        MismatchError: not one dimension, or rows that do not exist.
    """
    try:  # to the host once, not once for each layer
        indices = rows.detach().to("cpu") if isinstance(rows, torch.Tensor) else torch.as_tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{method}({rows!r}): give a tensor of row indices.") from error
    if not isinstance(rows, torch.Tensor) and not indices.numel():
        indices = indices.long()
    if indices.dtype == torch.bool and mask:
        if indices.dim() != 1 or (batch is not None and len(indices) != batch):
            raise MismatchError(f"{method}: a mask of shape {list(indices.shape)} does not fit {batch} rows.")
        return indices.nonzero().flatten()
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ConfigError(f"{method}: row indices are integers, not {indices.dtype}.")
    if indices.dim() != 1:
        raise MismatchError(f"{method}: row indices have one dimension, not shape {list(indices.shape)}.")
    indices = indices.long()
    if batch is not None:
        indices = torch.where(indices < 0, indices + batch, indices)
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < batch:
            raise MismatchError(f"{method}: rows {torch.as_tensor(rows).tolist()} are not all among {batch} rows.")
    return indices


def batch_of(layer: Any) -> int | None:
    """Rows of one of Transformers' own layers; None before its first update."""
    states = getattr(layer, "conv_states", None) or {}
    for held in (getattr(layer, "keys", None), *states.values()):
        if isinstance(held, torch.Tensor) and held.dim() > 1:
            return held.shape[0]
    return None
