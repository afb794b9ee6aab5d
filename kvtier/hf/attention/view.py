"""`KVView`: what `Cache.update` gives the model instead of a dense tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from kvtier.attention.dispatch import repeat
from kvtier.attention.reader import LayerReader
from kvtier.errors import UnsupportedError
from kvtier.forward.forward import Forward
from kvtier.memory.blocks.block import Pools

_SDPA = F.scaled_dot_product_attention
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


#: Makes a view of a blank. A quarter of the cost of `_make_wrapper_subclass`, and half of that of `as_subclass`.
_subclass: Any = torch.Tensor._make_subclass
#: Part, repeats and form of a view, as of `KVView`.
_What = tuple[int, int, int]
#: Of whole keys and whole values, as `update` gives them: these objects.
KEYS: _What = (0, 1, 0)
VALUES: _What = (1, 1, 0)
#: Masks whose elements are what attention adds or selects by. Of others torch asks their own `__torch_function__`: the
#: elements of a `torch.nn.attention.bias.CausalBias` are memory that nobody wrote.
_PLAIN_MASKS = frozenset({type(None), torch.Tensor, torch.nn.Parameter})
_META = torch.device("meta")
#: Layers for which views are made at once.
_AT_ONCE = 16


class Snapshot:
    """The KV of one layer at one length, shared by a view of its keys and a view of its values.

    Attributes:
        forward, reader: of the cache and of the layer.
        length: tokens shown.
        epoch: of the layer when it was taken.
    """

    __slots__ = ("__weakref__", "_dense", "epoch", "forward", "length", "reader")

    def __init__(self, forward: Forward, reader: LayerReader) -> None:
        layer = reader.layer
        self.forward = forward
        self.reader = reader
        self.length = layer.length
        self.epoch = layer.epoch
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def current(self) -> bool:
        """Whether it shows all that the layer holds."""
        layer = self.reader.layer
        return (self.length, self.epoch) == (layer.length, layer.epoch)

    def dense(self, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as tensors of their own, made once, for the sake of `operation`."""
        if self._dense is None:
            self._dense = self.forward.densify(self.reader, self.length, self.epoch, operation)
        return self._dense

    def views(self) -> tuple[KVView, KVView]:
        """A view of the keys and one of the values."""
        return views_of(self.forward, self.reader, self)


def views_of(forward: Forward, reader: LayerReader, snapshot: Snapshot | None = None) -> tuple[KVView, KVView]:
    """A view of all keys and one of all values of a layer. They share a snapshot: the one given, or one of now."""
    layer = reader.layer
    pools, length = layer.blocks.pools, layer.length if snapshot is None else snapshot.length
    blanks: _Blanks | None = forward.blanks.get(pools)
    if blanks is None or blanks.length != length or blanks.batch != len(layer.rows):
        blanks = forward.blanks[pools] = _Blanks(pools, len(layer.rows), length)
    while True:
        try:
            pair = blanks.pairs.pop()
            break
        except IndexError:  # another thread may take what this one makes
            blanks.make(min(len(forward.readers), _AT_ONCE))
    if snapshot is None:
        snapshot = pair[0].snapshot
        snapshot.forward, snapshot.reader, snapshot.epoch = forward, reader, layer.epoch
    else:
        pair[0].snapshot = pair[1].snapshot = snapshot
    return pair


class KVView(torch.Tensor):
    """Keys or values of one layer, `[batch, heads, tokens, dim]`: shape, dtype and device, but no bytes.

    `scaled_dot_product_attention` on a pair of views is taken over by kvtier. The `repeat_kv` that Transformers applies
    before it stays a view. Any other operation gets a dense tensor, made once per view and counted in the cache's
    stats. Writing into a view raises: what the cache holds never changes. There is no storage behind a view: whoever
    asks for one from Python gets that of the dense tensor, and whoever asks from C++ gets an error.

    Attributes:
        snapshot: what is shown.
        shape: as of the dense tensor. A slot, as models read it several times per layer and token.
        part: 0 for keys, 1 for values.
        repeats: query heads that each KV head stands for.
        form: 0: `[batch, heads * repeats, tokens, dim]`; 1: with an axis for repeats behind the heads; 2: that axis
            expanded.
    """

    __slots__ = ("_what", "shape", "snapshot")

    snapshot: Snapshot
    shape: torch.Size
    _what: _What

    def __new__(cls, *args: Any, **kwargs: Any) -> KVView:
        """Not for callers: `TieredKVCache.update` and `cache.layers[i].keys` make views."""
        raise TypeError("TieredKVCache makes views; they have no constructor.")

    # What models ask most is answered without torch's dispatcher, which takes some microseconds.

    @property
    def part(self) -> int:
        """0 for keys, 1 for values."""
        return self._what[0]

    @property
    def repeats(self) -> int:
        """Query heads that each KV head stands for."""
        return self._what[1]

    @property
    def form(self) -> int:
        """Which step of `repeat_kv` the view is at."""
        return self._what[2]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the elements."""
        return self.snapshot.reader.layer.layout.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where attention runs."""
        return self.snapshot.reader.layer.device.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether attention runs on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As of the dense tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    # The three steps of `repeat_kv`, and what gives the view itself.

    def __getitem__(self, index: Any) -> Any:
        view = _index(self, index)
        return _on_dense(torch.Tensor.__getitem__, (self, index), {}) if view is None else view

    def expand(self, *sizes: Any, **named: Any) -> Any:
        """As of the dense tensor; a view where it is the second step of `repeat_kv`."""
        view = _expand(self, *sizes, **named)
        return _on_dense(torch.Tensor.expand, (self, *sizes), named) if view is None else view

    def reshape(self, *sizes: Any, **named: Any) -> Any:
        """As of the dense tensor; a view where it is the third step of `repeat_kv`."""
        view = _reshape(self, *sizes, **named)
        return _on_dense(torch.Tensor.reshape, (self, *sizes), named) if view is None else view

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = "keys" if self.part == 0 else "values"
        layer = self.snapshot.reader.layer
        return f"KVView({part} of layer {layer.index}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense("pickle").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense("deepcopy").clone()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense("dlpack").__dlpack__(*args, **kwargs)

    def dense(self, operation: str = "dense") -> torch.Tensor:
        """This view as an ordinary tensor, the same at every call."""
        dense = self.snapshot.dense(operation)[self.part]
        if self.form == 0:
            return repeat(dense, self.repeats)
        return dense[:, :, None].expand(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:
            # Written out for what models call once per layer: whole keys and values of one snapshot.
            if len(args) == 3 and type(args[1]) is type(args[2]) is KVView:
                query, keys, values = args
                at, what = keys.snapshot, keys._what
                if (
                    at is values.snapshot
                    and at._dense is None
                    and ((what is KEYS and values._what is VALUES) or _are_pair(what, values._what))
                    and type(query) is not KVView
                    and (not kwargs or type(kwargs.get("attn_mask")) in _PLAIN_MASKS)
                ):
                    kwargs, repeat = kwargs or {}, at.reader.repeat
                    if repeat is not None and not repeat.schedules:
                        out = repeat(query, at.length, at.epoch, kwargs, what[1])
                        if out is not None:
                            return out
                    return at.forward.attend(at.reader, at.length, at.epoch, query, None, kwargs, what[1])
            return _attention(args, kwargs or {})
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _PLACE:
            return _PLACE[func](args[0].device)
        handler = _LAZY.get(func)
        if handler is not None:
            lazy = handler(*args, **kwargs)
            if lazy is not None:
                return lazy
        return _on_dense(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Calls that reach torch from C++, past `__torch_function__`.
        name = func.name() if hasattr(func, "name") else str(func)
        _refuse_writes(name.split("::")[-1].split(".")[0], args, kwargs or {})
        args, kwargs = _dense_arguments(name, args, kwargs or {})
        return func(*args, **kwargs)


# Making views


def _view(snapshot: Snapshot, part: int, shape: tuple[int, ...], dtype: torch.dtype, repeats: int, form: int) -> KVView:
    blank, size = _blank(shape, dtype)
    view: KVView = _subclass(KVView, blank)
    view.snapshot, view.shape, view._what = snapshot, size, (part, repeats, form)
    return view


def make_view(snapshot: Snapshot, part: int, shape: tuple[int, ...], dtype: torch.dtype) -> KVView:
    """A view of keys (part 0) or values (part 1), in this shape."""
    made = _view(snapshot, part, shape, dtype, 1, 0)
    made._what = VALUES if part else KEYS
    return made


def _derived(view: KVView, shape: tuple[int, ...], repeats: int, form: int) -> KVView:
    """A view of what `view` shows, in another shape."""
    return _view(view.snapshot, view.part, shape, view.dtype, repeats, form)


class _Blanks:
    """Views for all layers of one layout in one step, which show nothing yet.

    They are made for several layers at once. Between two layers a model reads all of a layer's weights, and a function
    of torch that then runs once takes five times as long as one that runs again.

    Attributes:
        pairs: of keys and values, for layers to come.
    """

    __slots__ = ("_keys", "_values", "batch", "length", "pairs")

    def __init__(self, pools: Pools, batch: int, length: int) -> None:
        layout = pools.layout
        self.batch, self.length = batch, length
        self._keys = _blank((batch, layout.k_heads, length, layout.k_dim), layout.dtype)
        self._values = _blank((batch, layout.v_heads, length, layout.v_dim), layout.dtype)
        self.pairs: list[tuple[KVView, KVView]] = []

    def make(self, count: int) -> None:
        """Make pairs, at least one."""
        (k_blank, k_size), (v_blank, v_size) = self._keys, self._values
        for _ in range(max(count, 1)):
            # It refers to no cache until somebody takes the pair: the cache keeps these.
            snapshot = Snapshot.__new__(Snapshot)
            snapshot.length, snapshot._dense = self.length, None
            keys: KVView = _subclass(KVView, k_blank)
            keys.shape, keys._what, keys.snapshot = k_size, KEYS, snapshot
            values: KVView = _subclass(KVView, v_blank)
            values.shape, values._what, values.snapshot = v_size, VALUES, snapshot
            self.pairs.append((keys, values))


# All layers of a model show the same few shapes in one step.
@functools.lru_cache(maxsize=64)
def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Size]:
    """A tensor of some shape without storage, and its shape.

    On the meta device torch's own functions cannot read it. The mark makes C++ that asks where its storage is raise;
    it would get a null pointer.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            blank = torch.empty(shape, dtype=dtype, device=_META)
    else:
        blank = torch.empty(shape, dtype=dtype, device=_META)
    torch._C._set_throw_on_mutable_data_ptr(blank)
    return blank, blank.shape


# Operations


def _attention(args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor:
    """`scaled_dot_product_attention`, called in any way."""
    given = dict(zip(_SDPA_NAMES, args, strict=False)) | dict(options)
    query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
    if len(args) != 3 and type(key) is type(value) is KVView:
        return _SDPA(query, key, value, **given)
    (query, key, value), given = _dense_arguments("scaled_dot_product_attention", (query, key, value), given)
    return _SDPA(query, key, value, **given)


def _are_pair(keys: _What, values: _What) -> bool:
    """Whether these are whole keys and values, repeated as often."""
    return keys[0] == 0 and values[0] == 1 and keys[1] == values[1] and keys[2] == values[2] == 0


def _on_dense(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Any operation: on the tensors that views show, unless it would write into them."""
    name = getattr(func, "__name__", str(func))
    _refuse_writes(name, args, kwargs)
    args, kwargs = _dense_arguments(name, args, kwargs)
    return func(*args, **kwargs)


# x[:, :, None, :, :], .expand(batch, heads, n, tokens, dim), .reshape(batch, heads * n, tokens, dim)


def _index(view: Any, index: Any) -> KVView | None:
    whole = slice(None)
    if not isinstance(view, KVView) or view.form != 0 or view.repeats != 1 or not isinstance(index, tuple):
        return None
    if len(index) not in (3, 5) or index[2] is not None or any(i != whole for i in index[:2] + index[3:]):
        return None
    batch, heads, tokens, dim = view.shape
    return _derived(view, (batch, heads, 1, tokens, dim), 1, form=1)


def _expand(view: Any, *sizes: Any, **named: Any) -> KVView | None:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size):
        sizes = tuple(sizes[0])
    if named or not isinstance(view, KVView) or view.form != 1 or len(sizes) != 5:
        return None
    shape = view.shape
    if (
        any(s not in (-1, shape[i]) for i, s in enumerate(sizes) if i != 2)
        or not isinstance(sizes[2], int)
        or sizes[2] < 1
    ):
        return None
    return _derived(view, (*shape[:2], sizes[2], *shape[3:]), sizes[2], form=2)


def _reshape(view: Any, *sizes: Any, **named: Any) -> KVView | None:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size):
        sizes = tuple(sizes[0])
    if named or not isinstance(view, KVView) or view.form != 2:
        return None
    batch, heads, n, tokens, dim = view.shape
    if tuple(sizes) != (batch, heads * n, tokens, dim):
        return None
    return _derived(view, tuple(sizes), n, form=0)


def _itself(view: Any, *args: Any, **named: Any) -> KVView | None:
    """For operations that give a dense tensor back as it is."""
    return view if isinstance(view, KVView) and not args and not named else None


def _to(view: Any, *args: Any, **named: Any) -> KVView | None:
    """`.to` where the view already is: accelerate's hooks call it on everything."""
    if not isinstance(view, KVView) or named.pop("copy", False):
        return None
    named.pop("non_blocking", None)
    if len(args) + len(named) != 1:
        return None
    target: Any = args[0] if args else next(iter(named.values()))
    if isinstance(target, torch.dtype):
        return view if target == view.dtype else None
    if not isinstance(target, str | int | torch.device):
        return None  # another tensor, whose dtype counts as well
    device = torch.device(target)
    if str(device) == "cuda":  # the current one
        device = torch.device("cuda", torch.cuda.current_device())
    return view if device == view.device else None


_LAZY: dict[Any, Callable[..., KVView | None]] = {
    torch.Tensor.__getitem__: _index,
    torch.Tensor.expand: _expand,
    torch.Tensor.reshape: _reshape,
    torch.Tensor.contiguous: _itself,
    torch.Tensor.detach: _itself,
    torch.Tensor.to: _to,
}


def _get(attribute: str) -> Any:
    """What `__torch_function__` is called with when an attribute is read."""
    return getattr(torch.Tensor, attribute).__get__


# What the blank behind a view answers rightly.
_METADATA = {_get(name) for name in ("dtype", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_nested")} | {
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}

# What it does not, as it is on the meta device.
_PLACE: dict[Any, Callable[[torch.device], Any]] = {
    _get("device"): lambda device: device,
    _get("is_cpu"): lambda device: device.type == "cpu",
    _get("is_cuda"): lambda device: device.type == "cuda",
    _get("is_meta"): lambda device: device.type == "meta",
    torch.Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}


def _dense_arguments(operation: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def dense(x: Any) -> Any:
        return x.dense(operation) if isinstance(x, KVView) else x

    return tree_map(dense, (tuple(args), dict(kwargs)))


def _refuse_writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    in_place |= name.startswith("__i") and name.endswith("__") and name[3:-2] in _IN_PLACE
    in_place |= bool(kwargs.get("inplace"))
    target = args[0] if in_place and args else kwargs.get("out")
    if any(isinstance(x, KVView) for x in (target if isinstance(target, list | tuple) else (target,))):
        raise UnsupportedError(
            f"`{name}` would write into the KV cache. What TieredKVCache holds never changes: work on a `.clone()`, "
            "or assign `cache.layers[i].keys`."
        )


_IN_PLACE = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul"}
