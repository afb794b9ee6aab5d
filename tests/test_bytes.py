"""What moves between the tiers is what must: downwards each sealed block once, upwards what is not resident."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvtier import TieredKVCache

pytestmark = pytest.mark.usefixtures("on_the_host")

LAYERS, HEADS, DIM, BLOCK_SIZE = 3, 2, 8, 4
TOKEN = 2 * HEADS * DIM * 4  # bytes of one token's keys and values in one layer, fp32
BLOCK = BLOCK_SIZE * TOKEN  # a multiple of 64: no padding

Blocks = list[int]  # a number of blocks for each layer


def make_cache(slots: float, write_through: float = 0.0) -> TieredKVCache:
    """A cache with an emulated device of so many blocks."""
    return TieredKVCache(
        device_budget=int(slots * BLOCK),
        host_budget=10**7,
        block_size=BLOCK_SIZE,
        write_through=write_through,
        host_attention=False,
    )


def prompt(rows: int, tokens: int, *, shared: int = 0, seed: int = 0) -> torch.Tensor:
    """Keys of `rows` rows that begin with the same `shared` tokens."""
    x = torch.randn(rows, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed))
    x[:, :, :shared] = x[:1, :, :shared]
    return x


def step(cache: TieredKVCache, keys: torch.Tensor) -> None:
    """One forward: each layer is updated, then attended to."""
    for i in range(LAYERS):
        k, v = cache.update(keys + i, keys.flip(-1) - i, i)
        F.scaled_dot_product_attention(torch.ones(keys.shape[0], HEADS, 1, DIM), k, v)


def decode(cache: TieredKVCache, rows: int = 1, n: int = 0) -> None:
    """One step of one new token for each row, all different."""
    step(cache, prompt(rows, 1, seed=1000 + n))


def absent(cache: TieredKVCache) -> Blocks:
    """Blocks of each layer without a device slot, for one row."""
    return [-(-layer.tokens // BLOCK_SIZE) - layer.device_blocks for layer in cache.residency().layers]


def used_blocks(cache: TieredKVCache) -> int:
    """Blocks in a cache without a device tier."""
    assert cache.stats.device.budget == 0
    return cache.stats.host.used_blocks


@pytest.mark.parametrize("slots", [33, 35, 50, 1000])
def test_downwards_every_sealed_block_moves_once_and_eviction_moves_nothing(slots: int) -> None:
    cache = make_cache(slots)
    step(cache, prompt(1, 50))
    for n in range(40):
        before = cache.stats
        decode(cache, n=n)
        after = cache.stats
        sealed = LAYERS if cache.get_seq_length() % BLOCK_SIZE == 0 else 0
        assert after.bytes_down - before.bytes_down == sealed * BLOCK
        assert after.bytes_down == LAYERS * (cache.get_seq_length() // BLOCK_SIZE) * BLOCK
    if slots < 50:
        assert cache.stats.evictions > 40
    assert cache.stats.bytes_down == LAYERS * 88 * TOKEN, "at 88 tokens, all sealed: a token's KV per token"


def test_with_a_watermark_no_block_moves_down_twice_and_none_before_it_is_reached() -> None:
    cache = make_cache(60, write_through=0.5)
    step(cache, prompt(1, 20))
    for n in range(60):
        quiet = cache.stats.device.used_blocks < 28
        decode(cache, n=n)
        stats = cache.stats
        assert not (quiet and stats.bytes_down), "nothing is copied while the device is half empty"
        assert stats.bytes_down <= LAYERS * (cache.get_seq_length() // BLOCK_SIZE) * BLOCK
        assert stats.bytes_down == sum(x.host_blocks for x in cache.residency().layers) * BLOCK
    assert cache.stats.evictions > 0


def fetched_ahead(cache: TieredKVCache) -> int:
    """Blocks fetched for the next step already."""
    return sum(reader.fetched_blocks for reader in cache._forward.readers.values())


@pytest.mark.parametrize("slots", [33, 35, 50, 57, 65])
def test_upwards_a_step_moves_exactly_the_blocks_that_are_not_resident(slots: int) -> None:
    """What was fetched at the end of a step for the next one is on the device when that begins. Where a step opens a
    block, room is made for it and for a larger workspace: what leaves for that is fetched as well."""
    cache = make_cache(slots)
    step(cache, prompt(1, 50))
    decode(cache)
    moved = exact = 0
    for n in range(30):
        before, missing = cache.stats, absent(cache)
        opens = cache.get_seq_length() % BLOCK_SIZE == 0
        step(cache, prompt(1, 1, seed=n))
        up = cache.stats.bytes_up - before.bytes_up
        assert up % BLOCK == 0
        assert up // BLOCK == cache.stats.block_fetches - before.block_fetches
        if opens or cache.get_seq_length() % BLOCK_SIZE < 3:  # what room there is for fetches follows a step later
            everything = LAYERS * -(-cache.get_seq_length() // BLOCK_SIZE)
            assert sum(missing) <= up // BLOCK <= 2 * everything
        else:
            # Now and then a block makes room for more fetches at a time.
            spare = up // BLOCK - sum(missing) - fetched_ahead(cache)
            assert 0 <= spare <= 1
            exact += spare == 0
        moved += up
    assert moved
    assert exact >= 4, "of seven steps that open nothing and follow none that do"


@pytest.mark.parametrize("rows", [1, 3])
def test_with_everything_resident_nothing_moves_either_way(rows: int) -> None:
    cache = make_cache(1000, write_through=0.5)
    step(cache, prompt(rows, 50))
    for n in range(20):
        decode(cache, rows, n)
    cache.reorder_cache(torch.zeros(rows, dtype=torch.long))
    cache.crop(-9)
    decode(cache, rows)
    stats = cache.stats
    assert (stats.bytes_down, stats.bytes_up, stats.copies_down, stats.copies_up) == (0, 0, 0, 0)
    assert (stats.evictions, stats.block_fetches, stats.moved_blocks) == (0, 0, 0)
    assert stats.block_hits > 0


def test_a_cache_in_the_host_tier_moves_nothing() -> None:
    cache = TieredKVCache(block_size=BLOCK_SIZE)
    step(cache, prompt(2, 50))
    for n in range(10):
        decode(cache, 2, n)
    assert (cache.stats.bytes_down, cache.stats.bytes_up, cache.stats.block_fetches) == (0, 0, 0)


@pytest.mark.parametrize("slots", [35, 50, 1000])
def test_blocks_spill_evenly_over_the_layers(slots: int) -> None:
    cache = make_cache(slots)
    step(cache, prompt(1, 50))
    for n in range(30):
        decode(cache, n=n)
        # What was fetched for the next step leaves again.
        ahead = [reader.fetched_blocks for reader in cache._forward.readers.values()]
        missing = [a + b for a, b in zip(absent(cache), ahead, strict=True)]
        assert max(missing) - min(missing) <= 2, missing


@pytest.mark.parametrize("device_slots", [None, 1000])
def test_four_equal_rows_hold_their_prompt_once_and_part_by_one_tail_each(device_slots: int | None) -> None:
    """`generate` repeats the rows for `num_beams` and `num_return_sequences` before the cache sees them."""
    cache = TieredKVCache(
        device_budget=None if device_slots is None else device_slots * BLOCK, block_size=BLOCK_SIZE, write_through=1.0
    )

    def used() -> int:
        return cache.stats.device.used_blocks + cache.stats.host.used_blocks

    step(cache, prompt(4, 50, shared=50))
    assert used() == LAYERS * 13
    for n in range(2):
        decode(cache, 4, n)
        assert used() == LAYERS * (12 + 4), "twelve whole blocks shared, a tail for each row"
    decode(cache, 4)
    assert used() == LAYERS * (12 + 4 * 2)
    before = cache.stats
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    assert used() == LAYERS * (12 + 2), "beams that died gave back what they alone held"
    assert cache.stats.bytes_up + cache.stats.bytes_down == before.bytes_up + before.bytes_down == 0
    assert [layer.shared_blocks for layer in cache.residency().layers] == [0] * LAYERS, "one table serves all rows"


@pytest.mark.parametrize("shared", [0, 3, 4, 17, 48, 49])
def test_rows_that_begin_alike_share_their_whole_blocks(shared: int) -> None:
    cache = TieredKVCache(block_size=BLOCK_SIZE)
    step(cache, prompt(3, 50, shared=shared))
    whole = shared // BLOCK_SIZE
    assert used_blocks(cache) == LAYERS * (whole + 3 * (13 - whole))
    assert [layer.shared_blocks for layer in cache.residency().layers] == [whole] * LAYERS


def test_shared_blocks_move_once_for_all_rows() -> None:
    cache = make_cache(60)  # one layer, laid out for four rows, takes 48
    step(cache, prompt(4, 48, shared=48))
    assert cache.stats.bytes_down == LAYERS * 12 * BLOCK
