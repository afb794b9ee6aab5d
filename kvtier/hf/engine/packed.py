"""A packed step as a model sees it: a cache that lasts for one forward, with the tokens of all sequences end to end."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from kvtier.forward.sub_batch import SubBatch
from kvtier.hf.attention.view import KVView, Snapshot, make_view
from kvtier.hf.models.layers import latent_widths


class PackedSnapshot(Snapshot):
    """The KV of all sequences of a step, end to end."""

    __slots__ = ()

    def views(self) -> tuple[KVView, KVView]:
        """A view of the keys and one of the values."""
        layout = self.reader.layer.layout
        return (
            make_view(self, 0, (1, layout.k_heads, self.length, layout.k_dim), layout.dtype),
            make_view(self, 1, (1, layout.v_heads, self.length, layout.v_dim), layout.dtype),
        )


class GivenPositions:
    """What a cache says of its length where the model is given positions, and the mask says nothing."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given to the model."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """As many as there are queries: the mask says nothing."""
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: none."""
        return -1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as the length."""
        return 0


class PackedCache(GivenPositions, Cache):
    """The cache of one packed forward.

    Args:
        batch: whose step has begun.
        config: of the model's decoder.
    """

    is_compileable = False

    def __init__(self, batch: SubBatch, config: Any) -> None:
        super().__init__(layers=[])
        self._forward = batch
        self._latents = latent_widths(config)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the step's tokens, and return those of all its sequences, end to end."""
        reader = self._forward.append(layer_idx, key_states, value_states)
        snapshot = PackedSnapshot(self._forward, reader)  # type: ignore[arg-type]
        layout = reader.layer.layout
        if self._latents and layout.k_heads == 1 and not self._latents.isdisjoint((layout.k_dim, layout.v_dim)):
            pair = self._forward.densify(reader, snapshot.length, snapshot.epoch, None)
        else:
            pair = snapshot.views()
        return pair
