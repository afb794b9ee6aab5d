"""`TieredLayer`: one full-attention layer of a `TieredKVCache`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvtier.attention.reader import LayerReader
from kvtier.errors import ConfigError, MismatchError, UnsupportedError
from kvtier.forward.forward import Forward
from kvtier.forward.token import NextToken
from kvtier.hf.attention.view import KVView, Snapshot, views_of
from kvtier.hf.cache import rows
from kvtier.hf.cache.rows import row_indices, whole_number
from kvtier.hf.callers.caller import Caller
from kvtier.kernels import launch
from kvtier.memory.storage.layout import in_one_dtype
from kvtier.tables.layer import LayerKV

#: What a layer holds at one time: its reader, length and epoch.
_Moment = tuple[LayerReader, int, int]


class _NotKept(UnsupportedError, AttributeError):
    """An attribute that only layers of another kind have; for `hasattr`, one that is missing."""


def check_meant(tokens_to_remove: int) -> None:
    """Warn, or raise `ConfigError`, where the installed Transformers warns of what `crop` is given, or refuses it."""
    if tokens_to_remove > 0:
        try:
            DynamicLayer().crop(tokens_to_remove)
        except ValueError as error:
            raise ConfigError(
                f"crop({tokens_to_remove}): give minus the number of tokens to remove, crop(-{tokens_to_remove}) for "
                f"{tokens_to_remove} of them. Nothing was changed."
            ) from error


def _check_tensors(index: int, keys: object, values: object) -> None:
    """Raise `MismatchError` unless both are tensors."""
    if not (isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)):
        kinds = f"{type(keys).__name__} and {type(values).__name__}"
        raise MismatchError(f"Layer {index}: keys and values are tensors, not {kinds}.")


class TieredLayer(DynamicLayer):
    """A layer that grows without end and whose blocks are in tiers.

    It has the interface of Transformers' `DynamicLayer`, whose type it inherits; it keeps no tensors of its own. What
    is read through `keys` and `values` is a copy: writing into it, or into a slice of it, does not change the cache.

    Attributes:
        index: the layer's index in the model.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, forward: Forward, index: int, caller: Caller) -> None:
        self._forward = forward
        self._caller = caller
        self.index = index
        self._assigned: dict[int, torch.Tensor] = {}
        self._latest: weakref.ref[Snapshot] | None = None
        self._half: tuple[_Moment, int, torch.Tensor] | None = None
        #: Appends the next token, where the last one was appended in a step that decodes.
        self._token: NextToken | None = None

    @property
    def _reader(self) -> LayerReader | None:
        return self._forward.readers.get(self.index)

    @property
    def _kv(self) -> LayerKV | None:
        reader = self._forward.readers.get(self.index)
        return None if reader is None else reader.layer

    def __getattr__(self, name: str) -> Any:
        """Only for what is missing: other kinds of layers have more than keys and values."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        raise _NotKept(
            f"Layer {self.index} of this cache keeps keys and values of full attention and has no `{name}`. If a model "
            "asked for it, the cache was made without its config, or with another model's: TieredKVCache(model.config)."
        )

    def __repr__(self) -> str:
        return f"TieredLayer({self.index}, tokens={self.get_seq_length()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"Layer {self.index} of a TieredKVCache cannot be copied or pickled by itself: copy the cache."
        )

    # What Transformers reads

    @property
    def is_initialized(self) -> bool:
        """Whether shapes are known."""
        return self._kv is not None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of keys and values; None before the first update."""
        return None if self._kv is None else self._kv.layout.dtype

    @property
    def device(self) -> torch.device | None:
        """Where attention runs; None before the first update."""
        return None if self._kv is None else self._kv.device.device

    @property
    def batch(self) -> int:
        """Rows; 0 before the first update."""
        kv = self._kv
        return 0 if kv is None or not kv.length else kv.batch

    def get_seq_length(self) -> int:
        """Tokens per row."""
        kv = self._kv
        return 0 if kv is None else kv.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the next `update` returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum but the budgets."""
        return -1

    # Updates

    def next_token(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`update`, if that is one more token in the middle of a step that decodes; None, and nothing done, if not."""
        token, caller = self._token, self._caller
        if (
            token is not None
            and self.index > caller.at
            and caller.takes_views
            and not self._assigned
            and token(key_states, value_states)
        ):
            caller.at = self.index
            self._half = None
            return self._given(token.reader)
        return None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fix shapes, dtype and device from `[batch, heads, any, dim]` tensors."""
        self._forward.check_open()
        self._forward.early(self.index, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens and return all keys and values so far.

        Args:
            key_states: `[batch, heads, tokens, k_dim]`, copied.
            value_states: `[batch, heads, tokens, v_dim]`, copied.

        Returns:
            The arguments, contiguous and in one dtype, if the layer was empty; else two `KVView`s of `[batch, heads,
            all tokens, dim]`, or tensors where the model reads KV itself.

        Raises:
            MismatchError, BudgetError, TransferError, InterruptedStepError, ConcurrentUseError, ClosedError.
            UnsupportedError: a CUDA graph is being captured, or an encoder-decoder was given one cache for two.
        """
        forward, caller, index = self._forward, self._caller, self.index
        if forward.closed or forward.memory.closed:
            forward.check_open()
        if self._assigned:
            self._check_assigned()
        _check_tensors(index, key_states, value_states)
        if index <= caller.at:
            caller.meet()
        caller.at = index
        self._half = None
        steps = forward.steps
        with steps.guard:
            found = forward.readers.get(index)
            before = 0 if found is None else found.layer.length
            begins = steps.update(index, before)  # which may count a step that a recurrent layer began
            if begins:
                forward.count_step()
            try:
                if launch.captured(key_states):
                    raise UnsupportedError(
                        "A CUDA graph is being captured. Its replays would write and read where this step does, "
                        "whatever the cache holds by then: leave forwards with a TieredKVCache out of graphs."
                    )
                reader = forward.append(index, key_states, value_states)
            except BaseException:
                if self.get_seq_length() == before:
                    steps.undo(self.index)
                    if begins:
                        forward.uncount_step()
                raise
        if before == 0:
            # Contiguous as the product of `DynamicCache`'s concatenation is: kernels round differently on strides.
            key_states, value_states = in_one_dtype(key_states, value_states)
            return key_states.contiguous(), value_states.contiguous()
        kv = reader.layer
        if not caller.takes_views and caller.reads_dense(kv.layout):
            return forward.densify(reader, kv.length, kv.epoch, None)
        if self._token is None or self._token.reader is not reader:
            self._token = forward.next_token(index, reader)
        return self._given(reader)

    def _given(self, reader: LayerReader) -> tuple[torch.Tensor, torch.Tensor]:
        """What `update` gives the model: views, known to `keep_given` where it may be asked."""
        views = views_of(self._forward, reader)
        if self._caller.drafts:
            self._latest = weakref.ref(views[0].snapshot)
        return views

    def keep_given(self) -> None:
        """Tokens are about to be cropped: views of now that somebody holds become tensors, where drafts are made of
        them (Gemma 4)."""
        held = self._latest() if self._caller.drafts and self._latest is not None else None
        if held is not None and held.current:
            held.dense("crop")

    # The dense face

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, `[batch, heads, tokens, k_dim]`, as a view; None before the first update.

        A tensor, where the model's attention cannot read views (cross-attention reads its KV here). Assigning keys and
        values of the same batch and length replaces what the layer holds.
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

    def dense(
        self, operation: str, start: int = 0, stop: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the tokens `[start, stop)`, or from `start` on, as tensors of the caller's own; None
        before the first update."""
        reader = self._reader
        if reader is None:
            return None
        stop = reader.layer.length if stop is None else stop
        return self._forward.densify(reader, stop, reader.layer.epoch, operation, start=start)

    def content(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same for a copy of the cache: keys `[batch, heads, tokens, k_dim]` and values `[batch, heads, tokens,
        v_dim]`. No model reads them, so no statistics count them."""
        reader = self._reader
        if reader is None:
            return None
        return self._forward.densify(reader, reader.layer.length, reader.layer.epoch, None, counted=False)

    def _view(self, part: int) -> torch.Tensor | None:
        if part in self._assigned:
            return self._assigned[part]
        reader = self._reader
        if reader is None:
            return None
        if self._caller.needs_tensors:
            return self._half_of(reader, part)
        # Keys and values read one after the other are one snapshot, so that they are fetched together.
        snapshot = self._latest() if self._latest is not None else None
        if snapshot is None or snapshot.reader is not reader or not snapshot.current:
            views = views_of(self._forward, reader)
            self._latest = weakref.ref(views[0].snapshot)
            return views[part]
        return snapshot.views()[part]

    def _half_of(self, reader: LayerReader, part: int) -> torch.Tensor:
        """Keys or values as a tensor. They are read one after the other: the second is kept until then."""
        moment, half = (reader, reader.layer.length, reader.layer.epoch), self._half
        self._half = None
        if half is not None and half[:2] == (moment, part):
            return half[2]
        pair = self._forward.densify(*moment, None)
        self._half = (moment, 1 - part, pair[1 - part])
        return pair[part]

    def _check_assigned(self) -> None:
        if self._assigned:
            raise MismatchError(
                f"Layer {self.index} was assigned {'keys' if 0 in self._assigned else 'values'} of another batch or "
                "length than its other half. Assign both, or `reset()` the cache."
            )

    def _assign(self, part: int, value: torch.Tensor | None) -> None:
        self._forward.check_open()
        if not isinstance(value, torch.Tensor):
            raise MismatchError(
                f"Layer {self.index}: keys and values are tensors, not {type(value).__name__}. To drop them, `reset()` "
                "the cache."
            )
        if isinstance(value, KVView):
            at = value.snapshot
            whole = at.reader is self._reader and at.length == at.reader.layer.length
            if whole and value.part == part and value.repeats == 1:
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
        with self._forward.steps.changing():
            self._forward.replace(self.index, *pair)

    # Rows and length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row.

        A positive number is what it is in the installed Transformers: the length to keep, or an error.
        """
        self._check_assigned()
        tokens_to_remove = whole_number("crop", tokens_to_remove)
        length = self.get_seq_length()
        if tokens_to_remove > 0:
            check_meant(tokens_to_remove)
            kept = min(tokens_to_remove, length)
        else:
            kept = max(length + tokens_to_remove, 0)
        if self._kv is not None:
            with self._forward.steps.changing():
                self._forward.crop(self.index, kept)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` continue what row `beam_idx[i]` held."""
        self.pick(row_indices("reorder_cache", beam_idx, self.batch or None, mask=False).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times. Copies nothing."""
        times = rows.repeats(repeats)
        self.pick([row for row in range(self.batch) for _ in range(times)])

    def batch_select_indices(self, indices: torch.Tensor | list[int]) -> None:
        """Keep the rows `indices` (or those where a boolean mask is true)."""
        self.pick(row_indices("batch_select_indices", indices, self.batch or None, mask=True).tolist())

    def pick(self, picked: list[int]) -> None:
        """Let row `i` continue what row `picked[i]` held, in `[0, batch)`."""
        kv = self._kv
        self._check_assigned()
        if kv is None or not kv.length or picked == list(range(kv.batch)):
            return
        if picked and max(picked) >= kv.batch:
            raise MismatchError(f"Row {max(picked)} of {kv.batch} of layer {self.index}, which has fewer than others.")
        with self._forward.steps.changing():
            self._forward.pick_rows(self.index, picked)

    def unassign(self) -> None:
        """Forget keys or values that were assigned without the other half."""
        self._assigned.clear()

    def reset(self) -> None:
        """Drop every token of this layer."""
        self.unassign()
        if self._kv is not None:
            with self._forward.steps.changing():
                self._forward.clear_layer(self.index)

    # Transformers' own offloading has no business here.

    def offload(self) -> None:
        """Nothing: placement is the memory's."""

    def prefetch(self) -> None:
        """Nothing: placement is the memory's."""
