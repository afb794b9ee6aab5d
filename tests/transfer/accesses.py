"""What an operation on the CPU reads and writes, in bytes, and where in the code it is asked for."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.cpu import native

Span = tuple[int, int]  # addresses [start, stop)

_MOST_SPANS = 512
_OWN = (__file__, str(Path(__file__).with_name("stream_model.py")))


class Observer(TorchDispatchMode):
    """Tells of every aten operation what it writes, what it reads and what it is called."""

    def __init__(self, tell: Callable[[list[torch.Tensor], list[torch.Tensor], str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._plans: dict[Any, tuple[list[tuple[int, str, bool]], bool]] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan(func)
        arguments, makes = plan
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, name, write in arguments:
            value = args[i] if i < len(args) else kwargs.get(name)
            if func is torch.ops.aten.index_copy_.default and write:
                # Of its target, only the rows that are named.
                value = [args[0].select(args[1], row) for row in args[2].tolist()]
            (writes if write else reads).extend(_tensors(value))
        if makes:
            writes.extend(_tensors(result))
        if reads or writes:
            self._tell(writes, reads, str(func))
        return result


def _plan(func: Any) -> tuple[list[tuple[int, str, bool]], bool]:
    """(position, name, written?) of the arguments that an operation reads or writes, and whether its results are new
    memory that it writes. Views and allocations do neither."""
    schema = func._schema
    if func._opname.startswith(("empty", "new_empty")) or (
        schema.returns and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    ):
        return [], False
    arguments = [
        (i, x.name, x.alias_info is not None and x.alias_info.is_write)
        for i, x in enumerate(schema.arguments)
        if "Tensor" in str(x.type)
    ]
    return arguments, any(r.alias_info is None for r in schema.returns)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in value if isinstance(x, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def spans_of(x: torch.Tensor) -> list[Span]:
    """The bytes of a tensor, neighbours joined; one span around all if they are many."""
    if not x.numel():
        return []
    size, start = x.element_size(), x.data_ptr()
    dims = sorted((stride * size, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride)
    length = size
    while dims and dims[0][0] <= length:
        stride, n = dims.pop(0)
        length += (n - 1) * stride
    starts = [start]
    for stride, n in dims:
        if len(starts) * n > _MOST_SPANS:
            return [(start, start + length + sum((n - 1) * stride for stride, n in dims))]
        starts = [s + i * stride for i in range(n) for s in starts]
    return [(s, s + length) for s in starts]


def block_spans(sequences: native.Sequences, nbytes: int) -> list[Span]:
    runs = {run for row in range(sequences.rows) for run in sequences.runs(row)}
    starts = {a + i * sequences.block_stride for a, _, count in runs for i in range(count)}
    return [(a, a + nbytes) for a in sorted(starts)]


def call_site() -> str:
    """Where in kvtier, or in a test, this is asked for."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _OWN and ("kvtier" in name or "tests" in name or name.startswith("<mutated")):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
