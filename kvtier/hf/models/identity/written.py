"""`Numbers`: tells tensors apart by what may have been written to them where torch's own count says nothing."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Attributes(dict[str, Any]):
    """The `__dict__` of a tensor that has a number. It is no other tensor's, and ends with its own: a weak reference to
    it is as good as one to the tensor, which `torch.utils.swap_tensors` refuses. That one swaps these with the content.

    A copy of it, and what a pickle of it gives, is a plain one.
    """

    __slots__ = ("__weakref__",)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # `torch.load` allows no call of `dict`


class _Known(NamedTuple):
    """A tensor that has a number.

    Attributes:
        number: its own.
        address: of its data, when it was asked for.
        alive: its attributes. When these end, it takes the number away.
    """

    number: int
    address: int
    alive: weakref.ref[_Attributes]


class Numbers:
    """A number for each tensor at its address. It gets another one when an optimizer has stepped that holds it, or a
    tensor at the same address.

    `torch.Tensor._version` counts writes, but for those of fused optimizers; and a tensor that takes the place of
    another one may have its address and its version. Steps of optimizers that hold none of these tensors change
    nothing: whoever trains one model keeps what is cached of others. Keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._next = itertools.count(1)
        self._hooked = False

    def of(self, x: torch.Tensor) -> int:
        """The number of a tensor. 0 on the meta device, where nothing can be written: `accelerate` makes new ones there
        after every forward."""
        address = x.data_ptr()
        found = self._known.get(id(x))
        if found is not None and found.address == address and found.alive() is x.__dict__:
            return found.number
        return 0 if x.is_meta else self._new(x, address)

    def _new(self, x: torch.Tensor, address: int) -> int:
        if not self._hooked:
            self._hooked = True
            register_optimizer_step_post_hook(self._stepped)
        known, key, attributes = self._known, id(x), _Attributes(x.__dict__)
        made = _Known(next(self._next), address, weakref.ref(attributes, lambda _: known.pop(key, None)))
        x.__dict__ = attributes  # what was there ends, and may take a number away
        known[key] = made
        return made.number

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step of any optimizer in the process."""
        if not self._known:
            return
        written = [x for group in optimizer.param_groups for x in group["params"]]
        # One storage may have several tensors: a detached one, or that of a model that was given the same weights.
        ids, addresses = {id(x) for x in written}, {_address(x) for x in written} - {0}
        for key, each in list(self._known.items()):
            if key in ids or each.address in addresses:
                self._known.pop(key, None)


def _address(x: torch.Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # of a kind without a storage: a step does not fail for it
        return 0


#: Of this process, as its optimizers are.
numbers = Numbers()
