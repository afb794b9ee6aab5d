"""The host's part of an attention call (Neo, section 3.1): the query comes down, CPU threads attend, the result goes
up."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from kvtier import tracing
from kvtier.attention.call import AttentionCall, Result, count_host, sequences_of, tensors_of, threads_of
from kvtier.attention.partition import Part
from kvtier.cpu import native
from kvtier.errors import TransferError
from kvtier.kernels.params import AttentionParams
from kvtier.memory.storage.buffers import IoBuffer, bytes_of
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.engine import Direction


class HostPart:
    """The host's part of one call. `end` it, whatever happens: nobody gives memory back while threads still read it.

    Args:
        call: whose part it is.
        part: what is on the host.
        params: of the call.

    Attributes:
        on_device: masks, sinks and biases on the query's device.
    """

    def __init__(self, call: AttentionCall, part: Part, params: AttentionParams) -> None:
        self._of, self._part = call, part
        reader, query = call.reader, call.query
        layout, engine = reader.layer.layout, reader.device.engine
        # Masks, sinks and biases come down with the query: a copy of their own would wait for all the device has to do.
        self.on_device = {name: x.detach().to(query.device).contiguous() for name, x in tensors_of(params).items()}
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
            self._copies_block = engine.pageable_copies_block and self._buffers.is_pageable(self._buffer)
            if not self._copies_block:
                self._down = self._buffer.last = engine.submit(copies, Direction.QUERY, reader.counters)
        if self._copies_block:
            try:
                self._come_by()
                with reader.memory.lock:
                    self._down = self._buffer.last = engine.submit(copies, Direction.QUERY, reader.counters)
            except BaseException:
                self._buffers.in_use = False  # nobody has this to end it
                raise

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
            count_host(reader, self._part, began, time.perf_counter() - began)
            return
        self._began = time.perf_counter() if tracing.active is not None else 0.0
        # This thread goes on to launch the device's part, and helps when it waits.
        self._future = self._call().submit(max(threads_of(reader) - 1, 1))

    def _call(self) -> native.Call:
        """The call over a layer's blocks, made once for as long as nothing but the numbers changes."""
        call, params, buffer = self._of, self._params, self._buffer
        layer, sequences = call.reader.layer, sequences_of(self._part, call.lengths)
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
            count_host(self._of.reader, self._part, self._began, self._future.seconds)

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
        if self._copies_block:
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
