"""What a reader keeps of where blocks are is, after any change, what would be found from nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache
from kvtier.attention import partition as module
from kvtier.attention.partition import Part, Partition
from kvtier.attention.reader import LayerReader
from kvtier.memory.blocks.block import State
from kvtier.memory.storage.pool import BlockPool
from kvtier.tables.table import BlockTable
from kvtier.testing import held, with_doubles

pytestmark = pytest.mark.usefixtures("on_the_host")

CPU = torch.device("cpu")
LAYERS, HEADS, DIM = 2, 1, 8

Lists = list[list[tuple[int, int]]]  # (index, address) of the blocks of each row


def filled(rows: int, blocks: int, budget: int | None) -> tuple[TieredKVCache, LayerReader]:
    """A cache of one layer with so many full blocks of 4 tokens in each row, and a device budget in blocks."""
    block = 2 * HEADS * DIM * 4 * 4
    cache = TieredKVCache(device_budget=budget and budget * block, host_budget=10**7, block_size=4)
    x = torch.randn(rows, HEADS, 4 * blocks, DIM)
    cache.update(x, x, 0)
    return cache, cache._forward.readers[0]


def listed(part: Part) -> Lists:
    """What a part says of itself."""
    return [
        [(index + i, address + i * part.nbytes) for index, address, count in row for i in range(count)]
        for row in part.rows
    ]


def for_the_library(part: Part) -> Lists:
    """What the native library would read."""
    found = part.sequences()
    return [
        [
            (index + i, address + i * found.block_stride)
            for address, index, count in found.runs(row)
            for i in range(count)
        ]
        for row in range(found.rows)
    ]


def tabled(table: Any) -> Lists:
    """What a device's kernels would read."""
    rows = []
    for row, count in enumerate(table.counts.tolist()):
        which = range(count) if table.positions is None else table.positions[row, :count].tolist()
        rows.append(list(zip(which, table.addresses[row, :count].tolist(), strict=True)))
    return rows


def from_nothing(reader: LayerReader, counts: Sequence[int]) -> dict[str, Lists]:
    """Block by block: what is on the device, what is arriving there, and what is on the host only."""
    pools = reader.layer.blocks.pools
    found: dict[str, Lists] = {name: [[] for _ in counts] for name in ("device", "arriving", "host")}
    for row, (table, count) in enumerate(zip(reader.layer.rows, counts, strict=True)):
        index = 0
        for run in table.resolve():
            for i in range(run.count):
                name = "arriving" if run.state is State.ARRIVING else "host" if run.device is None else "device"
                pool: BlockPool | None = pools.host if name == "host" else pools.device
                slot = run.host if name == "host" else run.device
                assert pool is not None
                assert slot is not None
                if index < count:
                    found[name][row].append((index, pool.bytes(slot + i, 1).data_ptr()))
                index += 1
    return found


def check(reader: LayerReader, lengths: int | Sequence[int]) -> Partition:
    """The reader's partition is the one from nothing, in all its forms."""
    size = reader.layer.layout.block_size
    counts = [lengths] * reader.layer.batch if isinstance(lengths, int) else lengths
    with reader.memory.lock:
        partition = reader.partition(lengths)
        for name, right in from_nothing(reader, [-(-n // size) for n in counts]).items():
            part = getattr(partition, name)
            assert listed(part) == for_the_library(part) == tabled(part.table(CPU)) == right, name
            assert part.blocks == len({x for row in right for x in row}), "distinct blocks"
            assert bool(part) is any(map(bool, right))
            for row in part.rows:
                for (a, x, n), (b, y, _) in itertools.pairwise(row):
                    assert (a + n, x + n * part.nbytes) != (b, y), "neighbours are one run"
        arriving = {run for table in reader.layer.rows for run in table.resolve() if run.state is State.ARRIVING}
        assert set(partition.incoming) <= arriving
    return partition


class Walk:
    """A cache that is used and changed at random; layers are attended to, so that they keep partitions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.size = self.random.choice((1, 2, 4))
        slot = 2 * HEADS * DIM * self.size * 4
        budget = self.random.choice((None, 30 * slot, 60 * slot, 1000 * slot))
        cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=self.size, write_through=0.5)
        self.cache = with_doubles(cache, held(seed)) if budget else cache
        self.two_tiers = budget is not None

    @property
    def readers(self) -> list[LayerReader]:
        return list(self.cache._forward.readers.values())

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    @property
    def rows(self) -> int:
        return self.readers[0].layer.batch

    def append(self) -> None:
        rows = self.rows if self.length else self.random.randint(1, 3)
        count = self.random.choice((1,) * 8 + (2, self.size, 3 * self.size + 1))
        if not self.length:
            count = self.random.randint(1, 20 * self.size)
        equal = self.random.random() < 0.3
        for i in range(LAYERS):
            past = i < len(self.readers) and self.readers[i].layer.length
            x = torch.randn(1 if equal else rows, HEADS, count, DIM).expand(rows, -1, -1, -1)
            keys, values = self.cache.update(x, x, i)
            if past and count <= 16:
                F.scaled_dot_product_attention(torch.randn(rows, HEADS, count, DIM), keys, values)

    def crop(self) -> None:
        self.cache.crop(-self.random.choice((1, 1, self.size, self.random.randint(1, self.length))))

    def reorder(self) -> None:
        self.cache.reorder_cache(torch.tensor([self.random.randrange(self.rows) for _ in range(self.rows)]))

    def fork(self) -> None:
        if self.rows < 3:
            self.cache.batch_repeat_interleave(2)

    def select(self) -> None:
        picked = self.random.sample(range(self.rows), self.random.randint(1, self.rows))
        self.cache.batch_select_indices(torch.tensor(picked))

    def evict(self) -> None:
        reader = self.random.choice(self.readers)
        if self.two_tiers:
            count, latest = self.random.choice((1, 1, 5)), self.random.random() < 0.5
            reader.device.evict_from(reader.layer.blocks, count, latest_first=latest)

    def fetch(self) -> None:
        reader = self.random.choice(self.readers)
        runs = [run for run in reader.layer.runs() if run.state is State.HOST]
        if self.two_tiers and runs:
            runs = self.random.sample(runs, self.random.randint(1, len(runs)))
            reader.device.fetch(runs, self.random.choice((1, 2, 30)), None, evict=False)

    def poll(self) -> None:
        self.readers[0].device.poll()

    def reclaim(self) -> None:
        device = self.readers[0].device
        if device.slabs is not None:
            device.room._reclaim(device.slabs.budget.free + self.random.randint(1, 4) * 1000, None)

    def step(self) -> None:
        acts = [self.append] * 12 + [self.evict, self.fetch, self.poll] * 3
        acts += [self.crop, self.reorder, self.fork, self.select, self.reclaim]
        act = self.random.choice(acts) if self.length else self.append
        try:
            if act in (self.evict, self.fetch, self.poll, self.reclaim):
                with self.cache._forward.memory.lock:
                    act()
            else:
                act()
        except BudgetError:
            self.cache.reset()


@pytest.mark.parametrize("seed", range(16))
def test_after_any_change_a_partition_is_the_one_that_would_be_found_from_nothing(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(80):
        walk.step()
        for reader in walk.readers:
            length = reader.layer.length
            if length and walk.random.random() < 0.8:
                # Now and then an older view, which sees fewer tokens, or rows that do not see the same.
                lengths: int | list[int] = length
                if walk.random.random() < 0.2:
                    lengths = [walk.random.randint(0, length) for _ in range(reader.layer.batch)]
                elif walk.random.random() < 0.1:
                    lengths = walk.random.randint(1, length)
                check(reader, lengths)
    walk.cache.check_integrity()


@pytest.mark.parametrize("budget", [None, 200])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_partition_is_kept_until_a_block_is_added(rows: int, budget: int | None) -> None:
    """A step that changes no block asks no table."""
    cache, reader = filled(rows, 20, budget)
    kept: dict[int, Partition] = {}
    for _ in range(40):
        one = torch.randn(rows, HEADS, 1, DIM)
        cache.update(one, one, 0)
        blocks = -(-reader.layer.length // 4)
        if reader.layer.length % 4:  # a block that was sealed is another run
            assert kept.setdefault(blocks, check(reader, reader.layer.length)) is check(reader, reader.layer.length)
    assert len(kept) == 10


def test_what_of_a_partition_did_not_change_is_not_made_again() -> None:
    """Tables of a part in use need not go up again where another part changed."""
    cache, reader = filled(1, 40, 30)
    with reader.memory.lock:
        reader.device.evict_from(reader.layer.blocks, 5)  # room for one more
    before = check(reader, reader.layer.length)
    assert before.device
    assert before.host
    table = before.host.table(CPU)
    one = torch.randn(1, HEADS, 1, DIM)
    cache.update(one, one, 0)
    after = check(reader, reader.layer.length)
    assert after.device is not before.device, "one block more"
    assert after.host is before.host
    assert after.host.table(CPU) is table


def test_a_table_that_kernels_may_read_still_is_never_written_again() -> None:
    cache, reader = filled(1, 40, 30)
    seen = []
    for _ in range(40):
        with reader.memory.lock:
            part = reader.partition(reader.layer.length).device
        seen.append((part.table(CPU), tabled(part.table(CPU))))
        one = torch.randn(1, HEADS, 1, DIM)
        cache.update(one, one, 0)
    assert len({id(table) for table, _ in seen}) <= 1 + 2 * 10, "one upload for each block that comes or goes"
    for table, content in seen:
        assert tabled(table) == content


def test_what_interrupts_the_making_of_a_partition_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in itertools.count():
        cache, reader = filled(2, 20, 100)
        check(reader, reader.layer.length)
        with reader.memory.lock:
            reader.device.evict_from(reader.layer.blocks, 3)
        x = torch.randn(2, HEADS, 5, DIM)
        cache.update(x, x, 0)
        steps = itertools.count()
        try:
            with monkeypatch.context() as patch:
                for owner, name in ((BlockTable, "resolve"), (module, "_address"), (Partition, "keep")):
                    patch.setattr(owner, name, interrupted(getattr(owner, name), steps, step))
                reader.partition(reader.layer.length)
        except KeyboardInterrupt:
            check(reader, reader.layer.length)
        else:
            break
    assert step > 5


def interrupted(act: Callable[..., Any], steps: itertools.count[int], last: int) -> Callable[..., Any]:
    """`act`, but an interrupt comes before the call of that number."""

    def wrapper(*args: Any) -> Any:
        if next(steps) == last:
            raise KeyboardInterrupt
        return act(*args)

    return wrapper


@pytest.mark.parametrize("seed", range(20))
def test_a_table_has_the_runs_of_each_row_aligned_as_kernels_want_them(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 4)):
        runs, index = [], 0
        for _ in range(rng.randint(0, 5)):
            index += rng.choice((0, 0, 1, 7))
            count = rng.choice((1, 1, 2, 9))
            runs.append((index, 64 * rng.randrange(2**40), count))
            index += count
        rows.append(runs)
    part = Part(rows, 192, sum(count for runs in rows for *_, count in runs))
    table = part.table(CPU)
    assert tabled(table) == listed(part) == for_the_library(part)
    assert part.table(CPU) is table
    from_the_first_on = all(index == at for row in listed(part) for at, (index, _) in enumerate(row))
    assert (table.positions is None) is from_the_first_on
    for x in (table.addresses, table.counts, table.positions):
        assert x is None or x.numel() == 0 or x.data_ptr() % 16 == table.addresses.data_ptr() % 16
