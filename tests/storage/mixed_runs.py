"""Transfers of runs of many lengths between pools of several layouts, through the real CUDA engine."""

from __future__ import annotations

import random

import torch

from kvtier.metrics import Counters
from kvtier.storage.block import BlockLayout
from kvtier.storage.links import Copy, TensorCopy, join
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import BlockPool
from kvtier.storage.transfer import CudaTransfers
from kvtier.types import Direction

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
        memory = Memory(
            place, Budget(tier, 10**8), lock_for=device if tier == "host" and device.type == "cuda" else None
        )
        pool = BlockPool(layout, memory)
        for _ in range(2):
            pool.grow(SLOTS // 2)
        for slab in pool.slabs:
            slab.data.copy_(torch.randint(0, 256, slab.data.shape, dtype=torch.uint8, device="cpu"))
        while pool.free:
            pool.allocate()
        found.append(pool)
    return found[0], found[1]


def some_runs(rng: random.Random, src: BlockPool, dst: BlockPool) -> list[Copy]:
    """Runs of one to several slots, joined where they happen to be neighbours; no slot is written twice."""

    def slots(pool: BlockPool) -> list[int]:
        numbers = [slab.base + i for slab in pool.slabs for i in range(slab.slots)]
        starts = rng.sample(range(0, SLOTS - 3, 4), SLOTS // 4 - 1)
        return [numbers[start + i] for start, n in zip(starts, lengths, strict=True) for i in range(n)]

    lengths = [rng.choice((1, 1, 1, 2, 4)) for _ in range(SLOTS // 4 - 1)]
    return join(src, slots(src), dst, slots(dst))


def moves_exactly(engine: CudaTransfers, seed: int) -> None:
    """Some transfers of all layouts at once, up and down, a tensor among them: the right bytes move, and no others."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pools = [make_pools(engine.device, layout) for layout in LAYOUTS]
    for direction in (Direction.FETCH, Direction.WRITE_BACK) * 2:
        copies: list[Copy | TensorCopy] = []
        for near, far in pools:
            copies += some_runs(rng, *((far, near) if direction is Direction.FETCH else (near, far)))
        rng.shuffle(copies)
        ends = torch.arange(9, device="cpu"), torch.zeros(9, dtype=torch.int64, device=engine.device)
        copies.insert(rng.randrange(len(copies)), TensorCopy(*ends))
        right = {slab.data.data_ptr(): slab.data.cpu().clone() for two in pools for p in two for slab in p.slabs}
        for copy in copies:
            if isinstance(copy, Copy):
                slab = copy.dst.slab(copy.dst_slot)
                begin = copy.dst.address(copy.dst_slot) - slab.data.data_ptr()
                source = copy.src.bytes(copy.src_slot, copy.count)
                right[slab.data.data_ptr()][begin : begin + copy.nbytes] = source.cpu()
        before = Counters(bytes_up=engine.counters.bytes_up, bytes_down=engine.counters.bytes_down)
        engine.submit(copies, direction).synchronize()
        for two in pools:
            for slab in (slab for p in two for slab in p.slabs):
                assert torch.equal(slab.data.cpu(), right[slab.data.data_ptr()])
        assert torch.equal(ends[1].cpu(), ends[0])
        moved = engine.counters.bytes_up - before.bytes_up + engine.counters.bytes_down - before.bytes_down
        assert moved == sum(copy.nbytes for copy in copies)
    engine.close()
    for two in pools:
        for pool in two:
            assert all(pool.references(slab.base + i) == 1 for slab in pool.slabs for i in range(slab.slots))
            pool.close()
