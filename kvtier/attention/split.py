"""Split attention: each block is attended in place, and the parts are merged by log-sum-exp (Neo, section 3).

A layer's KV is in three parts: on the device, arriving there, on the host. CPU threads attend to the host's part
through runs of blocks, while the device attends to its own; what is arriving is waited for as late as possible. Any
partition is exact. On a CPU model without a device tier there is one part, and it is the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvtier.attention.call import AttentionCall, Result, count_host, sequences_of, threads_of
from kvtier.attention.host_part import HostPart
from kvtier.attention.partition import Part, Partition
from kvtier.attention.reader import LayerReader
from kvtier.cpu import fallback, native
from kvtier.kernels import launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.memory.access.readers import Reading
from kvtier.memory.blocks import residency
from kvtier.tables.layer import LayerKV

#: Queries per sequence up to which host threads serve where there is a device: with more, arithmetic counts and not
#: memory, so blocks go there; see `streaming`. Where the CPU is all there is, see `_serves_prompts`.
MAX_HOST_QUERIES = 16


def can_attend(layer: LayerKV, queries: int = 1) -> bool:
    """Whether host threads serve a step of so many queries per sequence on this layer, whatever is asked, so that it
    needs no workspace for it."""
    return native.available() and _fits(layer, queries)


def _fits(layer: LayerKV, queries: int) -> bool:
    """Whether blocks are attended to in place where a step has so many queries per sequence."""
    layout = layer.layout
    return (
        layout.dtype in native.DTYPES
        and layout.k_heads == layout.v_heads
        and (queries <= MAX_HOST_QUERIES or _serves_prompts(layer))
        and not (torch.is_grad_enabled() and layer.carries_graph)
    )


def _serves_prompts(layer: LayerKV) -> bool:
    """Whether host threads attend with any number of queries: nothing is faster where there is no device."""
    device = layer.device
    return device.slabs is None and device.device.type == "cpu" and native.serves_prompts()


def serves(reader: LayerReader, query: torch.Tensor, params: AttentionParams, queries: int = 0) -> bool:
    """Whether `attend` can take this call. What it cannot take is streamed, or read as one tensor.

    Args:
        queries: of any one sequence at the most; 0: those of `query`.
    """
    layer, layout = reader.layer, reader.layer.layout
    if (
        query.dtype is not layout.dtype
        or query.shape[1] % layout.k_heads
        or (query.requires_grad and torch.is_grad_enabled())
        or not _fits(layer, queries or query.shape[2])
    ):
        return False
    mask = params.mask
    if mask is not None and (mask.dtype not in native.MASKS or mask.requires_grad):
        return False
    device = layer.device.device
    if device.type != "cpu" and not layer.may_be_spilled:
        if launch.available(device):
            return True
        # Without Triton torch's own kernel is the best there is, if one tensor of the layer fits as well.
        if layer.workspace_bytes(layer.length) <= layer.device.home.budget.free + reader.workspace.nbytes:
            return False
    return native.available() or fallback.serves(queries or query.shape[2], layout.k_dim, layout.v_dim, params)


def attend(
    reader: LayerReader,
    lengths: int | Sequence[int],
    query: torch.Tensor,
    params: AttentionParams,
    *,
    cu_queries: Sequence[int] | None = None,
    pause: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Attention of `query` over the first tokens of each sequence of a layer, in place.

    Args:
        reader: of the layer.
        lengths: tokens of every row, or of each.
        query: `[rows, heads, queries, k_dim]`, the last tokens of each row; with `cu_queries`, those of all rows end to
            end, `[1, heads, total, k_dim]` or `[total, heads, k_dim]`. On the layer's device.
        params: scale, masks and biases, of which `serves` approved.
        cu_queries: `[rows + 1]` ints, where the queries of each row begin and end; a row may have none.
        pause: called when the query is on its way to the host and the device has its part, if there is both: other work
            may be given to the device meanwhile, and blocks may move.

    Returns:
        The shape of `query` with v_dim, in its dtype.

    Raises:
        TransferError: a fetch failed.
    """
    with reader.memory.lock:
        reader.memory.mend()
        partition = reader.partition(lengths)
        reading = reader.begin()
    in_one_memory = reader.in_one_memory and native.available()
    if pause is not None and partition.host and reader.device.slabs is not None and not in_one_memory:
        return _in_halves(AttentionCall(reader, lengths, query, cu_queries), partition, params, reading, pause)
    try:
        if in_one_memory:
            return _whole(reader, partition, lengths, query, params, cu_queries)
        return _attend(AttentionCall(reader, lengths, query, cu_queries), partition, params)
    finally:
        reader.end(reading)


def _in_halves(
    call: AttentionCall,
    partition: Partition,
    params: AttentionParams,
    reading: Reading | None,
    pause: Callable[[], None],
) -> torch.Tensor:
    """A call with a pause, before which the device has its part and the query is on its way to the host."""
    reader = call.reader
    try:
        _count(reader, partition)
        parts = _Parts(call, partition, params)
    except BaseException:
        reader.end(reading)
        raise
    try:
        try:
            parts.attend_on_device(partition.device)
            parts.attend_on_device(partition.arriving)
        finally:
            reader.end(reading)
        return _after_pause(parts, pause)
    finally:
        parts.end()


def _after_pause(parts: _Parts, pause: Callable[[], None]) -> torch.Tensor:
    """The second half of an attention call: the host's part, and the merge.

    Nothing is read while others go on, and no slot is held. They may have moved blocks: then the call is made again.
    """
    call, reader, partition = parts.call, parts.call.reader, parts.partition
    pause()
    with reader.memory.lock:
        reader.memory.mend()
        now = reader.partition(call.lengths)
        reading = reader.begin()
    try:
        if now is not partition and now.host.rows != partition.host.rows:
            parts.end()
            return _attend(call, now, parts.params)
        parts.begin_on_host()
        return parts.finish()
    finally:
        reader.end(reading)


def _whole(
    reader: LayerReader,
    partition: Partition,
    lengths: int | Sequence[int],
    query: torch.Tensor,
    params: AttentionParams,
    cu_queries: Sequence[int] | None,
) -> torch.Tensor:
    """All parts in memory that the CPU reads, and nothing to wait for: one call of the native library.

    Written out, as it runs once per layer and token.
    """
    began, host = time.perf_counter(), partition.host
    _count(reader, partition)
    if partition.incoming:
        arrive(reader, partition)
    part = partition.whole()
    out = native.attend(
        reader.shape,
        query,
        sequences_of(part, lengths),
        params,
        threads=threads_of(reader),
        cu_queries=cu_queries,
    )
    if host:
        count_host(reader, host, began, (time.perf_counter() - began) * host.blocks / part.blocks)
    return out


def _count(reader: LayerReader, partition: Partition) -> None:
    """Count what is attended to."""
    counters, host = reader.counters, partition.host
    counters.block_hits += partition.device.blocks
    if host:
        counters.host_attended += 1
        counters.host_blocks += host.blocks
        counters.host_bytes += host.blocks * host.nbytes


def arrive(reader: LayerReader, partition: Partition) -> None:
    """Let the compute stream wait for what is arriving."""
    with reader.memory.lock:
        reader.device.engine.follow()  # for what it has arrived meanwhile, another thread's stream has waited
        for run in partition.incoming:
            for part in run.leaves():
                residency.arrive(part)
        for move in partition.moves:
            if move.transfer is not None:
                move.transfer.wait()


def _attend(call: AttentionCall, partition: Partition, params: AttentionParams) -> torch.Tensor:
    """Over all parts, without a pause."""
    reader, device, host = call.reader, partition.device, partition.host
    _count(reader, partition)
    if not partition.arriving and not (device and host):
        if device:
            return call.on_device(device, params, alone=True)[0]
        if reader.device.slabs is None:
            return call.on_host(host, params, alone=True)[0]
    parts = _Parts(call, partition, params)
    try:
        if call.query.device.type == "cpu":
            parts.begin_on_host()  # there is nothing to launch first
        parts.attend_on_device(device)
        if call.query.device.type != "cpu":
            parts.begin_on_host()
        parts.attend_on_device(partition.arriving)
        return parts.finish()
    finally:
        parts.end()


class _Parts:
    """The parts of one call, which are attended to in place and then merged. `end` it, whatever happens.

    Args:
        call: its arguments.
        partition: where its blocks are.
        params: scale, masks and biases.
    """

    def __init__(self, call: AttentionCall, partition: Partition, params: AttentionParams) -> None:
        self.call, self.partition, self.params = call, partition, params
        self._results: list[Result] = []
        #: From now on its query is on the way there.
        self._host = HostPart(call, partition.host, params) if partition.host else None
        # Sinks count once: in the host's part, or in the first one of the device.
        self._own = params if self._host is None else replace(params, **(self._host.on_device | {"sinks": None}))

    def attend_on_device(self, part: Part) -> None:
        """The device attends to its own part, or waits for what is arriving and attends to that."""
        if part:
            if part is self.partition.arriving:
                arrive(self.call.reader, self.partition)
            self._results.append(self.call.on_device(part, self._own))
            if self._own.sinks is not None:
                self._own = replace(self._own, sinks=None)

    def begin_on_host(self) -> None:
        """CPU threads attend to the host's part from now on, if there is one."""
        if self._host is not None:
            self._host.begin()

    def finish(self) -> torch.Tensor:
        """All parts together, in the query's dtype."""
        if self._host is not None:
            self._host.wait()
            self._results.append(self._host.result())
        return merge(self._results, self.call.query.dtype)

    def end(self) -> None:
        """The call has ended, well or not."""
        if self._host is not None:
            self._host.end()


def merge(parts: list[Result], dtype: torch.dtype) -> torch.Tensor:
    """The attention over all parts together, in `dtype`."""
    first = parts[0][0]
    if len(parts) == 1:
        return first.to(dtype)
    small = first.device.type == "cpu" and first.dim() <= 4 and dtype in native.DTYPES and native.available()
    if small and not launch.available(first.device):
        return native.merge(parts, first if dtype is first.dtype else torch.empty_like(first, dtype=dtype))
    return paged.merge(parts, dtype=dtype)[0]
