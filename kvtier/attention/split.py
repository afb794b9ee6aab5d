"""Split attention: each block is attended in place, and the parts are merged by log-sum-exp (Neo, section 3).

A layer's KV is in three parts: on the device, arriving there, on the host. CPU threads attend to the host's part
through runs of blocks, while the device attends to its own; what is arriving is waited for as late as possible. Any
partition is exact. On a CPU model without a device tier there is one part, and it is the whole.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtier import tracing
from kvtier.attention.partition import Part, Partition
from kvtier.attention.reader import LayerReader
from kvtier.cpu import fallback, native
from kvtier.errors import TransferError
from kvtier.kernels import launch, paged
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import memory_at
from kvtier.memory.blocks import residency
from kvtier.memory.owner import Owner
from kvtier.memory.storage.buffers import IoBuffer, bytes_of
from kvtier.memory.storage.layout import BlockLayout
from kvtier.tables.layer import LayerKV
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.engine import Direction

#: Queries per sequence up to which host threads serve where there is a device: with more, arithmetic counts and not
#: memory, so blocks go there; see `streaming`. Where the CPU is all there is, see `_serves_prompts`.
MAX_HOST_QUERIES = 16

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


def can_attend(layer: LayerKV, queries: int = 1) -> bool:
    """Whether host threads serve a step of so many queries per sequence on this layer, whatever is asked, so that it
    needs no workspace for it."""
    layout = layer.layout
    graph = torch.is_grad_enabled() and layer.carries_graph
    if graph or layout.dtype not in native.DTYPES or layout.k_heads != layout.v_heads or not native.available():
        return False
    return queries <= MAX_HOST_QUERIES or _serves_prompts(layer)


def _serves_prompts(layer: LayerKV) -> bool:
    """Whether host threads attend with any number of queries: nothing is faster where there is no device."""
    device = layer.device
    return device.slabs is None and device.device.type == "cpu" and native.serves_prompts()


def serves(reader: LayerReader, query: torch.Tensor, params: AttentionParams, queries: int = 0) -> bool:
    """Whether `attend` can take this call. What it cannot take is streamed, or read as one tensor.

    Args:
        queries: of any one sequence at the most; 0: those of `query`.
    """
    layer = reader.layer
    layout = layer.layout
    heads, queries = query.shape[1], queries or query.shape[2]
    if (
        (queries > MAX_HOST_QUERIES and not _serves_prompts(layer))
        or query.dtype is not layout.dtype
        or layout.dtype not in native.DTYPES
        or layout.k_heads != layout.v_heads
        or heads % layout.k_heads
        or (torch.is_grad_enabled() and (query.requires_grad or layer.carries_graph))
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
    return native.available() or fallback.serves(queries, layout.k_dim, layout.v_dim, params)


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
    try:
        if reader.in_one_memory and native.available():
            return _whole(reader, partition, lengths, query, params, cu_queries)
        call = _Call(reader, lengths, query, cu_queries)
        if pause is None or not partition.host or reader.device.slabs is None:
            return call.attend(partition, params)
        begun = _Begun(call, partition, params)
    finally:
        reader.end(reading)
    return _after_pause(begun, pause)


def _after_pause(begun: _Begun, pause: Callable[[], None]) -> torch.Tensor:
    """The second half of an attention call: the host's part, and the merge.

    Nothing is read while others go on, and no slot is held. They may have moved blocks: then the call is made again.
    """
    call, reader, partition = begun.call, begun.call.reader, begun.partition
    try:
        pause()
        with reader.memory.lock:
            reader.memory.mend()
            now = reader.partition(call.lengths)
            reading = reader.begin()
        try:
            if now is not partition and now.host.rows != partition.host.rows:
                begun.end()
                return call.attend(now, begun.params)
            return begun.finish()
        finally:
            reader.end(reading)
    finally:
        begun.end()


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
    began, counters, host = time.perf_counter(), reader.counters, partition.host
    counters.block_hits += partition.device.blocks
    if partition.incoming:
        arrive(reader, partition)
    part = partition.whole()
    out = native.attend(
        reader.shape,
        query,
        _sequences(part, lengths),
        params,
        threads=_threads(reader),
        cu_queries=cu_queries,
    )
    if host:
        counters.host_attended += 1
        counters.host_blocks += host.blocks
        counters.host_bytes += host.blocks * host.nbytes
        _count_host(reader, host, began, (time.perf_counter() - began) * host.blocks / part.blocks)
    return out


def _count_host(reader: LayerReader, part: Part, began: float, seconds: float) -> None:
    """Host threads attended to a part, from `began` on."""
    reader.counters.host_seconds += seconds
    tracer = tracing.active
    if tracer is not None:
        tracer.host(reader.counters, reader.layer.index, began, seconds, part.blocks, part.blocks * part.nbytes)


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


def _sequences(part: Part, lengths: int | Sequence[int]) -> native.Sequences:
    """The blocks of a part and the lengths of a call, for the native library."""
    sequences = part.sequences()
    if isinstance(lengths, int):
        sequences.set_length(lengths)
    else:
        sequences.set_lengths(lengths)
    return sequences


def _threads(reader: LayerReader) -> int:
    """How many threads attend. Without a team of OpenMP's to borrow, that may be the library's own."""
    if not reader.owner.uses_threads:
        reader.owner.uses_threads = True
        _users.add(reader.owner)
    return torch.get_num_threads()


class _Call:
    """One call of `attend`, whose arguments it has."""

    __slots__ = ("cu_queries", "lengths", "query", "reader")

    def __init__(
        self, reader: LayerReader, lengths: int | Sequence[int], query: torch.Tensor, cu_queries: Sequence[int] | None
    ) -> None:
        self.reader = reader
        self.lengths = lengths
        self.query = query
        self.cu_queries = cu_queries

    def attend(self, partition: Partition, params: AttentionParams) -> torch.Tensor:
        """Over all parts."""
        device, host = partition.device, partition.host
        self.count(partition)
        if partition.arriving or (device and host):
            return self._at_once(partition, params)
        if device:
            return self.on_device(device, params, alone=True)[0]
        if self.reader.device.slabs is None:
            return self._on_host(host, params, alone=True)[0]
        return self._at_once(partition, params)

    def count(self, partition: Partition) -> None:
        """Count what is attended to."""
        counters, host = self.reader.counters, partition.host
        counters.block_hits += partition.device.blocks
        if host:
            counters.host_attended += 1
            counters.host_blocks += host.blocks
            counters.host_bytes += host.blocks * host.nbytes

    def _at_once(self, partition: Partition, params: AttentionParams) -> torch.Tensor:
        """The host's part on CPU threads, meanwhile the device's own, then what is arriving."""
        reader, query, own = self.reader, self.query, params
        host: _HostPart | None = None
        parts: list[Result] = []
        if partition.host:
            host = _HostPart(self, partition.host, params)
            own = replace(params, **(host.on_device | {"sinks": None}))
        try:
            if host is not None and query.device.type == "cpu":
                host.begin()  # there is nothing to launch first
            if partition.device:
                parts.append(self.on_device(partition.device, own))
                own = own if own.sinks is None else replace(own, sinks=None)
            if host is not None and query.device.type != "cpu":
                host.begin()
            if partition.arriving:
                arrive(reader, partition)
                parts.append(self.on_device(partition.arriving, own))
            if host is not None:
                host.wait()
                parts.append(host.result())
        finally:
            # Whatever happens, nobody gives memory back while threads still read it.
            if host is not None:
                host.end()
        return merge(parts, query.dtype)

    def on_device(self, part: Part, params: AttentionParams, *, alone: bool = False) -> Result:
        """The attention over blocks that the device reads, in fp32; `alone`: it is the whole, in the query's dtype."""
        query = self.query
        if query.device.type == "cpu" and native.available() and not launch.available(query.device):
            return self._native(part, params, alone)
        dtype = query.dtype if alone else torch.float32
        table, params = part.table(query.device), _params_on(params, query.device)
        if self.cu_queries is None and type(self.lengths) is int:
            return self.reader.prepared(dtype)(query, table, self.lengths, params)
        return self._paged(query, part, params, dtype)

    def _on_host(self, part: Part, params: AttentionParams, *, alone: bool = False) -> Result:
        """The same over blocks in host memory, of a query that is there too."""
        began = time.perf_counter()
        if native.available():
            result = self._native(part, params, alone)
        else:
            result = self.plain(part, self.query, params, self.query.dtype if alone else torch.float32)
        _count_host(self.reader, part, began, time.perf_counter() - began)
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
            _sequences(part, self.lengths),
            params,
            threads=_threads(reader),
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


def _up(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    with torch.inference_mode(False):
        made = torch.tensor(numbers, dtype=dtype, device=_HOST)
        return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def merge(parts: list[Result], dtype: torch.dtype) -> torch.Tensor:
    """The attention over all parts together, in `dtype`."""
    first = parts[0][0]
    if len(parts) == 1:
        return first.to(dtype)
    small = first.device.type == "cpu" and first.dim() <= 4 and dtype in native.DTYPES and native.available()
    if small and not launch.available(first.device):
        return native.merge(parts, first if dtype is first.dtype else torch.empty_like(first, dtype=dtype))
    return paged.merge(parts, dtype=dtype)[0]


class _Begun:
    """The first half of a call with a part on the host: its query is on the way there, and the device has its own part,
    and waits for what is arriving. `end` it, whatever happens.

    Args:
        call, partition, params: as of `_Call.attend`.
    """

    def __init__(self, call: _Call, partition: Partition, params: AttentionParams) -> None:
        self.call, self.partition, self.params = call, partition, params
        self._parts: list[Result] = []
        call.count(partition)
        self._host = _HostPart(call, partition.host, params)
        try:
            own = replace(params, **(self._host.on_device | {"sinks": None}))
            for part in (partition.device, partition.arriving):
                if part:
                    if part is partition.arriving:
                        arrive(call.reader, partition)
                    self._parts.append(call.on_device(part, own))
        except BaseException:
            self.end()
            raise

    def finish(self) -> torch.Tensor:
        """The host attends, and the parts are merged."""
        self._host.begin()
        self._host.wait()
        return merge([*self._parts, self._host.result()], self.call.query.dtype)

    def end(self) -> None:
        """The call has ended, well or not."""
        self._host.end()


class _HostPart:
    """The host's part of one call: the query comes down, CPU threads attend, the result goes up.

    Args:
        call: whose part it is.
        part: what is on the host.
        params: of the call.

    Attributes:
        on_device: masks, sinks and biases on the query's device.
    """

    def __init__(self, call: _Call, part: Part, params: AttentionParams) -> None:
        self._of, self._part = call, part
        reader, query = call.reader, call.query
        layout, engine = reader.layer.layout, reader.device.engine
        # Masks, sinks and biases come down with the query: a copy of their own would wait for all the device has to do.
        self.on_device = {name: x.detach().to(query.device).contiguous() for name, x in _tensors(params).items()}
        self._future: native.Future | None = None
        self._arrived = False
        self._began = 0.0
        self._waits: tracing.Time | None = None
        with reader.memory.lock:
            self._buffers = reader.io_buffers
            misses = self._buffers.misses
            self._buffer: IoBuffer = self._buffers.take(
                query.shape, layout.v_dim, layout.dtype, bytes_of(self.on_device.values())
            )
            self._buffers.in_use = True
            reader.counters.io_buffer_misses += self._buffers.misses - misses
            others: dict[str, Any] = self._buffer.room_for(self.on_device)
            self._params = replace(params, **others) if others else params
            copies = [TensorCopy(query, self._buffer.query)]
            copies += [TensorCopy(self.on_device[name], x) for name, x in others.items()]
            blocks = self._buffers.blocks(self._buffer)
            if not blocks:
                self._down = self._buffer.last = engine.submit(copies, Direction.QUERY, reader.counters)
        if blocks:
            self._come_by()
            with reader.memory.lock:
                self._down = self._buffer.last = engine.submit(copies, Direction.QUERY, reader.counters)

    def _come_by(self) -> None:
        """Before copies that block the CPU until the device has come by: wait for that without the lock, so that others
        go on."""
        reader = self._of.reader
        with reader.memory.lock:
            event = reader.device.engine.mark()
        if event is not None:
            event.settle()

    def _receive(self) -> None:
        """Wait for the query. Others go on meanwhile."""
        self._arrived = True
        self._down.block()
        with self._of.reader.memory.lock:
            self._down.synchronize()

    def begin(self) -> None:
        """Wait for the query, and let the threads begin."""
        reader, buffer = self._of.reader, self._buffer
        self._receive()  # also the end of the last call's use of these tensors; see `IoBuffer`
        with reader.memory.lock:
            if reader.device.engine.asynchronous:
                reader.device.engine.poll()  # so what the last result's copy held on to is given up now
        if not native.available():
            began = time.perf_counter()
            out, lse = self._of.plain(self._part, buffer.query, self._params, torch.float32)
            buffer.out.copy_(out)
            buffer.lse.copy_(lse)
            _count_host(reader, self._part, began, time.perf_counter() - began)
            return
        self._began = time.perf_counter() if tracing.active is not None else 0.0
        # This thread goes on to launch the device's part, and helps when it waits.
        self._future = self._call().submit(max(_threads(reader) - 1, 1))

    def _call(self) -> native.Call:
        """The call over a layer's blocks, made once for as long as nothing but the numbers changes."""
        call, params, buffer = self._of, self._params, self._buffer
        layer, sequences = call.reader.layer, _sequences(self._part, call.lengths)
        key = (sequences, params.scale, params.causal, params.window)
        repeated = params.plain and call.cu_queries is None
        found = buffer.calls.get(layer.index)
        if repeated and found is not None and found[0] == key:
            return found[1]
        made = native.Call(
            call.reader.shape,
            buffer.query,
            sequences,
            params,
            buffer.out,
            buffer.lse,
            cu_queries=call.cu_queries,
        )
        if repeated:
            buffer.calls[layer.index] = (key, made)
        return made

    def wait(self) -> None:
        """Until no thread reads or writes any more. The device has its own part of the call by now."""
        if tracing.active is not None:
            self._waits = self._of.reader.device.engine.stamp()
        if self._future is not None:
            self._future.wait()
            _count_host(self._of.reader, self._part, self._began, self._future.seconds)

    def end(self) -> None:
        """The call has ended, well or not: others may have the memory."""
        try:
            if self._future is not None:
                self._future.wait()
            if not self._arrived:  # it was never asked for, and must not come into the next call's buffer
                with contextlib.suppress(TransferError):
                    self._receive()
        finally:
            self._buffers.in_use = False

    def result(self) -> Result:
        """(out, lse) on the query's device, fp32."""
        reader, buffer = self._of.reader, self._buffer
        up = [torch.empty_like(x, device=self._of.query.device) for x in (buffer.out, buffer.lse)]
        copies = [TensorCopy(buffer.out, up[0]), TensorCopy(buffer.lse, up[1])]
        if self._buffers.blocks(buffer):
            self._come_by()
        with reader.memory.lock:
            back = buffer.last = reader.device.engine.submit(copies, Direction.RESULT, reader.counters)
            back.wait()
        tracer = tracing.active
        if tracer is not None and self._waits is not None:
            tracer.waited(
                reader.counters, reader.layer.index, reader.device.name, self._waits, reader.device.engine.stamp()
            )
        return up[0], up[1]


def _tensors(params: AttentionParams) -> dict[str, Any]:
    found = {name: getattr(params, name) for name in ("mask", "first_valid", "sinks", "slopes")}
    return {name: x for name, x in found.items() if x is not None}


def _params_on(params: AttentionParams, device: torch.device) -> AttentionParams:
    moved = {name: x.to(device) for name, x in _tensors(params).items() if x.device != device}
    return replace(params, **moved) if moved else params


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
