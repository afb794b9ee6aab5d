"""Assigning a layer's keys and values on a memory that others use: all or nothing."""

from __future__ import annotations

import torch

from kvtier import BudgetError, KVTierError, TieredKVCache, TieredMemory
from kvtier.testing import failing, with_doubles
from kvtier.transfer.engine import Transfer

HEADS, DIM, BLOCK, TOKENS = 1, 4, 4, 26
SLOT = 2 * HEADS * DIM * BLOCK * 4


def filled(memory: TieredMemory, tokens: torch.Tensor) -> TieredKVCache:
    cache = TieredKVCache(memory=memory, block_size=BLOCK)
    for layer in range(2):
        cache.update(tokens, -tokens, layer)
    return cache


def check(cache: TieredKVCache, tokens: torch.Tensor, keys: torch.Tensor | None = None) -> None:
    cache.check_integrity()
    for i, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys.dense(), tokens if keys is None or i else keys)
        assert torch.equal(layer.values.dense(), -tokens)


def test_what_is_refused_or_fails_leaves_the_layer_even_if_another_cache_comes_meanwhile() -> None:
    """With each budget, and each copy failing in turn."""
    x = torch.randn(1, HEADS, TOKENS, DIM)
    refused = failed = done = 0
    for host in range(4, 34, 3):
        for nth in range(6):
            left = [10**6]

            def fails(transfer: Transfer, left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            memory = with_doubles(TieredMemory(device_budget=12 * SLOT, host_budget=host * SLOT), failing(fails))
            try:
                cache = filled(memory, x)
            except BudgetError:
                break
            other = TieredKVCache(memory=memory, block_size=BLOCK)
            left[0] = nth
            try:
                cache.layers[0].keys = 2 * x
                done += 1
                keys = 2 * x
            except KVTierError as error:
                refused += isinstance(error, BudgetError)
                failed += not isinstance(error, BudgetError)
                keys = x
            left[0] = 10**6
            check(cache, x, keys)
            n = 0
            try:
                while True:  # it takes all the room that is left
                    other.update(x[:, :, :1], x[:, :, :1], 0)
                    n += 1
            except BudgetError:
                pass
            check(cache, x, keys)
            assert other.get_seq_length() == n
            cache.close()
            other.close()
            assert memory.stats.device.bytes == memory.stats.host.bytes == 0
            memory.close()
    assert min(refused, failed, done) > 0, (refused, failed, done)
