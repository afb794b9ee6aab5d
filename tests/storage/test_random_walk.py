"""Random walks over a cache beside a trivial dense model of it: after every operation they hold the same numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from kvtier import BudgetError, TieredKVCache, TransferError
from kvtier.storage.gather import dense_kv
from kvtier.testing import failing, held, with_doubles

HEADS, K_DIM, V_DIM = 2, 4, 3
LAYERS = 3


@dataclass
class DenseModel:
    """What the cache should hold: for each layer, keys `[batch, heads, tokens, dim]` and values."""

    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return self.layers[0][0].shape[0] if self.layers else 0

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, new: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.length == 0:
            self.layers = [(k.clone(), v.clone()) for k, v in new]
        else:
            self.layers = [
                (torch.cat([k, nk], 2), torch.cat([v, nv], 2))
                for (k, v), (nk, nv) in zip(self.layers, new, strict=True)
            ]

    def each(self, change) -> None:
        self.layers = [(change(k), change(v)) for k, v in self.layers]


class Walk:
    """One cache and its model, changed together."""

    def __init__(self, seed: int, engine=None, budgets: tuple[int, ...] = (10**9,), host: int = 10**9) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.block_size = self.random.choice((1, 2, 4, 5))
        budget = self.random.choice(budgets)
        self.cache = TieredKVCache(
            device_budget=budget or None,
            host_budget=host,
            block_size=self.block_size,
            write_through=self.random.choice((0.0, 0.5, 1.0)),
        )
        if engine is not None:
            with_doubles(self.cache, engine)
        self.model = DenseModel()
        self.refused = 0

    def tokens(self, batch: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New keys and values; often with rows that are equal, wholly or at their beginning."""
        out = []
        twins = self.random.random() < 0.4
        part = self.random.randint(0, count)
        for _ in range(LAYERS):
            # Drawn on the CPU, wherever they go: the same walk on every device.
            k = torch.randn(batch, HEADS, count, K_DIM, generator=self.torch, device="cpu")
            v = torch.randn(batch, HEADS, count, V_DIM, generator=self.torch, device="cpu")
            if twins:
                for row in range(1, batch):
                    k[row, :, :part], v[row, :, :part] = k[row - 1, :, :part], v[row - 1, :, :part]
            out.append((k.to(torch.get_default_device()), v.to(torch.get_default_device())))
        return out

    def append(self) -> None:
        batch = self.model.batch if self.model.length else self.random.randint(1, 4)
        count = self.random.choice((1, 1, 1, 2, self.block_size, 2 * self.block_size + 1, 9))
        new = self.tokens(batch, count)
        before = self.model.length
        try:
            for i, (k, v) in enumerate(new):
                keys, values = self.cache.update(k, v, i)
                assert keys.shape[2] == values.shape[2] == before + count
        except (BudgetError, TransferError):
            self.refused += 1
            if before:
                self.cache.crop(0)
            else:
                self.cache.reset()
                self.model = DenseModel()
        else:
            self.model.append(new)

    def crop(self) -> None:
        n = self.random.randint(0, min(self.model.length, 7))
        self.cache.crop(-n)
        self.model.each(lambda x: x[:, :, : x.shape[2] - n])

    def reorder(self) -> None:
        index = torch.tensor([self.random.randrange(self.model.batch) for _ in range(self.model.batch)])
        self.cache.reorder_cache(index)
        self.model.each(lambda x: x[index])

    def select(self) -> None:
        index = torch.tensor(self.random.sample(range(self.model.batch), self.random.randint(1, self.model.batch)))
        self.cache.batch_select_indices(index)
        self.model.each(lambda x: x[index])

    def repeat(self) -> None:
        if self.model.batch <= 3:
            self.cache.batch_repeat_interleave(2)
            self.model.each(lambda x: x.repeat_interleave(2, 0))

    def reset(self) -> None:
        self.cache.reset()
        self.model = DenseModel()

    def spill(self) -> None:
        """Evict some blocks, whichever policy would have."""
        for store in self.cache._runtime.layers.values():
            if store.tiers.far is not None:
                for block in list(store.resident)[: self.random.randint(0, 3)]:
                    try:
                        store.tiers.evict(block)
                    except (BudgetError, TransferError):
                        self.refused += 1

    def prefetch(self) -> None:
        for store in self.cache._runtime.layers.values():
            store.tiers.staging.prefetch(store)

    def shrink(self) -> None:
        """Give back a slab, as a growing workspace would ask."""
        for store in self.cache._runtime.layers.values():
            store.tiers.workspace.release()
            try:
                store.tiers.reclaim(store.tiers.near.budget.free + store.layout.nbytes, None)
            except (BudgetError, TransferError):
                self.refused += 1

    def read(self) -> None:
        """Compare, through the workspace or through tensors of the reader's own."""
        for i, (k, v) in enumerate(self.model.layers):
            store = self.cache._runtime.layers[i]
            try:
                if self.random.random() < 0.5:
                    keys, values = dense_kv(store, store.length)
                else:
                    keys, values = self.cache.layers[i].keys.dense(), self.cache.layers[i].values.dense()
            except (BudgetError, TransferError):
                self.refused += 1
                continue
            assert torch.equal(keys, k), f"keys of layer {i}"
            assert torch.equal(values, v), f"values of layer {i}"

    def step(self) -> None:
        operations = [self.append] * 8 + [self.reset] * (self.random.random() < 0.1) + [self.shrink]
        if self.model.length:
            operations += [self.crop, self.reorder, self.select, self.repeat, self.spill, self.spill, self.prefetch]
        self.random.choice(operations)()
        self.cache.check_integrity()
        if self.model.length > 48:
            self.reset()
        if self.model.length and self.random.random() < 0.5:
            self.read()
            self.cache.check_integrity()
        stats = self.cache.stats
        assert stats.device.bytes <= stats.device.peak_bytes <= stats.device.budget
        assert stats.host.bytes <= stats.host.peak_bytes <= stats.host.budget


def walk(seed: int, steps: int = 250, **options) -> Walk:
    """Walk `steps` operations."""
    trip = Walk(seed, **options)
    for _ in range(steps):
        trip.step()
    return trip


@pytest.mark.parametrize("seed", range(8))
def test_a_cache_in_the_host_tier_holds_what_a_dense_cache_holds(seed):
    walk(seed, budgets=(0,))


@pytest.mark.parametrize("seed", range(12))
def test_a_cache_over_two_tiers_holds_what_a_dense_cache_holds(seed):
    walk(100 + seed, budgets=(20_000, 60_000, 10**7))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_transfers_may_come_as_late_and_in_any_order_as_allowed(seed, eagerness, late):
    walk(200 + seed, engine=held(seed, eagerness, late=late), budgets=(20_000, 60_000))


@pytest.mark.parametrize("seed", range(6))
def test_transfers_may_fail(seed):
    walk(300 + seed, engine=failing(0.2, seed), budgets=(20_000, 60_000))


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_that_is_refused_leaves_what_was_there(seed):
    trip = walk(400 + seed, budgets=(0, 12_000), host=14_000)
    assert trip.refused
