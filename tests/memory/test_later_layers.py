"""Admission of what only a later layer shows: rows that share less than in the first, and rows of another batch."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.planning.admission import Claim

CONFIG = LlamaConfig(num_hidden_layers=2)


def test_a_second_layer_whose_rows_share_less_is_admitted_anew() -> None:
    alike, apart = torch.ones(4, 1, 8, 4), torch.randn(4, 1, 8, 4)
    with (
        TieredMemory(host_budget=1_000) as memory,
        TieredKVCache(CONFIG, memory=memory, block_size=4) as cache,
    ):
        for layer in range(2):
            cache.update(alike, alike, layer)  # layers that are new are admitted again in any case
        cache.crop(-8)
        cache.update(alike, alike, 0)
        with pytest.raises(BudgetError, match="A step of 8 tokens"):
            cache.update(apart, apart, 1)
        assert cache.get_seq_length() == 0
        cache.check_integrity()


def claimed(cache: TieredKVCache, x: torch.Tensor) -> Claim:
    """What a forward over two layers claims when it begins."""
    cache.update(x, x, 0)
    (claim,) = cache._forward._held.owner.claims.values()
    cache.update(x, x, 1)
    return claim


def test_a_cache_that_was_cropped_to_nothing_claims_what_a_new_one_claims() -> None:
    x = torch.randn(4, 1, 8, 4)
    with TieredKVCache(CONFIG, block_size=4) as used, TieredKVCache(CONFIG, block_size=4) as new:
        claimed(used, x[:1])
        used.crop(-8)
        assert claimed(used, x) == claimed(new, x)
