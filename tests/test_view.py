"""Laws of `KVView`: whatever is asked of it, it answers as the dense tensor does; it is never written."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from kvtier import ClosedError, KVView, StaleViewError, TieredKVCache, UnsupportedError
from kvtier.hf.attention import view as view_module
from kvtier.hf.attention.view import Snapshot

pytestmark = pytest.mark.usefixtures("on_the_host")

ROWS, HEADS, TOKENS, DIM, BLOCK_SIZE = 2, 2, 11, 8, 4
SLOT = 2 * HEADS * DIM * 4 * BLOCK_SIZE

View = torch.Tensor
Op = Callable[[torch.Tensor], Any]


def make(
    device_slots: int | None = None, first: int = 7, *, host_attention: bool = False
) -> tuple[TieredKVCache, torch.Tensor, torch.Tensor]:
    """A cache of two layers, and the keys and values that it holds."""
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(ROWS, HEADS, TOKENS, DIM, generator=rng) for _ in range(2))
    budget = None if device_slots is None else device_slots * SLOT
    cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=BLOCK_SIZE, host_attention=host_attention)
    for part in (slice(0, first), slice(first, TOKENS)):
        for layer in range(2):
            cache.update(keys[:, :, part], values[:, :, part], layer)
    return cache, keys, values


@pytest.fixture(params=[None, 14, 1000], ids=["host", "spilled", "device"])
def held(request: pytest.FixtureRequest) -> tuple[TieredKVCache, torch.Tensor, torch.Tensor]:
    """The cache at each placement."""
    return make(request.param)


def pair(cache: TieredKVCache, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer as `update` returns them."""
    return Snapshot(cache._forward, cache._forward.readers[layer]).views()


def repeat_kv(x: torch.Tensor, n: int = 3) -> torch.Tensor:
    """As in Transformers' models."""
    rows, heads, tokens, dim = x.shape
    return x[:, :, None, :, :].expand(rows, heads, n, tokens, dim).reshape(rows, heads * n, tokens, dim)


def saved_and_loaded(x: torch.Tensor) -> torch.Tensor:
    """By way of `torch.save`."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


OPS: dict[str, Op] = {
    "shape": lambda x: (x.shape, x.size(), x.size(2), x.size(dim=-1), x.dim(), x.ndim, x.numel(), x.nelement()),
    "place": lambda x: (x.is_cpu, x.is_cuda, x.is_meta, x.get_device(), x.is_nested, x.is_sparse, x.is_quantized),
    "getters": lambda x: [
        getattr(torch.Tensor, n).__get__(x) for n in ("device", "is_cpu", "is_meta", "dtype", "shape")
    ],
    "unbound": lambda x: (torch.Tensor.expand(x, 2, 2, -1, -1) if len(x) == 2 else 0, torch.Tensor.reshape(x, (-1,))),
    "kind": lambda x: (x.dtype, x.device, x.layout, x.is_cuda, x.is_floating_point(), x.element_size(), x.itemsize),
    "graph": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn, x.grad, x.is_contiguous(), x.stride(), x.nbytes),
    "len": len,
    "iterate": list,
    "unpack": lambda x: [row.sum() for row in x],
    "repeat_kv": repeat_kv,
    "repeat_once": lambda x: repeat_kv(x, 1),
    "repeat_parts": lambda x: [x[:, :, None, :, :], x[:, :, None].expand(-1, -1, 3, -1, -1)],
    "repeat_twice": lambda x: repeat_kv(repeat_kv(x, 2), 2),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, 2, dim=1),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "rmatmul": lambda x: torch.ones(5, DIM) @ x.mT,
    "einsum": lambda x: torch.einsum("bhtd,bhsd->bhts", x, x),
    "bmm": lambda x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)),
    "cat": lambda x: torch.cat([x, x[:, :, :1]], dim=-2),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split([5, 6], 2),
    "chunk_unbind": lambda x: (torch.chunk(x, 2, 1), x.unbind(0)),
    "index": lambda x: (x[0], x[..., -1], x[:, :, 2:5], x[:, 1], x[x > 0], x[:, :, None], x[torch.tensor([1, 0])]),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "gather": lambda x: torch.gather(x, 2, torch.zeros(ROWS, HEADS, 1, DIM, dtype=torch.long)),
    "transpose": lambda x: (x.transpose(1, 2), x.mT, x.permute(3, 2, 1, 0), x.movedim(0, 1)),
    "reshape": lambda x: (x.reshape(-1), x.view(ROWS, -1), x.flatten(), x.unsqueeze(0), x.unflatten(3, (2, 4))),
    "expand": lambda x: x.expand(3, ROWS, HEADS, TOKENS, DIM),
    "arithmetic": lambda x: (x + 1, 1 - x, x * x, x / 2, -x, x**2, 2 // (x + 9), abs(x), x % 2),
    "compare": lambda x: (x == x, x > 0, x.eq(0), torch.equal(x, x.clone()), torch.allclose(x, x)),
    "reduce": lambda x: (x.sum(), x.mean(-1), x.max(), x.amax(2), x.norm(), x.std(), x.any(), x.argmax(-1)),
    "softmax": lambda x: (F.softmax(x, -1), F.layer_norm(x, (DIM,)), F.linear(x, torch.ones(3, DIM))),
    "cast": lambda x: (x.to(torch.float16), x.half(), x.double(), x.to("cpu"), x.type(torch.float64), x.bfloat16()),
    "to_like": lambda x: (x.to(torch.ones(1)), x.to(torch.ones(1, dtype=torch.float64)), x.to(device="cpu"), x.to()),
    "copy": lambda x: (x.clone(), x.contiguous(), x.detach(), x.cpu(), x.data),
    "like": lambda x: (torch.zeros_like(x), x.new_ones(2), torch.empty_like(x).shape, x.new_tensor([1.0])),
    "where": lambda x: (torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, 1.0), x.clamp(0), x.tril()),
    "read_into": lambda x: torch.empty(ROWS, HEADS, TOKENS, DIM).copy_(x),
    "add_into": lambda x: torch.ones(ROWS, HEADS, TOKENS, DIM).add_(x),
    "out": lambda x: torch.add(x, 1, out=torch.empty(ROWS, HEADS, TOKENS, DIM)),
    "assign_into": lambda x: torch.zeros(ROWS, HEADS, TOKENS, DIM).index_put_((torch.tensor([0]),), x[:1]),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "tolist": lambda x: torch.tensor(x.tolist()),
    "dlpack": lambda x: torch.from_dlpack(x),
    "float": lambda x: (float(x[0, 0, 0, 0]), x[0, 0, 0, 0].item(), int(x.sum()), bool(x.any())),
    "contains": lambda x: (0.25 in x, hash(x) == hash(x)),
    "format": lambda x: f"{x[0, 0, 0, 0]:.3f}",
    "save": saved_and_loaded,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy_module": lambda x: (copy.copy(x), copy.deepcopy(x), copy.deepcopy([x, x])),
    "vmap": lambda x: torch.vmap(lambda row: row.sum(0))(x),
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16).__class__ and (x @ x.mT),
}


def same(expected: Any, actual: Any) -> bool:
    """Equal, bit by bit, in value and in type; views count as the tensors they show."""
    if isinstance(expected, torch.Tensor):
        actual = actual.dense() if isinstance(actual, KVView) else actual
        return expected.dtype == actual.dtype and torch.equal(expected, actual)
    if isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return type(expected) is type(actual) and expected == actual


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("name", OPS)
def test_any_operation_on_a_view_is_the_operation_on_the_tensor(name: str, part: int) -> None:
    cache, *dense = make(14)
    views = (cache.layers[1].keys, cache.layers[1].values)
    assert all(type(view) is KVView for view in views)
    expected = OPS[name](dense[part].clone())
    for _ in range(2):
        assert same(expected, OPS[name](views[part]))
    assert torch.equal(views[part].dense(), dense[part])
    cache.check_integrity()


def test_a_dense_fallback_is_counted_once_for_each_view_and_by_name_and_shape_alone_is_free(held) -> None:
    cache, keys, _ = held
    view = cache.layers[0].keys
    assert (view.shape, len(view), view.dtype, view.device) == (keys.shape, ROWS, keys.dtype, keys.device)
    assert "KVView" in repr(view)
    assert cache.stats.dense_fallbacks == 0
    for _ in range(3):
        view.sum()
    stats = cache.stats
    assert (stats.dense_fallbacks, stats.dense_fallback_bytes) == (1, 2 * keys.nbytes)
    assert stats.dense_fallback_ops == {"sum": 1}


# Attention


MASKS: dict[str, Callable[[int], torch.Tensor | None]] = {
    "none": lambda queries: None,
    "boolean": lambda queries: torch.ones(queries, TOKENS, dtype=torch.bool).tril(TOKENS - queries),
    "by_row": lambda queries: torch.rand(ROWS, 1, queries, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3,
    "additive": lambda queries: torch.randn(ROWS, 1, queries, TOKENS, generator=torch.Generator().manual_seed(2)),
}
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "keywords": lambda q, k, v, m, c, **kw: F.scaled_dot_product_attention(
        q, k, v, attn_mask=m, dropout_p=0.0, is_causal=c, **kw
    ),
    "positions": lambda q, k, v, m, c, **kw: F.scaled_dot_product_attention(q, k, v, m, 0.0, c, **kw),
    "all_keywords": lambda q, k, v, m, c, **kw: F.scaled_dot_product_attention(
        value=v, key=k, query=q, attn_mask=m, is_causal=c, scale=0.3, **kw
    ),
}


@pytest.mark.parametrize("queries", [1, 3, TOKENS])
@pytest.mark.parametrize("heads", ["equal", "repeated", "grouped"])
@pytest.mark.parametrize("call", CALLS)
def test_attention_on_views_is_bitwise_attention_on_tensors(held, call: str, heads: str, queries: int) -> None:
    cache, keys, values = held
    rng = torch.Generator().manual_seed(3)
    query = torch.randn(ROWS, HEADS * (1 if heads == "equal" else 3), queries, DIM, generator=rng)
    options = {"enable_gqa": True} if heads == "grouped" else {}
    shape = repeat_kv if heads == "repeated" else (lambda x: x)
    for mask, causal in itertools.product(MASKS, (False, True)):
        if causal and mask != "none":
            continue
        args = (MASKS[mask](queries), causal)
        expected = CALLS[call](query, shape(keys), shape(values), *args, **options)
        k, v = pair(cache)
        actual = CALLS[call](query, shape(k), shape(v), *args, **options)
        assert torch.equal(expected, actual), (mask, causal)
    assert cache.stats.dense_fallbacks == 0
    assert cache.stats.views_attended == 5


def test_views_that_are_no_pair_are_attended_as_the_tensors_they_show(held) -> None:
    cache, keys, values = held
    k, v = pair(cache)
    sdpa = F.scaled_dot_product_attention
    query = torch.ones(ROWS, HEADS, 1, DIM)
    assert torch.equal(sdpa(query, v, k), sdpa(query, values, keys))
    assert torch.equal(sdpa(query, k, k), sdpa(query, keys, keys))
    assert torch.equal(sdpa(query, k, values), sdpa(query, keys, values))
    assert torch.equal(sdpa(k, k, v), sdpa(keys, keys, values))
    assert torch.equal(sdpa(query, k, cache.layers[1].values), sdpa(query, keys, values))


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("placement", ["attended on the host", "host", "device"])
def test_a_mask_that_says_itself_what_it_means_is_asked(placement: str, bias: Callable[[int, int], Any]) -> None:
    """Its elements are no mask: nobody wrote them."""
    cache, keys, values = make(1000 if placement == "device" else None, host_attention="attended" in placement)
    for queries, call in itertools.product((1, 3), ("keywords", "positions")):
        query = torch.randn(ROWS, HEADS, queries, DIM, generator=torch.Generator().manual_seed(3))
        args = (bias(queries, TOKENS), False)
        assert torch.equal(CALLS[call](query, *pair(cache), *args), CALLS[call](query, keys, values, *args))
    assert cache.stats.dense_fallback_ops == {"scaled_dot_product_attention": 4}


def test_what_attention_refuses_on_tensors_it_refuses_on_views() -> None:
    cache, keys, values = make()
    for query, options in (
        (torch.ones(ROWS, HEADS, 1, DIM + 1), {}),
        (torch.ones(ROWS, 3 * HEADS, 1, DIM), {}),
        (torch.ones(ROWS, HEADS, 1, DIM), {"attn_mask": torch.ones(1, TOKENS + 1)}),
        (torch.ones(ROWS, HEADS, 1, DIM), {"no_such_option": 1}),
    ):
        errors = []
        for k, v in ((keys, values), pair(cache)):
            with pytest.raises((RuntimeError, TypeError)) as raised:
                F.scaled_dot_product_attention(query, k, v, **options)
            errors.append(raised.type)
        assert errors[0] is errors[1]


# Storage


def test_whoever_asks_a_view_for_its_memory_gets_the_tensors_or_an_error() -> None:
    script = Path(__file__).with_name("ask_for_memory.py")
    code = (
        "import runpy, sys, warnings; warnings.simplefilter('ignore'); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    done = forks.run(code, str(script))
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) > 30
    refused = {name for name, (_, view) in told.items() if view.endswith("!")}
    for name, (dense, view) in told.items():
        assert name in refused or view == dense, name
    # What people do: these are answered.
    assert not refused & {
        "from_dlpack",
        "data_ptr",
        "untyped_storage",
        "numpy",
        "asarray",
        "pickle",
        "save",
        "scripted",
    }


def test_the_blank_behind_views_can_be_looked_at() -> None:
    """It turns up in a debugger, or in a traceback that shows variables."""
    blank, shape = view_module._blank((1, 2, 3, 4), torch.float32)
    assert repr(blank)
    assert blank.shape == shape == (1, 2, 3, 4)
    assert blank.untyped_storage().device.type == "meta"


def test_views_are_made_at_once_where_layers_of_two_layouts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, made, layers = TieredKVCache(), list[int](), 8
    make_pairs = view_module._Blanks.make

    def make_some(blanks: Any, count: int) -> None:
        made.append(count)
        make_pairs(blanks, count)

    for tokens in (5, 1):
        monkeypatch.setattr(view_module._Blanks, "make", make_some if tokens == 1 else make_pairs)
        for layer in range(layers):
            token = torch.randn(1, HEADS, tokens, DIM * (1 + layer % 2))
            keys, values = cache.update(token, token, layer)
            assert keys.shape == values.shape == (1, HEADS, 6 if tokens == 1 else 5, token.shape[3])
    assert made == [layers, layers]
    cache.reset()
    assert not cache._forward.blanks


# Writing


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(1),
    "imul": lambda x: x.__imul__(2),
    "setitem": lambda x: x.__setitem__(0, 0),
    "copy_": lambda x: x.copy_(torch.zeros_like(x)),
    "zero_": lambda x: x.zero_(),
    "fill_": lambda x: x.fill_(1),
    "masked_fill_": lambda x: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool), 0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([0]), torch.zeros(1, HEADS, TOKENS, DIM)),
    "out": lambda x: torch.add(torch.ones(x.shape), 1, out=x),
    "relu_": lambda x: torch.relu_(x),
    "relu_inplace": lambda x: F.relu(x, inplace=True),
    "init": lambda x: torch.nn.init.zeros_(x),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "resize_": lambda x: x.resize_(1),
    "set_": lambda x: x.set_(torch.ones(1)),
    "data": lambda x: setattr(x, "data", torch.zeros(x.shape)),
    "requires_grad_": lambda x: x.requires_grad_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_into_a_view_raises_and_changes_nothing(write: str) -> None:
    cache, keys, values = make()
    view = cache.layers[0].keys
    with pytest.raises(UnsupportedError):
        WRITES[write](view)
    assert torch.equal(view.dense(), keys)
    assert torch.equal(cache.layers[0].keys.dense(), keys)
    assert torch.equal(cache.layers[0].values.dense(), values)


def test_writing_into_what_a_view_became_does_not_reach_the_cache(held) -> None:
    cache, keys, _ = held
    for change in (lambda x: x.dense().zero_(), lambda x: x.transpose(1, 2).zero_(), lambda x: x[0].fill_(9)):
        change(cache.layers[0].keys)
        assert torch.equal(cache.layers[0].keys.dense(), keys)


# Age


CHANGES: dict[str, Callable[[TieredKVCache], Any]] = {
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_view_of_what_the_cache_no_longer_holds_raises(held, change: str) -> None:
    cache, _, _ = held
    keys, values = pair(cache)
    repeated = repeat_kv(keys), repeat_kv(values)
    CHANGES[change](cache)
    error = ClosedError if change == "close" else StaleViewError
    reads = (
        lambda: keys.sum(),
        lambda: F.scaled_dot_product_attention(torch.ones(ROWS, HEADS, 1, DIM), keys, values),
        lambda: F.scaled_dot_product_attention(torch.ones(ROWS, 3 * HEADS, 1, DIM), *repeated),
        lambda: torch.cat([torch.ones_like(torch.zeros(keys.shape)), keys]),
    )
    for read in reads:
        with pytest.raises(error):
            read()
    assert keys.shape == (ROWS, HEADS, TOKENS, DIM), "shapes may always be asked"


def test_a_view_is_stale_even_when_as_many_tokens_came_back(held) -> None:
    cache, keys, values = held
    view = cache.layers[0].keys
    cache.crop(-2)
    for layer in range(2):
        cache.update(keys[:, :, :2], values[:, :, :2], layer)
    with pytest.raises(StaleViewError):
        view.sum()


@pytest.mark.parametrize("device_slots", [None, 26, 1000])
def test_views_of_an_older_length_stay_right_while_the_cache_grows(device_slots: int | None) -> None:
    """gemma3n and gemma4 read what an earlier layer returned until the forward ends."""
    cache, keys, values = make(device_slots)
    taken = [(TOKENS, *pair(cache))]
    rng = torch.Generator().manual_seed(4)
    for _ in range(8):
        k, v = (torch.randn(ROWS, HEADS, 2, DIM, generator=rng) for _ in range(2))
        for layer in range(2):
            views = cache.update(k, v, layer)
            if layer == 0:
                keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
                taken.append((keys.shape[2], *views))
    query = torch.ones(ROWS, HEADS, 1, DIM)
    for length, k, v in taken:
        expected = F.scaled_dot_product_attention(query, keys[:, :, :length], values[:, :, :length])
        assert torch.equal(F.scaled_dot_product_attention(query, k, v), expected)
        assert torch.equal(k, keys[:, :, :length])
        assert torch.equal(v, values[:, :, :length])


# Gradients and modes


GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "repeated": lambda q, k, v: F.scaled_dot_product_attention(q.repeat(1, 3, 1, 1), repeat_kv(k), repeat_kv(v)),
    "eager": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), -1) @ v,
}


@pytest.mark.parametrize("way", GRADIENTS)
@pytest.mark.parametrize("needs", ["query", "keys", "both"])
def test_a_backward_pass_is_right_or_raises_and_a_forward_pass_is_right(way: str, needs: str) -> None:
    cache, keys, values = make()
    new = torch.ones(ROWS, HEADS, 1, DIM, requires_grad=needs != "query")
    query = torch.ones(ROWS, HEADS, 1, DIM, requires_grad=needs != "keys")
    bias = torch.zeros(1, requires_grad=True)  # so that there is something to train in any case
    out = GRADIENTS[way](query, *cache.update(new * 2, new * 3, 0)) + bias
    expected = GRADIENTS[way](query, torch.cat([keys, new * 2], 2), torch.cat([values, new * 3], 2))
    assert torch.equal(out, expected)
    if needs == "query":  # past keys and values are constants then: the gradient is that of the dense cache
        (ours,) = torch.autograd.grad(out.sum(), query)
        (theirs,) = torch.autograd.grad(expected.sum(), query)
        assert torch.equal(ours, theirs)
        return
    with pytest.raises(UnsupportedError, match="backward"):
        out.sum().backward()


@pytest.mark.parametrize("way", GRADIENTS)
@pytest.mark.parametrize("device_slots", [None, 14, 1000])
@pytest.mark.parametrize("host_attention", [False, True])
def test_forward_mode_ad_gets_the_tangent_of_a_query_and_is_refused_that_of_keys(
    way: str, device_slots: int | None, host_attention: bool
) -> None:
    cache, keys, values = make(device_slots, host_attention=host_attention)
    new, query, tangent = torch.randn(3, ROWS, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).unbind()
    held = torch.cat([keys, new], 2), torch.cat([values, new], 2)
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        for part in (0, 1):
            pair = [new, new]
            pair[part] = forward_ad.make_dual(new, tangent)
            for act in (
                lambda pair=pair: cache.update(*pair, 0),
                lambda part=part: setattr(
                    cache.layers[0], ("keys", "values")[part], forward_ad.make_dual(keys.clone(), keys)
                ),
            ):
                with pytest.raises(UnsupportedError, match="tangent"):
                    act()
            assert cache.get_seq_length() == TOKENS
        dual = forward_ad.make_dual(query, tangent)
        ours = forward_ad.unpack_dual(GRADIENTS[way](dual, *cache.update(new, new, 0))).tangent
        theirs = forward_ad.unpack_dual(GRADIENTS[way](dual, *held)).tangent
    torch.testing.assert_close(ours, theirs)

    def of_query(x: torch.Tensor) -> torch.Tensor:
        return GRADIENTS[way](x, *pair_of_views)

    pair_of_views = cache.layers[0].keys, cache.layers[0].values
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(torch.func.jvp(of_query, (query,), (tangent,))[1], theirs)
    cache.check_integrity()


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("device_slots", [None, 30, 1000])
@pytest.mark.parametrize("modes", list(itertools.product(MODES, repeat=3)), ids="-".join)
def test_a_cache_goes_from_any_mode_into_any_other(modes: tuple[str, ...], device_slots: int | None) -> None:
    budget = None if device_slots is None else device_slots * SLOT
    cache = TieredKVCache(device_budget=budget, host_budget=10**7, block_size=BLOCK_SIZE, host_attention=False)
    held: list[torch.Tensor] = []
    views: list[tuple[torch.Tensor, torch.Tensor]] = []
    for mode in modes:
        with MODES[mode]():
            for count in (5, 1, 1, 1, 1):
                new = torch.randn(ROWS, HEADS, count, DIM)
                held.append(new.clone())
                for layer in range(2):
                    k, v = cache.update(new, -new, layer)
                    query = torch.ones(ROWS, HEADS, 1, DIM)
                    every = torch.cat(held, 2)
                    expected = F.scaled_dot_product_attention(query, every, -every)
                    assert torch.equal(F.scaled_dot_product_attention(query, k, v), expected)
            views.append((cache.layers[0].keys, every))
            assert torch.equal(cache.layers[1].values, -every)
    for view, every in views:
        assert torch.equal(view, every), "a view outlives the mode it was made in"
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.update(torch.ones(ROWS, HEADS, 1, DIM), torch.ones(ROWS, HEADS, 1, DIM), 0)
    cache.check_integrity()
