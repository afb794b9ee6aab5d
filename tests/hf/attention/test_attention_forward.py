"""The attention function and its masks, against attention written out in float64."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from families import build_model, prompt_ids
from placements import ON_HOST
from torch import nn
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

import kvtier
from kvtier import KVView, TieredKVCache, UnsupportedError
from kvtier.cpu import native
from kvtier.hf.attention import interface as attention
from kvtier.hf.attention.interface import attention_forward, attention_mask

BATCH, KV_HEADS, K_DIM = 2, 2, 8
LOWEST = torch.finfo(torch.float32).min
#: Of fp32; fused kernels of accelerators round more.
EXACT = 1e-5 if ON_HOST else 5e-5


class Layer(nn.Module):
    """An attention layer, as far as attention functions look at it."""

    def __init__(self, group: int = 1, causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = group, causal
        self.eval()


def written_out(q: Any, k: Any, v: Any, seen: Any, scale: float, softcap: float = 0, sinks: Any = None, bias: Any = 0):
    """`[batch, queries, heads, v_dim]` in float64; zeros where a query sees nothing."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = (scores + bias).masked_fill(~seen, -torch.inf)
    column = torch.full((*scores.shape[:3], 1), -torch.inf, dtype=torch.float64)
    column = column if sinks is None else sinks.double().view(1, -1, 1, 1).expand_as(column)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def tensors(queries: int, tokens: int, group: int, v_dim: int, *, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (KV_HEADS * group, queries, K_DIM), (KV_HEADS, tokens, K_DIM), (KV_HEADS, tokens, v_dim)
    return tuple(2 * torch.randn(BATCH, *shape, generator=generator) for shape in shapes)


def as_views(k: torch.Tensor, v: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same keys and values in a tiered cache whose last update brought `queries` tokens."""
    cache = TieredKVCache(block_size=4, device_budget=1 << 22)
    past = k.shape[2] - queries
    cache.update(k[:, :, :past], v[:, :, :past], 0)
    views = cache.update(k[:, :, past:], v[:, :, past:], 0)
    assert all(isinstance(x, KVView) for x in views)
    return views


def every_kind() -> Iterator[Any]:
    for kind, softcap, sinks, bias, window in itertools.product(
        ("none", "bool", "additive"), (0, 3.0), (False, True), (False, True), (None, 4, 100)
    ):
        if window is not None and kind != "none":
            continue
        yield pytest.param(kind, softcap, sinks, bias, window, id=f"{kind}-{softcap}-{sinks}-{bias}-{window}")


@pytest.mark.parametrize("chunk_bytes", [1 << 28, 700])
@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
@pytest.mark.parametrize(("kind", "softcap", "sinks", "bias", "window"), list(every_kind()))
def test_it_computes_attention(
    kind: str, softcap: float, sinks: bool, bias: bool, window: Any, views: bool, chunk_bytes: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention, "_CHUNK_BYTES", chunk_bytes)
    for (queries, tokens), group, v_dim, causal in itertools.product(
        ((1, 13), (5, 13), (13, 13)), (1, 3), (K_DIM, 12), (True, False)
    ):
        if views and queries == tokens:
            continue
        q, k, v = tensors(queries, tokens, group, v_dim)
        generator = torch.Generator().manual_seed(1)
        at, positions = torch.arange(tokens - queries, tokens)[:, None], torch.arange(tokens)
        seen, mask = torch.ones(queries, tokens, dtype=torch.bool), None
        if kind != "none":
            seen = torch.rand(BATCH, 1, queries, tokens, generator=generator) < 0.6
            seen[..., 0] = True
            mask = seen if kind == "bool" else torch.where(seen, 0.0, LOWEST)
        elif causal:
            seen = positions <= at
            seen = seen & (positions > at - window) if window else seen
        heads = KV_HEADS * group
        position_bias = torch.randn(1, heads, queries, tokens, generator=generator) if bias else None
        s_aux = torch.randn(heads, generator=generator) if sinks else None
        arguments = {"softcap": softcap or None, "s_aux": s_aux, "sliding_window": window}
        expected = written_out(q, k, v, seen, 0.3, softcap, s_aux, position_bias if bias else 0)
        keys, values = as_views(k, v, queries) if views else (k, v)
        layer = Layer(group, causal)
        actual, weights = attention_forward(
            layer, q, keys, values, mask, scaling=0.3, position_bias=position_bias, **arguments
        )
        assert weights is None
        assert actual.is_contiguous()
        assert actual.dtype == q.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
def test_defaults_are_those_of_transformers(views: bool) -> None:
    """Scale 1 / sqrt(k_dim); causal by the argument, else by the module, else yes."""
    q, k, v = tensors(5, 13, 1, K_DIM)
    everything, causal = torch.ones(5, 13, dtype=torch.bool), torch.ones(5, 13, dtype=torch.bool).tril(8)
    for module, is_causal, seen in (
        (Layer(causal=True), None, causal),
        (Layer(causal=True), False, everything),
        (Layer(causal=False), None, everything),
        (Layer(causal=False), True, causal),
        (nn.Module().eval(), None, causal),
    ):
        keys, values = as_views(k, v, 5) if views else (k, v)
        actual, _ = attention_forward(module, q, keys, values, None, is_causal=is_causal)
        expected = written_out(q, k, v, seen, K_DIM**-0.5)
        torch.testing.assert_close(actual.double(), expected, rtol=EXACT, atol=EXACT)


def test_groups_are_read_from_the_tensors_and_repeats_made_by_the_model_are_fine() -> None:
    q, k, v = tensors(5, 13, 6, K_DIM)
    expected = written_out(q, k, v, torch.ones(5, 13, dtype=torch.bool).tril(8), 0.3)
    for repeats in (1, 2, 6):
        keys, values = as_views(k, v, 5)
        shape = (BATCH, KV_HEADS, repeats, 13, K_DIM)
        keys, values = (
            x[:, :, None, :, :].expand(shape).reshape(BATCH, KV_HEADS * repeats, 13, K_DIM) for x in (keys, values)
        )
        assert isinstance(keys, KVView)
        mask = torch.ones(BATCH, 1, 5, 13, dtype=torch.bool).tril(8)
        for pair, seen in itertools.product(((keys, values), (k, v)), (None, mask)):
            actual, _ = attention_forward(nn.Module().eval(), q, *pair, seen, scaling=0.3)
            torch.testing.assert_close(actual.double(), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_see_nothing_stay_finite_and_leave_the_others_alone(
    dtype: torch.dtype, sinks: bool, softcap: Any, views: bool
) -> None:
    q, k, v = (x.to(dtype) for x in tensors(5, 13, 2, K_DIM))
    s_aux = torch.zeros(4, dtype=dtype) if sinks else None
    seen = torch.ones(BATCH, 1, 5, 13, dtype=torch.bool).tril(8)
    seen[1, :, :3] = False
    expected = written_out(q, k, v, seen, 0.3, softcap or 0, s_aux)
    lowest = torch.finfo(dtype).min
    masks = seen, torch.where(seen, 0.0, lowest).to(dtype), torch.where(seen, 0.0, -torch.inf).to(dtype)
    tolerance = EXACT if dtype == torch.float32 else 5e-2
    for mask, bias in itertools.product(masks, (None, torch.zeros(1, 4, 5, 13, dtype=dtype))):
        keys, values = as_views(k, v, 5) if views else (k, v)
        actual, _ = attention_forward(
            Layer(2), q, keys, values, mask, scaling=0.3, softcap=softcap, s_aux=s_aux, position_bias=bias
        )
        assert actual.isfinite().all()
        for row, some in ((0, slice(None)), (1, slice(3, None))):
            torch.testing.assert_close(actual[row, some].double(), expected[row, some], rtol=0, atol=tolerance)


def test_masks_longer_than_the_keys_and_of_fewer_dimensions_are_read_as_torch_reads_them() -> None:
    q, k, v = tensors(5, 13, 1, K_DIM)
    seen = torch.rand(5, 13, generator=torch.Generator().manual_seed(3)) < 0.7
    seen[:, 0] = True
    some = torch.randn(1, KV_HEADS, 5, 13, generator=torch.Generator().manual_seed(4))
    longer = torch.cat([seen, torch.ones(5, 4, dtype=torch.bool)], 1)
    for views, softcap, bias in itertools.product((False, True), (None, 3.0), (None, some)):
        expected = written_out(q, k, v, seen, 0.3, softcap or 0, bias=0 if bias is None else bias)
        for mask in (seen, seen[None, None], longer[None, None]):
            keys, values = as_views(k, v, 5) if views else (k, v)
            options = {"scaling": 0.3, "softcap": softcap, "position_bias": bias}
            actual, _ = attention_forward(Layer(), q, keys, values, mask, **options)
            torch.testing.assert_close(actual.double(), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
def test_a_mask_of_tokens_that_a_window_has_passed_is_refused_as_torch_refuses_it(views: bool) -> None:
    """A user's own mask, which goes to all layers alike: its last columns would be those of the keys."""
    q, k, v = tensors(5, 13, 1, K_DIM)
    keys, values = as_views(k, v, 5) if views else (k, v)
    for mask in (torch.ones(1, 1, 5, 20, dtype=torch.bool), torch.zeros(1, 1, 5, 20)):
        with pytest.raises(UnsupportedError, match=r"20 tokens.*13"):
            attention_forward(Layer(), q, keys, values, mask, sliding_window=13)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("one", ["query", "keys"])
def test_one_row_of_queries_or_of_keys_stands_for_all(one: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(queries, 13, 3, K_DIM)
    q, k, v = (q[:1], k, v) if one == "query" else (q, k[:1], v[:1])
    seen = torch.rand(BATCH, 1, queries, 13, generator=torch.Generator().manual_seed(3)) < 0.7
    seen[..., 0] = True
    for library, softcap, s_aux in itertools.product((True, False), (None, 3.0), (None, torch.zeros(6))):
        if not library:
            monkeypatch.setattr(native, "available", lambda: False)
        keys, values = as_views(k, v, queries)
        actual, _ = attention_forward(Layer(3), q, keys, values, seen, scaling=0.3, softcap=softcap, s_aux=s_aux)
        expected = written_out(q, k, v, seen, 0.3, softcap or 0, s_aux)
        torch.testing.assert_close(actual.double(), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8], ids=str)
def test_a_mask_of_integers_is_refused_and_not_added_to_the_scores(dtype: torch.dtype, views: bool) -> None:
    q, k, v = tensors(5, 13, 1, K_DIM)
    bias = torch.zeros(1, KV_HEADS, 5, 13)
    for softcap, position_bias in itertools.product((None, 3.0), (None, bias)):
        keys, values = as_views(k, v, 5) if views else (k, v)
        mask = torch.ones(1, 1, 5, 13, dtype=dtype)
        with pytest.raises(UnsupportedError, match=r"attention_mask\.bool\(\)"):
            attention_forward(Layer(), q, keys, values, mask, softcap=softcap, position_bias=position_bias)


@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_dropout_is_for_training(softcap: Any, views: bool) -> None:
    q, k, v = tensors(5, 13, 2, K_DIM)
    expected = written_out(q, k, v, torch.ones(5, 13, dtype=torch.bool).tril(8), 0.3, softcap or 0)
    layer = Layer(2)

    def forward(dropout: float) -> torch.Tensor:
        keys, values = as_views(k, v, 5) if views else (k, v)
        return attention_forward(layer, q, keys, values, None, scaling=0.3, softcap=softcap, dropout=dropout)[0]

    torch.testing.assert_close(forward(0.5).double(), expected, rtol=EXACT, atol=EXACT)
    layer.train()
    torch.manual_seed(0)
    mean = torch.stack([forward(0.3) for _ in range(3000 if not views else 600)]).mean(0)
    assert not torch.allclose(forward(0.3).double(), expected, atol=0.1)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=0.25 if views else 0.12)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_needs_its_gradient_gets_it_on_views_too(frozen: bool) -> None:
    q, k, v = tensors(5, 13, 2, K_DIM)
    gradients = []
    for views, softcap in itertools.product((False, True), (None, 3.0)):
        learned = [q.clone(), torch.zeros(4), torch.zeros(1, 4, 5, 13)][frozen:]
        query, s_aux, bias = [q] * frozen + [x.requires_grad_() for x in learned]
        keys, values = as_views(k, v, 5) if views else (k, v)
        out, _ = attention_forward(
            Layer(2), query, keys, values, None, scaling=0.3, softcap=softcap, s_aux=s_aux, position_bias=bias
        )
        out.square().sum().backward()
        gradients.append([x.grad for x in learned])
    for tensor, view in zip(gradients[:2], gradients[2:], strict=True):
        assert all(x.abs().max() > 0.1 for x in tensor)
        torch.testing.assert_close(tensor, view, **({} if ON_HOST else {"rtol": EXACT, "atol": EXACT}))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_training_gives_the_gradients_of_the_models_own_attention(name: str) -> None:
    model = build_model(name, "eager").train()
    inputs = {"input_ids": prompt_ids(), "labels": prompt_ids(length=40, seed=5)}

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs, use_cache=False).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    for module in model.modules():  # which draws other numbers
        for attribute in ("p", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    expected = gradients()
    with kvtier.enable(model):
        actual = gradients()
    assert expected.keys() == actual.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, p=parameter: p + m)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_what_it_does_not_know_is_refused(name: str) -> None:
    q, k, v = tensors(1, 5, 1, K_DIM)
    attention_forward(Layer(), q, k, v, None, **{name: None}, output_attentions=False, position_ids=torch.arange(1))
    with pytest.raises(UnsupportedError, match=name):
        attention_forward(Layer(), q, k, v, None, **{name: torch.arange(1)})


# ------------------------------------------------------------------------------------------- masks


def padding_masks(kv_length: int) -> dict[str, torch.Tensor | None]:
    left, right = torch.ones(BATCH, kv_length, dtype=torch.bool), torch.ones(BATCH, kv_length, dtype=torch.bool)
    left[1, :2], right[1, -2:] = False, False
    return {"none": None, "ones": torch.ones_like(left), "left": left, "right": right, "short": left[:, 2:]}


@pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "short"])
@pytest.mark.parametrize("local", [None, 4, 100])
def test_no_mask_means_that_the_last_query_stands_at_the_last_key(padding: str, local: int | None) -> None:
    """Where the mask function gives none, plain lower-right causality is what sdpa's own mask says in full."""
    omitted = set()
    function = sliding_window_causal_mask_function(local) if local else causal_mask_function
    for q_length, kv_length, q_offset in itertools.product(range(1, 7), range(6, 12), range(0, 11)):
        if q_offset + q_length > kv_length:
            continue
        arguments: dict[str, Any] = {
            "batch_size": BATCH,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "mask_function": function,
            "attention_mask": padding_masks(kv_length)[padding],
            "local_size": local,
        }
        full = sdpa_mask(**arguments, allow_is_causal_skip=False)
        mask = attention_mask(**arguments, dtype=torch.float32, config=transformers.LlamaConfig())
        if mask is not None:
            assert torch.equal(mask, full)
        elif q_length > 1:
            assert torch.equal(full, torch.ones_like(full).tril(kv_length - q_length))
            omitted.add((q_length, kv_length))
        else:
            # One query and no mask: everything there is. A static cache has room behind the tokens, but not for one.
            assert sdpa_mask(**arguments) is None
        assert attention_mask(**arguments, allow_is_causal_skip=False) is not None
    if padding in ("none", "ones") and local != 4:
        assert {(6, 6), (3, 9), (2, 11)} <= omitted, "chunks of a prefill on a warm cache need no mask"
    else:
        assert not omitted
