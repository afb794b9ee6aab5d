"""Attention where the KV lies, at every split between host and device, gives the tokens of ``DynamicCache``."""

import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, attentions, dynamic_cache, prompt_ids, tiny_model
from placements import (
    ON_HOST,
    ROOMY,
    Placement,
    assert_same_as_dynamic_cache,
    assert_same_outcome,
    check_invariants,
    close,
    outcome,
    smallest_budget,
    tiered_cache,
    tiered_parts,
)
from test_families import CROSSED_WHOLLY, greedy, reference
from test_modes import MODES
from transformers import Cache

from kvtier import TieredKVCache
from kvtier.attention import split, streaming
from kvtier.cpu import native
from kvtier.kernels import reference as torch_reference
from kvtier.testing import held, with_doubles
from kvtier.transfer.engine import Direction, Transfer

SDPA = [name for name, family in FAMILIES.items() if family.tiered and "sdpa" in attentions(name)]
MLA = ("deepseek_v3",)  # works on its keys between update and attention: a view must become a tensor
BACKENDS = ("native", "torch")
CASES = ((16, "host"), (1, "host"), (64, "device"), (16, "smallest"), (16, "between"))


def cases() -> Iterator[Any]:
    """Every case with the native library; without it the block size does not matter."""
    for name, backend in itertools.product(SDPA, BACKENDS):
        some = [*CASES, (1, "smallest")] if name in CROSSED_WHOLLY else CASES
        for block_size, placement in some if backend == "native" else [x for x in some if x[0] == 16]:
            ids = f"{name}-{block_size}-{placement}-{backend}"
            yield pytest.param(name, block_size, placement, backend, id=ids)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who attends on the host: the native library, or torch where there is none."""
    if request.param == "native" and not native.available():
        pytest.skip("the native library is not compiled")
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    return request.param


@pytest.mark.parametrize(("name", "block_size", "placement", "backend"), list(cases()), indirect=["backend"])
def test_any_placement_gives_the_tokens_of_dynamic_cache(
    name: str, block_size: int, placement: Placement, backend: str
) -> None:
    model = tiny_model(name)
    cache = assert_same_as_dynamic_cache(
        model,
        greedy,
        placement,
        block_size=block_size,
        host_attention=True,
        expected=reference(name, "sdpa"),
    )
    masked = backend == "torch" and name in ("t5", "falcon")
    if placement == "host" and ON_HOST and name not in MLA and not masked:
        # The fallback leaves masks to a dense read.
        assert sum(part.stats.host_attended for part in tiered_parts(cache)) > 0


@pytest.mark.parametrize("placement", ["host", "smallest", "between"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_gives_what_dynamic_cache_gives(name: str, family: str, placement: Placement) -> None:
    model = tiny_model(family)
    assert_same_as_dynamic_cache(model, MODES[name], placement, block_size=4, host_attention=True)


@torch.no_grad()
def forwards(cache: Cache, steps: tuple[int, ...] = (40, 1, 1, 5, 1, 1, 1), rows: int = 2) -> Iterator[torch.Tensor]:
    """Logits of forwards of so many tokens each."""
    model = tiny_model("llama")
    for i, n in enumerate(steps):
        yield model(input_ids=prompt_ids(rows=rows, length=n, seed=i), past_key_values=cache).logits


def test_at_every_split_point_the_logits_are_those_of_dynamic_cache(backend: str) -> None:
    """From the smallest budget to all on the device, a block at a time."""
    model = tiny_model("llama")

    def run(cache: Cache) -> list[torch.Tensor]:
        return list(forwards(cache))

    def make(budget: int) -> Cache:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    expected = run(dynamic_cache(model))
    smallest = smallest_budget(make, run)
    roomy = make(ROOMY)
    run(roomy)
    block = roomy._forward.readers[0].layer.layout.nbytes
    everything = sum(store.count * block for store in (x.layer for x in roomy._forward.readers.values()))
    shares = []
    # Of the torch backend, only that it is right is asked, at a third of the points.
    for budget in range(smallest, everything + 12 * block, block if backend == "native" else 3 * block):
        cache = make(budget)
        assert close(expected, run(cache))
        check_invariants(cache)
        store = cache._forward.readers[1].layer
        shares.append((store.spilled, store.count))
        if backend == "native":
            assert cache.stats.bytes_up == 0, "what lies on the host is attended there, never fetched"
    if backend == "torch":
        return  # a tensor of one layer takes part of the budget
    missing = [m for m, _ in shares]
    count = shares[0][1]
    assert missing[0] >= count - 4, "all but the open tails and little more"
    assert missing[-1] == 0
    assert len(set(missing)) > count * 0.8, "hardly a split point is left out"


def test_plain_sdpa_decoding_densifies_nothing_and_the_stats_show_who_attended() -> None:
    model = tiny_model("llama")
    for budget in (None, ROOMY):
        cache = tiered_cache(model, budget, host_attention=True)
        list(forwards(cache))
        stats = cache.stats
        assert stats.dense_fallbacks == 0
        assert stats.device.workspace_bytes == stats.host.workspace_bytes == 0
        layers = len(cache._forward.readers)
        assert stats.views_attended == 6 * layers
        assert stats.host_attended == (6 * layers if budget is None and ON_HOST else 0)
    if not ON_HOST:
        return
    # Two rows of 49 tokens at the end, in blocks of 16.
    cache = tiered_cache(model, None, host_attention=True)
    list(forwards(cache, (48, 1)))
    assert cache.stats.host_blocks == layers * 2 * 4


@pytest.mark.parametrize("prompts", [True, False])
def test_a_long_prefill_on_a_warm_cache_is_attended_in_place_where_there_is_no_device(
    prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is read as one tensor, which gives its memory back."""
    if not prompts:
        monkeypatch.setattr(native, "serves_prompts", lambda: False)
    model = tiny_model("llama")
    in_place = ON_HOST and native.available() and native.serves_prompts()
    steps = (40, 1, split.MAX_HOST_QUERIES + 1, 1, *((150, 1) if in_place else ()))
    cache = tiered_cache(model, None, host_attention=True)
    expected = list(forwards(dynamic_cache(model), steps))
    actual = forwards(cache, steps)
    for i in range(len(steps)):
        assert close(expected[i], next(actual))
        tier = cache.stats.host if ON_HOST else cache.stats.device
        assert (tier.workspace_bytes > 0) == (i == 2 and not in_place)
    assert cache.stats.dense_fallbacks == 0
    if in_place:
        assert cache.stats.host_attended == 5 * len(cache._forward.readers)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_transfers_as_late_as_allowed_and_poisoned_memory_change_nothing(seed: int, late: bool) -> None:
    model = tiny_model("llama")

    def make(budget: int) -> TieredKVCache:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    expected = list(forwards(dynamic_cache(model)))
    smallest = smallest_budget(make, lambda cache: list(forwards(cache)))
    for budget in (smallest, int(smallest * 1.5)):
        cache = with_doubles(make(budget), held(seed, eagerness=0.3 * (seed % 3), late=late))
        assert close(expected, list(forwards(cache)))
        check_invariants(cache)
        assert cache.stats.host_attended > 0
        assert cache.stats.attention_bytes > 0


EDGES = [(Transfer.synchronize, Direction.QUERY), (Transfer.wait, Direction.RESULT)]


@pytest.mark.parametrize(("wait", "direction"), EDGES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_without_one_of_its_waits_it_is_wrong(wait: Any, direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubles notice a query that is not yet down, and a result that is not yet up."""

    def not_there(transfer: Transfer) -> None:
        if transfer.direction is not direction:
            wait(transfer)

    model = tiny_model("llama")

    def make(budget: int) -> TieredKVCache:
        return tiered_cache(model, budget, block_size=4, host_attention=True)

    expected = list(forwards(dynamic_cache(model)))
    smallest = smallest_budget(make, lambda cache: list(forwards(cache)))
    monkeypatch.setattr(Transfer, wait.__name__, not_there)
    cache = with_doubles(make(smallest), held(0, eagerness=0.0))
    result = outcome(lambda: list(forwards(cache)))
    assert isinstance(result, Exception) or not close(expected, result)


def test_a_sink_counts_once_however_the_kv_is_split() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 50, 12), torch.randn(2, 2, 50, 12)
    query, sinks = torch.randn(2, 4, 1, 12), torch.randn(4) * 3
    params = split.AttentionParams(scale=0.3, sinks=sinks, softcap=5.0, window=37, causal=True)
    expected, _ = torch_reference.attend(query.double(), keys.double(), values.double(), params)
    for budget in (None, ROOMY, 6000, 3000):
        cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=4)
        for i in range(0, 50, 10):
            cache.update(keys[:, :, i : i + 10], values[:, :, i : i + 10], 0)
        reader = cache._forward.readers[0]
        assert bool(reader.layer.spilled) == (budget in (6000, 3000))
        out = cache._forward.attend(reader, 50, reader.layer.epoch, query, params)
        assert close(expected.float(), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_double_as_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 300, 64).to(dtype), torch.randn(2, 2, 300, 64).to(dtype)
    query = torch.randn(2, 4, 1, 64).to(dtype)
    expected, _ = torch_reference.attend(
        query.double(), keys.double(), values.double(), split.AttentionParams(64**-0.5)
    )
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, enable_gqa=True)
    allowed = 2 * (sdpa(keys, values).double() - expected).abs().max()
    for budget in (None, ROOMY, 100_000):
        cache = TieredKVCache(device_budget=budget, host_budget=10**8, block_size=16)
        cache.update(keys[:, :, :299], values[:, :, :299], 0)
        ours = sdpa(*cache.update(keys[:, :, 299:], values[:, :, 299:], 0))
        assert cache.stats.views_attended == 1
        assert cache.stats.dense_fallbacks == 0
        assert (ours.double() - expected).abs().max() <= allowed


@pytest.mark.usefixtures("on_the_host")
def test_a_mask_that_nobody_expected_is_still_right() -> None:
    """Broadcast masks, additive masks in another dtype, and masks with other strides."""
    torch.manual_seed(0)
    keys, values, query = torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16), torch.randn(3, 4, 3, 16)
    cache = TieredKVCache(block_size=8)
    cache.update(keys[:, :, :33], values[:, :, :33], 0)
    views = cache.update(keys[:, :, 33:], values[:, :, 33:], 0)
    seen = torch.rand(3, 4, 3, 40) < 0.7
    seen[..., 0] = True
    masks = [
        seen,
        seen[:1],
        seen[:, :1],
        seen[:1, :1, :1],
        seen[0, 0],
        torch.randn(3, 1, 3, 40),
        torch.randn(3, 1, 3, 80)[..., ::2],
        torch.randn(40, 3).t(),
        torch.randn(3, 1, 1, 40).expand(3, 4, 3, 40),
    ]
    for mask in masks:
        for scale in (None, 0.1):
            sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, query)
            options: dict[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
            expected = sdpa(keys, values, **options)
            assert_same_outcome(expected, outcome(functools.partial(sdpa, *views, **options)), bitwise=False)
    assert cache.stats.host_attended == 2 * len(masks)


def test_dropout_and_gradients_are_left_to_torch() -> None:
    keys, values = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    cache = TieredKVCache()
    cache.update(keys[:, :, :19], values[:, :, :19], 0)
    views = cache.update(keys[:, :, 19:], values[:, :, 19:], 0)
    query = torch.randn(1, 2, 1, 8, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, *views)
    out.sum().backward()
    theirs = query.grad
    query.grad = None
    torch.nn.functional.scaled_dot_product_attention(query, keys, values).sum().backward()
    assert close(query.grad, theirs)
    torch.nn.functional.scaled_dot_product_attention(query.detach(), *views, dropout_p=0.5)
    assert cache.stats.host_attended == 0


@pytest.mark.usefixtures("on_the_host")
def test_ten_thousand_steps_leave_nothing_behind() -> None:
    """Memory does not grow, and no thread outlives the caches that it worked for."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    torch.manual_seed(0)
    one = torch.randn(1, 2, 1, 32)
    query = torch.randn(1, 4, 1, 32)
    before, grown = threads(), []
    caches = [TieredKVCache(host_budget=10**8, device_budget=budget, block_size=16) for budget in (None, 30_000)]
    for step in range(10_000):
        for cache in caches:
            views = cache.update(one, one, 0)
            torch.nn.functional.scaled_dot_product_attention(query, *views, enable_gqa=True)
            if step % 300 == 299:
                cache.crop(50 - cache.get_seq_length())
        if step in (2_000, 9_999):
            grown.append(rss())
    assert grown[1] - grown[0] < 2**20
    for cache in caches:
        assert cache.stats.host_attended > 9_000
        cache.close()
    assert threads() == before


@pytest.mark.parametrize("score_bytes", [2**28, 4 * 2 * 4 * 60 * 7])
def test_many_queries_with_params_of_every_kind_are_right_in_any_number_of_chunks(
    score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SCORE_BYTES", score_bytes)
    torch.manual_seed(0)
    keys, values, query = torch.randn(2, 2, 60, 8), torch.randn(2, 2, 60, 8), torch.randn(2, 4, 25, 8)
    mask = torch.rand(2, 1, 25, 60) < 0.8
    for params in (
        split.AttentionParams(0.3),
        split.AttentionParams(0.3, mask=mask),
        split.AttentionParams(0.3, causal=True),
        split.AttentionParams(0.3, causal=True, window=7),
        split.AttentionParams(0.3, causal=True, softcap=3.0, mask=mask),
        split.AttentionParams(0.3, causal=True, sinks=torch.randn(4), first_valid=torch.tensor([3, 40])),
        split.AttentionParams(0.3, slopes=torch.rand(4)),
    ):
        cache = TieredKVCache(block_size=8)
        for part in (slice(0, 35), slice(35, 60)):
            cache.update(keys[:, :, part], values[:, :, part], 0)
        reader = cache._forward.readers[0]
        out = cache._forward.attend(reader, 60, reader.layer.epoch, query, params)
        expected, _ = torch_reference.attend(query.double(), keys.double(), values.double(), params)
        assert close(expected.float(), out)


@pytest.mark.parametrize("budget", [None, 3000], ids=["host", "split"])
def test_what_the_cache_makes_for_itself_is_made_where_it_belongs_whatever_the_default_device(
    budget: int | None, backend: str
) -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        keys, values = torch.randn(2, 2, 60, 8), torch.randn(2, 2, 60, 8)
        one, many = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 25, 8)
        cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=4)
    with torch.device("meta"):  # holds no numbers: whatever is made there shows
        for part in (slice(0, 40), *(slice(i, i + 1) for i in range(40, 60))):
            cache.update(keys[:, :, part], values[:, :, part], 0)
        reader, params = cache._forward.readers[0], split.AttentionParams(0.3, causal=True, window=17)
        # Not through a view: torch puts the default device aside while it calls those.
        outs = [cache._forward.attend(reader, 60, reader.layer.epoch, query, params) for query in (one, many)]
    with torch.device("cpu"):
        for query, out in zip((one, many), outs, strict=True):
            expected, _ = torch_reference.attend(query.double(), keys.double(), values.double(), params)
            assert close(expected.float(), out)
