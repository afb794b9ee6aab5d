"""Plans that follow what changes are, after any change, the plans that would be made from nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache
from kvtier.attention import plans
from kvtier.cpu import native
from kvtier.storage import compaction
from kvtier.storage.addresses import Addresses
from kvtier.storage.store import LayerStore
from kvtier.testing import held, with_doubles

pytestmark = pytest.mark.usefixtures("on_the_host")

LAYERS, HEADS, DIM = 2, 1, 8

Lists = list[list[tuple[int, int]]]


def filled(rows: int, blocks: int, budget: int | None) -> tuple[TieredKVCache, LayerStore]:
    """A cache of one layer with so many full blocks of 4 tokens in each row, and a device budget in blocks."""
    block = 2 * HEADS * DIM * 4 * 4
    cache = TieredKVCache(device_budget=budget and budget * block, host_budget=10**7, block_size=4)
    x = torch.randn(rows, HEADS, 4 * blocks, DIM)
    cache.update(x, x, 0)
    return cache, cache._runtime.layers[0]


def rows_of(addresses: Addresses) -> Lists:
    """(index, address) of the blocks of each row."""
    return [addresses.row(row) for row in range(addresses.rows)]


def from_nothing(layer: LayerStore, count: int) -> tuple[Lists, Lists, int]:
    """What a plan should hold: near, far, and distinct blocks of the part that the host reads."""
    near: Lists = []
    far: Lists = []
    for table in layer.rows:
        blocks = list(enumerate(table.blocks[:count]))
        pool = layer.tiers.far_pool(layer.layout)
        near.append([(i, layer.pool.bytes(b.near, 1).data_ptr()) for i, b in blocks if b.near is not None])
        far.append([(i, pool.bytes(b.far, 1).data_ptr()) for i, b in blocks if b.near is None])
    return near, far, len({x for row in (near if layer.tiers.far is None else far) for x in row})


def listed(blocks: native.BlockList) -> Lists:
    """What the native library would read."""
    begins = blocks.begins.tolist()
    rows = []
    for begin, end in itertools.pairwise(begins):
        which = range(end - begin) if blocks.indices is None else blocks.indices[begin:end].tolist()
        rows.append(list(zip(which, blocks.blocks[begin:end].tolist(), strict=True)))
    return rows


def tabled(table: Any) -> Lists:
    """What a device's kernels would read."""
    rows = []
    for row, count in enumerate(table.counts.tolist()):
        which = range(count) if table.positions is None else table.positions[row, :count].tolist()
        rows.append(list(zip(which, table.addresses[row, :count].tolist(), strict=True)))
    return rows


def check(layer: LayerStore, length: int) -> plans.Plan:
    """The layer's plan is the one from nothing, in all its forms."""
    plan = plans.of(layer, length)
    near, far, distinct = from_nothing(layer, -(-length // layer.layout.block_size))
    assert rows_of(plan.near) == near
    assert rows_of(plan.far) == far
    assert plan.distinct == distinct
    assert tabled(plan.table(layer)) == near
    slots = plan.slots(layer)
    far_pool = layer.tiers.far_pool(layer.layout)
    assert [[(i, layer.pool.address(s)) for i, s in row] for row in slots[0]] == near
    assert [[(i, far_pool.address(s)) for i, s in row] for row in slots[1]] == far
    if native.available():
        hosts = near if layer.tiers.far is None else far
        assert (listed(plan.blocks) if plan.blocks is not None else [[]] * layer.batch) == hosts
        if plan.device is not None:
            assert listed(plan.device) == near
    return plan


class Walk:
    """A cache that is used and changed at random; layers are attended to, so that they keep plans."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.size = self.random.choice((1, 2, 4))
        slot = 2 * HEADS * DIM * self.size * 4
        budget = self.random.choice((None, 30 * slot, 60 * slot, 1000 * slot))
        cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=self.size, write_through=0.5)
        self.cache = with_doubles(cache, held(seed)) if budget else cache
        self.done: dict[str, int] = {}

    @property
    def layers(self) -> list[LayerStore]:
        return list(self.cache._runtime.layers.values())

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def append(self) -> None:
        rows = self.layers[0].batch if self.length else self.random.randint(1, 3)
        count = self.random.choice((1,) * 8 + (2, self.size, 3 * self.size + 1))
        if not self.length:
            count = self.random.randint(1, 20 * self.size)
        equal = self.random.random() < 0.3
        for i in range(LAYERS):
            past = i < len(self.layers) and self.layers[i].length
            x = torch.randn(1 if equal else rows, HEADS, count, DIM).expand(rows, -1, -1, -1)
            keys, values = self.cache.update(x, x, i)
            if past and count <= 16:
                F.scaled_dot_product_attention(torch.randn(rows, HEADS, count, DIM), keys, values)

    def crop(self) -> None:
        self.cache.crop(-self.random.choice((1, 1, self.size, self.random.randint(1, self.length))))

    def reorder(self) -> None:
        rows = self.layers[0].batch
        self.cache.reorder_cache(torch.tensor([self.random.randrange(rows) for _ in range(rows)]))

    def fork(self) -> None:
        if self.layers[0].batch < 3:
            self.cache.batch_repeat_interleave(2)

    def select(self) -> None:
        rows = self.layers[0].batch
        self.cache.batch_select_indices(torch.tensor(self.random.sample(range(rows), self.random.randint(1, rows))))

    def evict(self) -> None:
        tiers = self.layers[0].tiers
        for _ in range(self.random.choice((1, 1, 5))):
            tiers.evict_one(self.layers[0].layout, None)

    def evict_anywhere(self) -> None:
        layer = self.random.choice(self.layers)
        if layer.tiers.far is not None and layer.resident:
            layer.tiers.evict(self.random.choice(list(layer.resident)))

    def promote(self) -> None:
        layer = self.random.choice(self.layers)
        if layer.tiers.far is not None and layer.missing():
            staging = layer.tiers.staging.fetch(layer, layer.missing()[: self.random.choice((1, 2, 30))], ahead=True)
            if staging is not None:
                staging.transfer.wait()
                layer.tiers.staging.finish(layer, staging)

    def compact(self) -> None:
        tiers = self.layers[0].tiers
        if tiers.far is not None:
            compaction.reclaim(tiers, tiers.near.budget.free + self.random.randint(1, 4) * 1000, None)

    def step(self) -> None:
        acts = [self.append] * 12 + [self.evict, self.evict_anywhere, self.promote] * 2
        acts += [self.crop, self.reorder, self.fork, self.select, self.compact]
        act = self.random.choice(acts) if self.length else self.append
        try:
            act()
        except BudgetError:
            self.cache.reset()
        self.done[act.__name__] = self.done.get(act.__name__, 0) + 1


@pytest.mark.parametrize("seed", range(16))
def test_after_any_change_a_plan_is_the_one_that_would_be_made_from_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []
    follow = plans.Plan.follow
    monkeypatch.setattr(plans.Plan, "follow", lambda *args: followed.append(follow(*args)) or followed[-1])
    walk = Walk(seed)
    for _ in range(80):
        walk.step()
        for layer in walk.layers:
            if layer.length and walk.random.random() < 0.8:
                # Now and then an older view, which sees fewer tokens.
                shorter = walk.random.random() < 0.1
                check(layer, walk.random.randint(1, layer.length) if shorter else layer.length)
    walk.cache.check_integrity()
    assert followed.count(True) > 10, "the walk must not rebuild only"


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plan_is_kept_while_blocks_are_added_and_evicted(rows: int, budget: int | None) -> None:
    cache, layer = filled(rows, 60, budget and budget * rows)
    plan, lists = check(layer, layer.length), set()
    for _ in range(200):
        one = torch.randn(rows, HEADS, 1, DIM)
        cache.update(one, one, 0)
        assert check(layer, layer.length) is plan, "nothing is made anew"
        lists.add(plan.blocks)
    assert budget is None or cache.stats.evictions > 40
    assert len(lists) <= 3, "host lists grow by doubling"


def test_what_leaves_the_tables_or_is_moved_to_close_a_gap_makes_a_new_plan() -> None:
    cache, layer = filled(2, 20, 100)
    for change in (
        lambda: cache.crop(-4),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0, 3])),
        lambda: compaction.reclaim(layer.tiers, layer.tiers.near.budget.free + 3000, None),
    ):
        plan = check(layer, layer.length)
        change()
        assert check(layer, layer.length) is not plan
    plan = check(layer, layer.length)
    cache.crop(-1)
    assert check(layer, layer.length) is plan, "no block left: assisted decoding crops at every step"


def test_what_interrupts_a_plan_that_follows_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in itertools.count():
        cache, layer = filled(2, 20, 100)
        plan = check(layer, layer.length)
        for _ in range(3):
            layer.tiers.evict_one(layer.layout, None)
        x = torch.randn(2, HEADS, 5, DIM)
        cache.update(x, x, 0)
        try:
            with monkeypatch.context() as patch:
                interrupt(patch, step)
                plans.of(layer, layer.length)
        except KeyboardInterrupt:
            assert check(layer, layer.length) is not plan
        else:
            break
    assert check(layer, layer.length) is plan, "it followed in as many steps"
    assert step > 10


def interrupt(patch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt what a plan does to follow, before its step number `step`."""
    steps = itertools.count()

    def interrupted(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            if next(steps) == step:
                raise KeyboardInterrupt
            return act(*args)

        return wrapper

    of_addresses = [(Addresses, name) for name in ("remove", "put", "push")]
    for owner, name in (*of_addresses, (plans, "_entry"), (LayerStore, "missing_count")):
        patch.setattr(owner, name, interrupted(getattr(owner, name)))


def test_a_plan_that_was_made_because_much_had_moved_follows_the_next_change() -> None:
    _cache, layer = filled(1, 40, 100)
    old = check(layer, layer.length)
    for _ in range(20):
        layer.tiers.evict_one(layer.layout, None)
    new = check(layer, layer.length)
    assert new is not old, "cheaper than to follow"
    layer.tiers.evict_one(layer.layout, None)
    assert check(layer, layer.length) is new


def test_a_table_that_kernels_may_read_still_is_never_written_again() -> None:
    cache, layer = filled(1, 40, 30)
    seen = []
    for _ in range(40):
        table = plans.of(layer, layer.length).table(layer)
        seen.append((table, tabled(table)))
        one = torch.randn(1, HEADS, 1, DIM)
        cache.update(one, one, 0)
    assert len({id(table) for table, _ in seen}) == 1 + 10, "one upload for each new block"
    for table, content in seen:
        assert tabled(table) == content


@pytest.mark.parametrize("seed", range(20))
def test_addresses_are_what_a_dictionary_would_hold_after_any_change(seed: int) -> None:
    rng = random.Random(seed)
    held = [{i: rng.getrandbits(47) for i in range(20) if rng.random() < 0.5} for _ in range(rng.randint(1, 4))]
    addresses = Addresses([(sorted(row), [row[i] for i in sorted(row)]) for row in held])
    index = 20
    for _ in range(60):
        row, at, address = rng.randrange(len(held)), rng.randrange(index), rng.getrandbits(47)
        act = rng.choice(("push", "put", "remove"))
        if act == "push":
            new = [(index, rng.getrandbits(47)) if rng.random() < 0.7 else None for _ in held]
            addresses.push(new)
            for content, entry in zip(held, new, strict=True):
                content.update([entry] if entry else [])
            index += 1
        elif act == "put":
            addresses.put(row, at, address)
            held[row][at] = address
        else:
            addresses.remove(row, at)
            held[row].pop(at, None)
        expected = [sorted(x.items()) for x in held]
        assert rows_of(addresses) == expected
        assert len(addresses) == sum(map(len, held))
        table = addresses.table(torch.device("cpu"))
        assert tabled(table) == expected
        for x in (table.counts, table.positions):
            assert x is None or (x.data_ptr() - table.addresses.data_ptr()) % 16 == 0, "kernels are compiled for that"
