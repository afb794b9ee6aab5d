"""`Repeat`: a decode step's attention call that is like the layer's last one, in as little Python as there can be.

Between two calls of a layer a model reads all of its weights, so nothing that Python needs is in a processor's cache:
what counts is how many functions and objects a call touches. What was found out for the last call holds for this one,
as long as nothing that it depends on has changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from kvtier.attention.reader import LayerReader
from kvtier.attention.split import MAX_HOST_QUERIES
from kvtier.attention.tangents import level
from kvtier.cpu import native
from kvtier.cpu.loader import check
from kvtier.kernels.params import AttentionParams


class Guard(Protocol):
    """Refuses a second thread, and use after what was cut short; see `forward.steps.Guard`."""

    holder: dict[int, list[int]]
    broken: bool


class Repeat:
    """A call of `split.attend` over blocks that the CPU reads, to be made again. One thread at a time.

    Args:
        reader: of the layer.
        length: tokens that it was over; one over as many blocks is like it.
        call: of the native library, at rest; nobody else repeats it.
        host_blocks, device_blocks: blocks that it reads.
        query: of the call.
        asked: the options of `scaled_dot_product_attention` as they were given, or parameters.
        repeats: as they were given.
        guard: around every use of the cache.
        schedules: as below.

    Attributes:
        schedules: what the cache's forward has to do behind a layer's attention, by device; empty: nothing.
    """

    __slots__ = (
        *("_asked", "_attend", "_audit", "_blocks", "_call", "_counters", "_device_blocks", "_dtype", "_guard"),
        *("_host_blocks", "_host_bytes", "_layer", "_least", "_lengths", "_memory", "_most", "_one", "_out_shape"),
        *("_out_strides", "_problem", "_reference", "_repeats", "_rows_version", "_sequences", "_shape", "_strides"),
        *("_version", "schedules"),
    )

    def __init__(
        self,
        reader: LayerReader,
        length: int,
        call: native.Call,
        host_blocks: int,
        device_blocks: int,
        query: torch.Tensor,
        asked: dict[str, Any] | AttentionParams,
        repeats: int,
        guard: Guard,
        schedules: Mapping[Any, Any],
    ) -> None:
        layer = reader.layer
        self._guard, self._audit, self.schedules = guard, reader.memory.audit, schedules
        self._counters, self._memory = reader.counters, reader.memory
        self._layer, self._rows_version = layer, layer.shape_version
        self._blocks, self._version = layer.blocks, layer.blocks.version
        size = layer.layout.block_size
        self._most = -(-length // size) * size
        self._least = self._most - size
        self._host_blocks, self._device_blocks = host_blocks, device_blocks
        self._host_bytes = host_blocks * layer.layout.nbytes
        self._shape, self._strides, self._dtype = query.shape, query.stride(), query.dtype
        self._asked, self._repeats = asked, repeats
        self._call, self._sequences = call, call.sequences  # held: the library reads what is theirs
        self._out_shape, self._out_strides = call.out_shape, call.out_strides
        self._lengths, self._one = call.sequences.length_words, call.sequences.rows == 1
        self._attend, self._reference, self._problem = call.function, call.reference, call.problem

    @staticmethod
    def of(
        reader: LayerReader,
        length: int,
        query: torch.Tensor,
        params: AttentionParams | None,
        options: dict[str, Any] | None,
        repeats: int,
        guard: Guard,
        schedules: Mapping[Any, Any],
    ) -> Repeat | None:
        """What repeats the call that was just made; None if it cannot be known to be the same next time."""
        layer = reader.layer
        if (
            params is None
            or not params.plain
            or params.causal  # as torch takes it: only where there are as many queries as tokens
            or params.window
            or not (reader.host_attention and reader.in_one_memory and reader.memory.private)
            or query.shape[2] > MAX_HOST_QUERIES
            or layer.carries_graph
            or query.requires_grad
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        with reader.memory.lock:
            partition = reader.partition(length)
            if partition.incoming:
                return None
            sequences = partition.whole().sequences()
        call = sequences.take(query, params)
        if call is None:
            return None
        blocks = (partition.host.blocks, partition.device.blocks)
        asked = params if options is None else options
        return Repeat(reader, length, call, *blocks, query, asked, repeats, guard, schedules)

    def __call__(
        self,
        query: torch.Tensor,
        length: int,
        epoch: int,
        asked: dict[str, Any] | AttentionParams | None,
        repeats: int,
        audited: bool = False,
    ) -> torch.Tensor | None:
        """The attention of `query` over the first `length` tokens, at an epoch of the layer.

        Args:
            audited: the caller counts it as a call that reads blocks, for the memory's audit.

        Returns:
            None if this is another call, or the blocks are to be compared first, or the cache is in use.
        """
        blocks, layer, audit = self._blocks, self._layer, self._audit
        if not (
            blocks.version == self._version
            and layer.shape_version == self._rows_version
            and layer.epoch == epoch
            and self._least < length <= self._most
            and length <= layer.length
            and query.shape == self._shape
            and query.stride() == self._strides
            and query.dtype is self._dtype
            and query.is_cpu
            and not query.requires_grad
            and level._current_level < 0
            and repeats == self._repeats
            and (asked is self._asked or asked == self._asked)
            and not torch.is_autocast_enabled("cpu")
        ):
            return None
        if audit is not None and not audited:
            if audit.calls <= 1:
                return None
            audit.calls -= 1
        # `with guard`, `Call.new_out` and `Sequences.set_length` written out. `Forward.attend` says why it refuses.
        guard, me = self._guard, [threading.get_ident()]
        holder = guard.holder
        if holder.setdefault(0, me) is not me:
            return None
        if guard.broken:
            holder.clear()
            return None
        guard.broken = True
        try:
            began, counters, problem, strides = time.perf_counter(), self._counters, self._problem, self._out_strides
            blocks.last_used = self._memory.clock
            out = torch.empty_like(query) if strides is None else query.new_empty_strided(self._out_shape, strides)
            problem.query = query.data_ptr()
            problem.out = out.data_ptr()
            if self._one:
                self._lengths[0] = length
            else:
                self._sequences.set_length(length)
            error = self._attend(self._reference, torch.get_num_threads())
            if error:
                check(error)
        except BaseException:
            # It reads, and the next call sets again what this one has set: Ctrl-C, which mostly comes here, cuts a
            # forward short and no change of the cache.
            guard.broken = False
            holder.clear()
            raise
        guard.broken = False
        holder.clear()
        counters.views_attended += 1
        host = self._host_blocks
        if host:
            counters.host_attended += 1
            counters.host_blocks += host
            counters.host_bytes += self._host_bytes
            counters.host_seconds += (time.perf_counter() - began) * host / (host + self._device_blocks)
        counters.block_hits += self._device_blocks
        return out
