"""A model on two devices, as `device_map` makes it, where there is none: tensors on the second one are on the CPU and
say that they are on `cpu:1`, and what is computed of them is there too.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.utils._pytree import tree_leaves

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)


class OnSecond(torch.Tensor):
    """A tensor on the second device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SECOND

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(x is not OnSecond for x in types):
            return NotImplemented  # views, which answer for themselves
        others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not isinstance(x, OnSecond)]
        if function not in _FROM_ANYWHERE and any(x.dim() and x.numel() for x in others):
            raise RuntimeError(f"{function.__name__}: expected all tensors on one device")
        return super().__torch_function__(function, types, args, kwargs or {})


#: What takes tensors of several devices.
_FROM_ANYWHERE = (torch.Tensor.copy_, torch.Tensor.as_subclass, torch.Tensor.to)


def second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Tensor.to` take a tensor there and back, and torch make tensors there, until the test ends."""
    to = torch.Tensor.to

    def to_device(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        given = options.get("device", args[0] if args else None)
        if isinstance(given, (str, torch.device)):
            there = torch.device(given) == SECOND
            if there != isinstance(x, OnSecond):
                x = x.as_subclass(OnSecond if there else torch.Tensor)
        return to(x, *args, **options)

    def made(make: Any, *args: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = make(*args, **options)
        return found.as_subclass(OnSecond) if options.get("device") in (SECOND, str(SECOND)) else found

    monkeypatch.setattr(torch.Tensor, "to", to_device)
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        monkeypatch.setattr(torch, name, functools.partial(made, getattr(torch, name)))


def dispatch(model: Any, first: int) -> Any:
    """Have the first layers of a model on the first device and the others on the second, with Accelerate's hooks."""
    second = {x for layer in model.get_decoder().layers[first:] for x in layer.modules()}
    for module in model.modules():
        device = SECOND if module in second else FIRST
        if device == SECOND:
            for held in (module._parameters, module._buffers):
                held.update({name: _there(x) for name, x in held.items() if x is not None})
        add_hook_to_module(module, AlignDevicesHook(device, io_same_device=module is model))
    return model


def _there(x: torch.Tensor) -> torch.Tensor:
    on_second = x.detach().as_subclass(OnSecond)
    return torch.nn.Parameter(on_second, False) if isinstance(x, torch.nn.Parameter) else on_second
