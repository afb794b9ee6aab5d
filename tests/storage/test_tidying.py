"""What is free on the device is brought together as blocks come and go, and nobody who reads notices."""

from __future__ import annotations

import pytest
import torch
from stream_model import StreamModel
from test_mutations import Patch, edit
from test_ordering import STEPS, Conversation, by_launch
from test_random_walk import Walk

from kvtier import TieredKVCache
from kvtier.planning import placement
from kvtier.storage import compaction
from kvtier.storage.compaction import Tidying
from kvtier.storage.gather import dense_kv
from kvtier.testing import failing, held

LAYERS, HEADS, DIM, BLOCK = 4, 1, 8, 2
SLOT = 2 * HEADS * BLOCK * DIM * 4


@pytest.fixture(autouse=True)
def _on_the_host() -> object:
    with torch.device("cpu"):
        yield


def always(patch: Patch) -> None:
    """Whatever is fetched counts as scattered."""
    patch.setattr(placement, "scattered", lambda runs, blocks: True)
    patch.setattr(compaction, "REST", 1)


def copies_of_fetches(count: int) -> list[int]:
    """Copies of one fetch after the other of a whole layer, where every other slot of the others is free at first."""
    cache = TieredKVCache(
        device_budget=200 * SLOT, host_budget=10**6, block_size=BLOCK, host_attention=False, write_through=1.0
    )
    tokens = torch.randn(1, HEADS, 64 * BLOCK, DIM)
    for i in range(LAYERS):
        cache.update(tokens, tokens, i)
        layer = cache._runtime.layers[i]
        for block in list(layer.resident) if not i else ():
            layer.tiers.evict(block)
    last, *others = cache._runtime.layers.values()
    tiers = last.tiers
    for layer in others:
        for block in list(layer.resident)[::2]:
            tiers.evict(block)
    copies = []
    for _ in range(count):
        before = cache.stats.copies_up
        tiers.staging.prefetch(last)
        assert len(tiers.staging.staged[last].slots) == 64
        copies.append(cache.stats.copies_up - before)
        tiers.staging.drop(last)
        cache.check_integrity()
    for layer in others:
        assert torch.equal(dense_kv(layer, layer.length)[0], tokens)
    return copies


def test_fetches_come_to_be_a_few_copies(monkeypatch: Patch) -> None:
    tidy = copies_of_fetches(30)
    assert tidy[0] > 4 * tidy[-1]
    monkeypatch.setattr(Tidying, "step", lambda self, keep: None)
    scattered = copies_of_fetches(3)
    assert scattered[0] == tidy[0]
    assert scattered[-1] > tidy[0] / 2, "they do not become fewer by themselves"


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_that_is_tidied_all_the_time_holds_what_a_dense_cache_holds(seed: int, monkeypatch: Patch) -> None:
    always(monkeypatch)
    assert walked(seed, late=bool(seed % 2)) > 0


def walked(seed: int, late: bool) -> int:
    """Blocks that were moved in a walk; an AssertionError where the cache does not hold what it should."""
    moved = 0
    step = Tidying.step

    def counted(tidying: Tidying, keep: object) -> None:
        nonlocal moved
        before = tidying._tiers.counters.moved_blocks
        step(tidying, keep)
        moved += tidying._tiers.counters.moved_blocks - before

    with Patch.context() as patch:
        patch.setattr(Tidying, "step", counted)
        engine = failing(0.1, seed) if seed % 4 == 3 else held(seed, 0.2, late=late)
        walk = Walk(700 + seed, engine=engine, budgets=(20_000, 40_000))
        for _ in range(150):
            walk.step()
    return moved


def fails(seed: int) -> bool:
    try:
        walked(seed, late=bool(seed % 2))
    except (AssertionError, KeyError, RuntimeError):
        return True
    return False


MUTATIONS = {
    "the layer is not told": edit(Tidying, "step", "block.layer.block_moved(block)", "pass"),
    "the writer is not told": edit(Tidying, "step", "block.layer.forget_plan()", "block.layer.block_moved(block)"),
    "a gap that was taken is written over": edit(
        Tidying, "step", "pool.allocate(gap - 1, block) if pool.is_free(gap) else None", "pool.retain(gap) or gap"
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_walk_notices(name: str, monkeypatch: Patch) -> None:
    always(monkeypatch)
    MUTATIONS[name](monkeypatch)
    assert any(fails(seed) for seed in range(12))


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("launches", [False, True], ids=["copies", "launches"])
@torch.no_grad()
def test_nothing_races_with_what_is_moved(host: bool, launches: bool) -> None:
    for seed in range(3):
        with Patch.context() as patch, StreamModel(seed, patch, eagerness=(0.0, 0.3, 0.9)[seed]) as model:
            always(patch)
            if launches:
                by_launch(patch)
            talk = Conversation(model, seed, host_attention=host, poison=seed % 2 == 0)
            for _ in range(STEPS):
                talk.step()
            talk.cache.check_integrity()
            talk.cache.close()
            assert not model.races


@pytest.mark.parametrize("keep", [0, 1])
def test_blocks_of_the_layer_that_is_read_stay_where_they_are(keep: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(compaction, "MOVES", 10**6)
    cache = TieredKVCache(device_budget=60 * SLOT, host_budget=10**6, block_size=BLOCK, host_attention=False)
    tokens = torch.randn(1, HEADS, 24 * BLOCK, DIM)
    for some in tokens.split(BLOCK, 2):
        for i in range(2):
            cache.update(some, some, i)
    stores = cache._runtime.layers
    for store in stores.values():
        for block in list(store.resident)[::2]:
            store.tiers.evict(block)
    before = [{block.near for block in store.resident} for store in stores.values()]
    tidying = stores[0].tiers.tidying(stores[0].layout)
    tidying._scattered = True
    tidying.step(keep=stores[keep])
    after = [{block.near for block in store.resident} for store in stores.values()]
    assert after[keep] == before[keep]
    assert after[1 - keep] != before[1 - keep]
    cache.check_integrity()
    for store in stores.values():
        keys, values = dense_kv(store, store.length)
        assert torch.equal(keys, tokens)
        assert torch.equal(values, tokens)
