"""A decode call that is like the last one is repeated; one that differs in anything is not taken for it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import build_model
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from kvtier import InterruptedStepError, TieredKVCache, UnsupportedError
from kvtier.attention.repeat import Repeat
from kvtier.cpu import native
from kvtier.hf.attention import interface as attention

pytestmark = pytest.mark.skipif(not native.available(), reason="only the native library's calls are repeated")

ROWS, HEADS, DIM, BLOCK = 2, 2, 8, 4


def interface(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """The attention implementation "kvtier", asked as `scaled_dot_product_attention` is."""
    names = {"attn_mask": "attention_mask", "scale": "scaling"}
    given = {names.get(name, name): value for name, value in options.items() if name != "enable_gqa"}
    given = {"attention_mask": None, "scaling": DIM**-0.5, "is_causal": False} | given
    return attention.attention_forward(torch.nn.Module().eval(), query, keys, values, **given)[0].transpose(1, 2)


#: Ways to ask for attention, both of which repeat calls.
WAYS: dict[str, Callable[..., torch.Tensor]] = {"sdpa": F.scaled_dot_product_attention, "kvtier": interface}
ways = pytest.mark.parametrize("way", WAYS)


class Layer:
    """One layer of a cache beside the tensors that it should hold."""

    def __init__(self, tokens: int = 9, way: str = "sdpa", **options: Any) -> None:
        self.attend = WAYS[way]
        self.random = torch.Generator().manual_seed(1)
        self.cache = TieredKVCache(block_size=BLOCK, **options)
        self.keys = self.values = torch.empty(ROWS, HEADS, 0, DIM)
        self.append(tokens)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def append(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.draw(ROWS, HEADS, tokens, DIM), self.draw(ROWS, HEADS, tokens, DIM)
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.cache.update(keys, values, 0)

    def query(self, heads: int = HEADS, queries: int = 1) -> torch.Tensor:
        return self.draw(ROWS, heads, queries, DIM)

    def step(self, views: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, **options: Any) -> None:
        """Attention over views is that over what the layer holds, as far as they show it."""
        n = views[0].shape[2]
        want = F.scaled_dot_product_attention(query, self.keys[:, :, :n], self.values[:, :, :n], **options)
        got = self.attend(query, *views, **options)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)

    def decode(self, steps: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps like each other, the last of which can be repeated. Returns the views of one more."""
        for _ in range(steps):
            self.step(self.append(1), self.query())
        return self.append(1)


def repeated(layer: Layer, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an attention call was answered by the one before."""
    answers: list[bool] = []
    call = Repeat.__call__

    def watched(self: Repeat, *args: Any, **options: Any) -> torch.Tensor | None:
        out = call(self, *args, **options)
        answers.append(out is not None)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Repeat, "__call__", watched)
        act()
    return any(answers)


@ways
def test_a_step_like_the_last_one_is_repeated_and_counted_as_any(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(way=way)
    for number in range(1, 40):
        views, query = layer.append(1), layer.query()
        known = repeated(layer, lambda v=views, q=query: layer.step(v, q), monkeypatch)
        # A block that is full, or a new one, makes it another call.
        assert known == (number > 1 and (9 + number) % BLOCK > 1)
        stats = layer.cache.stats
        assert stats.views_attended == stats.host_attended == number
        assert stats.host_blocks == sum(ROWS * -(-(9 + i) // BLOCK) for i in range(1, number + 1))
        assert stats.host_seconds > 0


def test_a_split_layer_is_repeated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(40, device_budget=4 * ROWS * BLOCK * HEADS * DIM * 8)
    layer.decode(2)
    residency = layer.cache.residency().layers[0]
    assert 0 < residency.device_blocks < 11 * ROWS
    views, query = layer.append(1), layer.query()
    before = layer.cache.stats
    layer.step(views, query)
    after = layer.cache.stats
    assert after.block_hits > before.block_hits
    assert after.host_blocks > before.host_blocks


def shorter(layer: Layer) -> None:
    old = layer.cache.layers[0].keys, layer.cache.layers[0].values
    for _ in range(6):
        layer.step(layer.append(1), layer.query())
    layer.step(old, layer.query())  # type: ignore[arg-type]


def longer(layer: Layer) -> None:
    old = layer.cache.layers[0].keys, layer.cache.layers[0].values
    new = layer.append(6)
    layer.step(old, layer.query())  # type: ignore[arg-type]
    layer.step(new, layer.query())


def moved(layer: Layer) -> None:
    views = layer.append(1)
    layer.step(views, layer.query())
    memory, blocks = layer.cache._forward.memory, layer.cache._forward.readers[0].layer.blocks
    with memory.lock:
        pool = blocks.pools.device
        assert pool is not None
        there = [(run.device, run.count) for run in blocks.runs if run.sealed and run.device is not None]
        memory.devices[0].eviction.evict(blocks.pools, 2)
        kept = {
            slot for run in blocks.runs if run.device is not None for slot in range(run.device, run.device + run.count)
        }
        for slot in (slot for first, count in there if first is not None for slot in range(first, first + count)):
            if slot not in kept:
                pool.bytes(slot, 1).fill_(255)  # as whoever takes it next
    layer.step(views, layer.query())


def reordered(layer: Layer) -> None:
    layer.cache.reorder_cache(torch.tensor([1, 0]))
    layer.keys, layer.values = layer.keys.flip(0), layer.values.flip(0)
    layer.step((layer.cache.layers[0].keys, layer.cache.layers[0].values), layer.query())  # type: ignore[arg-type]


def more_heads(layer: Layer) -> None:
    query = layer.query(2 * HEADS)
    keys, values = layer.append(1)
    want = F.scaled_dot_product_attention(query, layer.keys, layer.values, enable_gqa=True)
    got = layer.attend(query, keys, values, enable_gqa=True)
    torch.testing.assert_close(got, want)


def more_queries(layer: Layer) -> None:
    # With the strides of one query.
    query = layer.draw(64).as_strided((ROWS, HEADS, 2, DIM), (HEADS * DIM, DIM, DIM, 1))
    layer.step(layer.append(1), query)


def other_strides(layer: Layer) -> None:
    query = layer.draw(ROWS, 1, HEADS, 2 * DIM)[..., ::2].transpose(1, 2)
    layer.step(layer.append(1), query)


def wide_rows(layer: Layer) -> None:
    query = layer.draw(ROWS, 3 * HEADS, 1, DIM)[:, HEADS : 2 * HEADS]
    layer.step(layer.append(1), query)


def other_scale(layer: Layer) -> None:
    layer.step(layer.append(1), layer.query(), scale=0.7)


def masked(layer: Layer) -> None:
    keys, values = layer.append(1)
    layer.step((keys, values), layer.query(), attn_mask=None)
    mask = torch.arange(keys.shape[2]) > 4
    layer.step((keys, values), layer.query(), attn_mask=mask[None, None, None].expand(ROWS, 1, 1, -1))


def with_gradient(layer: Layer) -> None:
    query = layer.query().requires_grad_()
    views = layer.append(1)
    got = layer.attend(query, *views)
    assert got.requires_grad
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, layer.keys, layer.values))


def with_a_tangent(layer: Layer) -> None:
    query, tangent = layer.query(), layer.query()
    views = layer.append(1)
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        query = forward_ad.make_dual(query, tangent)
        got = forward_ad.unpack_dual(layer.attend(query, *views))
        want = forward_ad.unpack_dual(F.scaled_dot_product_attention(query, layer.keys, layer.values))
        torch.testing.assert_close(got.primal, want.primal)
        torch.testing.assert_close(got.tangent, want.tangent)


def under_autocast(layer: Layer) -> None:
    views = layer.append(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.attend(layer.query(), *views).dtype == torch.bfloat16


def of_a_graph(layer: Layer) -> None:
    keys = layer.draw(ROWS, HEADS, 1, DIM).requires_grad_()
    values = layer.draw(ROWS, HEADS, 1, DIM)
    with torch.enable_grad():
        views = layer.cache.update(keys, values, 0)
        assert layer.attend(layer.query(), *views).requires_grad


CHANGES: dict[str, tuple[Callable[[Layer], None], str]] = {
    "shorter": (shorter, ""),
    "longer": (longer, "self._least < length <= self._most"),
    "moved": (moved, "blocks.version == self._version"),
    "reordered": (reordered, "layer.shape_version == self._rows_version"),
    "more heads": (more_heads, ""),
    "more queries": (more_queries, "query.shape == self._shape"),
    "other strides": (other_strides, "query.stride() == self._strides"),
    "wide rows": (wide_rows, "query.stride() == self._strides"),
    "other scale": (other_scale, "(asked is self._asked or asked == self._asked)"),
    "masked": (masked, "(asked is self._asked or asked == self._asked)"),
    "with a gradient": (with_gradient, "not query.requires_grad"),
    "with a tangent": (with_a_tangent, "level._current_level < 0"),
    "under autocast": (under_autocast, 'not torch.is_autocast_enabled("cpu")'),
    "of a graph": (of_a_graph, ""),
}


def start(way: str) -> Layer:
    layer = Layer(20, way, device_budget=16 * ROWS * BLOCK * HEADS * DIM * 8)
    layer.decode(1)
    return layer


@ways
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_another_call(change: str, way: str) -> None:
    with torch.no_grad() if change != "with a gradient" else torch.enable_grad():
        layer = start(way)
        CHANGES[change][0](layer)
        layer.cache.check_integrity()


def test_what_is_causal_over_as_many_tokens_as_queries_is_not_so_over_more() -> None:
    layer = Layer(2)
    views = layer.cache.layers[0].keys, layer.cache.layers[0].values
    layer.step(views, layer.query(queries=2), is_causal=True)  # type: ignore[arg-type]
    layer.step(layer.append(1), layer.query(queries=2), is_causal=True)


def without(function: Callable[..., Any], condition: str, constant: str = "True") -> Callable[..., Any]:
    """A function in which the first such condition is constant."""
    source = textwrap.dedent(inspect.getsource(function))
    assert condition in source, "the condition is no longer there: renew this test"
    names: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(condition, constant, 1)
    exec(compile(code, "<without a condition>", "exec"), function.__globals__, names)
    made: Callable[..., Any] = names[function.__name__]
    return made


@pytest.mark.parametrize("change", [name for name, (_, condition) in CHANGES.items() if condition])
def test_each_condition_is_needed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, condition = CHANGES[change]
    monkeypatch.setattr(Repeat, "__call__", without(Repeat.__call__, condition))
    with torch.no_grad() if change != "with a gradient" else torch.enable_grad():
        layer = start("sdpa")
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever notices
            act(layer)


# What the implementation "kvtier" is asked for, and a call of `scaled_dot_product_attention` is not


def asked(layer: Layer, **options: Any) -> None:
    """What is asked for is answered, over views as over tensors."""
    query, views = layer.query(), layer.append(1)
    want = interface(query, layer.keys, layer.values, **options)
    torch.testing.assert_close(interface(query, *views, **options), want)


def dropped(layer: Layer) -> None:
    query, views = layer.query(), layer.append(1)
    training = torch.nn.Module().train()
    got = attention.attention_forward(training, query, *views, None, DIM**-0.5, 0.5, is_causal=False)[0]
    assert not torch.allclose(got.transpose(1, 2), interface(query, layer.keys, layer.values))


def keys_twice(layer: Layer) -> None:
    query, (keys, _) = layer.query(), layer.append(1)
    torch.testing.assert_close(interface(query, keys, keys), interface(query, layer.keys, layer.keys))


def values_twice(layer: Layer) -> None:
    query, (_, values) = layer.query(), layer.append(1)
    torch.testing.assert_close(interface(query, values, values), interface(query, layer.values, layer.values))


def of_two_layers(layer: Layer) -> None:
    query, (keys, _) = layer.query(), layer.append(1)
    other = Layer(layer.keys.shape[2])
    values = other.cache.layers[0].values
    assert values is not None
    torch.testing.assert_close(interface(query, keys, values), interface(query, layer.keys, other.values))


def two_queries(layer: Layer) -> None:
    """Causal, though their last call was not."""
    query, views = layer.draw(ROWS, HEADS, 2, DIM), (layer.cache.layers[0].keys, layer.cache.layers[0].values)
    interface(query, *views)  # type: ignore[arg-type]
    got = interface(query, *layer.append(1), is_causal=True)
    torch.testing.assert_close(got, interface(query, layer.keys, layer.values, is_causal=True))


def read_dense(layer: Layer) -> None:
    """Whoever has the tensor of a view gets what they were made of, not what blocks hold later."""
    query, views = layer.query(), layer.append(1)
    before = layer.cache.stats.views_attended
    (views[0] + 0, interface(query, *views))
    assert layer.cache.stats.views_attended == before


def weights(layer: Layer) -> None:
    query, views = layer.query(), layer.append(1)
    with pytest.raises(UnsupportedError):
        interface(query, *views, output_attentions=True)


#: By name: who notices, the function, and its condition and what it is replaced by.
ASKED: dict[str, tuple[Callable[[Layer], None], Callable[..., Any], str, str]] = {
    "softcap": (lambda x: asked(x, softcap=0.3), attention.attention_forward, "softcap is None", "True"),
    "sinks": (lambda x: asked(x, s_aux=torch.ones(HEADS)), attention.attention_forward, "s_aux is None", "True"),
    "bias": (
        lambda x: asked(x, position_bias=torch.linspace(0, 9, 23).expand(1, HEADS, 1, 23)),
        *(attention.attention_forward, "position_bias is None", "True"),
    ),
    "mask": (
        lambda x: asked(x, attn_mask=(torch.arange(23) > 9)[None, None, None]),
        *(attention.attention_forward, "attention_mask is None", "True"),
    ),
    "dropout": (dropped, attention.attention_forward, "not dropout", "True"),
    "weights": (weights, attention.attention_forward, "_READ.isdisjoint(kwargs)", "True"),
    "window": (
        lambda x: asked(x, sliding_window=5, is_causal=True),
        *(attention._again, "(window is not None and window < length)", "False"),
    ),
    "keys twice": (keys_twice, attention._again, "value._what is not VALUES", "False"),
    "values twice": (values_twice, attention._again, "key._what is not KEYS", "False"),
    "of two layers": (of_two_layers, attention._again, "at is not value.snapshot", "False"),
    "two queries": (two_queries, attention._again, "query.shape[2] != 1", "False"),
    "read as tensors": (read_dense, attention._again, "at._dense is not None", "False"),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_else_is_asked_for_is_another_call(name: str) -> None:
    with torch.no_grad():
        ASKED[name][0](start("kvtier"))


@pytest.mark.parametrize("name", ASKED)
def test_each_condition_of_the_short_way_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, function, condition, constant = ASKED[name]
    changed = without(function, condition, constant)
    monkeypatch.setattr(attention, function.__name__, changed)
    with torch.no_grad():
        layer = start("kvtier")
        with pytest.raises((Exception, pytest.fail.Exception)):  # whatever notices
            act(layer)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("broken_off", [0, 1])
def test_an_interrupt_in_a_repeated_call_costs_the_step_and_not_the_cache(
    kind: type[BaseException], broken_off: int
) -> None:
    model = build_model("llama", "sdpa")
    cache, reference = TieredKVCache(model.config, block_size=BLOCK), DynamicCache(config=model.config)

    def step(tokens: torch.Tensor) -> None:
        torch.testing.assert_close(
            model(tokens, past_key_values=cache).logits, model(tokens, past_key_values=reference).logits
        )

    with torch.no_grad():
        step(torch.tensor([[1, 2, 3, 4, 5]]))
        step(torch.tensor([[6]]))
        again: Any = cache._forward.readers[broken_off].repeat
        attend = again._attend

        def interrupted(*args: Any) -> Any:
            attend(*args)
            raise kind

        again._attend = interrupted
        with pytest.raises(kind):
            model(torch.tensor([[7]]), past_key_values=cache)
        again._attend = attend
        with pytest.raises(InterruptedStepError, match=r"`crop\(0\)`"):
            model(torch.tensor([[7]]), past_key_values=cache)
        cache.crop(0)
        cache.check_integrity()
        for token in range(7, 16):
            step(torch.tensor([[token]]))
