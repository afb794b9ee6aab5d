"""One call of attention over some of a layer's blocks: on the device, or by CPU threads where they are."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtier import tracing
from kvtier.attention.partition import Part
from kvtier.attention.reader import LayerReader
from kvtier.cpu import fallback, native
from kvtier.kernels import launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import memory_at
from kvtier.memory.owner import Owner
from kvtier.memory.storage.layout import BlockLayout

_HOST = torch.device("cpu")

Result = tuple[torch.Tensor, torch.Tensor]  # (out, lse)

#: Caches for which threads of the native library may be at work or asleep.
_users: weakref.WeakSet[Owner] = weakref.WeakSet()


def release_threads(owner: Owner) -> None:
    """A cache is closed: with the last one, the library's threads end."""
    if owner in _users:
        _users.discard(owner)
        owner.uses_threads = False
        if not _users:
            native.library().kvtier_shutdown()


class AttentionCall:
    """One call, whose arguments it has; each of its methods attends to one part.

    Args:
        reader: of the layer.
        lengths, query, cu_queries: as of `split.attend`.
    """

    __slots__ = ("cu_queries", "lengths", "query", "reader")

    def __init__(
        self, reader: LayerReader, lengths: int | Sequence[int], query: torch.Tensor, cu_queries: Sequence[int] | None
    ) -> None:
        self.reader = reader
        self.lengths = lengths
        self.query = query
        self.cu_queries = cu_queries

    def on_device(self, part: Part, params: AttentionParams, *, alone: bool = False) -> Result:
        """The attention over blocks that the device reads, in fp32; `alone`: it is the whole, in the query's dtype."""
        query = self.query
        if query.device.type == "cpu" and native.available() and not launch.available(query.device):
            return self._native(part, params, alone)
        dtype = query.dtype if alone else torch.float32
        table, params = part.table(query.device), params_on(params, query.device)
        if self.cu_queries is None and type(self.lengths) is int:
            return self.reader.prepared(dtype)(query, table, self.lengths, params)
        return self._paged(query, part, params, dtype)

    def on_host(self, part: Part, params: AttentionParams, *, alone: bool = False) -> Result:
        """The same over blocks in host memory, of a query that is there too."""
        began = time.perf_counter()
        if native.available():
            result = self._native(part, params, alone)
        else:
            result = self.plain(part, self.query, params, self.query.dtype if alone else torch.float32)
        count_host(self.reader, part, began, time.perf_counter() - began)
        return result

    def _native(self, part: Part, params: AttentionParams, alone: bool) -> Result:
        """The same by the native library, on the threads of this process."""
        reader, query = self.reader, self.query
        layout = reader.layer.layout
        out = lse = None
        if not alone:
            shape = query.shape[:-1]
            out = torch.empty((*shape, layout.v_dim), dtype=torch.float32, device=_HOST)
            lse = torch.empty(shape, dtype=torch.float32, device=_HOST)
        out = native.attend(
            reader.shape,
            query,
            sequences_of(part, self.lengths),
            params,
            threads=threads_of(reader),
            out=out,
            lse=lse,
            cu_queries=self.cu_queries,
        )
        return out, lse  # type: ignore[return-value]

    def plain(self, part: Part, query: torch.Tensor, params: AttentionParams, dtype: torch.dtype) -> Result:
        """The same in torch."""
        layout = self.reader.layer.layout
        fits = self.cu_queries is None and type(self.lengths) is int
        if fits and fallback.serves(query.shape[2], layout.k_dim, layout.v_dim, params):
            out, lse = fallback.attend(query, _runs(layout, part, self.lengths), params)  # type: ignore[arg-type]
            return out.to(dtype), lse
        return self._paged(query, part, params, dtype)

    def _paged(self, query: torch.Tensor, part: Part, params: AttentionParams, dtype: torch.dtype) -> Result:
        layout, device, lengths, bounds = self.reader.layer.layout, query.device, self.lengths, self.cu_queries
        in_one_row = bounds is not None and query.dim() == 4
        if in_one_row:
            query = query[0].transpose(0, 1)
        out = torch.empty((*query.shape[:-1], layout.v_dim), dtype=dtype, device=device)
        ragged: dict[str, Any] = {}
        if bounds is not None:
            ragged["cu_queries"] = _up(bounds, torch.int32, device)
            ragged["max_queries"] = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
        count = lengths if isinstance(lengths, int) else _up(lengths, torch.int32, device)
        out, lse = paged.attend(query, part.table(device), layout, count, params, out=out, **ragged)
        return (out.transpose(0, 1)[None], lse.transpose(0, 1)[None]) if in_one_row else (out, lse)


def count_host(reader: LayerReader, part: Part, began: float, seconds: float) -> None:
    """Host threads attended to a part, from `began` on."""
    reader.counters.host_seconds += seconds
    tracer = tracing.active
    if tracer is not None:
        tracer.host(reader.counters, reader.layer.index, began, seconds, part.blocks, part.blocks * part.nbytes)


def sequences_of(part: Part, lengths: int | Sequence[int]) -> native.Sequences:
    """The blocks of a part and the lengths of a call, for the native library."""
    sequences = part.sequences()
    if isinstance(lengths, int):
        sequences.set_length(lengths)
    else:
        sequences.set_lengths(lengths)
    return sequences


def threads_of(reader: LayerReader) -> int:
    """How many threads attend. Without a team of OpenMP's to borrow, that may be the library's own."""
    if not reader.owner.uses_threads:
        reader.owner.uses_threads = True
        _users.add(reader.owner)
    return torch.get_num_threads()


def tensors_of(params: AttentionParams) -> dict[str, Any]:
    found = {name: getattr(params, name) for name in ("mask", "first_valid", "sinks", "slopes")}
    return {name: x for name, x in found.items() if x is not None}


def params_on(params: AttentionParams, device: torch.device) -> AttentionParams:
    moved = {name: x.to(device) for name, x in tensors_of(params).items() if x.device != device}
    return replace(params, **moved) if moved else params


def _up(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    with torch.inference_mode(False):
        made = torch.tensor(numbers, dtype=dtype, device=_HOST)
        return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _runs(layout: BlockLayout, part: Part, length: int) -> list[list[fallback.KeysAndValues]]:
    """For each row, runs of full blocks; the last block by itself if it is not full."""
    size = layout.block_size

    def blocks(address: int, count: int, tokens: int) -> fallback.KeysAndValues:
        keys, values = layout.split(memory_at(address, count * part.nbytes, _HOST))
        return keys[:, :, :tokens], values[:, :, :tokens]

    rows = []
    for row in part.rows:
        runs: list[fallback.KeysAndValues] = []
        for index, address, count in row:
            full = max(min(count, length // size - index), 0)
            if full:
                runs.append(blocks(address, full, size))
            if full < count:
                runs.append(blocks(address + full * part.nbytes, 1, length - (index + full) * size))
        rows.append(runs)
    return rows
