"""Laws of `BlockPool`: exact bytes, free + used == total, neighbours, references, poison."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Budget, Memory
from kvtier.storage.pool import EXTENT, BlockPool, Slab, runs

LAYOUT = BlockLayout(k_heads=2, v_heads=2, k_dim=4, v_dim=3, block_size=4, dtype=torch.float32)


def make_pool(slots: int, *, spare: int = 0, poison: bool = False) -> BlockPool:
    """A pool whose budget is `slots` slots and `spare` bytes."""
    memory = Memory(torch.device("cpu"), Budget("host", slots * LAYOUT.nbytes + spare))
    return BlockPool(LAYOUT, memory, poison=poison)


def take(pool: BlockPool, near: int | None = None, avoid: Slab | None = None) -> int:
    """A slot that must be there."""
    slot = pool.allocate(near, avoid=avoid)
    assert slot is not None
    return slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("heads", [(1, 1, 5, 3), (2, 3, 4, 4), (1, 0, 9, 0)], ids=str)
def test_keys_and_values_of_all_slots_lie_apart_and_inside_the_slot(
    heads: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    k_heads, v_heads, k_dim, v_dim = heads
    layout = BlockLayout(k_heads, v_heads, k_dim, v_dim, 3, dtype)
    used = 3 * layout.token_bytes
    assert used <= layout.nbytes < used + 64
    assert layout.nbytes % 64 == 0
    pool = BlockPool(layout, Memory(torch.device("cpu"), Budget("host", 4 * layout.nbytes)))
    pool.grow(4)
    slots = [take(pool) for _ in range(4)]
    for slot in slots:
        pool.bytes(slot, 1).zero_()
    for n, slot in enumerate(slots, 1):
        pool.keys(slot, 1).fill_(2 * n)
        pool.values(slot, 1).fill_(2 * n + 1)
    for n, slot in enumerate(slots, 1):
        assert (pool.keys(slot, 1) == 2 * n).all()
        assert (pool.values(slot, 1) == 2 * n + 1).all()
        assert not pool.bytes(slot, 1)[used:].any(), "something was written into the padding"


def test_a_pool_takes_the_exact_bytes_of_its_slots_and_never_more_than_its_budget() -> None:
    pool = make_pool(7, spare=LAYOUT.nbytes - 1)
    budget = pool.memory.budget
    assert (pool.nbytes, budget.used) == (0, 0)
    assert pool.grow(3) == 3
    assert pool.nbytes == budget.used == 3 * LAYOUT.nbytes
    assert pool.grow(100) == 4, "as many as the budget still holds"
    assert pool.grow(1) == 0
    assert pool.nbytes == budget.used == budget.peak == 7 * LAYOUT.nbytes
    slots = [s for slab in pool.slabs for s in range(slab.base, slab.base + slab.slots)]
    assert sorted(take(pool) for _ in range(7)) == slots
    assert pool.allocate() is None
    pool.check_integrity()
    pool.close()
    assert (pool.nbytes, budget.used, pool.slots) == (0, 0, 0)


def test_a_slab_is_given_back_whole_and_at_once_and_its_numbers_never_come_again() -> None:
    pool = make_pool(32)
    pool.grow(16)
    pool.grow(16)
    first, second = pool.slabs
    alive = weakref.ref(first.data)
    slot = take(pool)
    assert pool.slab(slot) is first
    with pytest.raises(AssertionError):
        pool.shrink(first)
    pool.release(slot)
    seen = set(range(first.base, second.base + second.slots))
    pool.shrink(first)
    assert alive() is None
    assert pool.nbytes == pool.memory.budget.used == 16 * LAYOUT.nbytes
    assert pool.grow(100) == 16
    assert not seen & set(range(pool.slabs[-1].base, pool.slabs[-1].base + 16))
    pool.check_integrity()


def test_a_slab_to_avoid_is_avoided_even_by_neighbours() -> None:
    pool = make_pool(40)
    pool.grow(20)
    pool.grow(20)
    first, second = pool.slabs
    slot = take(pool, avoid=second)
    for _ in range(20):
        slot = take(pool, near=slot, avoid=first)
        assert pool.slab(slot) is second
    assert pool.allocate(near=slot, avoid=first) is None


@pytest.mark.parametrize("owners", [1, 2, 5, 9])
def test_owners_that_interleave_get_runs_of_neighbours(owners: int) -> None:
    each = 3 * EXTENT + 5
    pool = make_pool(owners * 4 * EXTENT)
    pool.grow(owners * 4 * EXTENT)
    slots: list[list[int]] = [[] for _ in range(owners)]
    for _ in range(each):
        for mine in slots:
            mine.append(take(pool, near=mine[-1] if mine else None))
    for mine in slots:
        lengths = [count for _, _, count in runs(mine)]
        assert all(count >= 16 for count in lengths[:-1]), lengths
    assert len({slot for mine in slots for slot in mine}) == owners * each


def test_a_slot_is_free_only_after_its_last_reference() -> None:
    pool = make_pool(1)
    pool.grow(1)
    slot = take(pool)
    pool.retain(slot)
    pool.retain(slot)
    for left in (2, 1):
        pool.release(slot)
        assert pool.references(slot) == left
        assert pool.allocate() is None
    pool.release(slot)
    assert pool.references(slot) == 0
    with pytest.raises(KeyError):
        pool.release(slot)
    with pytest.raises(KeyError):
        pool.retain(slot)
    assert take(pool) == slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_fills_what_nobody_owns_with_nan(dtype: torch.dtype) -> None:
    layout = BlockLayout(1, 1, 4, 4, 2, dtype)
    pool = BlockPool(layout, Memory(torch.device("cpu"), Budget("host", 2 * layout.nbytes)), poison=True)
    pool.grow(2)
    slot, other = take(pool), take(pool)
    assert pool.keys(slot, 1).isnan().all(), "new slots"
    for x in (slot, other):
        pool.bytes(x, 1).zero_()
    pool.retain(slot)
    pool.release(slot)
    assert not pool.keys(slot, 1).isnan().any(), "still owned"
    pool.release(slot)
    assert pool.keys(slot, 1).isnan().all()
    assert pool.values(slot, 1).isnan().all()
    assert not pool.keys(other, 1).isnan().any(), "not ours"


@pytest.mark.parametrize("seed", range(6))
def test_any_walk_keeps_every_byte_and_every_count(seed: int) -> None:
    """Beside the pool: a dict from slot to references. Each slot in use holds its own number as its bytes."""
    rng = random.Random(seed)
    pool = make_pool(90, poison=seed % 2 == 0)
    model: dict[int, int] = {}
    marks: dict[int, int] = {}
    total = 0
    for _ in range(600):
        act = rng.choice(("take", "take", "take", "near", "near", "retain", "drop", "drop", "drop", "grow", "shrink"))
        if act == "grow":
            total += pool.grow(rng.randint(1, 40))
        elif act == "shrink":
            for slab in pool.slabs:
                if not any(slab.base <= slot < slab.base + slab.slots for slot in model):
                    total -= slab.slots
                    pool.shrink(slab)
                    break
        elif act in ("take", "near"):
            near = rng.choice(sorted(model)) if act == "near" and model else None
            avoid = rng.choice(pool.slabs) if pool.slabs and rng.random() < 0.2 else None
            slot = pool.allocate(near, avoid=avoid)
            outside = [s for slab in pool.slabs if slab is not avoid for s in range(slab.base, slab.base + slab.slots)]
            if slot is None:
                assert set(outside) <= model.keys()
            else:
                assert slot in outside
                assert slot not in model
                model[slot], marks[slot] = 1, rng.randrange(255)
                pool.bytes(slot, 1).fill_(marks[slot])
        elif model:
            slot = rng.choice(sorted(model))
            if act == "retain":
                pool.retain(slot)
                model[slot] += 1
            else:
                pool.release(slot)
                model[slot] -= 1
                if not model[slot]:
                    del model[slot]
        assert (pool.used, pool.used + pool.free, pool.slots) == (len(model), total, total)
        assert pool.nbytes == pool.memory.budget.used == total * LAYOUT.nbytes
        pool.check_integrity()
        for slot, refs in model.items():
            assert pool.references(slot) == refs
            assert (pool.bytes(slot, 1) == marks[slot]).all(), "somebody wrote into a slot that was not theirs"
