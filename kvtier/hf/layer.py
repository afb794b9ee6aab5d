"""`TieredLayer`: one full-attention layer of a `TieredKVCache`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvtier.errors import BudgetError, MismatchError, UnsupportedError
from kvtier.hf.view import KVView, Snapshot
from kvtier.kernels import launch
from kvtier.runtime import Runtime
from kvtier.storage.block import in_one_dtype
from kvtier.storage.store import LayerStore


class TieredLayer(DynamicLayer):
    """A layer that grows without end and whose blocks lie in tiers.

    It has the interface of Transformers' `DynamicLayer`, whose type it inherits; it keeps no tensors of its own. What
    is read through `keys` and `values` is a copy: writing into it, or into a slice of it, does not change the cache.

    Attributes:
        index: the layer's index in the model.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, runtime: Runtime, index: int) -> None:
        self._runtime = runtime
        self.index = index
        self._assigned: dict[int, torch.Tensor] = {}
        self._latest: weakref.ref[Snapshot] | None = None

    @property
    def _store(self) -> LayerStore | None:
        return self._runtime.layers.get(self.index)

    def __repr__(self) -> str:
        return f"TieredLayer({self.index}, tokens={self.get_seq_length()})"

    # What Transformers reads

    @property
    def is_initialized(self) -> bool:
        """Whether shapes are known."""
        return self._store is not None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values; None before the first update."""
        return None if self._store is None else self._store.layout.dtype

    @property
    def device(self) -> torch.device | None:
        """Where attention runs; None before the first update."""
        return None if self._store is None else self._store.tiers.device

    def get_seq_length(self) -> int:
        """Tokens per row."""
        store = self._store
        return 0 if store is None else store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the next `update` returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum but the budgets."""
        return -1

    # Updates

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fix shapes, dtype and device from `[batch, heads, any, dim]` tensors."""
        self._runtime.check_open()
        self._runtime.early(self.index, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens and return all keys and values so far.

        Args:
            key_states: `[batch, heads, tokens, k_dim]`, copied.
            value_states: `[batch, heads, tokens, v_dim]`, copied.

        Returns:
            The arguments, contiguous and in one dtype, if the layer was empty; else two `KVView`s of `[batch, heads,
            all tokens, dim]`.

        Raises:
            MismatchError, BudgetError, TransferError, InterruptedStepError, ConcurrentUseError, ClosedError.
            UnsupportedError: a CUDA graph is being captured.
        """
        runtime = self._runtime
        runtime.check_open()
        self._check_assigned()
        steps = runtime.steps
        with steps.changing():
            before = self.get_seq_length()
            begins = steps.update(self.index, before)  # which may count a step that a recurrent layer began
            runtime.counters.steps += begins
            try:
                if launch.capturing(key_states.device):
                    raise UnsupportedError(
                        "A CUDA graph is being captured. Its replays would write and read where this step does, "
                        "whatever the cache holds by then: leave forwards with a TieredKVCache out of graphs."
                    )
                store = runtime.append(self.index, key_states, value_states)
            except BaseException as error:
                if self.get_seq_length() == before:
                    steps.undo(self.index)
                if isinstance(error, BudgetError):
                    runtime.undo_first()
                raise
        if before == 0:
            # Contiguous as the product of `DynamicCache`'s concatenation is: kernels round differently on strides.
            key_states, value_states = in_one_dtype(key_states, value_states)
            return key_states.contiguous(), value_states.contiguous()
        return Snapshot(runtime, store).views()

    # The dense face

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, `[batch, heads, tokens, k_dim]`, as a view; None before the first update.

        Assigning keys and values of the same batch and length replaces what the layer holds.
        """
        return self._view(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._assign(0, value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, `[batch, heads, tokens, v_dim]`, as a view; None before the first update."""
        return self._view(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._assign(1, value)

    def dense(self, operation: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values as tensors of the caller's own; None before the first update."""
        return None if self._store is None else Snapshot(self._runtime, self._store).dense(operation)

    def _view(self, part: int) -> torch.Tensor | None:
        if part in self._assigned:
            return self._assigned[part]
        store = self._store
        if store is None:
            return None
        # Keys and values read one after the other are one snapshot, so that they are fetched together.
        snapshot = self._latest() if self._latest is not None else None
        if snapshot is None or (snapshot.store, snapshot.length, snapshot.epoch) != (store, store.length, store.epoch):
            snapshot = Snapshot(self._runtime, store)
            self._latest = weakref.ref(snapshot)
        return snapshot.views()[part]

    def _check_assigned(self) -> None:
        if self._assigned:
            raise MismatchError(
                f"Layer {self.index} was assigned {'keys' if 0 in self._assigned else 'values'} of another batch or "
                "length than its other half. Assign both, or `reset()` the cache."
            )

    def _assign(self, part: int, value: torch.Tensor | None) -> None:
        self._runtime.check_open()
        if value is None:
            raise MismatchError(f"Layer {self.index}: `reset()` the cache instead of assigning None.")
        if isinstance(value, KVView):
            at = value.snapshot
            if at.store is self._store and value.part == part and value.repeats == 1 and at.length == at.store.length:
                self._assigned.pop(part, None)
                return
            value = value.dense("assign")
        other = self._assigned.get(1 - part)
        if other is None:
            current = self._view(1 - part)
            if current is None or current.shape[::2] != value.shape[::2]:
                # The other half must follow: until then the layer holds what it held.
                self._assigned[part] = value
                return
            other = current.dense("assign") if isinstance(current, KVView) else current
        pair = (value, other) if part == 0 else (other, value)
        self._assigned.clear()
        with self._runtime.steps.changing():
            self._runtime.replace(self.index, *pair)

    # Rows and length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row.

        A positive number is what it is in the installed Transformers: the length to keep, or an error.
        """
        self._check_assigned()
        tokens_to_remove = int(tokens_to_remove)  # 5.17 passes a tensor after assisted decoding
        length = self.get_seq_length()
        if tokens_to_remove > 0:
            DynamicLayer().crop(tokens_to_remove)  # warns or raises as Transformers does
            kept = min(tokens_to_remove, length)
        else:
            kept = max(length + tokens_to_remove, 0)
        if self._store is not None:
            with self._runtime.steps.changing():
                self._store.crop(kept)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` continue what row `beam_idx[i]` held."""
        self._pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Copies nothing."""
        if self._store is not None:
            self._pick([row for row in range(self._store.batch) for _ in range(int(repeats))])

    def batch_select_indices(self, indices: torch.Tensor | list[int]) -> None:
        """Keep the rows `indices` (or those where a boolean mask is true)."""
        if not isinstance(indices, torch.Tensor):
            indices = torch.as_tensor(indices, device="cpu")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._pick(indices.tolist())

    def _pick(self, rows: list[int]) -> None:
        store = self._store
        self._check_assigned()
        if store is None or store.length == 0:
            return
        rows = [row + store.batch if row < 0 else row for row in rows]
        if not all(0 <= row < store.batch for row in rows):
            raise MismatchError(f"Rows {rows} are not all among the {store.batch} rows of layer {self.index}.")
        if rows == list(range(store.batch)):
            return
        with self._runtime.steps.changing():
            store.pick_rows(rows)

    def reset(self) -> None:
        """Drop every token of this layer."""
        self._assigned.clear()
        if self._store is not None:
            with self._runtime.steps.changing():
                self._store.clear()

    # Transformers' own offloading has no business here.

    def offload(self) -> None:
        """Nothing: placement is the runtime's."""

    def prefetch(self) -> None:
        """Nothing: placement is the runtime's."""
