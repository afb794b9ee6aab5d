"""Recurrent states, which a model changes in place: which of them a forward has changed, and whether it ended."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)
from transformers.configuration_utils import PretrainedConfig

from kvtier.forward.forward import Forward
from kvtier.forward.steps import RecurrentPart
from kvtier.hf.cache.layer import TieredLayer
from kvtier.hf.cache.resident import check_indexer, is_models_own
from kvtier.hf.callers.caller import Caller
from kvtier.hf.models.layers import not_kept

CONV, RECURRENT = "conv", "recurrent"
_SOMEWHERE = -1


class _State:
    """One tensor of a recurrent layer, and what it was when last looked at."""

    __slots__ = ("held", "kind", "number", "tensor", "version")

    def __init__(self, held: dict[int, torch.Tensor | None], part: RecurrentPart) -> None:
        self.held = held
        _, self.kind, self.number = part
        self.mark()

    def mark(self) -> None:
        """It is as it should be."""
        self.tensor = self.held[self.number]
        self.version = _version(self.tensor)

    @property
    def absent(self) -> bool:
        """Whether it was never made."""
        return self.held[self.number] is None

    @property
    def changed(self) -> bool:
        """Whether it was replaced, or changed in place where torch counts that."""
        tensor = self.held[self.number]
        return tensor is not self.tensor or _version(tensor) != self.version

    @property
    def opaque(self) -> bool:
        """Whether it may change uncounted: inference tensors count nothing, nor do fused kernels of an accelerator."""
        tensor = self.held[self.number]
        return tensor is not None and (tensor.device.type != "cpu" or tensor.is_inference())


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


class RecurrentStates:
    """Tells `StepTracker` which recurrent states a forward changes: a forward that ended in the middle is noticed.

    Models change these states in two ways: through `update_conv_state` and `update_recurrent_state`, and, when they
    decode, in place and behind the cache's back. Of the second way one sees that a model asks for a layer just before,
    and that torch has counted a change when the model comes to the next layer. Where torch does not count, and until it
    was seen to count, being asked for a layer stands for the change.

    At most one layer at a time is under watch: the one that was reached last.
    """

    def __init__(self, forward: Forward, layers: Sequence[Any]) -> None:
        self._forward = forward
        # A cache that is dropped gives its states back at once: what it looks at must not keep it.
        settle = weakref.WeakMethod(self.settle)

        def pending() -> None:
            look = settle()
            if look is not None:
                look()

        self._pending = pending
        self.watch(layers)

    def watch(self, layers: Sequence[Any]) -> None:
        """Begin again with these layers, empty or just copied."""
        self._layers: dict[int, dict[RecurrentPart, _State]] = {}
        self._groups: dict[tuple[int, int], dict[RecurrentPart, _State]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                kinds = ((CONV, layer.conv_states), (RECURRENT, layer.recurrent_states))
                self._layers[i] = {(i, kind, n): _State(held, (i, kind, n)) for kind, held in kinds for n in held}
        attention = [i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
        #: What may have changed when a model asks for no layer in particular. A later one follows some attention layer,
        #: whose update shows how far a forward got.
        self._leading = {
            part: state
            for i, states in self._layers.items()
            if i <= min(attention, default=i)
            for part, state in states.items()
        }
        self._counted: set[str] = set()  # kinds that torch was seen to count
        present = [part for states in self._layers.values() for part, state in states.items() if not state.absent]
        self._recurrent_seen = {number for _, kind, number in present if kind == RECURRENT}
        self._announced = False  # whether the model says when it is about to change a layer
        self.last_read: tuple[int | None, int | None] = (None, None)
        self._forward.steps.undoable = not self._layers and not any(map(is_models_own, layers))
        self._at: int | None = None
        self._by = 0  # the thread that reached it
        self._asked: dict[RecurrentPart, _State] = {}  # what of it may be changed in place
        self._assumed: dict[RecurrentPart, bool] = {}  # part -> whether a call may follow that means the same
        self._called: set[RecurrentPart] = set()
        self._forward.steps.pending = None

    def settle(self) -> None:
        """Tell what was changed in place, and leave the layer reached last."""
        if self._at is not None:
            self._look(self._asked, self._by)
            self._at = None
            self._forward.steps.pending = None

    def reached(self, layer: int, number: int | None, recording: bool | None = None) -> None:
        """A model is about to change a layer.

        Args:
            layer: the layer.
            number: which of its states; None for all.
            recording: whether the layer is recording, for a model that will change the convolution's state in place
                unless it is; None for a model that may also ask the cache to change it.
        """
        if layer not in self._layers:
            return
        steps = self._forward.steps
        with steps.changing():
            self._announced = True
            self._ask(layer, self._numbered(layer, number))
            steps.check_goes_on()
            self._check_begun(layer, number or 0)
            for part, state in self._asked.items():
                if self._recurrent_seen and state.number not in self._recurrent_seen:
                    continue  # models ask more than once for convolutions other than the one that feeds a recurrence
                if self._uncounted(state) and not (recording and state.kind == CONV):
                    self._touch(part)
                    self._assumed[part] = recording is None or state.kind == RECURRENT

    def read(self, layer: int | None, number: int | None) -> None:
        """A model reads a layer (or some layer, where None), perhaps to change it: for models that never say more."""
        self.last_read = (layer, number)
        if self._announced or (layer is not None and layer not in self._layers):
            return
        with self._forward.steps.changing():
            if layer is not None:
                self._ask(layer, self._numbered(layer, number))
            else:
                self._ask(_SOMEWHERE, self._leading)

    def update(self, kind: str, layer: int, number: int, change: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Carry out a change that the model asks the cache for."""
        part = (layer, kind, number)
        states = self._layers.get(layer, {})
        if part not in states:
            return change()  # which raises
        state, steps = states[part], self._forward.steps
        with steps.changing():
            if kind == RECURRENT:
                conv = (layer, CONV, number)
                self._find_conv(conv, states[conv])
                self._recurrent_seen.add(number)
            self._enter(layer)
            self._asked = {x: y for x, y in self._asked.items() if x != part}  # any other change is of no forward
            assumed = self._assumed.pop(part, False)
            if not assumed:
                self._touch(part)
            self._called.add(part)
            try:
                return change()
            except Exception:
                if state.changed or assumed:
                    steps.tear()
                else:
                    steps.undo(part)
                raise
            finally:
                state.mark()

    def _find_conv(self, part: RecurrentPart, state: _State) -> None:
        """A model that did not say that it changes the convolution's state has done so by now, in the same forward."""
        if self._at != part[0]:
            self.settle()
            self._look({part: state}, threading.get_ident())
        self._enter(part[0])
        if part not in self._called and part not in self._assumed and self._uncounted(state):
            self._touch(part)

    def _check_begun(self, layer: int, number: int) -> None:
        """Raise where a forward comes to a layer that another left half changed: the model itself may trip over it."""
        steps, states = self._forward.steps, self._layers[layer]
        conv, recurrent = (layer, CONV, number), (layer, RECURRENT, number)
        if not states[recurrent].absent:
            unfinished = conv in steps.began and recurrent not in steps.began and not steps.complete
        elif self._recurrent_seen:
            unfinished = number in self._recurrent_seen and steps.ended_at == conv
        else:  # either the first forward ended in its first recurrent layer, or the model has only convolutions
            alone = [part for part in steps.began if type(part) is tuple] == [conv]
            unfinished = alone and not steps.knows_states() and not (steps.expected and steps.complete)
        if unfinished:
            steps.tear()
            raise steps.interrupted()

    def _numbered(self, layer: int, number: int | None) -> dict[RecurrentPart, _State]:
        if number is None:
            return self._layers[layer]
        group = self._groups.get((layer, number))
        if group is None:
            group = {part: state for part, state in self._layers[layer].items() if part[2] == number}
            self._groups[layer, number] = group
        return group

    def _ask(self, layer: int, states: dict[RecurrentPart, _State]) -> None:
        self._enter(layer)
        self._called.clear()
        self._asked = states
        for state in states.values():
            state.mark()

    def _enter(self, layer: int) -> None:
        if self._at == layer:
            self._look(self._asked, self._by)
            return
        self.settle()
        self._at, self._by = layer, threading.get_ident()
        self._asked = {}
        self._assumed.clear()
        self._called.clear()
        self._forward.steps.pending = self._pending

    def _look(self, states: dict[RecurrentPart, _State], by: int) -> None:
        for part, state in states.items():
            if state.changed:
                state.mark()
                self._counted.add(state.kind)
                if self._assumed.pop(part, None) is None and self._forward.steps.saw(part, by):
                    self._forward.count_step()

    def _uncounted(self, state: _State) -> bool:
        return state.kind not in self._counted and state.opaque

    def _touch(self, part: RecurrentPart) -> None:
        if self._forward.steps.touch(part):
            self._forward.count_step()


class RecurrentFace(DynamicCache):
    """The part of a cache that recurrent layers see: Transformers', watched.

    Layers with full attention have no part of it. A model that asks them for one is another than the cache was made
    for, and gets an error before anything changes.
    """

    _config: PretrainedConfig | None
    _forward: Forward
    _recurrent: RecurrentStates
    _caller: Caller

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in Transformers. Needs the cache to know the model's config."""
        self._forward.check_open()
        self._check_recurrent(layer_idx)
        change = partial(super().update_conv_state, conv_states, layer_idx, state_idx, **kwargs)
        return self._recurrent.update(CONV, layer_idx, state_idx, change)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """As in Transformers. Needs the cache to know the model's config."""
        self._forward.check_open()
        self._check_recurrent(layer_idx)
        change = partial(super().update_recurrent_state, recurrent_states, layer_idx, state_idx, **kwargs)
        return self._recurrent.update(RECURRENT, layer_idx, state_idx, change)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As in Transformers. Needs the cache to know the model's config."""
        self._forward.check_open()
        if layer_idx >= len(self.layers) or isinstance(self.layers[layer_idx], TieredLayer):
            raise not_kept(layer_idx, "the keys of an indexer", self._config)
        check_indexer(layer_idx, self.layers[layer_idx], indexer_key_states.shape[1])
        keys = super().update_indexer(indexer_key_states, layer_idx)
        if self._forward.steps.failed_at == layer_idx:
            self._forward.steps.failed_at = None
        return keys

    # Questions that a model asks before it changes a recurrent state in place: the only sign of it in some models.

    def is_recording_past(self, layer_idx: int) -> bool:
        """As in Transformers."""
        if layer_idx >= len(self.layers):
            raise not_kept(layer_idx, "a recurrent state", self._config)
        recording: bool = getattr(self.layers[layer_idx], "record_past", False)
        read, number = self._recurrent.last_read
        self._recurrent.reached(layer_idx, number if read == layer_idx else None, recording)
        return recording

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As in Transformers."""
        self._check_recurrent(layer_idx)
        if layer_idx is None:
            self._recurrent.read(None, None)
        else:
            self._recurrent.reached(layer_idx, state_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As in Transformers (5.18 and newer)."""
        self._check_recurrent(layer_idx)
        self._recurrent.read(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As in Transformers (5.18 and newer)."""
        self._check_recurrent(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def _check_recurrent(self, layer_idx: int | None) -> None:
        """Raise unless a layer (any layer, where None) keeps a recurrent state, and no other thread uses the cache."""
        self._caller.read_state(layer_idx or 0)
        layers = self.layers if layer_idx is None else self.layers[layer_idx : layer_idx + 1]
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
            raise not_kept(layer_idx or 0, "a recurrent state", self._config)
