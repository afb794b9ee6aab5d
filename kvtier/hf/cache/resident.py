"""The layers that stay resident: Transformers' own, as Transformers would make them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvtier.config import warn_caller
from kvtier.errors import InterruptedStepError, MismatchError, UnsupportedError
from kvtier.forward.forward import Forward
from kvtier.hf.cache.layer import TieredLayer, check_meant
from kvtier.hf.callers.caller import Caller
from kvtier.hf.models.layers import grows_untiered
from kvtier.memory.storage.layout import fits

#: What an update of a sliding layer changes.
_WINDOW = ("keys", "values", "cumulative_length", "is_initialized")
#: The module of Transformers' own layers.
_TRANSFORMERS = CacheLayerMixin.__module__


class ResidentLayers:
    """The layers of a cache that are Transformers' own: updated as part of a step, taken back where it does not end.

    Args:
        forward, caller: of the cache.
        layers: all layers of the cache, tiered ones too: the list itself.
    """

    def __init__(self, forward: Forward, caller: Caller, layers: list[Any]) -> None:
        self._forward = forward
        self._caller = caller
        self._layers = layers
        #: What updates of sliding layers returned in the step under way.
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self,
        index: int,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TieredKVCache.update`, for a layer of Transformers' own."""
        layer = self._layers[index]
        self._forward.check_open()
        self._caller.follow(index)
        steps = self._forward.steps
        _check_fits(index, layer, key_states, value_states)
        with steps.changing():
            before = {name: vars(layer)[name] for name in _WINDOW if name in vars(layer)}
            length = layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0
            begins = steps.update(index, length)
            if begins:
                self._forward.count_step()
            try:
                if begins:
                    self._windows.clear()
                    self._forward.admit(key_states, value_states)
                keys, values = layer.update(key_states, value_states, *args, **kwargs)
            except BaseException:
                vars(layer).update(before)
                steps.undo(index)
                if begins:
                    self._forward.uncount_step()
                raise
            if isinstance(layer, DynamicSlidingWindowLayer):
                if layer.record_past:
                    self._windows.pop(index, None)  # of a step before, if a tiered layer began this one
                else:
                    # The layer keeps slices of these: holding them for a step costs nothing and lets `crop` undo it.
                    self._windows[index] = (keys, values)
            elif indexed(layer, layer.get_seq_length()) < layer.get_seq_length():
                steps.failed_at = index  # until its indexer is updated too
        return keys, values

    def end_step(self) -> None:
        """The step under way is over, or was taken back: it cannot be taken back any more."""
        self._windows.clear()
        for layer in self._layers:
            tokens = layer.get_seq_length() if isinstance(layer, DynamicIndexedLayer) else 0
            if tokens:
                _trim_indexer(layer, tokens)

    def take_back(self, index: int, before: int, fresh: Sequence[Any]) -> None:
        """Let a layer hold what it held before the step under way.

        Args:
            before: tokens that it held.
            fresh: empty layers of the model.
        """
        layer = self._layers[index]
        if before == 0:
            self.renew(index, fresh)
        elif index in self._windows:
            keys, values = self._windows[index]
            # The window is the head of what the last `update` returned.
            tokens = layer.get_seq_length() - before
            layer.keys, layer.values = keys[:, :, :-tokens], values[:, :, :-tokens]
            layer.cumulative_length = before
        elif isinstance(layer, DynamicIndexedLayer):  # its own `crop` takes as many from an indexer that is behind
            DynamicLayer.crop(layer, before - layer.get_seq_length())
        else:
            layer.crop(before - layer.get_seq_length())

    def renew(self, index: int, fresh: Sequence[Any]) -> None:
        """Put an empty layer in the place of one."""
        new = fresh[index]
        if hasattr(self._layers[index], "record_past"):
            new.record_past = self._layers[index].record_past
        self._layers[index] = new


def indexed(layer: Any, otherwise: int) -> int:
    """Tokens of which a layer's indexer holds keys; `otherwise`: it has no indexer, or was never updated."""
    keys = layer.indexer_keys if isinstance(layer, DynamicIndexedLayer) else None
    return otherwise if keys is None else keys.shape[1]


def _trim_indexer(layer: Any, tokens: int) -> None:
    """Keep what an indexer holds of a layer's first tokens."""
    if layer.indexer_keys is not None:
        layer.indexer_keys = layer.indexer_keys[:, :tokens]
    if getattr(layer, "indexer_position_ids", None) is not None:
        layer.indexer_position_ids = layer.indexer_position_ids[..., :tokens]


def check_indexer(index: int, layer: Any, new: int) -> None:
    """Raise `InterruptedStepError` where an indexer would be given keys of `new` tokens behind others than its layer
    holds. Models update it before the layer or behind it."""
    held, tokens = indexed(layer, 0), layer.get_seq_length()
    if held not in (tokens, tokens - new):
        raise InterruptedStepError(
            f"Layer {index} holds {tokens} tokens, and its indexer {held} before {new} more: an earlier forward did "
            "not finish. `reset()` the cache."
        )


def _check_fits(index: int, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise `MismatchError` where Transformers' own layer would fail after it changed, or not at all."""
    for new, held in ((keys, getattr(layer, "keys", None)), (values, getattr(layer, "values", None))):
        if not isinstance(held, torch.Tensor) or held.dim() != 4 or new.dim() != 4:
            continue
        same = (new.shape[:2], new.shape[3]) == (held.shape[:2], held.shape[3])
        if not same or not fits(new, held.dtype) or new.device != held.device:
            raise MismatchError(
                f"Layer {index} holds {tuple(held.shape)} in {held.dtype} on {held.device}, but was given "
                f"{tuple(new.shape)} in {new.dtype} on {new.device}. A cache serves one model, dtype and batch; "
                "`reset()` empties it. Of an engine, make a new one."
            )


def check_crop(layers: Sequence[Any], tokens_to_remove: int) -> None:
    """Raise before `crop` changes some layers of a cache where others would refuse it, or go back wrongly in silence.

    Raises:
        ConfigError: a positive number, where the installed Transformers refuses it.
        UnsupportedError: a layer does not hold what it would go back to.
    """
    # Convolutions do not know of how many tokens they are: of as many as any layer with attention.
    tokens = max((x.get_seq_length() for x in layers if isinstance(x, CacheLayerMixin)), default=sys.maxsize)
    for index, layer in enumerate(layers):
        why = None if isinstance(layer, TieredLayer) else _cannot_go_back(layer, tokens_to_remove, tokens)
        if why is not None:
            raise UnsupportedError(
                f"crop({tokens_to_remove}): layer {index} ({type(layer).__name__}) {why}. Nothing was cropped. "
                "`reset()` the cache and compute the tokens again, as `keep_prefix` does. Windows and convolutions can "
                "be cropped if `cache.activate_past_recording()` is called before the first forward."
            )
    check_meant(tokens_to_remove)


def is_models_own(layer: Any) -> bool:
    """Whether a layer is of a class that a model brings, so that nobody here knows what it keeps (DeepSeek V4)."""
    return not isinstance(layer, TieredLayer) and type(layer).__module__ != _TRANSFORMERS


def _is_inherited(layer: Any, method: str) -> bool:
    """Whether a method is that of Transformers' own layers, which knows nothing of what a model's class adds."""
    return next(x for x in type(layer).__mro__ if method in vars(x)).__module__ == _TRANSFORMERS


def check_rows(layers: Sequence[Any], method: str) -> None:
    """Raise `UnsupportedError` before a method picks rows of some layers and leaves states of others as they are."""
    for index, layer in enumerate(layers):
        recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
        if recurrent or (is_models_own(layer) and _is_inherited(layer, method)):
            # In Transformers 5.17 that of DeepSeek V4 knows of keys only.
            knows = not (is_models_own(layer) and _is_inherited(layer, "reorder_cache"))
            way_out = " `reorder_cache(rows)` takes rows of all, some of them or some several times." if knows else ""
            raise UnsupportedError(
                f"{method}: layer {index} ({type(layer).__name__}) keeps more than keys and values, and Transformers "
                f"would leave that as it is. Nothing was changed.{way_out}"
            )


def _cannot_go_back(layer: Any, tokens_to_remove: int, tokens: int) -> str | None:
    """Why a layer of Transformers', of a cache of so many tokens, cannot be cropped; None if it can."""
    removed = abs(tokens_to_remove)
    left = max(tokens - removed, 0)
    if is_models_own(layer) and _is_inherited(layer, "crop"):
        return "keeps more than its `crop` knows of"
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if any(layer.is_recurrent_states_initialized.values()):
            return "keeps a recurrent state, which no token can be taken back from"
        kernels = [
            (x.shape[-1], layer.conv_kernel_size[i])
            for i, x in layer.conv_states.items()
            if isinstance(x, torch.Tensor)
        ]
        if kernels and not layer.record_past:
            return "keeps no more of the past than the next token needs"
        if any(held - removed < min(kernel, left) for held, kernel in kernels):
            return "has recorded fewer tokens than that"
    # What passes through the window: of a model's own class, that may be a part of the tokens (Unlimited-OCR).
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.cumulative_length >= layer.sliding_window:
        if not layer.record_past:
            return "keeps no more of the past than its window"
        if tokens_to_remove > 0:
            return "takes minus the number of tokens to remove behind its window"
        left = max(layer.cumulative_length - removed, 0)
        if layer.keys.shape[-2] - removed < min(layer.sliding_window - 1, left):
            return "has recorded fewer tokens than that"
    return None


def croppable(layer: Any) -> bool:
    """Whether a layer can take back any of its tokens."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) or is_models_own(layer):
        return False
    return not isinstance(layer, DynamicSlidingWindowLayer) or layer.get_seq_length() < layer.sliding_window


def takes_crop_0(layer: Any) -> bool:
    """Whether a layer of a cache may be told `crop(0)`, which trims what was recorded of the past.

    Transformers refuses it where nothing was recorded and the past is gone: no error, nothing to undo.
    """
    if isinstance(layer, DynamicSlidingWindowLayer) and not layer.get_seq_length():
        return False  # it would look at keys that it does not have
    past_gone = isinstance(layer, LinearAttentionCacheLayerMixin) or (
        isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
    )
    return not past_gone or layer.record_past


def resident_bytes(layer: Any) -> int:
    """Bytes of a layer that Transformers keeps itself."""
    if isinstance(layer, TieredLayer):
        return 0
    total = 0
    for value in vars(layer).values():
        for x in value.values() if isinstance(value, dict) else (value,):
            if isinstance(x, torch.Tensor) and x.numel() > 1:
                total += x.nbytes
    return total


def warn_if_none_is_tiered(config: object, layers: Sequence[Any]) -> None:
    """Warn where all that grows with the context is in layers that stay resident."""
    growing = [x for x in layers if grows_untiered(x) and not isinstance(x, TieredLayer)]
    if growing and not any(isinstance(x, TieredLayer) for x in layers):
        warn_caller(
            f"No layer of this model ({type(config).__name__}) is tiered: {len(growing)} of {len(layers)} keep KV next "
            "to something else, such as a recurrent state. It grows with the context and stays with the model, outside "
            "every budget: this cache saves no memory here."
        )
