"""`KVView`: what `Cache.update` gives the model instead of a dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from kvtier.attention.calls import repeat
from kvtier.errors import UnsupportedError
from kvtier.runtime import Runtime
from kvtier.storage.store import LayerStore

_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Snapshot:
    """The KV of one layer at one length, shared by a view of its keys and a view of its values.

    Attributes:
        runtime, store: where it lies.
        length: tokens shown.
        epoch: of the store when it was taken.
    """

    __slots__ = ("__weakref__", "_dense", "epoch", "length", "runtime", "store")

    def __init__(self, runtime: Runtime, store: LayerStore) -> None:
        self.runtime = runtime
        self.store = store
        self.length = store.length
        self.epoch = store.epoch
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def dense(self, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as tensors of their own, made once, for the sake of `operation`."""
        if self._dense is None:
            self._dense = self.runtime.densify(self.store, self.length, self.epoch, operation)
        return self._dense

    def views(self) -> tuple[KVView, KVView]:
        """A view of the keys and one of the values."""
        layout, batch = self.store.layout, self.store.batch
        return (
            KVView(self, 0, (batch, layout.k_heads, self.length, layout.k_dim)),
            KVView(self, 1, (batch, layout.v_heads, self.length, layout.v_dim)),
        )


class KVView(torch.Tensor):
    """Keys or values of one layer, `[batch, heads, tokens, dim]`: shape, dtype and device, but no bytes.

    `scaled_dot_product_attention` on a pair of views is taken over by kvtier. The `repeat_kv` that Transformers applies
    before it stays a view. Any other operation gets a dense tensor, made once per view and counted in the cache's
    stats. Writing into a view raises: what the cache holds never changes.
    """

    snapshot: Snapshot
    part: int
    repeats: int = 1
    form: int = 0
    _shape: torch.Size

    # form 0: [batch, heads * repeats, tokens, dim]; 1: with an axis for repeats behind the heads; 2: that axis
    # expanded.

    @staticmethod
    def __new__(cls, snapshot: Snapshot, part: int, shape: Sequence[int], repeats: int = 1, form: int = 0) -> KVView:
        store = snapshot.store
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=store.layout.dtype, device=store.tiers.device)
        self.snapshot = snapshot
        self.part = part
        if form or repeats != 1:
            self.repeats, self.form = repeats, form
        self._shape = torch.Size(shape)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # What a model asks most, answered without torch's dispatcher.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape, as of the dense tensor."""
        return self._shape

    def size(self, dim: int | None = None) -> Any:
        """As of the dense tensor."""
        return self._shape if dim is None else self._shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = "keys" if self.part == 0 else "values"
        return f"KVView({part} of layer {self.snapshot.store.index}, shape={tuple(self._shape)}, dtype={self.dtype})"

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
        return dense[:, :, None].expand(self._shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is F.scaled_dot_product_attention:
            return _attention(args, kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _LAZY.get(func)
        if handler is not None:
            lazy = handler(*args, **kwargs)
            if lazy is not None:
                return lazy
        name = getattr(func, "__name__", str(func))
        _refuse_writes(name, args, kwargs)
        args, kwargs = _dense_arguments(name, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Calls that reach torch from C++, past `__torch_function__`.
        name = func.name() if hasattr(func, "name") else str(func)
        _refuse_writes(name.split("::")[-1].split(".")[0], args, kwargs or {})
        args, kwargs = _dense_arguments(name, args, kwargs or {})
        return func(*args, **kwargs)


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    if len(args) == 3:
        (query, key, value), options = args, dict(kwargs)
    else:
        options = dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)
        query, key, value = options.pop("query"), options.pop("key"), options.pop("value")
    pair = (
        isinstance(key, KVView)
        and isinstance(value, KVView)
        and not isinstance(query, KVView)
        and key.snapshot is value.snapshot
        and (key.part, value.part) == (0, 1)
        and key.form == value.form == 0
        and key.repeats == value.repeats
        and key.snapshot._dense is None
    )
    if pair and not isinstance(options.get("attn_mask"), KVView):
        at = key.snapshot
        return at.runtime.attend(at.store, at.length, at.epoch, key.repeats, query, options)
    (query, key, value), options = _dense_arguments("scaled_dot_product_attention", (query, key, value), options)
    return F.scaled_dot_product_attention(query, key, value, **options)


# The three steps of `repeat_kv`: x[:, :, None, :, :], .expand(batch, heads, n, tokens, dim), .reshape(...)


def _index(view: Any, index: Any) -> KVView | None:
    whole = slice(None)
    if not isinstance(view, KVView) or view.form != 0 or view.repeats != 1 or not isinstance(index, tuple):
        return None
    if len(index) not in (3, 5) or index[2] is not None or any(i != whole for i in index[:2] + index[3:]):
        return None
    batch, heads, tokens, dim = view._shape
    return KVView(view.snapshot, view.part, (batch, heads, 1, tokens, dim), 1, form=1)


def _expand(view: Any, *sizes: Any, **named: Any) -> KVView | None:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size):
        sizes = tuple(sizes[0])
    if named or not isinstance(view, KVView) or view.form != 1 or len(sizes) != 5:
        return None
    shape = view._shape
    if (
        any(s not in (-1, shape[i]) for i, s in enumerate(sizes) if i != 2)
        or not isinstance(sizes[2], int)
        or sizes[2] < 1
    ):
        return None
    return KVView(view.snapshot, view.part, (*shape[:2], sizes[2], *shape[3:]), sizes[2], form=2)


def _reshape(view: Any, *sizes: Any, **named: Any) -> KVView | None:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size):
        sizes = tuple(sizes[0])
    if named or not isinstance(view, KVView) or view.form != 2:
        return None
    batch, heads, n, tokens, dim = view._shape
    if tuple(sizes) != (batch, heads * n, tokens, dim):
        return None
    return KVView(view.snapshot, view.part, tuple(sizes), n, form=0)


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

_METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "device",
        "dtype",
        "ndim",
        "is_cuda",
        "is_cpu",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "is_meta",
    )
} | {
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
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
