"""`Depends`: what a model's keys and values depend on besides tokens."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtier.hf.models.generation import device_of, inner
from kvtier.hf.models.identity.written import numbers

#: Modules that give the same in training mode: who adds one to a model need not think of it.
_SAME_IN_TRAINING = frozenset(
    (torch.nn.Identity, torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.ModuleDict)
)


class Depends(NamedTuple):
    """What keys and values depend on besides tokens.

    Attributes:
        computed_as: adapters, and the dtypes of sharded modules and of autocast.
        weights: a number that changes when weights are written or replaced.
        training: what is in training mode, which may change what it gives: "the model" or a part; "": nothing.
        adapted: modules with adapters, switched on or off.
    """

    computed_as: tuple[Any, ...]
    weights: int
    training: str
    adapted: tuple[Any, ...]


def depends(model: Any) -> Depends:
    """What keys and values depend on now, by one walk over all modules."""
    modules = _modules(model)
    adapted = tuple(module for module in modules if _has_adapters(module))
    return Depends(_computed_as(model, modules), _weights(modules), _training(modules), adapted)


def modes(model: Any, adapted: Sequence[Any]) -> tuple[Any, ...]:
    """What of it is known without such a walk: whether the model as a whole is in training mode, the dtype of autocast,
    and which adapters compute in these modules."""
    return model.training, autocast_of(model), *map(_computing, adapted)


def training(model: Any) -> str:
    """What of a model is in training mode, as `Depends.training`."""
    return _training(_modules(model))


def _training(modules: list[Any]) -> str:
    for i, module in enumerate(modules):
        if module.training and type(module) not in _SAME_IN_TRAINING:
            return f"a {type(module).__name__} of the model" if i else "the model"
    return ""


def _modules(model: Any) -> list[Any]:
    """As `model.modules()`, in the same order and in a fourth of the time."""
    found, left = dict[Any, None](), [model]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left += reversed(module._modules.values())
    return list(found)


def adapters(model: Any) -> tuple[str, ...]:
    """Adapters that change what the model computes now, and how much."""
    return _adapters(_modules(model))


def _adapters(modules: list[Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    each = list[tuple[int, tuple[str, ...]]]()
    for i, module in enumerate(modules):
        if _has_adapters(module):  # most have none: to ask for what is not there is slow
            mine = _computing(module)
            found |= dict.fromkeys(mine)
            each.append((i, mine))
    if len({mine for _, mine in each}) > 1:  # which module has which is part of it; the same in later processes
        found[hashlib.blake2b(repr(each).encode(), digest_size=16).hexdigest()] = None
    return tuple(found)


def _has_adapters(module: Any) -> bool:
    return "base_layer" in module._modules


def _computing(module: Any) -> tuple[str, ...]:
    """The adapters of a module that compute now, each with its scale."""
    merged, scaling = getattr(module, "merged", False), getattr(module, "scaling", None) or {}
    names = getattr(module, "merged_adapters" if merged else "active_adapters", None)
    if not isinstance(names, (list, tuple)) or (not merged and getattr(module, "disable_adapters", False)):
        return ()
    return tuple(f"{name} {scaling.get(name, 1)} {merged}" for name in names)


def computed_as(model: Any) -> tuple[Any, ...]:
    """What keys and values depend on now, tokens and weights aside: adapters, and the dtype of autocast."""
    return _computed_as(model, _modules(model))


def _computed_as(model: Any, modules: list[Any]) -> tuple[Any, ...]:
    return (*_adapters(modules), *_left_out(model), *_sharded_as(modules), autocast_of(model))


def _left_out(model: Any) -> tuple[str, ...]:
    """What a config asks of attention and its implementation leaves out without a word: torch's the cap on scores."""
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return ("no cap on scores",) if capped and config._attn_implementation == "sdpa" else ()


def autocast_of(model: Any) -> torch.dtype | None:
    """The dtype of the autocast under which a model computes now: one that its own forward is wrapped in, as
    `accelerate` does for mixed precision, or one that is on; None: neither."""
    device = device_of(model).type
    forward = vars(inner(model)).get("forward")
    while forward is not None:
        for cell in getattr(forward, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                cast = cell.cell_contents
                if isinstance(cast, torch.autocast) and cast.device == device:
                    return cast.fast_dtype if cast._enabled else None
        forward = getattr(forward, "__wrapped__", None)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def weights_version(model: Any) -> int:
    """Changes when weights are written or replaced: through torch or its optimizers, not through `.data`, which nobody
    counts."""
    return _weights(_modules(model))


def _weights(modules: list[Any]) -> int:
    _reshard(modules)
    total, number = 0, numbers.of
    for module in modules:
        for x in module._parameters.values():
            if x is not None:
                total = hash((total, number(x), 0 if x.is_inference() else x._version))
        if module._buffers:
            for x in lasting_buffers(module).values():
                total = hash((total, number(x), 0 if x.is_inference() else x._version))
    return total


def _reshard(modules: list[Any]) -> None:
    """Take back what a forward has gathered of sharded weights: that of the outermost module stays, in other tensors
    each time."""
    for module in _sharded(modules):
        module.reshard()


def _sharded_as(modules: list[Any]) -> tuple[str, ...]:
    """The dtypes in which sharded modules compute, where their policies say that: their weights have others."""
    policies = [module._get_fsdp_state()._mp_policy for module in _sharded(modules)]
    return tuple(sorted({str(x.param_dtype) for x in policies if x.param_dtype is not None}))


def _sharded(modules: list[Any]) -> list[Any]:
    """The modules that FSDP shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who shards a model has imported it
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def lasting_buffers(module: Any) -> dict[str, torch.Tensor]:
    """The buffers of a module that say what it will compute.

    A rotary embedding that depends on the length writes its frequencies in forwards: "longrope" in each one, from
    others of its buffers; "dynamic" where a sequence is long, and where the next one is short it takes the original
    frequencies, which stand in their place here.
    """
    found = {name: x for name, x in module._buffers.items() if x is not None}
    types = vars(module).get("rope_type")
    for layer_type, kind in types.items() if isinstance(types, dict) else (("", types),):
        name, original = (f"{layer_type}_{x}".lstrip("_") for x in ("inv_freq", "original_inv_freq"))
        if kind == "longrope":
            found.pop(name, None)
        elif kind == "dynamic" and name in found and original in found:
            found[name] = found[original]
    return found
