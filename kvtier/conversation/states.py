"""Layers that keep a window or a recurrent state: what they hold is of one position, so it is copied there, to go back
to it. Nothing of a copy is ever handed to a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvtier.hf.cache.layer import TieredLayer
from kvtier.hf.models.layers import keeps_nothing

#: The layers of a cache that Transformers keeps, by index.
States = dict[int, Any]
#: The dimension of their tensors that has the rows of the batch, where that is not the first one.
_ROWS_IN = {"indexer_position_ids": 1}


def has_states(layers: Sequence[Any]) -> bool:
    """Whether some layers keep more or less than all keys and values."""
    return any(_is_state(layer) for layer in layers)


def copied(layers: Sequence[Any], row: int | None = None) -> States:
    """Copies of the layers that are not tiered and hold something; of one row of the batch, or of all."""
    return {i: _copy(layer, row) for i, layer in enumerate(layers) if _is_state(layer)}


def row_of(states: States, row: int) -> States:
    """Copies of some states, of one row of the batch."""
    return {i: _copy(layer, row) for i, layer in states.items()}


def joined(rows: Sequence[States]) -> States:
    """Copies of some states of one row each, as a batch."""
    first, *others = rows
    found = {i: _copy(layer) for i, layer in first.items()}
    if others:
        for i, layer in found.items():
            _join(layer, [row[i] for row in rows])
    return found


def nbytes(states: States) -> int:
    """Bytes that they take."""
    return sum(x.nbytes for layer in states.values() for _, x in _tensors(layer) if _batched(x))


def _is_state(layer: Any) -> bool:
    return not isinstance(layer, TieredLayer) and not keeps_nothing(layer)


def _copy(layer: Any, row: int | None = None) -> Any:
    """A copy of one row of the batch, or of all."""
    with torch.inference_mode(False), torch.no_grad():
        parts = {
            id(x): x if row is None or not _batched(x) else x.narrow(_ROWS_IN.get(name, 0), row, 1)
            for name, x in _tensors(layer)
        }
        for part in parts.values():
            if part.is_cuda:  # made on another stream, perhaps, to which its memory returns when it is dropped
                part.record_stream(torch.cuda.current_stream(part.device))
        return copy.deepcopy(layer, {key: part.detach().clone() for key, part in parts.items()})


def _tensors(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a layer, each with the name of the attribute that has it."""
    found = []
    for name, value in vars(layer).items():
        values = value.values() if isinstance(value, dict) else (value,)
        found += [(name, x) for x in values if isinstance(x, torch.Tensor)]
    return found


def _batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 1


def _join(layer: Any, rows: Sequence[Any]) -> None:
    for name, value in list(vars(layer).items()):
        each = [vars(row)[name] for row in rows]
        if _batched(value):
            setattr(layer, name, torch.cat(each, _ROWS_IN.get(name, 0)))
        elif isinstance(value, dict):
            setattr(
                layer, name, {k: torch.cat([x[k] for x in each], 0) if _batched(v) else v for k, v in value.items()}
            )


# On their way to a disk


def packed_states(states: States) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors by name, and what else the layers hold, as JSON takes it; None where that cannot be said."""
    tensors, about = dict[str, torch.Tensor](), dict[str, Any]()
    for i, layer in states.items():
        mine: dict[str, Any] = {}
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                tensors[f"s.{i}.{name}"] = value
            elif isinstance(value, dict):
                rest = {}
                for key, x in value.items():
                    if isinstance(x, torch.Tensor):
                        tensors[f"s.{i}.{name}.{key}"] = x
                    elif _plain(x) and isinstance(key, int):
                        rest[str(key)] = x
                    else:
                        return None
                mine[name] = {"dict": rest}
            elif _plain(value):
                mine[name] = {"value": value}
            elif isinstance(value, torch.dtype):
                mine[name] = {"dtype": str(value).removeprefix("torch.")}
            elif isinstance(value, torch.device):
                mine[name] = {"device": True}
            else:
                return None
        about[str(i)] = mine
    return {name: x.contiguous() for name, x in tensors.items()}, about


def unpacked_states(
    tensors: dict[str, torch.Tensor],
    about: dict[str, Any],
    layers: Mapping[int, Any],
    device: Callable[[int], torch.device],
) -> States | None:
    """The layers again, made of new ones, each where `device` says; None where these are others."""
    found: States = {}
    for index, mine in about.items():
        i = int(index)
        if i not in layers:
            return None
        layer = layers[i]
        for name, each in mine.items():
            if "dict" in each:
                setattr(layer, name, {int(key): x for key, x in each["dict"].items()})
            elif "value" in each:
                setattr(layer, name, each["value"])
            elif "dtype" in each:
                setattr(layer, name, getattr(torch, each["dtype"]))
            elif "device" in each:
                setattr(layer, name, device(i))
        found[i] = layer
    for full, x in tensors.items():
        which, *where = full.split(".")
        if which != "s":
            continue
        i, name = int(where[0]), where[1]
        if len(where) == 3:
            vars(found[i])[name][int(where[2])] = x.to(device(i))
        else:
            setattr(found[i], name, x.to(device(i)))
    return found


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
