"""Transfers of runs of many lengths between pools of several layouts, through the real CUDA engine."""

from __future__ import annotations

import random

import torch

from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.stats import Counters
from kvtier.transfer.copies import Copy, TensorCopy, joined
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction

#: Slots of 64, 1216 and 24,640 bytes: less than a program copies at a time, no power of two, and more.
LAYOUTS = (
    BlockLayout(1, 1, 3, 2, 5, torch.float16),
    BlockLayout(2, 3, 7, 16, 19, torch.uint8),
    BlockLayout(2, 2, 80, 80, 77, torch.uint8),
)
SLOTS = 40


def make_pools(device: torch.device, layout: BlockLayout) -> tuple[BlockPool, BlockPool]:
    """A pool of a device and one of the host, of `SLOTS` slots in two slabs each, filled with random bytes."""
    found = []
    for place, tier in ((device, "device"), (torch.device("cpu"), "host")):
        slabs = SlabAllocator(
            place, Budget(tier, 10**8), lock_for=device if tier == "host" and device.type == "cuda" else None
        )
        pool = BlockPool(layout, slabs)
        for _ in range(2):
            pool.grow(SLOTS // 2)
        for slab in pool.slabs:
            slab.data.copy_(torch.randint(0, 256, slab.data.shape, dtype=torch.uint8, device="cpu"))
            pool.claim(slab.base, slab.slots)
        found.append(pool)
    return found[0], found[1]


def some_runs(rng: random.Random, src: BlockPool, dst: BlockPool) -> list[Copy]:
    """Runs of one to several slots, joined where they happen to be neighbours; no slot is written twice."""

    def slots(pool: BlockPool) -> list[int]:
        numbers = [slab.base + i for slab in pool.slabs for i in range(slab.slots)]
        starts = rng.sample(range(0, SLOTS - 3, 4), SLOTS // 4 - 1)
        return [numbers[start + i] for start, n in zip(starts, lengths, strict=True) for i in range(n)]

    lengths = [rng.choice((1, 1, 1, 2, 4)) for _ in range(SLOTS // 4 - 1)]
    return joined(Copy(src.span(a, 1), dst.span(b, 1)) for a, b in zip(slots(src), slots(dst), strict=True))


def moves_exactly(engine: CudaTransfers, seed: int) -> None:
    """Some transfers of all layouts at once, up and down, a tensor among them: the right bytes move, and no others."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pools = [make_pools(engine.device, layout) for layout in LAYOUTS]
    for direction in (Direction.FETCH, Direction.WRITE_BACK) * 2:
        copies: list[Copy | TensorCopy] = []
        for on_device, on_host in pools:
            copies += some_runs(rng, *((on_host, on_device) if direction is Direction.FETCH else (on_device, on_host)))
        rng.shuffle(copies)
        ends = torch.arange(9, device="cpu"), torch.zeros(9, dtype=torch.int64, device=engine.device)
        copies.insert(rng.randrange(len(copies)), TensorCopy(*ends))
        right = {slab.data.data_ptr(): slab.data.cpu().clone() for two in pools for p in two for slab in p.slabs}
        for copy in copies:
            if isinstance(copy, Copy):
                target = copy.target
                written = right[target.slab.data_ptr()][target.offset : target.offset + target.nbytes]
                written.copy_(copy.source.bytes().cpu())
        counters = Counters()
        engine.submit(copies, direction, counters).synchronize()
        for two in pools:
            for slab in (slab for p in two for slab in p.slabs):
                assert torch.equal(slab.data.cpu(), right[slab.data.data_ptr()])
        assert torch.equal(ends[1].cpu(), ends[0])
        assert counters.bytes_up + counters.bytes_down == sum(copy.nbytes for copy in copies)
    engine.close()
    for two in pools:
        for pool in two:
            pool.close()
