"""A packed batch: tables of any lengths get any numbers of new tokens in one call, all or none."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvtier import BudgetError, TieredMemory
from kvtier.cpu import native
from kvtier.memory.storage.layout import BlockLayout
from kvtier.tables import writing
from kvtier.tables.table import BlockTable

CPU = torch.device("cpu")


class World:
    """Tables of one set of blocks, and the tokens that each should hold."""

    def __init__(self, layout: BlockLayout, tables: int, *, device_budget: int | None, host_budget: int) -> None:
        self.layout = layout
        self.memory = TieredMemory(device_budget=device_budget, host_budget=host_budget)
        self.owner = self.memory.join()
        self.device = self.memory.on(CPU)
        self.blocks = self.memory.block_set(self.owner, self.device, layout, 0)
        self.tables = [BlockTable() for _ in range(tables)]
        shapes = ((layout.k_heads, 0, layout.k_dim), (layout.v_heads, 0, layout.v_dim))
        self.dense = [tuple(torch.empty(shape, dtype=layout.dtype) for shape in shapes) for _ in self.tables]

    def tokens(self, counts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        layout, g = self.layout, torch.Generator().manual_seed(seed)
        total = sum(counts)
        keys = torch.randn((1, layout.k_heads, total, layout.k_dim), generator=g).to(layout.dtype)
        values = torch.randn((1, layout.v_heads, total, layout.v_dim), generator=g).to(layout.dtype)
        return keys, values, [0, *itertools.accumulate(counts)]

    def append(self, counts: list[int], seed: int) -> None:
        keys, values, bounds = self.tokens(counts, seed)
        writing.append_packed(self.device, self.blocks, self.tables, keys, values, bounds)
        for i, (a, b) in enumerate(itertools.pairwise(bounds)):
            self.dense[i] = tuple(
                torch.cat([old, x[0, :, a:b]], 1) for old, x in zip(self.dense[i], (keys, values), strict=True)
            )

    def check(self) -> None:
        size = self.layout.block_size
        for table, (keys, values) in zip(self.tables, self.dense, strict=True):
            assert table.length == keys.shape[1]
            index = 0
            for run in table.resolve():
                pools = self.blocks.pools
                pool, slot = (pools.host, run.host) if run.device is None else (pools.device, run.device)
                assert pool is not None
                assert slot is not None
                for i in range(run.count):
                    span = slice(index * size, min((index + 1) * size, table.length))
                    count = span.stop - span.start
                    assert torch.equal(pool.keys(slot + i, 1)[0, :, :count], keys[:, span])
                    assert torch.equal(pool.values(slot + i, 1)[0, :, :count], values[:, span])
                    index += 1
            assert index == -(-table.length // size)
        self.memory.check_integrity()


@pytest.mark.parametrize("library", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("two_tiers", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(12))
def test_every_table_gets_its_own_tokens(
    seed: int, two_tiers: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:
        monkeypatch.setattr(native, "available", lambda: False)
    rng = random.Random(seed)
    heads = rng.choice((1, 2))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float64))
    layout = BlockLayout(heads, heads, rng.choice((4, 8)), rng.choice((4, 8)), rng.choice((1, 3, 4)), dtype)
    world = World(layout, rng.randint(1, 5), device_budget=64 * layout.nbytes if two_tiers else None, host_budget=10**6)
    for step in range(12):
        world.append([rng.choice((0, 1, 1, 1, 2, 3, 7)) for _ in world.tables], seed=100 * seed + step)
        world.check()


@pytest.mark.parametrize("seed", range(12))
def test_without_room_for_all_no_table_gets_any(seed: int) -> None:
    rng = random.Random(seed)
    layout = BlockLayout(1, 1, 4, 4, 2, torch.float32)
    world = World(layout, 4, device_budget=None, host_budget=12 * layout.nbytes)
    refused = 0
    for step in range(40):
        counts = [rng.choice((0, 1, 1, 3, 5)) for _ in world.tables]
        try:
            world.append(counts, seed=step)
        except BudgetError:
            refused += 1
            for i, table in enumerate(world.tables):
                if rng.random() < 0.5:
                    kept = rng.randint(0, table.length)
                    table.crop(kept, layout.block_size, world.device.free)
                    world.dense[i] = tuple(x[:, :kept] for x in world.dense[i])
        world.check()
    assert refused


def test_where_torch_makes_tensors_by_default_does_not_matter() -> None:
    """What goes up to a device begins in page-locked memory of the host."""
    with torch.device("meta"):
        assert torch.equal(
            writing._up([[3, 4]], torch.int64, torch.device("cpu")), torch.tensor([[3, 4]], device="cpu")
        )
