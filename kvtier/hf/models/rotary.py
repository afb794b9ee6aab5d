"""`Stretched`: what rotary embeddings keep, from one forward to the next, of how long a sequence was."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from kvtier.forks import heed, inherited

#: Of each embedding of a model: its frequencies, and the tokens that they are for.
_Frequencies = list[tuple[torch.Tensor, Any]]


class _Turn:
    """For one forward at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        heed(self)

    def forked(self) -> None:
        """See `Inherited`."""
        self.lock = inherited(self.lock, threading.RLock)


#: Of each model whose frequencies change.
_turns: weakref.WeakKeyDictionary[torch.nn.Module, _Turn] = weakref.WeakKeyDictionary()


class Stretched:
    """Rotary embeddings of a model whose frequencies are those of the longest sequence so far ("dynamic" NTK), until a
    forward is shorter than where that begins. They are replaced and never written to: to have them is to keep them.

    Those that each forward chooses for itself ("longrope") are in the model, too: of either kind there is one forward
    at a time within `turn`, whoever else has a `Stretched` of the model.

    Args:
        model: of Transformers; it may have no such embedding.
    """

    def __init__(self, model: Any) -> None:
        self._parts = [(module, prefix) for module in model.modules() for prefix in _prefixes(module, "dynamic")]
        self._own: _Frequencies | None = None  # of the model, while others take their place
        changes = self._parts or any(_prefixes(module, "longrope") for module in model.modules())
        self._turn = _turns.setdefault(model, _Turn()) if changes else _Turn()

    @property
    def turn(self) -> threading.RLock:
        """Held from `begin` to `give_back`. The lock itself, for a `with`: an interrupt that comes as a context of our
        own begins would leave it with whoever keeps the traceback."""
        return self._turn.lock

    def begin(self) -> None:
        """Up to `give_back`, forwards begin with the frequencies of a model that has computed nothing. A sequence that
        is computed forward by forward has the frequencies of its length whichever of its forwards come before: each
        one is longer than the last."""
        self.give_back()
        self._own = [self._now(*part) for part in self._parts]
        self._put([(getattr(x, f"{name}original_inv_freq"), x.original_max_seq_len) for x, name in self._parts])

    def give_back(self) -> None:
        """The model has its own frequencies, also where an interrupt has cut this short before."""
        if self._own is None:
            return
        with self.turn:
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


def _prefixes(module: Any, kind: str) -> list[str]:
    """What the names of a module's frequencies begin with, of each that is of a kind: one per type of layers, where
    they have different ones."""
    types = vars(module).get("rope_type")
    each = types.items() if isinstance(types, dict) else [("", types)]
    return [f"{layer_type}_" if layer_type else "" for layer_type, each_kind in each if kind in str(each_kind)]
