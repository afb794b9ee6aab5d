"""What queries and results pass through is paid for by the host budget, comes back, and is in no block's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache
from kvtier.storage.memory import Memory
from kvtier.storage.staging import room_of
from kvtier.storage.transfer import Transfer
from kvtier.testing import held, with_doubles
from kvtier.types import Direction

pytestmark = pytest.mark.usefixtures("on_the_host")

HEADS, DIM, SIZE = 2, 8, 4
SLOT = 2 * HEADS * DIM * SIZE * 4


def spilled(host: int = 10**6, *, tokens: int = 64, rows: int = 1, device: int = 8) -> TieredKVCache:
    """A cache most of which lies on the host."""
    cache = TieredKVCache(device_budget=device * SLOT, host_budget=host, block_size=SIZE)
    x = torch.randn(rows, HEADS, tokens, DIM)
    cache.update(x, x, 0)
    return cache


def attend(cache: TieredKVCache, queries: int = 1, heads: int = 2 * HEADS) -> None:
    """As many new tokens, and attention that is right."""
    layer = cache._runtime.layers[0]
    rows = layer.batch
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
    assert before.handover_bytes == 0
    attend(cache)
    after = cache.stats.host
    assert after.handover_bytes == needed(1)
    assert after.bytes - before.bytes >= needed(1)
    cache.check_integrity()
    attend(cache, 3)
    assert cache.stats.host.handover_bytes == needed(3), "one, as large as the largest call"
    attend(cache, 1)
    assert cache.stats.host.handover_bytes == needed(3), (
        "assisted decoding asks for one, then for several, then for one"
    )
    assert cache.stats.handover_misses == 0
    cache.check_integrity()
    cache.reset()
    assert cache.stats.host.bytes == 0
    cache = spilled()
    attend(cache)
    budget = cache._runtime._host.budget
    cache.close()
    assert budget.used == 0


def test_what_is_page_locked_is_shown(monkeypatch: pytest.MonkeyPatch, page_locking: Any) -> None:
    make = Memory.__init__
    monkeypatch.setattr(
        Memory,
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
    budget = cache._runtime._host.budget
    others = budget.free - needed(1) + 1
    assert budget.reserve(others)
    attend(cache)
    stats = cache.stats
    assert stats.handover_misses == 1
    assert stats.host.handover_bytes == 0
    budget.release(others)
    cache.check_integrity()
    attend(cache)
    assert cache.stats.handover_misses == 1, "as soon as there is room, it is kept"
    assert cache.stats.host.handover_bytes == needed(1)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_needs_the_room_gets_it(late: bool) -> None:
    """The budget that admission names is the one that works, whatever queries passed through meanwhile."""
    host = 40 * SLOT
    cache = with_doubles(
        TieredKVCache(device_budget=8 * SLOT, host_budget=host, block_size=SIZE), held(0, eagerness=0.0, late=late)
    )
    x = torch.randn(1, HEADS, 32, DIM)
    cache.update(x, x, 0)
    attend(cache, 16, 4 * HEADS)
    attend(cache)
    kept = cache.stats.host.handover_bytes
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
    assert cache.stats.host.handover_bytes < kept
    assert cache.stats.handover_misses > 0
    assert cache.get_seq_length() > tokens
    assert refused.tier == "host"
    blocks = -(-(cache.get_seq_length() + 1) // SIZE)
    assert blocks == (host // SLOT) + 8, (
        "every slot of both budgets holds a block, but for the one that blocks pass through"
    )


def late() -> tuple[TieredKVCache, torch.Tensor, torch.Tensor]:
    """A cache whose transfers end as late as they may; a query, and a token for the next step."""
    cache = with_doubles(
        TieredKVCache(device_budget=8 * SLOT, host_budget=10**6, block_size=SIZE), held(0, eagerness=0.0, late=True)
    )
    x = torch.randn(1, HEADS, 64, DIM)
    cache.update(x, x, 0)
    return cache, torch.randn(1, HEADS, 1, DIM), torch.randn(1, HEADS, 1, DIM)


def test_a_query_on_its_way_down_is_waited_for_though_its_call_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, query, one = late()
    tiers = cache._runtime.layers[0].tiers
    views = cache.update(one, one, 0)

    def failing(transfer: Transfer) -> None:
        # As where the device's part, which is launched before that, finds no memory.
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "synchronize", failing)
        with pytest.raises(torch.OutOfMemoryError):
            F.scaled_dot_product_attention(query, *views)
    under_way = [x for x in tiers.engine.in_flight() if x.direction is Direction.QUERY]
    assert under_way
    tiers.handover.release()
    assert not set(under_way) & set(tiers.engine.in_flight())


def test_copies_ahead_of_need_do_not_take_it() -> None:
    """A block that could stay on the device is no reason for every call to take memory of its own."""
    cache = TieredKVCache(device_budget=64 * SLOT, host_budget=40 * SLOT, block_size=SIZE, write_through=0.5)
    x = torch.randn(1, HEADS, 20 * SIZE, DIM)
    cache.update(x, x, 0)
    layer = cache._runtime.layers[0]
    for _ in range(2):
        layer.tiers.evict_one(layer.layout, None)
    attend(cache, 16, 4 * HEADS)
    kept = cache.stats.host.handover_bytes
    assert kept > 4 * SLOT
    budget = cache._runtime._host.budget
    others = budget.free
    assert budget.reserve(others)
    x = torch.randn(1, HEADS, 16 * SIZE, DIM)
    cache.update(x, x, 0)
    stats = cache.stats
    assert stats.host.handover_bytes == kept
    assert stats.evictions == 2
    attend(cache)
    assert cache.stats.handover_misses == 0
    budget.release(others)
    x = torch.randn(1, HEADS, SIZE, DIM)
    cache.update(x, x, 0)
    assert cache.stats.bytes_down > stats.bytes_down, "copies were due all the while"
    assert cache.stats.host.handover_bytes == kept
    cache.check_integrity()


def test_it_is_given_back_only_when_the_last_result_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the budget's other holders may write there, and on a CUDA device its pages are unlocked."""
    cache, query, one = late()
    F.scaled_dot_product_attention(query, *cache.update(one, one, 0))
    tiers = cache._runtime.layers[0].tiers
    kept = tiers.handover._kept
    assert kept is not None
    assert kept.last is not None
    assert kept.last in tiers.engine.in_flight()
    given: list[torch.Tensor] = []
    release = Memory.release

    def released(memory: Memory, data: torch.Tensor) -> None:
        assert kept.last not in tiers.engine.in_flight()
        given.append(data)
        release(memory, data)

    monkeypatch.setattr(Memory, "release", released)
    tiers.handover.release()
    assert given[0] is kept.data
    monkeypatch.undo()
    tiers.handover.release()
    assert len(given) == 1
    cache.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_comes_down_with_the_query_and_not_by_a_copy_that_waits(dtype: torch.dtype) -> None:
    """Whoever copies it alone waits for all that the device still has to do."""
    cache = TieredKVCache(device_budget=8 * SLOT, host_budget=10**6, block_size=SIZE)
    with_doubles(cache, held(0, eagerness=0.0, late=True))
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
    assert cache.stats.host.handover_bytes == needed(2) + room_of([mask]), "paid for as the query is"
    out_and_lse = 2 * 2 * HEADS * (DIM + 1) * 4
    assert cache.stats.attention_bytes - before == query.nbytes + mask.nbytes + out_and_lse
    dense = [y.dense() for y in (keys, values)]
    torch.testing.assert_close(
        got, F.scaled_dot_product_attention(query, *dense, attn_mask=mask, enable_gqa=True), rtol=1e-5, atol=1e-5
    )
