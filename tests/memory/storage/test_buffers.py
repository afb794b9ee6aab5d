"""Workspaces and I/O buffers are paid for by the budgets, come back, and are in no block's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behind import behind_the_cpus_back
from torch.nn import functional as F

from kvtier import BudgetError, Policy, TieredKVCache
from kvtier.memory.storage.buffers import IoBuffers, Workspace, bytes_of
from kvtier.memory.storage.slabs import Budget, SlabAllocator
from kvtier.memory.tiered import default_engine
from kvtier.planning.step import StepPlan, StepState
from kvtier.testing import HeldTransfers, held, with_doubles
from kvtier.transfer.engine import Direction, Event, Transfer

HEADS, DIM, SIZE = 2, 8, 4
SLOT = 2 * HEADS * DIM * SIZE * 4
#: Where nothing goes on behind the CPU's back, queries and results pass through nothing.
ENGINE = behind_the_cpus_back(default_engine)


def spilled(host: int = 10**6, *, tokens: int = 64, rows: int = 1, device: int = 8) -> TieredKVCache:
    """A cache most of which is on the host."""
    cache = TieredKVCache(device_budget=device * SLOT, host_budget=host, block_size=SIZE)
    with_doubles(cache, ENGINE)
    x = torch.randn(rows, HEADS, tokens, DIM)
    cache.update(x, x, 0)
    return cache


def attend(cache: TieredKVCache, queries: int = 1, heads: int = 2 * HEADS) -> None:
    """As many new tokens, and attention that is right."""
    rows = cache._forward.readers[0].layer.batch
    x = torch.randn(rows, HEADS, queries, DIM)
    keys, values = cache.update(x, x, 0)
    query = torch.randn(rows, heads, queries, DIM)
    out = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    exact = F.scaled_dot_product_attention(query, keys.dense(), values.dense(), enable_gqa=True)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


def needed(queries: int, heads: int = 2 * HEADS) -> int:
    """Bytes of a query, a result in fp32 and its weights, each rounded up to 64."""
    rows = heads * queries
    return sum(-(-n // 64) * 64 for n in (rows * DIM * 4, rows * DIM * 4, rows * 4))


def test_the_host_budget_pays_for_it_and_the_stats_show_it() -> None:
    cache = spilled()
    before = cache.stats.host
    assert before.io_buffer_bytes == 0
    attend(cache)
    after = cache.stats.host
    assert after.io_buffer_bytes == needed(1)
    assert after.bytes - before.bytes >= needed(1)
    cache.check_integrity()
    attend(cache, 3)
    assert cache.stats.host.io_buffer_bytes == needed(3), "one, as large as the largest call"
    attend(cache, 1)
    assert cache.stats.host.io_buffer_bytes == needed(3), (
        "assisted decoding asks for one, then for several, then for one"
    )
    assert cache.stats.io_buffer_misses == 0
    cache.check_integrity()
    cache.reset()
    assert cache.stats.host.bytes == 0
    cache = spilled()
    attend(cache)
    budget = cache._forward.memory.host.slabs.budget
    cache.close()
    assert budget.used == 0


def test_what_is_page_locked_is_shown(monkeypatch: pytest.MonkeyPatch, page_locking: Any) -> None:
    make = SlabAllocator.__init__
    monkeypatch.setattr(
        SlabAllocator,
        "__init__",
        lambda self, *args, **kwargs: make(self, *args, **(kwargs | {"lock_for": torch.device("cuda", 0)})),
    )
    locked = page_locking.locked
    cache = spilled()
    attend(cache)
    stats = cache.stats
    assert stats.host.page_locked_bytes == stats.host.bytes
    assert stats.host.page_locked_bytes + stats.device.page_locked_bytes == sum(locked.values())
    assert needed(1) in locked.values(), "to the byte, not to the next power of two"
    cache.reset()
    assert not locked


def test_where_the_budget_has_no_room_a_call_takes_memory_of_its_own_and_says_so() -> None:
    cache = spilled()
    budget = cache._forward.memory.host.slabs.budget
    others = budget.free - needed(1) + 1
    assert budget.reserve(others)
    attend(cache)
    stats = cache.stats
    assert stats.io_buffer_misses == 1
    assert stats.host.io_buffer_bytes == 0
    budget.release(others)
    cache.check_integrity()
    attend(cache)
    assert cache.stats.io_buffer_misses == 1, "as soon as there is room, it is kept"
    assert cache.stats.host.io_buffer_bytes == needed(1)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_needs_the_room_gets_it(late: bool) -> None:
    """The budget that admission names is the one that works, whatever queries passed through meanwhile."""
    host = 40 * SLOT
    cache = with_doubles(
        TieredKVCache(device_budget=8 * SLOT, host_budget=host, block_size=SIZE),
        behind_the_cpus_back(held(0, eagerness=0.0, late=late)),
    )
    x = torch.randn(1, HEADS, 32, DIM)
    cache.update(x, x, 0)
    attend(cache, 16, 4 * HEADS)
    attend(cache)
    kept = cache.stats.host.io_buffer_bytes
    assert kept > 4 * SLOT
    tokens = cache.get_seq_length()
    refused = None
    while refused is None:
        try:
            attend(cache)
        except BudgetError as error:
            refused = error
        assert cache.stats.host.peak_bytes <= host
        cache.check_integrity()
    assert cache.stats.host.io_buffer_bytes < kept
    assert cache.stats.io_buffer_misses > 0
    assert cache.get_seq_length() > tokens
    assert refused.tier == "host"
    blocks = -(-(cache.get_seq_length() + 1) // SIZE)
    assert blocks == (host // SLOT) + 8, (
        "every slot of both budgets holds a block, but for the one that blocks pass through"
    )


def late() -> tuple[TieredKVCache, torch.Tensor, torch.Tensor]:
    """A cache whose transfers end as late as they may; a query, and a token for the next step."""
    cache = with_doubles(
        TieredKVCache(device_budget=8 * SLOT, host_budget=10**6, block_size=SIZE),
        behind_the_cpus_back(held(0, eagerness=0.0, late=True)),
    )
    x = torch.randn(1, HEADS, 64, DIM)
    cache.update(x, x, 0)
    return cache, torch.randn(1, HEADS, 1, DIM), torch.randn(1, HEADS, 1, DIM)


def test_a_query_on_its_way_down_is_waited_for_though_its_call_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, query, one = late()
    reader = cache._forward.readers[0]
    views = cache.update(one, one, 0)

    def failing(transfer: Transfer) -> None:
        # As where the device's part, which is launched before that, finds no memory.
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "synchronize", failing)
        with pytest.raises(torch.OutOfMemoryError):
            F.scaled_dot_product_attention(query, *views)
    under_way = [x for x in reader.device.engine.in_flight() if x.direction is Direction.QUERY]
    assert under_way
    reader.io_buffers.release()
    assert not set(under_way) & set(reader.device.engine.in_flight())


class FetchesNothing(Policy):
    """What left the device stays on the host, though there is room."""

    def plan(self, state: StepState) -> StepPlan:
        plan = super().plan(state)
        for layer in plan.layers:
            layer.fetch = layer.keep = 0
        return plan


def test_copies_ahead_of_need_do_not_take_it() -> None:
    """A block that could stay on the device is no reason for every call to take memory of its own."""
    cache = TieredKVCache(device_budget=64 * SLOT, host_budget=40 * SLOT, block_size=SIZE, policy=FetchesNothing())
    with_doubles(cache, ENGINE)
    x = torch.randn(1, HEADS, 20 * SIZE, DIM)
    cache.update(x, x, 0)
    reader = cache._forward.readers[0]
    with reader.memory.lock:
        reader.device.evict_from(reader.layer.blocks, 2)
    attend(cache, 16, 4 * HEADS)
    kept = cache.stats.host.io_buffer_bytes
    assert kept > 4 * SLOT
    budget = cache._forward.memory.host.slabs.budget
    others = budget.free
    assert budget.reserve(others)
    x = torch.randn(1, HEADS, 16 * SIZE, DIM)
    cache.update(x, x, 0)
    stats = cache.stats
    assert stats.host.io_buffer_bytes == kept
    attend(cache)
    assert cache.stats.io_buffer_misses == 0
    budget.release(others)
    x = torch.randn(1, HEADS, SIZE, DIM)
    cache.update(x, x, 0)
    assert cache.stats.bytes_down > stats.bytes_down, "copies were due all the while"
    assert cache.stats.host.io_buffer_bytes == kept
    cache.check_integrity()


def test_it_is_given_back_only_when_the_last_result_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the budget's other holders may write there, and on a CUDA device its pages are unlocked."""
    cache, query, one = late()
    F.scaled_dot_product_attention(query, *cache.update(one, one, 0))
    reader = cache._forward.readers[0]
    engine, buffers = reader.device.engine, reader.io_buffers
    kept = buffers._kept
    assert kept is not None
    assert kept.last is not None
    assert kept.last in engine.in_flight()
    given: list[torch.Tensor] = []
    release = SlabAllocator.release

    def released(slabs: SlabAllocator, data: torch.Tensor) -> None:
        assert kept.last not in engine.in_flight()
        given.append(data)
        release(slabs, data)

    monkeypatch.setattr(SlabAllocator, "release", released)
    buffers.release()
    assert given[0] is kept.data
    monkeypatch.undo()
    buffers.release()
    assert len(given) == 1
    cache.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_comes_down_with_the_query_and_not_by_a_copy_that_waits(dtype: torch.dtype) -> None:
    """Whoever copies it alone waits for all that the device still has to do."""
    cache = TieredKVCache(device_budget=8 * SLOT, host_budget=10**6, block_size=SIZE)
    with_doubles(cache, behind_the_cpus_back(held(0, eagerness=0.0, late=True)))
    for n in (64, 1):
        x = torch.randn(2, HEADS, n, DIM)
        keys, values = cache.update(x, x, 0)
    tokens = keys.shape[2]
    seen = torch.rand(2, 1, 1, tokens) < 0.7
    mask = seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    query = torch.randn(2, 2 * HEADS, 1, DIM)
    before = cache.stats.attention_bytes
    got = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    assert cache.stats.host_attended == 1
    assert cache.stats.host.io_buffer_bytes == needed(2) + bytes_of([mask]), "paid for as the query is"
    out_and_lse = 2 * 2 * HEADS * (DIM + 1) * 4
    assert cache.stats.attention_bytes - before == query.nbytes + mask.nbytes + out_and_lse
    dense = [y.dense() for y in (keys, values)]
    torch.testing.assert_close(
        got, F.scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True), rtol=1e-5, atol=1e-5
    )


# By themselves


def slabs(limit: int, tier: str = "host") -> SlabAllocator:
    return SlabAllocator(torch.device("cpu"), Budget(tier, limit))


def test_a_workspace_is_as_large_as_asked_and_a_little_more_where_that_is_free() -> None:
    memory = slabs(10**5)
    asked: list[int] = []
    workspace = Workspace(memory, asked.append)
    first = workspace.take(6400)
    assert workspace.nbytes == memory.budget.used == first.numel() == 6400 + 6400 // 16 // 64 * 64
    version = workspace.version
    assert workspace.take(6500) is first, "what is there serves"
    assert workspace.version == version
    second = workspace.take(64000)
    assert second is not first
    assert workspace.version != version, "tensors over the old memory are stale"
    assert memory.budget.used == second.numel()
    assert not asked, "nobody had to make room"
    taken = memory.allocate(memory.budget.free - 1000)
    assert taken is not None
    exact = workspace.take(memory.budget.free + workspace.nbytes)
    assert memory.budget.free == 0
    assert exact.numel() == 10**5 - taken.numel()


def test_a_workspace_is_no_larger_than_promised_where_others_may_need_the_rest() -> None:
    memory = slabs(10**5)
    workspace = Workspace(memory, lambda nbytes: None)
    assert workspace.take(6400, 6400).numel() == 6400
    assert workspace.take(6400, 6528).numel() == 6400, "what is there serves"
    assert workspace.take(6528, 6592).numel() == 6592
    assert workspace.take(3200, 3264).numel() == 3264, "what is there is more than promised"
    assert workspace.take(64, 0).numel() == 64
    assert memory.budget.used == 64


def test_a_workspace_asks_for_room_until_it_is_there_and_takes_nothing_where_it_is_not() -> None:
    memory = slabs(10**4)
    blocks = [memory.allocate(3000) for _ in range(3)]

    def make_room(nbytes: int) -> None:
        while memory.budget.free < nbytes:
            if not blocks:
                raise BudgetError("nothing more", tier="host", needed=nbytes, budget=10**4)
            block = blocks.pop()
            assert block is not None
            memory.release(block)

    workspace = Workspace(memory, make_room)
    assert workspace.take(5000).numel() >= 5000
    assert len(blocks) == 1
    with pytest.raises(BudgetError):
        workspace.take(10**4 + 1)
    assert (workspace.nbytes, memory.budget.used) == (0, 0), "what it had was given back for it"


def test_a_workspace_that_is_read_stays_and_one_that_is_much_too_large_goes() -> None:
    memory = slabs(10**5)
    workspace = Workspace(memory, lambda nbytes: None)
    workspace.take(10**4)
    workspace.in_use = True
    assert workspace.release_idle() == 0
    workspace.shrink(100)
    assert workspace.nbytes
    workspace.in_use = False
    workspace.shrink(workspace.nbytes // 2)
    assert workspace.nbytes, "half of it may be asked for soon"
    workspace.shrink(workspace.nbytes // 2 - 1)
    assert workspace.nbytes == memory.budget.used == 0
    n = workspace.take(640).numel()
    assert workspace.release_idle() == n
    assert memory.budget.used == 0


@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (7, 4, 8), (1, 1, 1, 1)], ids=str)
def test_an_io_buffer_lays_out_query_result_and_masks_apart_from_each_other(shape: tuple[int, ...]) -> None:
    memory = slabs(10**6)
    buffers = IoBuffers(memory)
    masks = {"mask": torch.zeros(2, 1, 1, 37, dtype=torch.bool), "sinks": torch.zeros(4)}
    buffer = buffers.take(shape, 5, torch.bfloat16, bytes_of(masks.values()))
    others = buffer.room_for(masks)
    assert (buffer.query.shape, buffer.query.dtype) == (shape, torch.bfloat16)
    assert (buffer.out.shape, buffer.out.dtype) == ((*shape[:-1], 5), torch.float32)
    assert (buffer.lse.shape, buffer.lse.dtype) == (shape[:-1], torch.float32)
    assert {name: (x.shape, x.dtype) for name, x in others.items()} == {
        name: (x.shape, x.dtype) for name, x in masks.items()
    }
    tensors = [buffer.query, buffer.out, buffer.lse, *others.values()]
    for i, x in enumerate(tensors):
        assert x.data_ptr() % 64 == buffer.data.data_ptr() % 64, "aligned as caches want it"
        x.view(torch.uint8).fill_(i + 1)
    for i, x in enumerate(tensors):
        assert bool((x.view(torch.uint8) == i + 1).all()), "nobody wrote over it"
    assert memory.budget.used == buffers.nbytes == buffer.data.numel()


def test_an_io_buffer_is_kept_for_smaller_calls_and_what_was_prepared_over_another_form_is_not() -> None:
    buffers = IoBuffers(slabs(10**6))
    large = buffers.take((1, 4, 16, 8), 8, torch.float32)
    large.calls[0] = ("key", "call")
    assert buffers.take((1, 4, 16, 8), 8, torch.float32) is large
    assert large.calls, "the same form: calls are repeated"
    assert buffers.take((1, 4, 1, 8), 8, torch.float32) is large
    assert not large.calls
    assert large.query.shape == (1, 4, 1, 8)
    assert buffers.misses == 0


@pytest.mark.parametrize(("misses", "blocks"), [(False, True), (True, True), (True, False)])
def test_nobody_waits_behind_a_lock_for_copies_that_are_not_page_locked(
    misses: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch, page_locking: Any
) -> None:
    """Such copies block the CPU until the device comes to them. Where they do not, nobody waits for the device: other
    work is given to it meanwhile."""
    make = SlabAllocator.__init__
    locked = {"lock_for": torch.device("cuda", 0)}
    monkeypatch.setattr(SlabAllocator, "__init__", lambda self, *args, **kwargs: make(self, *args, **(kwargs | locked)))
    seen = list[str]()

    class Marked(HeldTransfers):
        pageable_copies_block = blocks

        def mark(self) -> Any:
            return Come()

        def submit(self, copies: Any, direction: Direction, counters: Any, **options: Any) -> Transfer:
            if direction in (Direction.QUERY, Direction.RESULT):
                seen.append(direction)
            return super().submit(copies, direction, counters, **options)

    class Come(Event):
        def passed(self) -> bool:
            return True

        def settle(self) -> None:
            assert not cache._forward.memory.lock._is_owned()
            seen.append("settled")

    cache = TieredKVCache(device_budget=8 * SLOT, host_budget=10**6, block_size=SIZE)
    with_doubles(cache, Marked, poison=False)
    x = torch.randn(1, HEADS, 64, DIM)
    cache.update(x, x, 0)
    budget = cache._forward.memory.host.slabs.budget
    others = budget.free - needed(1) + 1 if misses else 0
    assert budget.reserve(others)
    query = torch.randn(1, 2 * HEADS, 1, DIM)
    keys, values = cache.update(x[:, :, :1], x[:, :, :1], 0)
    seen.clear()
    F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    waits = ["settled"] if misses and blocks else []
    assert seen == [*waits, Direction.QUERY, *waits, Direction.RESULT]
    assert cache.stats.io_buffer_misses == misses
    budget.release(others)
    cache.close()
