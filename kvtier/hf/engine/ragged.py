"""A step of sequences of any lengths, one row each, for models that keep recurrent states: these are stacked by row."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from kvtier.forward.sub_batch import SubBatch
from kvtier.hf.attention.packed import end_to_end
from kvtier.hf.engine.packed import GivenPositions, PackedSnapshot
from kvtier.hf.models.layers import transformers_layers


def state_layers(config: Any) -> dict[int, Any]:
    """New layers for recurrent states, by index, as Transformers makes them."""
    layers = enumerate(transformers_layers(config))
    return {i: layer for i, layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)}


class RaggedCache(GivenPositions, DynamicCache):
    """The cache of one forward `[rows, tokens]`: a row for each segment of a step, all of as many tokens.

    Keys and values go to the step's sequences, recurrent states to `states`.

    Args:
        batch: whose step has begun.
        config: of the model's decoder.
        states: layers of recurrent states by index, with a row for each segment; changed by the model.
    """

    is_compileable = False

    def __init__(self, batch: SubBatch, config: Any, states: dict[int, Any]) -> None:
        super().__init__()
        self.layers = [states.get(i, layer) for i, layer in enumerate(transformers_layers(config))]
        self._forward = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the step's tokens, and return those of all its sequences, end to end."""
        reader = self._forward.append(layer_idx, end_to_end(key_states), end_to_end(value_states))
        return PackedSnapshot(self._forward, reader).views()  # type: ignore[arg-type]
