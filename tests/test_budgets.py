"""Budgets are hard at every moment; too small a one is refused by a name that works; nothing is lost by a refusal."""

from __future__ import annotations

import mmap
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from kvtier import BudgetError, ConfigError, TieredKVCache
from kvtier.memory.storage import system

pytestmark = pytest.mark.usefixtures("on_the_host")

LAYERS, HEADS, DIM = 3, 2, 8
TOKEN = 2 * HEADS * DIM * 4  # bytes of one token's keys and values in one layer, fp32

CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_key_value_heads=HEADS)

Tokens = list[tuple[torch.Tensor, torch.Tensor]]


def tokens(rng: torch.Generator, rows: int, count: int) -> Tokens:
    """New keys and values for every layer."""
    return [
        (torch.randn(rows, HEADS, count, DIM, generator=rng), torch.randn(rows, HEADS, count, DIM, generator=rng))
        for _ in range(LAYERS)
    ]


class Driven:
    """A cache, and beside it what it should hold."""

    def __init__(self, cache: TieredKVCache, seed: int = 0) -> None:
        self.cache = cache
        self.rng = torch.Generator().manual_seed(seed)
        self.held: Tokens = []
        self.layers_done = 0

    @property
    def length(self) -> int:
        return self.held[0][0].shape[2] if self.held else 0

    def forward(self, rows: int, count: int) -> None:
        """Update every layer and attend to it, as a model does."""
        new = tokens(self.rng, rows, count)
        self.layers_done = 0
        for i, (k, v) in enumerate(new):
            keys, values = self.cache.update(k, v, i)
            F.scaled_dot_product_attention(torch.ones(rows, HEADS, 1, DIM), keys, values)
            self.layers_done += 1
        if self.held:
            new = [(torch.cat([a, k], 2), torch.cat([b, v], 2)) for (a, b), (k, v) in zip(self.held, new, strict=True)]
        self.held = new

    def forwards(self, workload: list[tuple[int, int]]) -> None:
        """One forward after the other, (rows, tokens) each."""
        for rows, count in workload:
            self.forward(rows, count)

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.held = [(k[:, :, : k.shape[2] - count], v[:, :, : v.shape[2] - count]) for k, v in self.held]

    def check(self) -> None:
        """Every layer holds what it should; every count agrees."""
        for i, (k, v) in enumerate(self.held):
            assert torch.equal(self.cache.layers[i].keys.dense(), k)
            assert torch.equal(self.cache.layers[i].values.dense(), v)
        self.cache.check_integrity()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[mmap.mmap]:
    """Every live memory map made since: a map lives as long as any tensor over it, remembered by whomever."""
    live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
    real = mmap.mmap

    def tracked(*args: int, **kwargs: int) -> mmap.mmap:
        region = real(*args, **kwargs)
        live.add(region)
        return region

    monkeypatch.setattr(mmap, "mmap", tracked)
    return live


@pytest.mark.parametrize("seed", range(12))
def test_what_is_mapped_never_exceeds_the_budgets_whatever_is_done(
    mapped: weakref.WeakSet[mmap.mmap], seed: int
) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4, 8))
    device, host = rng.choice((None, 9_000, 20_000, 60_000)), rng.choice((30_000, 100_000, 10**6))
    cache = TieredKVCache(
        CONFIG, device_budget=device, host_budget=host, block_size=block_size, write_through=rng.choice((0, 0.5, 1))
    )
    for _ in range(60):
        act = rng.random()
        length = cache.get_seq_length()
        try:
            if act < 0.7 or not length:
                rows = cache._forward.readers[0].layer.batch if length else rng.randint(1, 4)
                driven = Driven(cache, rng.randrange(1000))
                driven.forward(rows, rng.choice((1, 1, 1, 2, 7, 20)))
            elif act < 0.8:
                cache.crop(-rng.randint(0, length))
            elif act < 0.9:
                rows = cache._forward.readers[0].layer.batch
                cache.reorder_cache(torch.tensor([rng.randrange(rows) for _ in range(rows)]))
            else:
                cache.layers[rng.randrange(LAYERS)].keys.sum()
        except BudgetError as error:
            assert error.budget == (device if error.tier == "device" else host)  # noqa: PT017
            cache.reset()
        stats = cache.stats
        assert stats.device.bytes <= stats.device.peak_bytes <= (device or 0)
        assert stats.host.bytes <= stats.host.peak_bytes <= host
        assert sum(map(len, mapped)) == stats.device.bytes + stats.host.bytes, "the counted bytes are the real ones"
        cache.check_integrity()


# Too small a device budget


def smallest_device_budget(block_size: int, workload: list[tuple[int, int]]) -> int:
    """The device budget found by following the errors."""
    budget = 1
    for _ in range(60):
        driven = Driven(TieredKVCache(CONFIG, device_budget=budget, host_budget=10**7, block_size=block_size))
        try:
            for rows, count in workload:
                driven.forward(rows, count)
        except BudgetError as error:
            assert (error.tier, error.budget) == ("device", budget)  # noqa: PT017
            assert error.needed > budget  # noqa: PT017
            assert str(error.needed) in str(error)  # noqa: PT017
            budget = error.needed
        else:
            driven.check()
            return budget
    raise AssertionError("the errors lead nowhere")


WORKLOADS = {
    "prefill": [(1, 18)],
    "decode": [(1, 18)] + [(1, 1)] * 7,
    "decode_from_nothing": [(1, 1)] * 10,
    "chunks": [(2, 13), (2, 13), (2, 1), (2, 13)],
    "batch": [(4, 21)] + [(4, 1)] * 4,
}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_errors_lead_to_the_smallest_budget_that_works(name: str, block_size: int) -> None:
    smallest = smallest_device_budget(block_size, WORKLOADS[name])
    for budget in {smallest - 1, smallest - 64, smallest - TOKEN * block_size, smallest * 3 // 4}:
        driven = Driven(TieredKVCache(CONFIG, device_budget=max(budget, 1), host_budget=10**7, block_size=block_size))
        with pytest.raises(BudgetError):
            driven.forwards(WORKLOADS[name])


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", WORKLOADS)
def test_any_budget_above_the_smallest_works_as_well(name: str, block_size: int) -> None:
    smallest = smallest_device_budget(block_size, WORKLOADS[name])
    slot = TOKEN * block_size
    for more in (1, slot // 2, slot, 2 * slot, 3 * slot, 5 * slot, 8 * slot, 13 * slot, 21 * slot, 34 * slot):
        driven = Driven(TieredKVCache(CONFIG, device_budget=smallest + more, host_budget=10**7, block_size=block_size))
        for rows, count in WORKLOADS[name]:
            driven.forward(rows, count)
        driven.check()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("device", [None, 15_000])
def test_the_host_budget_that_is_named_is_exactly_what_the_step_needs(device: int | None, block_size: int) -> None:
    workload = [(1, 30)] + [(1, 1)] * 10

    def outcome(host: int) -> BudgetError | None:
        driven = Driven(TieredKVCache(CONFIG, device_budget=device, host_budget=host, block_size=block_size))
        try:
            for rows, count in workload:
                driven.forward(rows, count)
        except BudgetError as error:
            return error
        driven.check()
        return None

    host = 1
    while (error := outcome(host)) is not None:
        assert error.tier == "host"
        assert error.budget == host
        assert error.needed > host
        host = error.needed
    assert outcome(host - 1) is not None
    for more in (1, 64, 1000, 5000):
        assert outcome(host + more) is None


@pytest.mark.parametrize(("device", "host"), [(None, 7_000), (1_600, 10**6), (4_000, 6_000)])
def test_without_a_config_a_first_forward_that_is_refused_changes_nothing_whichever_layer_finds_out(
    device: int | None, host: int
) -> None:
    """How many layers will come is not known then: the first ones pass."""
    cache = TieredKVCache(device_budget=device, host_budget=host, block_size=4)
    driven = Driven(cache)
    with pytest.raises(BudgetError, match="Nothing was changed"):
        driven.forward(1, 23)
    assert driven.layers_done > 0, "a later layer is refused"
    assert cache.get_seq_length() == 0
    assert cache.layers[0].get_seq_length() == 0
    assert cache.stats.host.used_blocks == cache.stats.device.used_blocks == 0
    cache.check_integrity()
    for index in range(driven.layers_done + 1):  # also in another dtype: no layer remembers
        keys = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
        cache.update(keys, keys, index)
    cache.reset()
    driven.forward(1, 3)
    driven.check()


# Out of host memory


@pytest.mark.parametrize("device", [None, 60_000])
@pytest.mark.parametrize("count", [1, 5, 17])
@pytest.mark.parametrize("rows", [1, 2])
def test_out_of_host_memory_nothing_is_lost_and_the_cache_goes_on_after_crop_and_after_reset(
    rows: int, count: int, device: int | None
) -> None:
    driven = Driven(
        TieredKVCache(CONFIG, device_budget=device, host_budget=60_000 if device is None else 30_000, block_size=4)
    )
    driven.forward(rows, 10)
    with pytest.raises(BudgetError) as raised:
        driven.forwards([(rows, count)] * 1000)
    assert raised.value.tier == "host"
    assert driven.layers_done == 0, "refused before the first layer changed"
    assert driven.length > 20
    assert driven.cache.get_seq_length() == driven.length
    driven.check()
    for _ in range(2):
        with pytest.raises(BudgetError):
            driven.forward(rows, count)
        driven.check()
    driven.crop(min(3 * count + 4, driven.length - 1))
    driven.forward(rows, count)
    driven.forward(rows, 1)
    driven.check()
    driven.cache.reset()
    assert driven.cache.stats.host.bytes == 0
    driven.held = []
    driven.forward(rows + 1, 9)
    driven.forward(rows + 1, 1)
    driven.check()


def test_budgets_may_be_written_in_every_way_and_are_shown_in_bytes() -> None:
    x = torch.randn(1, HEADS, 3, DIM)
    for device, host, device_bytes, host_bytes in (
        (30_000, 20_000, 30_000, 20_000),
        ("64KiB", "1 MB", 65536, 10**6),
        ({"cpu": "64KiB"}, 20_000, 65536, 20_000),
        (None, "64KiB", 0, 65536),
    ):
        cache = TieredKVCache(CONFIG, device_budget=device, host_budget=host, block_size=64)
        cache.update(x, x, 0)
        assert (cache.stats.device.budget, cache.stats.host.budget) == (device_bytes, host_bytes)
    for device, host in ((0.001, 0.002), ("auto", "auto")):
        cache = TieredKVCache(CONFIG, device_budget=device, host_budget=host, block_size=64)
        assert cache.stats.host.budget > 10**6, "before the first forward: what it would be now"
        cache.update(x, x, 0)
        assert cache.stats.device.budget > 10**6
        assert cache.stats.host.budget > 10**6


def test_on_a_machine_without_free_memory_statistics_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_host_memory", lambda: 2**20)  # less than "auto" leaves
    cache, x = TieredKVCache(CONFIG), torch.randn(1, HEADS, 3, DIM)
    assert cache.stats.host.budget == 0
    assert "empty" in repr(cache)
    with pytest.raises(ConfigError, match="leaves nothing"):
        cache.update(x, x, 0)


def test_what_is_printed_of_a_cache_is_what_is_there() -> None:
    x = torch.randn(1, HEADS, 3, DIM)
    cache = TieredKVCache(CONFIG, device_budget="64KiB", host_budget="1MiB", block_size=64)
    empty = repr(cache)
    assert "empty" in empty
    cache.update(x, x, 0)
    assert "1 x 3 tokens" in repr(cache)
    table = str(cache.stats)
    assert "64 KiB" in next(line for line in table.splitlines() if line.strip().startswith("device"))
    assert "1 MiB" in next(line for line in table.splitlines() if line.strip().startswith("host "))
    shown = {line.name: line.value for line in cache.stats.lines()}
    assert shown["steps"] == "1"
    assert all(getattr(cache.stats, name) for name in shown), "what is 0 is not shown"
    assert all(f"{name} " in table and value in table for name, value in shown.items())
    cache.crop(0)
    assert repr(cache) == empty
    cache.reset()
    assert repr(cache) == empty
