"""`Forward`: what one cache does in a forward, on a memory that others may use too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier import tracing
from kvtier.attention import dispatch
from kvtier.attention.dense import own_kv
from kvtier.attention.reader import LayerReader
from kvtier.attention.repeat import Repeat
from kvtier.config import CacheOptions
from kvtier.errors import ClosedError, StaleViewError
from kvtier.forward.appending import AppendingForward
from kvtier.kernels.params import AttentionParams
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import Pools
from kvtier.memory.tiered import TieredMemory
from kvtier.stats import LayerResidency, Progress
from kvtier.tables.layer import LayerKV
from kvtier.tables.parked.sequence import ParkedLayer, ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences


class Forward(AppendingForward):
    """Everything behind a `TieredKVCache`, between Transformers and the memory.

    Args:
        memory, options, expected, tiered, dense, progress: see `AppendingForward`.
    """

    def __init__(
        self,
        memory: TieredMemory,
        options: CacheOptions,
        *,
        expected: frozenset[int] | None = None,
        tiered: int = 0,
        dense: Callable[[], bool] = lambda: True,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        super().__init__(memory, options, expected=expected, tiered=tiered, dense=dense, progress=progress)
        self.closed = False
        #: What views of a step have in common, by layout, kept for those who make them.
        self.blanks: dict[Pools, Any] = {}

    # Reading

    def attend(
        self,
        reader: LayerReader,
        length: int,
        epoch: int,
        query: torch.Tensor,
        params: AttentionParams | None,
        options: dict[str, Any] | None = None,
        repeats: int = 1,
    ) -> torch.Tensor:
        """Attention of `query` over a view of a layer; see `dispatch.attend`. Then what is due is fetched."""
        layer, audit = reader.layer, self.memory.audit
        if self.closed or layer.epoch != epoch or length > layer.length:
            self.check_view(reader, length, epoch)
        if audit is not None:
            audit.calls -= 1
            if audit.calls <= 0:
                self._compare(layer, audit)
        if reader.repeat is not None:
            out = reader.repeat(query, length, epoch, params if options is None else options, repeats, audited=True)
            if out is not None:
                if self._schedules:
                    with self.steps.guard:
                        self._advance(reader)
                return out
        with self.steps.guard:
            reader.counters.views_attended += 1
            dtype = query.dtype
            if torch.is_autocast_enabled(layer.device.kind):
                query, dtype = dispatch.under_autocast(layer, query)
            if options is not None:
                params = dispatch.params_of(layer, length, repeats, query, options)
            tracer = tracing.active
            began = 0.0 if tracer is None else reader.device.engine.stamp()
            try:
                out = dispatch.attend(
                    reader, length, query, params, options, repeats, room=self._rooms.get(layer.device, 0)
                )
            except Exception:
                self._not_read(reader)
                raise
            self.steps.failed_at = None
            if tracer is not None:
                ended = reader.device.engine.stamp()
                tracer.attention(reader.counters, layer.index, layer.device.name, began, ended, query.shape[2])
            if self._schedules:
                self._advance(reader)
            if tracer is None:
                reader.repeat = Repeat.of(
                    reader, length, query, params, options, repeats, self.steps.guard, self._schedules
                )
        return out if out.dtype is dtype else out.to(dtype)

    def _not_read(self, reader: LayerReader) -> None:
        """An error came up where a layer is read: a forward that ends with it did not finish."""
        index, steps = reader.layer.index, self.steps
        reader.repeat = None  # which does not tell of a call that succeeds
        if (index in steps.began or index in steps.sometimes) and steps.inside(threading.get_ident()):
            steps.failed_at = index

    def densify(
        self,
        reader: LayerReader,
        length: int,
        epoch: int,
        operation: str | None,
        *,
        start: int = 0,
        counted: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a view, or its tokens from `start` on, as tensors of the caller's own; `operation` None:
        by design."""
        self.check_view(reader, length, epoch)
        audit = self.memory.audit
        if audit is not None:
            audit.calls -= 1
            if audit.calls <= 0:
                self._compare(reader.layer, audit)
        with self.steps.changing():
            try:
                keys, values = own_kv(reader, length, start)
            except Exception:
                self._not_read(reader)
                raise
            self.steps.failed_at = None
            if counted:
                self.counters.count_dense(operation, keys.nbytes + values.nbytes)
            self._after(reader)
        return dispatch.without_gradient(reader.layer, keys, values)

    def _compare(self, layer: LayerKV, audit: Audit) -> None:
        """A layer is read: compare its blocks in host memory with what was written."""
        with self.memory.lock:
            self.memory.mend()
            audit.read(layer.runs())

    def check_view(self, reader: LayerReader, length: int, epoch: int) -> None:
        """Raise `StaleViewError` unless the cache still holds what a view shows."""
        layer = reader.layer
        if self.closed:
            self.check_open()
        if layer.epoch != epoch or self.readers.get(layer.index) is not reader or length > layer.length:
            raise StaleViewError(
                f"A view of layer {layer.index} is read after the cache dropped or reordered tokens. Take a new one."
            )

    # Rows and length

    def crop(self, index: int, length: int) -> None:
        """Keep the first `length` tokens of every row of a layer."""
        layer = self.readers[index].layer
        with self.memory.lock:
            self.memory.mend()
            layer.crop(length)
            self._changed(layer.device)

    def pick_rows(self, index: int, rows: Sequence[int]) -> None:
        """Make the rows of before with these numbers the rows of a layer."""
        layer = self.readers[index].layer
        with self.memory.lock:
            self.memory.mend()
            layer.pick_rows(rows)
            self._changed(layer.device)

    def clear_layer(self, index: int) -> None:
        """Drop every token of a layer."""
        layer = self.readers[index].layer
        with self.memory.lock:
            self.memory.mend()
            layer.clear()
            self._changed(layer.device)

    # Parked sequences

    def park(
        self,
        parked: ParkedSequences,
        row: int,
        length: int,
        start: int = 0,
        then: Callable[[ParkedSequence], None] = lambda sequence: None,
    ) -> ParkedSequence:
        """Keep the first tokens of a row when the cache ends. The cache may go on.

        Args:
            parked, row, length, start: see `ParkedSequences.park`.
            then: called with the sequence under the same lock: nobody sees it before.

        Raises:
            MismatchError: layers unlike those that were parked before; nothing was changed.
        """
        with self.steps.changing():  # noqa: SIM117 - a test takes each lock away in turn
            with self.memory.lock:
                if self.memory.recovery.has_garbage:
                    self.memory.recovery.collect()
                sequence = parked.park({i: reader.layer for i, reader in self.readers.items()}, row, length, start)
                for device in self._held.devices():
                    self._changed(device)
                then(sequence)
                return sequence

    def follow(self, parked: ParkedSequences, rows: Sequence[ParkedSequence], length: int) -> int:
        """Begin with the first tokens of parked sequences, one for each row of the batch. The cache is empty.

        Returns:
            The tokens that it has then; see `ParkedSequences.follow`.

        Raises:
            BudgetError: there is no room for what they are; the cache is empty.
        """

        def make(index: int, found: ParkedLayer) -> LayerKV:
            self._at_rest_elsewhere(found.device)
            reader = self._held.make_like(index, found.device, found.parked.pools.layout, self.options)
            self._install(reader)
            return reader.layer

        assert not self.readers, "a cache that holds tokens"
        with self.steps.changing():  # noqa: SIM117 - a test takes each lock away in turn
            with self.memory.lock:
                if self.memory.recovery.has_garbage:
                    self.memory.recovery.collect()
                try:
                    length = parked.follow(rows, length, make)
                except Exception:
                    for reader in list(self.readers.values()):
                        self.readers.pop(reader.layer.index)
                        self._drop(reader)
                    parked.relax()
                    raise
                for device in self._held.devices():
                    self._changed(device)
                if length:
                    self.steps.expected = (self.steps.expected or frozenset()) | self.readers.keys()
                return length

    def follow_on(self, parked: ParkedSequences, sequence: ParkedSequence, length: int) -> int:
        """Go on with tokens of a parked sequence that begins where the cache ends.

        Returns:
            The tokens that were added; see `ParkedSequences.follow_on`.

        Raises:
            BudgetError, CorruptionError, MismatchError: the cache holds what it held.
        """
        layers = {i: reader.layer for i, reader in self.readers.items()}
        with self.steps.changing():  # noqa: SIM117 - a test takes each lock away in turn
            with self.memory.lock:
                if self.memory.recovery.has_garbage:
                    self.memory.recovery.collect()
                try:
                    length = parked.follow_on(sequence, length, layers)
                except Exception:
                    for layer in layers.values():
                        layer.crop(min(layer.length, sequence.start))
                    parked.relax()
                    raise
                finally:
                    for device in self._held.devices():
                        self._changed(device)
                return length

    # Life

    def clear(self) -> None:
        """Drop everything and give all memory back; counters begin at 0."""
        self._log("the end")
        self.steps.shut()  # until all of this is done
        self._release()
        self._held.renew()
        self._forget_steps()
        self._admitted.clear()
        self.history.clear()
        self.blanks.clear()
        self.steps.reset()

    def _release(self) -> None:
        with self.memory.lock, self.memory.change:
            self._held.release()

    def close(self) -> None:
        """Give all memory, streams and registrations back. Idempotent."""
        if self.closed:
            return
        self._log("the end")
        self.steps.shut()  # until all of this is done
        self._release()
        self._finalizer.detach()
        if self.memory.private:
            self.memory.close()
        else:
            self.memory.give_back()  # what copies were still using
        self._schedules.clear()
        self.blanks.clear()
        self.closed = True  # cut short before this, it is unfinished: no step may find what has no owner any more
        self.steps.reset()
        self.steps.break_off()  # for a thread that found it open just before

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self.closed:
            raise ClosedError("This TieredKVCache was closed. Make a new one.")
        if self.memory.closed:
            self.memory.check_open()

    # What a user sees

    def residency(self, index: int) -> LayerResidency | None:
        """Where the blocks of a layer are; None before its first update."""
        layer = self.layer(index)
        if layer is None:
            return None
        with self.memory.lock:
            runs = layer.runs()
            device = sum(run.count for run in runs if run.device is not None)
            host = sum(run.count for run in runs if run.host is not None)
            both = sum(run.count for run in runs if run.device is not None and run.host is not None)
            shared = sum(run.count for run in runs if run.refs > 1)
            total = sum(run.count for run in runs) * layer.layout.nbytes
        return LayerResidency(index, "tiered", layer.length, device, host, shared, total, both)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees with every other. For tests and debugging."""
        self.memory.check_integrity()
        with self.memory.lock:
            for reader in self.readers.values():
                reader.check_integrity()
            for schedule in self._schedules.values():
                schedule.check_integrity()
