"""Who touches the same bytes is ordered: real caches over the real CUDA engine and a model of streams.

No race is found wherever blocks lie and whatever moves them. That one would be found, `test_missing_edges` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from stream_model import StreamModel
from test_random_walk import Walk
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache
from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.storage import links
from kvtier.testing import held, with_doubles
from kvtier.types import Direction

Patch = pytest.MonkeyPatch
FETCH, WRITE_BACK, QUERY, RESULT = Direction
LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
SLOT = 2 * HEADS * BLOCK * DIM * 4
STEPS = 40


class Conversation:
    """A cache under pressure, used as a model uses it: update and attention, layer by layer; crops and reorders.

    Args:
        model: of the streams.
        seed: of what is done.
        host_attention: host threads attend to what is not on the device; else it is fetched.
        poison: whatever becomes free is written over at once.
    """

    def __init__(self, model: StreamModel, seed: int, *, host_attention: bool, poison: bool = False) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        # Whoever fetches needs room for one layer as one tensor: 2 rows of up to 25 blocks.
        slots = self.random.choice((16, 24, 40) if host_attention and native.available() else (60, 70, 90))
        cache = TieredKVCache(
            device_budget=slots * SLOT,
            host_budget=160 * SLOT,  # little more than all of it: far slots are soon used again
            block_size=BLOCK,
            host_attention=host_attention,
            write_through=self.random.choice((0.0, 0.5, 1.0)),
        )
        self.cache = with_doubles(cache, model.engine, poison=poison)
        self._queries: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def forward(self, tokens: int) -> None:
        """So many more tokens for each of two rows. The memory of queries is used again, as in a captured graph."""
        query = self._queries.setdefault(tokens, torch.empty(2, 2 * HEADS, tokens, DIM))
        for i in range(LAYERS):
            keys, values = (torch.randn(2, HEADS, tokens, DIM) for _ in range(2))
            past = self.cache.layers[i].get_seq_length() if i < len(self.cache.layers) else 0
            views = self.cache.update(keys, values, i)
            if past:
                query.normal_()
                F.scaled_dot_product_attention(query, *views, enable_gqa=True)

    def step(self) -> None:
        """One forward, crop or reorder."""
        if self.length > 80:
            self.cache.crop(30 - self.length)
        chosen = self.random.choice(("decode",) * 6 + ("prompt", "crop", "crop", "reorder"))
        try:
            if self.length < 3:
                self.forward(self.random.randint(10, 40))
            elif chosen == "decode":
                self.forward(1)
            elif chosen == "prompt":
                self.forward(self.random.choice((3, 9, 17, 20)))
            elif chosen == "crop":
                self.cache.crop(-self.random.randint(1, min(2 * BLOCK, self.length - 1)))
            else:
                self.cache.reorder_cache(torch.tensor([self.random.randrange(2) for _ in range(2)]))
        except BudgetError:
            self.cache.crop(0)
            self.cache.crop(max(self.length // 2, 1) - self.length)


def in_torch(patch: Patch) -> None:
    """Without the native library, host attention is torch's, on the CPU's own thread."""
    patch.setattr(native, "available", lambda: False)


def through_tables(patch: Patch) -> None:
    """The device's part, and long prompts, read blocks where they lie, as its kernels do."""
    patch.setattr(launch, "available", lambda device: True)


def by_launch(patch: Patch, least: tuple[int, ...] = (1,) * len(links.SIZES)) -> None:
    """Blocks are copied by launches, as if so few runs of each of `links.SIZES` paid for one."""
    patch.setattr(links, "FEWEST", 1)
    patch.setattr(links, "least_runs", lambda device, direction: least)


def by_both(patch: Patch) -> None:
    """Single blocks by launches, where there are two or more, longer runs by the copy engine."""
    by_launch(patch, (2, *links.NEVER[1:]))
    patch.setattr(links, "SIZES", (SLOT, *links.SIZES[1:]))


#: Who attends, and what of `cache.stats` shows that the conversation came by.
WAYS: dict[str, tuple[bool, Callable[[Patch], None] | None, tuple[str, ...]]] = {
    "fetched": (False, None, ("promotions", "prefetched", "moved_blocks")),
    "host threads": (True, None, ("host_attended", "block_fetches")),
    "host in torch": (True, in_torch, ("host_attended", "block_fetches")),
    "device kernels": (True, through_tables, ("host_attended", "block_fetches", "prefetched")),
    "fetched by launches": (False, by_launch, ("promotions", "prefetched", "moved_blocks")),
    "fetched both ways": (False, by_both, ("promotions", "prefetched", "moved_blocks")),
    "host threads, launches": (True, by_launch, ("host_attended", "block_fetches")),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_whoever_attends_nothing_races(way: str) -> None:
    host, change, counted = WAYS[way]
    seen = dict.fromkeys(("evictions", "bytes_down", *counted), 0)
    actors: set[str] = set()
    launches = 0
    for seed in range(4):
        with Patch.context() as patch:
            if change is not None:
                change(patch)
            with StreamModel(seed, patch, eagerness=(0.0, 0.3, 0.9)[seed % 3]) as model:
                talk = Conversation(model, seed, host_attention=host, poison=seed % 2 == 0)
                for _ in range(STEPS):
                    talk.step()
                talk.cache.check_integrity()
                stats = talk.cache.stats
                talk.cache.close()
                assert not model.races  # one found within a transfer is a failed transfer to whoever submitted it
        seen = {name: count + getattr(stats, name) for name, count in seen.items()}
        actors |= {kind.rsplit(" ", 1)[0] for kind in model.accesses}
        launches += model.launches
    assert actors >= {"compute", "host", "fetch", "write_back"} | ({"query", "result"} if host else set())
    assert (launches > 0) == (change in (by_launch, by_both))
    assert all(seen.values()), f"these conversations no longer reach everything: {seen}"


@pytest.mark.parametrize("launches", [False, True], ids=["copies", "launches"])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_a_random_walk_of_everything_a_cache_can_do_has_no_race(seed: int, launches: bool, monkeypatch: Patch) -> None:
    if launches:
        by_launch(monkeypatch)
    with StreamModel(seed, monkeypatch) as model:
        walk = Walk(500 + seed, engine=model.engine, budgets=(20_000, 60_000))
        for _ in range(60):
            walk.step()
        walk.cache.close()
    assert not model.races
    assert (model.launches > 0) == launches


@pytest.mark.parametrize("late", [False, True], ids=["inline", "late"])
def test_slots_of_a_fetch_that_nobody_wants_any_more_are_no_reason_to_refuse(late: bool) -> None:
    """What fits must not depend on when copies end."""
    cache = TieredKVCache(
        device_budget=6 * SLOT, host_budget=2 * SLOT, block_size=BLOCK, host_attention=True, write_through=1.0
    )
    if late:
        with_doubles(cache, held(0, eagerness=0.0))
    tokens = torch.randn(1, HEADS, 4 * BLOCK, DIM)
    cache.update(tokens, tokens, 0)
    store = cache._runtime.layers[0]
    for block in list(store.resident)[:2]:
        store.tiers.evict(block)
    store.tiers.staging.prefetch(store)
    cache.crop(1 - 4 * BLOCK)
    if late or tokens.device.type == "cpu":  # a CUDA device may have ended by now, or not
        assert len(store.tiers.engine.in_flight()) == late
    for count in (BLOCK - 1, *[BLOCK] * 6):
        cache.update(tokens[:, :, :count], tokens[:, :, :count], 0)
    assert cache.get_seq_length() == 7 * BLOCK
    cache.check_integrity()
    cache.close()
