"""Many queries over a long past: the layer passes through a workspace of bounded size, and nothing else changes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import dynamic_cache, prompt_ids, tiny_model
from placements import outcome, smallest_budget, tiered_cache

from kvtier import BudgetError, TieredKVCache
from kvtier.attention import split, streaming
from kvtier.attention.reader import LayerReader
from kvtier.cpu import native
from kvtier.kernels import reference
from kvtier.kernels.params import AttentionParams
from kvtier.planning import sizing
from kvtier.testing import failing, held, with_doubles
from kvtier.transfer.engine import Transfer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Problem:
    """A layer's KV in a cache, queries over it, and something to ask."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.batch, self.heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 3))
        self.dtype = rng.choice(DTYPES)
        self.past, self.queries = rng.randint(1, 120), rng.randint(17, 70)
        self.length = self.past + self.queries
        self.size = rng.choice((1, 3, 16))
        k_dim = rng.choice((8, 12))
        v_dim = rng.choice((k_dim, k_dim, 4))
        self.keys = self._random(self.batch, self.heads, self.length, k_dim)
        self.values = self._random(self.batch, self.heads, self.length, v_dim)
        self.query = self._random(self.batch, self.heads * group, self.queries, k_dim)
        self.params = self._params()
        self.row = self.heads * self.size * (k_dim + v_dim) * self.dtype.itemsize * self.batch

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.dtype)

    def _params(self) -> AttentionParams:
        rng, heads = self.rng, self.query.shape[1]
        mask = None
        if rng.random() < 0.5:
            shape = (rng.choice((1, self.batch)), rng.choice((1, heads)), rng.choice((1, self.queries)), self.length)
            mask = torch.rand(shape) < 0.8
            if rng.random() < 0.5:
                low = rng.choice((-torch.inf, torch.finfo(self.dtype).min))
                mask = torch.randn(shape).masked_fill(~mask, low).to(self.dtype)
        return AttentionParams(
            scale=rng.choice((0.1, 0.4)),
            softcap=rng.choice((0.0, 0.0, 0.0, 3.0)),
            window=rng.choice((0, 0, 1, 20, 500)),
            causal=rng.random() < 0.6,
            mask=mask,
            first_valid=torch.randint(0, 60, (self.batch,)) if rng.random() < 0.3 else None,
            sinks=torch.randn(heads) if rng.random() < 0.2 else None,
            slopes=torch.rand(heads) if rng.random() < 0.2 else None,
        )

    def reader(self, cache: TieredKVCache) -> LayerReader:
        """The layer, filled in two steps, with another layer's KV beside it."""
        for part in (slice(0, self.past), slice(self.past, self.length)):
            for layer in (0, 1):
                cache.update(self.keys[:, :, part], self.values[:, :, part], layer)
        return cache._forward.readers[0]

    def expected(self) -> torch.Tensor:
        """In float64."""
        return reference.attend(self.query.double(), self.keys.double(), self.values.double(), self.params)[0]


def tolerance(dtype: torch.dtype) -> float:
    """Of values near 1: some roundings of the dtype, more where sums are rounded in the same."""
    return (8 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(40))
def test_parts_give_what_the_whole_gives(seed: int, device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(seed)
    monkeypatch.setattr(sizing, "STREAM_BYTES", problem.rng.randint(1, 4) * problem.row)
    budget = problem.row * (7 + problem.rng.randint(0, 20)) if device else None
    cache = TieredKVCache(device_budget=budget, host_budget=2**24, block_size=problem.size, write_through=0.0)
    cache = with_doubles(cache, held(seed))
    reader = problem.reader(cache)
    if not streaming.serves(reader, problem.length, problem.query, problem.params):
        pytest.skip("one part holds all of this one")
    out = streaming.attend(reader, problem.length, problem.query, problem.params)
    assert out.dtype is problem.dtype
    torch.testing.assert_close(out.double(), problem.expected(), rtol=0, atol=tolerance(problem.dtype))
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("queries", [1, 4])
def test_a_mask_of_integers_is_refused_as_torch_refuses_it(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parts are attended to by code that would add any numbers to the scores."""
    monkeypatch.setattr(sizing, "STREAM_BYTES", 2000)
    keys, values, query = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, queries, 8)
    mask = torch.ones(1, 1, queries, 40, dtype=torch.int64)
    for budget in (None, 9000):
        cache = TieredKVCache(device_budget=budget, host_budget=2**24, block_size=4)
        cache.update(keys[:, :, :30], values[:, :, :30], 0)
        views = cache.update(keys[:, :, 30:], values[:, :, 30:], 0)
        for kv in ((keys, values), views):
            with pytest.raises(RuntimeError, match="dtype"):
                torch.nn.functional.scaled_dot_product_attention(query, *kv, attn_mask=mask)
            torch.nn.functional.scaled_dot_product_attention(query, *kv, attn_mask=mask.bool())
        cache.check_integrity()
        cache.close()


def turns(model: Any, cache: Any, lengths: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Logits of prompts of so many tokens, one after the other, each followed by two tokens."""
    ids = prompt_ids(length=sum(lengths) + 2 * len(lengths), seed=3)
    done = 0
    for n in lengths:
        for count in (n, 1, 1):
            with torch.inference_mode():  # not around the yield: it would hold for whoever asks
                logits = model(ids[:, done : done + count], past_key_values=cache, use_cache=True).logits
            yield logits
            done += count


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_second_prompt_needs_no_room_for_a_whole_layer(name: str) -> None:
    model = tiny_model(name)
    lengths = (90, 40, 70)

    def make(budget: int | None) -> Any:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    expected = list(turns(model, dynamic_cache(model), lengths))
    smallest = smallest_budget(make, lambda cache: list(turns(model, cache, lengths)))
    layer = _largest_layer(make, model, lengths)
    assert smallest < layer / 2, "what passes through the workspace must not grow with the context"
    for budget, engine in (
        (smallest, held(1, eagerness=0.0)),
        (smallest, held(2, late=True)),
        (2 * smallest, held(1, eagerness=0.0)),
    ):
        cache = with_doubles(make(budget), engine)
        for ours, theirs in zip(turns(model, cache, lengths), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        stats = cache.stats
        assert stats.device.peak_bytes <= budget
        assert stats.dense_fallbacks == 0
        cache.check_integrity()


def _largest_layer(make: Any, model: Any, lengths: tuple[int, ...]) -> int:
    cache = make(None)
    list(turns(model, cache, lengths))
    return max(x.layer.layout.token_bytes * x.layer.length for x in cache._forward.readers.values())


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.skipif(not native.available() or not native.serves_prompts(), reason="no kernel for prompts")
@pytest.mark.parametrize("seed", range(40))
def test_in_place_it_is_what_the_whole_gives(seed: int) -> None:
    problem = Problem(seed)
    cache = TieredKVCache(host_budget=2**24, block_size=problem.size)
    reader = problem.reader(cache)
    if problem.dtype is torch.float64:
        assert not split.serves(reader, problem.query, problem.params)
        pytest.skip("the kernel has no double precision")
    assert split.serves(reader, problem.query, problem.params)
    threads, outs = torch.get_num_threads(), []
    for n in (1, 2):
        torch.set_num_threads(n)
        outs.append(split.attend(reader, problem.length, problem.query, problem.params))
    torch.set_num_threads(threads)
    assert outs[0].dtype is problem.dtype
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0].double(), problem.expected(), rtol=0, atol=tolerance(problem.dtype))
    assert cache.stats.host.workspace_bytes == 0
    cache.check_integrity()
    cache.close()


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.skipif(not native.available() or not native.serves_prompts(), reason="no kernel for prompts")
def test_a_second_prompt_in_place_needs_no_more_than_the_blocks() -> None:
    model = tiny_model("llama")
    lengths = (90, 40, 70)

    def run(cache: Any) -> list[torch.Tensor]:
        return list(turns(model, cache, lengths))

    cache = TieredKVCache(config=model.config, host_budget=2**24, block_size=4)
    expected = run(dynamic_cache(model))
    run(cache)
    held_bytes = sum(x.layer.count * x.layer.layout.nbytes for x in cache._forward.readers.values())
    assert cache.stats.host.peak_bytes < 1.1 * held_bytes
    cache = TieredKVCache(config=model.config, host_budget=cache.stats.host.peak_bytes, block_size=4)
    for ours, theirs in zip(run(cache), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_on_the_host_a_long_past_takes_a_bounded_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the native library does not serve prompts."""
    monkeypatch.setattr(native, "serves_prompts", lambda: False)
    model = tiny_model("llama")
    cache = tiered_cache(model, None, block_size=4, host_attention=True)
    monkeypatch.setattr(sizing, "STREAM_BYTES", 2000)
    lengths = (200, 30)
    for ours, theirs in zip(turns(model, cache, lengths), turns(model, dynamic_cache(model), lengths), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert cache.stats.host.workspace_bytes <= 2000


def test_what_lies_on_the_host_is_fetched_once_for_a_prompt() -> None:
    model = tiny_model("llama")

    def make(budget: int | None) -> Any:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    lengths = (120, 40)
    smallest = smallest_budget(make, lambda cache: list(turns(model, cache, lengths)))
    cache = make(smallest)
    steps = turns(model, cache, lengths)
    for _ in range(3):
        next(steps)
    before = cache.stats
    next(steps)
    after = cache.stats
    held_bytes = sum(x.count * x.layout.nbytes for x in (x.layer for x in cache._forward.readers.values()))
    assert 0 < after.bytes_up - before.bytes_up <= held_bytes


def test_a_failed_fetch_in_the_middle_leaves_a_cache_that_works() -> None:
    model = tiny_model("llama")

    def make(budget: int | None) -> Any:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    lengths = (60, 40)
    expected = list(turns(model, dynamic_cache(model), lengths))
    smallest = smallest_budget(make, lambda cache: list(turns(model, cache, lengths)))
    broken = [False]

    def fails(transfer: Transfer) -> bool:
        return broken[0] and transfer.direction.name == "FETCH"

    cache = with_doubles(make(smallest), failing(fails))
    steps = turns(model, cache, lengths)
    for _ in range(3):
        next(steps)
    length = cache.get_seq_length()
    broken[0] = True
    assert isinstance(outcome(lambda: next(steps)), Exception)
    broken[0] = False
    cache.crop(0)
    assert cache.get_seq_length() == length, "what a broken forward added is gone"
    ids = prompt_ids(length=sum(lengths) + 4, seed=3)
    with torch.inference_mode():
        again = model(ids[:, length : length + lengths[1]], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, expected[3], rtol=1e-4, atol=1e-4)
    cache.check_integrity()


def test_too_small_a_budget_is_refused_before_anything_changes() -> None:
    model = tiny_model("llama")
    make = functools.partial(tiered_cache, model, block_size=4, host_attention=True)
    smallest = smallest_budget(make, lambda cache: list(turns(model, cache, (40, 40))))
    cache = make(smallest - 1)
    done = 0
    steps = turns(model, cache, (40, 40))
    while not isinstance(refusal := outcome(lambda: next(steps)), BudgetError):
        done = cache.get_seq_length()
        assert isinstance(refusal, torch.Tensor)
    assert cache.get_seq_length() == done
    cache.check_integrity()


@pytest.mark.parametrize("seed", [1, 3, 17, 255, 375, 418])
def test_what_is_admitted_goes_through_however_tight_the_budgets(seed: int) -> None:
    """A step is refused when its first layer is given its tokens, or never; what was fetched ahead makes way."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, dim = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((8, 16))
    size, layers, dtype = rng.choice((1, 4, 16)), rng.choice((1, 2, 3)), rng.choice((*DTYPES[:2], torch.float64))
    block = batch * heads * 2 * dim * size * dtype.itemsize
    cache = TieredKVCache(
        device_budget=block * rng.randint(3, 40),
        host_budget=rng.choice((10**7, block * rng.randint(5, 60))),
        block_size=size,
        write_through=rng.choice((0.0, 0.5)),
    )
    length = 0
    for _ in range(8):
        count = rng.choice((1, 1, 3, 17, 40, 70))
        at = torch.arange(length, length + count)[:, None]
        mask = torch.arange(length + count) <= at if count > 1 else None
        for layer in range(layers):
            keys, values, query = (torch.randn(batch, n * heads, count, dim).to(dtype) for n in (1, 1, 2))
            try:
                views = cache.update(keys, values, layer)
            except BudgetError:
                # How many layers there will be, nobody has told the cache before the first step.
                assert layer == 0 or length == 0
                return
            if length:
                torch.nn.functional.scaled_dot_product_attention(query, *views, attn_mask=mask, enable_gqa=True)
        length += count
        cache.check_integrity()
