"""The entry "sdpa" of Transformers' attention functions, once there is a tiered cache in the process."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from families import build_model, dynamic_cache, prompt_ids
from placements import ON_HOST, tiered_cache
from torch import nn
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvtier import KVView, TieredKVCache
from kvtier.hf.attention import dynamo, interface, sdpa
from kvtier.hf.attention.sdpa import sdpa_forward

STOCK = sdpa.sdpa_attention_forward


class Layer(nn.Module):
    num_key_value_groups, is_causal = 2, True


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of calls that went to Transformers' function."""
    calls: list[dict[str, Any]] = []

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return STOCK(*args, **options)

    for module in (sdpa, interface):
        monkeypatch.setattr(module, "sdpa_attention_forward", recorded)
    return calls


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that torch's dispatcher handed to views."""
    functions: list[Any] = []
    stock = KVView.__torch_function__

    def recorded(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        functions.append(func)
        return stock(func, types, args, kwargs)

    monkeypatch.setattr(KVView, "__torch_function__", classmethod(recorded))
    return functions


def views(cache: TieredKVCache, queries: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query, and views of a cache of 24 tokens in 2 heads of 8."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 24, 8)
    cache.update(keys[:, :, :-queries], values[:, :, :-queries], 0)
    return torch.randn(1, 4, queries, 8), *cache.update(keys[:, :, -queries:], values[:, :, -queries:], 0)


def test_a_step_that_decodes_reaches_kvtier_without_the_dispatcher(dispatched: list[Any]) -> None:
    model = build_model("llama", "sdpa")
    cache = tiered_cache(model)
    with torch.no_grad():
        model(prompt_ids(rows=1, length=9), past_key_values=cache)
        dispatched.clear()
        before = cache.stats.views_attended
        for token in range(5):
            model(torch.tensor([[token]]), past_key_values=cache)
    assert cache.stats.views_attended == before + 5 * model.config.num_hidden_layers
    assert not dispatched


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_gives_what_transformers_function_gives(scaling: float | None, stock: list[dict[str, Any]]) -> None:
    with TieredKVCache(block_size=4) as cache:
        query, keys, values = views(cache)
        assert type(keys) is KVView
        got, weights = sdpa_forward(Layer(), query, keys, values, None, scaling=scaling, sliding_window=3, dropout=0.0)
        assert not stock
        expected, _ = STOCK(Layer(), query, keys.dense(), values.dense(), None, scaling=scaling, sliding_window=3)
    assert weights is None
    torch.testing.assert_close(got, expected, atol=1e-5 if ON_HOST else 5e-5, rtol=1e-4)
    assert got.is_contiguous() == expected.is_contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.5},
        {"position_bias": torch.zeros(1, 4, 1, 24)},
        {"output_attentions": True},
        {"softcap": 2.0},
        {"attention_mask": torch.ones(1, 1, 1, 24, dtype=torch.bool)},
        {"queries": 2},
        {"learns": True},
        {"tensors": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_other_call_goes_to_transformers_function_as_it_is(
    options: dict[str, Any], stock: list[dict[str, Any]]
) -> None:
    options = dict(options)
    mask, learns, dense = (
        options.pop("attention_mask", None),
        options.pop("learns", False),
        options.pop("tensors", False),
    )
    with TieredKVCache(block_size=4) as cache:
        query, keys, values = views(cache, options.pop("queries", 1))
        if dense:
            keys, values = keys.dense(), values.dense()
        query.requires_grad_(learns)
        try:
            sdpa_forward(Layer(), query, keys, values, mask, **options)
        except ValueError:
            assert "softcap" in options  # newer Transformers refuses it under "sdpa"
    assert [{name: x for name, x in call.items() if x is not None} for call in stock] == [options]


def test_heads_of_a_padded_batch_that_share_one_kv_head_are_attended_to_in_place() -> None:
    """Newer Transformers makes queries of them, more than host threads take."""
    model = build_model("llama", "sdpa", num_attention_heads=24, num_key_value_heads=1, head_dim=8)
    ids, mask = prompt_ids(rows=2, length=9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    cache = tiered_cache(model, 1 << 20, block_size=4, host_attention=True)
    got = model.generate(ids, past_key_values=cache, **given)
    assert cache.stats.views_attended == 5 * model.config.num_hidden_layers
    assert (cache.stats.dense_fallbacks, cache.stats.dense_reads) == (0, 0)
    assert torch.equal(got, model.generate(ids, past_key_values=dynamic_cache(model), **given))


def test_options_may_be_given_by_place_as_transformers_function_takes_them(stock: list[dict[str, Any]]) -> None:
    with TieredKVCache(block_size=4) as cache:
        query, keys, values = views(cache)
        got, _ = sdpa_forward(Layer(), query, keys, values, None, 0.0, 0.3)
        expected, _ = STOCK(Layer(), query, keys.dense(), values.dense(), None, 0.0, 0.3)
    assert stock == [{}]
    torch.testing.assert_close(got, expected, atol=1e-5 if ON_HOST else 5e-5, rtol=1e-4)


def test_a_compiled_model_without_a_tiered_cache_stays_one_graph() -> None:
    model = build_model("llama", "sdpa")
    cache = TieredKVCache(model.config)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_forward
    tokens = prompt_ids(rows=1, length=6)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = model(tokens, past_key_values=StaticCache(model.config, max_cache_len=16)).logits
        torch._dynamo.reset()
        try:
            compiled = torch.compile(model.forward, backend=backend, fullgraph=True)
            got = compiled(tokens, past_key_values=StaticCache(model.config, max_cache_len=16)).logits
        finally:
            torch._dynamo.reset()
    torch.testing.assert_close(got, expected)
    assert len(graphs) == 1
    assert any("scaled_dot_product_attention" in str(node.target) for node in graphs[0].graph.nodes)
    cache.close()


def test_an_exported_model_stays_whole() -> None:
    cache = TieredKVCache()

    class Attention(nn.Module):
        num_key_value_groups, is_causal = 1, True

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, None)[0]

    q, k, v = torch.randn(3, 1, 2, 5, 8)
    for strict in (False, True):
        exported = torch.export.export(Attention(), (q, k, v), strict=strict)
        torch.testing.assert_close(exported.module()(q, k, v), Attention()(q, k, v))
    cache.close()


@pytest.mark.parametrize("how", ["closed", "dropped", "left", "copied"])
def test_the_entry_is_that_of_transformers_again_when_no_cache_is_open(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_caches", {})
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", STOCK)
    first, second = TieredKVCache(), TieredKVCache()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_forward
    first.close()
    first.close()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_forward, "another one is open"
    if how == "closed":
        second.close()
    elif how == "left":
        with second:
            pass
    elif how == "copied":
        twin = copy.deepcopy(second)
        second.close()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_forward, "the copy is open"
        twin.close()
    else:
        second._was_used = True
        del second
        gc.collect()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is STOCK
    assert not sdpa._caches


def test_somebody_elses_entry_stays_and_sees_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def own(module: Any, query: Any, key: Any, *args: Any, **options: Any) -> Any:
        seen.append(type(key))
        return STOCK(module, query, key, *args, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    model = build_model("llama", "sdpa")
    cache = tiered_cache(model)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    with torch.no_grad():
        model(prompt_ids(rows=1, length=9), past_key_values=cache)
        model(torch.tensor([[3]]), past_key_values=cache)
    assert seen[-1] is KVView


def test_a_torch_that_cannot_be_told_keeps_transformers_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", STOCK)
    monkeypatch.setattr(torch.compiler, "substitute_in_graph", None)
    monkeypatch.setattr(sdpa.dynamo, "traces", dynamo.traces.__wrapped__)
    cache = TieredKVCache()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is STOCK
    cache.close()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is STOCK
