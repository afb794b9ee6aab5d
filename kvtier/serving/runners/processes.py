"""`Processes`: those that compute with one model, each with its part of the weights (tensor parallelism)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from kvtier.hf.models import generation as of


class Processes:
    """The processes that a model is divided over. A forward of one waits for all others, so all have to compute the
    same steps. Every method but `last` is to be called in all of them, in the same order.

    Args:
        groups: of processes, one along each dimension of the mesh that they are in.
        device: of the model.
    """

    def __init__(self, groups: list[Any], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._last = 0.0

    @classmethod
    def of(cls, model: Any) -> Processes | None:
        """Those of a model; None: it is whole in this process, whatever others there are."""
        mesh = of.mesh_of(model)
        return None if mesh is None else cls(mesh.get_all_groups(), of.device_of(model))

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """The clock of the first process."""

        def read() -> float:
            now = torch.tensor([clock()], dtype=torch.float64, device=self._device)
            for group in self._groups:
                torch.distributed.broadcast(now, group=group, group_src=0)
            self._last = float(now)
            return self._last

        return read

    def last(self) -> float:
        """What the clock said last."""
        return self._last

    def same(self, what: object) -> bool:
        """Whether all have the same, as its `repr` says."""
        number = int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest())
        least = torch.tensor([number, -number], device=self._device)
        for group in self._groups:
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
        return least.tolist() == [number, -number]
