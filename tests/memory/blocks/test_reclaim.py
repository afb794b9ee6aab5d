"""Defragmentation: blocks move within a tier so that slabs or ranges become free, and nobody who reads them notices."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKVCache
from kvtier.errors import BudgetError
from kvtier.memory.access.readers import Reading
from kvtier.memory.blocks import reclaim, residency
from kvtier.memory.blocks.block import BlockSet, Pools, Run, State
from kvtier.memory.integrity import check_set
from kvtier.memory.owner import Owner
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool, Fence
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers import fetching
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning import sizing
from kvtier.planning.policy import Policy
from kvtier.stats import Counters
from kvtier.tables.layer import LayerKV
from kvtier.testing import held, with_doubles
from kvtier.transfer.doubles import HeldTransfers
from kvtier.transfer.engine import Event

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
LAYOUT = BlockLayout(1, 1, 4, 4, 2, torch.float32)
WIDE = BlockLayout(2, 2, 8, 8, 4, torch.float32)
N = LAYOUT.nbytes


class Tier:
    """Pools of one host budget, and runs in them whose bytes are their own number."""

    def __init__(self, budget: int, *layouts: BlockLayout) -> None:
        self.slabs = SlabAllocator(CPU, Budget("host", budget))
        self.engine = HeldTransfers(CPU, eagerness=0.0)
        self.sets = []
        for layout in layouts or (LAYOUT,):
            pool = BlockPool(layout, self.slabs)
            self.sets.append(BlockSet(0, 0, Pools(layout, None, pool, self.engine), Counters()))
        self.numbers: dict[Run, list[int]] = {}
        self._next = 0

    @property
    def pool(self) -> BlockPool:
        return self.sets[0].pools.host

    @property
    def pools(self) -> list[BlockPool]:
        return [blocks.pools.host for blocks in self.sets]

    def run(self, start: int, count: int, which: int = 0) -> Run:
        """A sealed run in exactly these slots, which are free."""
        blocks = self.sets[which]
        blocks.pools.host.claim(start, count)
        run = residency.allocate(blocks, start, count)
        residency.seal(run)
        self.numbers[run] = []
        for i in range(count):
            self._next = self._next % 250 + 1
            self.numbers[run].append(self._next)
            blocks.pools.host.bytes(start + i, 1).fill_(self._next)
        return run

    def placed(self, pool: BlockPool) -> Iterator[reclaim.Placed]:
        for blocks in self.sets:
            if blocks.pools.host is pool:
                for run in blocks.runs:
                    if run.host is not None:
                        yield reclaim.Placed(run.host, run)

    def check(self) -> None:
        """Every run holds what it held, and all counts agree."""
        for run, numbers in self.numbers.items():
            found = []
            for leaf in run.leaves():
                assert leaf.host is not None
                pool = leaf.blocks.pools.host
                found += [pool.bytes(leaf.host + i, 1) for i in range(leaf.count)]
            assert all((x == n).all() for x, n in zip(found, numbers, strict=True)), "a block lost its bytes"
        for blocks in self.sets:
            check_set(blocks)
            pool = blocks.pools.host
            pool.check_integrity()
            assert pool.used == sum(run.count for run in blocks.runs)
        assert self.slabs.budget.used == sum(pool.nbytes for pool in self.pools)


def bases(pool: BlockPool) -> list[int]:
    return [slab.base for slab in pool.slabs]


# Slabs


def test_a_slab_that_is_free_goes_before_anything_moves() -> None:
    tier = Tier(24 * N)
    for _ in range(3):
        tier.pool.grow(8)
    a, _, c = bases(tier.pool)
    runs = [tier.run(a + 1, 3), tier.run(c, 2)]
    assert reclaim.reclaim(tier.pools, tier.placed, 8 * N)
    assert bases(tier.pool) == [a, c]
    assert [run.host for run in runs] == [a + 1, c]
    tier.check()


def test_the_blocks_of_the_emptiest_slab_move_to_free_slots_of_the_others() -> None:
    tier = Tier(24 * N)
    for _ in range(3):
        tier.pool.grow(8)
    a, b, c = bases(tier.pool)
    tier.run(a, 3)
    few = tier.run(b + 2, 2), tier.run(b + 6, 1)
    tier.run(c + 3, 5)
    assert reclaim.free_bytes(tier.pools) == 13 * N
    assert reclaim.reclaim(tier.pools, tier.placed, 8 * N)
    assert bases(tier.pool) in ([a, c], [b, c])
    tier.check()
    assert few[0].blocks.counters.moved_blocks == 3, "no more than it must"
    assert reclaim.free_bytes(tier.pools) == 13 * N, "nothing is lost"


def test_a_run_that_fits_nowhere_whole_is_cut() -> None:
    tier = Tier(24 * N)
    for _ in range(3):
        tier.pool.grow(8)
    a, b, c = bases(tier.pool)
    for start in (a, a + 3, a + 6, c + 1, c + 4, c + 7):
        tier.run(start, 2 if start not in (c + 7,) else 1)
    run = tier.run(b, 3)
    assert reclaim.reclaim(tier.pools, tier.placed, 8 * N)
    assert bases(tier.pool) == [a, c]
    assert len(list(run.leaves())) > 1
    tier.check()


def test_a_slab_whose_blocks_fit_nowhere_else_is_replaced_by_a_smaller_one() -> None:
    tier = Tier(20 * N)
    tier.pool.grow(4)
    tier.pool.grow(16)
    a, b = bases(tier.pool)
    tier.run(a, 4)
    scattered = [tier.run(b + 3 * i, 1) for i in range(5)]
    assert reclaim.reclaim(tier.pools, tier.placed, 11 * N)
    assert [slab.slots for slab in tier.pool.slabs] == [4, 5]
    assert bases(tier.pool)[0] == a
    starts = sorted(run.host or 0 for run in scattered)
    assert starts == list(range(starts[0], starts[0] + 5))
    tier.check()
    assert not reclaim.reclaim(tier.pools, tier.placed, 12 * N), "all that is left is used"
    tier.check()


def full_but_for_gaps(budget: int) -> tuple[Tier, list[Run]]:
    """A full slab of 4, and one of 16 with 5 blocks that fit nowhere else."""
    tier = Tier(budget * N)
    tier.pool.grow(4)
    tier.pool.grow(16)
    a, b = bases(tier.pool)
    tier.run(a, 4)
    return tier, [tier.run(b + 3 * i, 1) for i in range(5)]


def no_more(patch: Patch) -> None:
    """The machine has no memory left."""

    def refuse(*args: object, **options: object) -> None:
        raise MemoryError

    for owner, name in ((mmap, "mmap"), (torch, "empty"), (torch.Tensor, "to"), (torch.Tensor, "clone")):
        patch.setattr(owner, name, refuse)


def test_a_slab_becomes_smaller_where_no_byte_is_left(monkeypatch: Patch) -> None:
    """Neither in the budget nor beside it."""
    tier, _ = full_but_for_gaps(20)
    budget = tier.slabs.budget
    assert budget.free == 0
    with monkeypatch.context() as patch:
        no_more(patch)
        assert reclaim.reclaim(tier.pools, tier.placed, 11 * N)
    assert [slab.slots for slab in tier.pool.slabs] == [4, 5]
    assert (budget.used, budget.peak) == (9 * N, 20 * N)
    tier.check()
    assert tier.pool.grow(11) == 11
    tier.check()


@pytest.mark.parametrize("free", [0, 4, 5])
@pytest.mark.parametrize("machine", ["has it", "has no more"])
def test_memory_that_cannot_be_cut_is_replaced_where_the_budget_has_room_for_both(
    free: int, machine: str, monkeypatch: Patch
) -> None:
    """Or else every block stays where it was."""
    tier, scattered = full_but_for_gaps(20 + free)
    tier.slabs.divisible, tier.slabs.elastic = False, True
    budget, before = tier.slabs.budget, [run.host for run in scattered]
    works = machine == "has it" and free == 5
    with monkeypatch.context() as patch:
        if machine == "has no more":
            no_more(patch)
        assert reclaim.reclaim(tier.pools, tier.placed, 11 * N + free * N) == works
    tier.check()
    assert budget.peak <= budget.limit == (20 + free) * N, "nothing is taken beyond the budget, which stays as it is"
    if works:
        assert [slab.slots for slab in tier.pool.slabs] == [4, 5]
    else:
        assert [run.host for run in scattered] == before
        assert [slab.slots for slab in tier.pool.slabs] == [4, 16]


def test_more_blocks_leave_a_device_whose_slabs_cannot_be_cut_until_there_is_room(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sizing, "slab_slots", lambda *args: 8)
    world = Memory(16)
    slabs = world.device.slabs
    assert slabs is not None
    slabs.divisible = False
    layer = world.layer(16)
    world.evict_every_other(layer)
    assert slabs.budget.free == 0
    with world.memory.lock:
        world.device.make_room(10 * SLOT)
    assert slabs.budget.free >= 10 * SLOT
    assert slabs.budget.peak == slabs.budget.limit
    world.check()
    world.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_what_is_cut_from_a_slab_is_given_back_to_the_machine() -> None:
    large = BlockLayout(16, 16, 64, 64, 128, torch.float32)
    tier = Tier(64 * large.nbytes, large)
    tier.pool.grow(64)
    (base,) = bases(tier.pool)
    tier.pool.bytes(base, 64).fill_(1)
    tier.run(base + 40, 3)
    before = resident()
    assert reclaim.reclaim(tier.pools, tier.placed, 61 * large.nbytes)
    assert before - resident() > 0.9 * 61 * large.nbytes
    tier.check()


def resident() -> int:
    """Bytes of this process that are in memory."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def test_a_page_locked_slab_that_is_cut_is_locked_as_far_as_it_goes(page_locking: Any) -> None:
    tier, _ = full_but_for_gaps(40)
    tier.slabs.lock_for = torch.device("cuda", 1)
    tier.pool.grow(16)
    base = bases(tier.pool)[-1]
    tier.run(base + 7, 1)
    tier.run(bases(tier.pool)[1] + 1, 2)
    register = page_locking.cudaHostRegister
    for refused in (False, True):
        slab = tier.pool.slabs[-1]
        address = slab.data.data_ptr()
        assert page_locking.locked[address] == slab.data.numel()
        if refused:
            page_locking.cudaHostRegister = lambda *args: 2
        tier.pool.cut(slab, slab.slots - 2)
        slab = tier.pool.slabs[-1]
        assert slab.data.data_ptr() == address
        assert page_locking.locked.get(address) == (None if refused else slab.data.numel())
        assert slab.mapped != refused
        assert tier.slabs.page_locked == sum(page_locking.locked.values())
        page_locking.cudaHostRegister = register
        tier.check()


def test_one_layout_gives_its_free_slots_to_another_of_the_same_budget() -> None:
    tier = Tier(16 * N + 2 * WIDE.nbytes, LAYOUT, WIDE)
    small, wide = tier.pools
    small.grow(16)
    wide.grow(2)
    tier.run(bases(small)[0] + 5, 2)
    tier.run(bases(wide)[0], 2, which=1)
    assert reclaim.reclaim(tier.pools, tier.placed, WIDE.nbytes)
    assert wide.grow(1) == 1
    tier.check()


@pytest.mark.parametrize("why", ["a reader", "a copy"])
def test_a_slab_that_somebody_still_uses_stays(why: str) -> None:
    tier = Tier(16 * N)
    tier.pool.grow(8)
    tier.pool.grow(8)
    a, b = bases(tier.pool)
    tier.run(a, 5)
    run = tier.run(b, 3)
    if why == "a reader":
        tier.pool.claim(b + 4, 1)
        tier.pool.give(b + 4, 1, Always())
        assert not reclaim.reclaim(tier.pools, tier.placed, 8 * N)
    else:
        # A fetch into some device memory that has not settled.
        host = tier.sets[0].pools.host
        target = BlockPool(LAYOUT, SlabAllocator(CPU, Budget("device", 8 * N)))
        target.grow(8)
        blocks = BlockSet(0, 0, Pools(LAYOUT, target, host, tier.engine), Counters())
        tier.sets.append(blocks)
        moving = residency.allocate(blocks, take(target, 2), 2)
        residency.seal(moving)
        residency.write_back([(moving, b + 3)])
        host.claim(b + 3, 2)
        tier.sets.pop()
        placed = list(tier.placed(host))

        def also(pool: BlockPool) -> Iterator[reclaim.Placed]:
            yield from placed
            yield reclaim.Placed(b + 3, moving)

        assert not residency.can_move(moving)
        assert not reclaim.reclaim(tier.pools, also, 8 * N)
        tier.engine.drain()
        assert residency.can_move(moving)
    assert run.host == b


class Always(Event):
    """A fence that does not pass."""

    def passed(self) -> bool:
        return False

    def settle(self) -> None:
        raise AssertionError("nobody waits here")


def take(pool: BlockPool, count: int) -> int:
    found = pool.take(count)
    assert found is not None
    assert found[1] == count
    return found[0]


# Ranges


def nothing() -> Fence | None:
    return None


def test_blocks_from_the_end_fill_the_gaps_nearest_the_beginning() -> None:
    tier = Tier(32 * N)
    tier.pool.grow(32)
    base = bases(tier.pool)[0]
    runs = [tier.run(base + start, count) for start, count in ((0, 2), (3, 3), (10, 4), (20, 2), (25, 5))]
    moved = tier.sets[0].counters
    reclaim.pack(tier.pool, tier.placed(tier.pool), 4, nothing)
    tier.check()
    assert moved.moved_blocks == 4, "no more than were allowed"
    assert [run.host for run in runs[:2]] == [base, base + 3], "what is near the beginning stays"
    assert [leaf.host for leaf in runs[4].leaves()] == [base + 25, base + 2], "the last block fills the first gap"
    assert next(iter(tier.pool.ranges()))[0] == base + 9, "the gaps nearest the beginning are filled"
    for _ in range(5):
        reclaim.pack(tier.pool, tier.placed(tier.pool), 100, nothing)
        tier.check()
    assert list(tier.pool.ranges()) == [(base + 16, 16)], "all that is free is one range"
    before = moved.moved_blocks
    reclaim.pack(tier.pool, tier.placed(tier.pool), 100, nothing)
    assert moved.moved_blocks == before, "in order it stays as it is"


def test_slots_that_were_copied_away_wait_for_their_readers() -> None:
    tier = Tier(8 * N)
    tier.pool.grow(8)
    base = bases(tier.pool)[0]
    tier.run(base, 1)
    tier.run(base + 6, 2)
    fence = Always()
    reclaim.pack(tier.pool, tier.placed(tier.pool), 8, lambda: fence)
    assert (tier.pool.held, tier.pool.free) == (2, 3)
    assert tier.pool.fences() == [fence]
    tier.check()


@pytest.mark.parametrize("seed", range(8))
def test_any_walk_of_moves_keeps_every_byte(seed: int) -> None:
    rng = random.Random(seed)
    tier = Tier(60 * N + 12 * WIDE.nbytes, LAYOUT, WIDE)
    for _ in range(120):
        which = rng.randrange(2)
        pool = tier.pools[which]
        act = rng.choice(("grow", "run", "run", "run", "free", "free", "pack", "reclaim"))
        live = [run for run in tier.numbers if run.blocks is tier.sets[which]]
        if act == "grow":
            pool.grow(rng.randint(1, 12))
        elif act == "run" and pool.free:
            start, count = rng.choice(list(pool.ranges()))
            begin = start + rng.randrange(count)
            tier.run(begin, rng.randint(1, start + count - begin), which)
        elif act == "free" and live:
            run = rng.choice(live)
            for leaf in list(run.leaves()):
                residency.free(leaf, None)
            del tier.numbers[run]
        elif act == "pack":
            reclaim.pack(pool, list(tier.placed(pool)), rng.choice((1, 3, 50)), nothing)
        elif act == "reclaim":
            wanted = rng.choice((N, WIDE.nbytes, 5 * N, 20 * N))
            free = reclaim.free_bytes(tier.pools)
            enough = reclaim.reclaim(tier.pools, tier.placed, wanted)
            assert enough == (tier.slabs.budget.free >= wanted)
            assert reclaim.free_bytes(tier.pools) == free
            assert enough or free < wanted or all(run.count for run in tier.numbers)
        tier.check()


# In a memory


HEADS, DIM, BLOCK, LAYERS = 1, 8, 2, 4
OURS = BlockLayout(HEADS, HEADS, DIM, DIM, BLOCK, torch.float32)
SLOT = OURS.nbytes


class NothingAhead(Policy):
    """Writes nothing back before it is evicted."""

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        return 0


class Memory:
    """A memory with the layers of one cache, all of the same tokens."""

    def __init__(self, device_slots: int, host_slots: int = 1000, *, device: bool = True) -> None:
        self.memory = TieredMemory(
            device_budget=device_slots * SLOT if device else None,
            host_budget=host_slots * SLOT,
            policy=NothingAhead(),
        )
        self.owner: Owner = self.memory.join()
        self.layers: list[LayerKV] = []
        self.tokens: list[torch.Tensor] = []
        with self.memory.lock:
            self.device = self.memory.on(CPU)

    def layer(self, blocks: int) -> LayerKV:
        """One more layer, of so many full blocks."""
        with self.memory.lock:
            owned = self.memory.block_set(self.owner, self.device, OURS, len(self.layers))
            layer = LayerKV(len(self.layers), OURS, self.device, owned, self.owner.counters)
            x = torch.randn(1, HEADS, blocks * BLOCK, DIM)
            if blocks:
                layer.append(x, x, layer.group(x, x)[0])
        self.layers.append(layer)
        self.tokens.append(x)
        return layer

    def evict_every_other(self, layer: LayerKV) -> None:
        """Let every other block leave the device."""
        with self.memory.lock:
            single: list[Run] = []
            for run in layer.tables[0].resolve():
                rest = run
                while rest.count > 1:
                    one, rest = residency.cut(rest, 1)
                    single.append(one)
                single.append(rest)
            for run in single[::2]:
                self.device.evict_run(run)

    def check(self) -> None:
        """Every layer holds its tokens."""
        self.memory.check_integrity()
        for layer, tokens in zip(self.layers, self.tokens, strict=True):
            keys = []
            for run in layer.tables[0].resolve():
                on_device = run.device is not None and run.state is not State.ARRIVING
                pool = layer.blocks.pools.device if on_device else layer.blocks.pools.host
                start = run.device if on_device else run.host
                assert pool is not None
                assert start is not None
                keys.append(pool.keys(start, run.count).transpose(0, 1).flatten(1, 2)[None])
            if keys:
                assert torch.equal(torch.cat(keys, 2), tokens)

    def close(self) -> None:
        with self.memory.lock:
            for layer in self.layers:
                layer.clear()
                self.memory.drop_set(self.owner, self.device, layer.blocks)
            self.memory.leave(self.owner)
        self.memory.close()


def test_slots_for_what_another_thread_has_fetched_meanwhile_are_given_back() -> None:
    """A fetch that finds no room waits for readers, and others may bring the same blocks while it does."""
    world = Memory(2)
    first = world.layer(1)
    with world.memory.lock:
        world.device.evict_from(first.blocks, 1)
    second = world.layer(2)
    run = first.tables[0].resolve()[0]
    reads, full = threading.Event(), threading.Event()

    def other() -> None:
        with world.memory.lock:
            reading = world.memory.readers.begin()
        reads.set()
        full.wait()
        with world.memory.lock:  # free once the fetch waits
            world.device.evict_from(second.blocks, 2)
            assert world.device.fetch([run], 1, None, evict=False) == [run]
            world.memory.readers.end(reading)

    thread = threading.Thread(target=other)
    thread.start()
    reads.wait()
    with world.memory.lock:
        full.set()
        assert world.device.fetch([run], 1, second.blocks, evict=True) == []
        assert run.state is State.BOTH
    thread.join()
    world.check()
    world.close()


def copies_of_fetches(times: int) -> list[int]:
    """Copies of one fetch after the other of a whole layer, where every other slot is free at first."""
    world = Memory(200)
    first = world.layer(60)
    others = [world.layer(40) for _ in range(LAYERS - 1)]
    with world.memory.lock:
        world.device.evict_from(first.blocks, 60)
    world.layer(80)  # takes all that is free
    for layer in others:
        world.evict_every_other(layer)
    found = []
    for _ in range(times):
        before = world.owner.counters.copies_up
        with world.memory.lock:
            got = world.device.fetch(list(first.runs()), 60, first.blocks, evict=False)
            assert sum(run.count for run in got) == 60
            found.append(world.owner.counters.copies_up - before)
            for run in got:
                residency.evict(run, None)
        world.check()
    world.close()
    return found


def test_fetches_come_to_be_a_few_copies(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fetching, "PACK_INTERVAL", 1)
    packed = copies_of_fetches(20)
    assert packed[0] > 4 * packed[-1]
    monkeypatch.setattr(reclaim, "pack", lambda *args: None)
    scattered = copies_of_fetches(3)
    assert scattered[0] == packed[0]
    assert scattered[-1] > packed[0] / 2, "they do not become fewer by themselves"


def test_a_few_blocks_move_now_and_then(monkeypatch: Patch) -> None:
    """Or they would take the time that they save."""
    monkeypatch.setattr(sizing, "scattered", lambda runs, blocks: True)
    asked: list[int] = []
    monkeypatch.setattr(reclaim, "pack", lambda pool, placed, blocks, fence: asked.append(blocks))
    world = Memory(40)
    layer = world.layer(8)
    with world.memory.lock:
        world.device.evict_from(layer.blocks, 8)
        for _ in range(2 * fetching.PACK_INTERVAL):
            for run in world.device.fetch(list(layer.runs()), 8, layer.blocks, evict=False):
                residency.evict(run, None)
    assert asked == [fetching.PACKED_BLOCKS] * 2
    world.close()


@pytest.mark.parametrize("keep", [0, 1])
def test_blocks_of_the_layer_that_is_read_stay_where_they_are(keep: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fetching, "PACKED_BLOCKS", 10**6)
    world = Memory(60)
    for _ in range(2):
        world.evict_every_other(world.layer(24))
    before = [[run.device for run in layer.runs()] for layer in world.layers]
    with world.memory.lock:
        world.device.fetching._scattered = True
        world.device.fetching._pack(world.layers[0].blocks.pools, world.layers[keep].blocks)
    after = [[leaf.device for run in layer.runs() for leaf in run.leaves()] for layer in world.layers]
    assert after[keep] == before[keep]
    assert after[1 - keep] != before[1 - keep]
    world.check()
    world.close()


def test_nothing_moves_while_another_thread_reads(monkeypatch: Patch) -> None:
    monkeypatch.setattr(fetching, "PACKED_BLOCKS", 10**6)
    world = Memory(60)
    for _ in range(2):
        world.evict_every_other(world.layer(24))
    other = Reading()
    other.thread += 1
    readers = world.memory.readers
    readers._active.append(other)

    def pack() -> int:
        with world.memory.lock:
            world.device.fetching._scattered, world.device.fetching._until_pack = True, 0
            world.device.fetching._pack(world.layers[0].blocks.pools, None)
        return world.owner.counters.moved_blocks

    assert pack() == 0
    with world.memory.lock:
        readers.end(other)
    assert pack() > 0
    world.check()
    world.close()


# Memory that is not blocks gives way to blocks, whatever device they are of


def test_io_buffers_are_given_back_for_blocks() -> None:
    world = Memory(0, 4, device=False)
    with world.memory.lock:
        buffers = world.memory.io_buffers(world.owner, world.device)
        buffers.take((1, 4, 1, 8), 8, torch.float32)
        host = world.memory.host.slabs.budget
        assert host.used == buffers.nbytes > 0
    world.layer(4)
    assert buffers.nbytes == 0
    assert host.used == 4 * SLOT
    world.check()
    world.close()


def test_io_buffers_are_given_back_for_blocks_that_leave_a_device() -> None:
    world = Memory(6, 4)
    layer = world.layer(6)
    with world.memory.lock:
        buffers = world.memory.io_buffers(world.owner, world.device)
        buffers.take((1, 4, 1, 8), 8, torch.float32)
        assert buffers.nbytes > 0
        world.device.evict_from(layer.blocks, 4)
    assert buffers.nbytes == 0
    assert layer.spilled == 4
    world.check()
    world.close()


def test_io_buffers_are_given_back_for_a_workspace() -> None:
    world = Memory(0, 4, device=False)
    world.layer(2)
    with world.memory.lock:
        buffers = world.memory.io_buffers(world.owner, world.device)
        buffers.take((1, 4, 1, 8), 8, torch.float32)
        world.memory.workspace(world.owner, world.device).take(2 * SLOT)
    assert buffers.nbytes == 0
    assert world.memory.stats.host.bytes == 4 * SLOT
    world.close()


@pytest.mark.parametrize("what", ["io buffers", "workspace"])
def test_memory_in_use_is_not_given_back(what: str) -> None:
    world = Memory(0, 4, device=False)
    with world.memory.lock:
        if what == "workspace":
            space = world.memory.workspace(world.owner, world.device)
            space.take(SLOT)
            space.in_use = True
        else:
            buffers = world.memory.io_buffers(world.owner, world.device)
            buffers.take((1, 4, 1, 8), 8, torch.float32)
            buffers.in_use = True
    with pytest.raises(BudgetError):
        world.layer(4)
    with world.memory.lock:
        if what == "workspace":
            assert space.nbytes == SLOT
            space.in_use = False
        else:
            assert buffers.nbytes > 0
            buffers.in_use = False
    world.memory.check_integrity()


def test_a_full_host_makes_a_device_give_its_fetches_up() -> None:
    cache = TieredKVCache(device_budget=16 * 256, host_budget=16 * 256, block_size=4)
    with_doubles(cache, held(0, 0.0))
    kv = torch.randn(1, 2, 82, 4)
    cache.update(kv, kv, 0)
    memory = cache._forward.memory
    (device,) = memory.devices
    assert isinstance(device, ComputeDevice)
    (blocks,) = device.sets
    with memory.lock:
        device.evict_from(blocks, 4)
        device.engine.drain()
        device.poll()
        device.fetch([run for run in blocks.runs if run.state is State.HOST], 3, None, evict=False)
        arriving = blocks.counts[State.ARRIVING]
        assert arriving == 3
        pool = blocks.pools.host
        while memory.host.take(pool, 1, None, required=False) is not None:  # the host is full
            pass
        free = reclaim.free_bytes(device.device_pools)
        # As many as fetches hold, besides what may leave without a copy to be made.
        device.make_room(free + (arriving + blocks.counts[State.BOTH]) * blocks.pools.layout.nbytes)
        assert not blocks.counts[State.ARRIVING]


def test_blocks_of_a_layout_that_came_while_it_waited_are_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes room waits for readers; meanwhile another thread may begin with blocks of a size that was not there."""
    memory = TieredMemory(device_budget=6_000, host_budget=100_000)
    x = torch.ones(1, 1, 400, 4)
    before, after = (TieredKVCache(memory=memory, block_size=size) for size in (4, 2))
    for count in (180, 1):
        before.update(x[:, :, :count], x[:, :, :count], 0)
    before.crop(-24)  # some slots are free, and no slab is
    (device,) = memory.devices
    assert device.slabs is not None
    wait, waits = type(memory.readers).wait, []

    def waiting(readers: Any) -> bool:
        if not waits:
            waits.append(readers)
            memory.lock.release()  # as a wait does
            before.close()
            after.update(x, x, 0)
            memory.lock.acquire()
            return True
        return wait(readers)

    monkeypatch.setattr(type(memory.readers), "wait", waiting)
    with memory.lock:
        assert device.slabs.budget.free < 512
        device.make_room(512)
        assert device.slabs.budget.free >= 512
    assert waits
    after.close()
    memory.close()
