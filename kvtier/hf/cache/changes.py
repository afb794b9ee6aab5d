"""`Changes`: what changes every layer of a cache, or none: tokens and rows that go, a forward that is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.forward.forward import Forward
from kvtier.hf.cache.layer import TieredLayer, check_meant
from kvtier.hf.cache.resident import ResidentLayers, check_crop, resident_bytes, takes_crop_0


class Changes:
    """Changes the layers of a cache together.

    Args:
        forward, resident: of the cache.
        layers: all layers of the cache: the list itself.
        fresh: makes empty layers of the model.
    """

    def __init__(
        self, forward: Forward, resident: ResidentLayers, layers: list[Any], fresh: Callable[[], Sequence[Any]]
    ) -> None:
        self._forward = forward
        self._resident = resident
        self._layers = layers
        self._fresh = fresh

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; 0: those of an unfinished forward, and what was recorded.

        Raises:
            ConfigError, UnsupportedError: as of `TieredKVCache.crop`. Nothing was cropped.
        """
        self._forward.steps.check_sound()
        self._forward.steps.settle()
        if not self._forward.steps.complete:
            self._drop_unfinished()
        if not any(x.get_seq_length() if isinstance(x, TieredLayer) else resident_bytes(x) for x in self._layers):
            # Some of Transformers' layers would look for keys or states that they do not have yet.
            check_meant(tokens_to_remove)
            self._end_step()
            return
        if tokens_to_remove:
            check_crop(self._layers, tokens_to_remove)
            for layer in self._layers:
                if isinstance(layer, TieredLayer):
                    layer.keep_given()
            self.call("crop", tokens_to_remove)
            return
        for layer in self._layers:
            if takes_crop_0(layer):
                layer.crop(0)
        self._end_step()

    def call(self, method: str, argument: Any) -> None:
        """Call a method of every layer, all or none."""
        self._each(lambda layer: getattr(layer, method)(argument))

    def pick(self, method: str, rows: torch.Tensor) -> None:
        """Let row `i` continue what row `rows[i]` held, in every layer or none; of Transformers' layers by `method`.

        Args:
            rows: checked, on the host; see `row_indices`.
        """
        picked = rows.tolist()  # once, not once for each layer
        self._each(lambda layer: layer.pick(picked) if isinstance(layer, TieredLayer) else getattr(layer, method)(rows))

    def _each(self, change: Callable[[Any], object]) -> None:
        """Change all layers or none: those of Transformers first, which refuse before they change."""
        changed = False
        for layer in sorted(self._layers, key=lambda layer: isinstance(layer, TieredLayer)):
            try:
                change(layer)
            except Exception:
                if changed:
                    self._forward.steps.break_off()
                raise
            changed = True
        self._end_step()

    def roll_back(self) -> bool:
        """A layer was refused: the layers before it give up what this forward gave them, where that is possible. False:
        only an empty cache is right."""
        steps = self._forward.steps
        if steps.expected is None:
            # Nobody knows yet which layers there are: a first forward that was refused would pass for a finished one.
            if steps.began and not any(steps.began.values()):  # a first layer has taken back its part by itself
                self._forward.uncount_step()
            self._forward.undo_first()
        elif steps.undoable:
            if not steps.complete:
                self._drop_unfinished()
                self._forward.uncount_step()
        elif not steps.knows_states() and not any(steps.began.values()):
            return False
        return True

    def renew(self) -> None:
        """Let every layer be empty: nothing is left in the forward."""
        self._resident.end_step()
        fresh = self._fresh()
        for i, layer in enumerate(self._layers):
            if isinstance(layer, TieredLayer):
                layer.unassign()
            else:
                self._resident.renew(i, fresh)

    def _drop_unfinished(self) -> None:
        steps = self._forward.steps
        if not steps.undoable:
            raise steps.interrupted()
        fresh = self._fresh()
        for i, before in steps.began.items():
            assert type(i) is int, "a recurrent state cannot be undone"
            layer = self._layers[i]
            if isinstance(layer, TieredLayer):
                layer.crop(before - layer.get_seq_length())
            else:
                self._resident.take_back(i, before, fresh)
        self._end_step()

    def _end_step(self) -> None:
        self._forward.steps.end()
        self._resident.end_step()
