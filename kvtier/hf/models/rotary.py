"""`Stretched`: what rotary embeddings keep, from one forward to the next, of how long a sequence was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Of each embedding of a model: its frequencies, and the tokens that they are for.
_Frequencies = list[tuple[torch.Tensor, Any]]


class Stretched:
    """Rotary embeddings of a model whose frequencies are those of the longest sequence so far ("dynamic" NTK), until a
    forward is shorter than where that begins. They are replaced and never written to: to have them is to keep them.

    Args:
        model: of Transformers; it may have no such embedding.
    """

    def __init__(self, model: Any) -> None:
        self._parts = [(module, prefix) for module in model.modules() for prefix in _prefixes(module)]
        self._own: _Frequencies | None = None  # of the model, while others take their place

    @contextmanager
    def original(self) -> Iterator[None]:
        """In this context forwards begin with the frequencies of a model that has computed nothing. A sequence that is
        computed forward by forward has the frequencies of its length whichever of its forwards come before: each one is
        longer than the last. Behind it the model has its own again."""
        self.give_back()
        self._own = [self._now(*part) for part in self._parts]
        try:
            self._put([(getattr(x, f"{name}original_inv_freq"), x.original_max_seq_len) for x, name in self._parts])
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """The model has its own frequencies, also where an interrupt has cut a context short."""
        if self._own is not None:
            self._put(self._own)
            self._own = None

    @staticmethod
    def _now(module: Any, name: str) -> tuple[torch.Tensor, Any]:
        length = getattr(module, f"{name}max_seq_len_cached", module.max_seq_len_cached)
        return getattr(module, f"{name}inv_freq"), length

    def _put(self, frequencies: _Frequencies) -> None:
        for (module, name), (inv_freq, length) in zip(self._parts, frequencies, strict=True):
            setattr(module, f"{name}inv_freq", inv_freq.to(getattr(module, f"{name}inv_freq").device))
            setattr(module, f"{name}max_seq_len_cached", length)


def _prefixes(module: Any) -> list[str]:
    """What the names of a module's frequencies begin with, of each that is stretched with the length: one per type of
    layers, where they have different ones."""
    types = vars(module).get("rope_type")
    each = types.items() if isinstance(types, dict) else [("", types)]
    return [f"{layer_type}_" if layer_type else "" for layer_type, kind in each if "dynamic" in str(kind)]
