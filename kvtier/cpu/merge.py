"""Parts of an attention result merged by log-sum-exp: for small results, which torch operations would dominate."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from kvtier.cpu.loader import check, library, library_with_gil
from kvtier.errors import KVTierError

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_AXES = 3  # of rows, in src/attention.h
_WORDS = 2 + 2 * _AXES  # of a `kvtier_part`
#: Merging more elements gives the GIL back.
_SHORT = 1 << 16


class _Problem(ctypes.Structure):
    # As in src/attention.h, arrays of three one by one: so they are set sooner.
    _fields_ = (
        ("out_dtype", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        *((f"shape_{i}", ctypes.c_int64) for i in range(_AXES)),
        ("out", ctypes.c_void_p),
        *((f"out_of_{i}", ctypes.c_int64) for i in range(_AXES)),
        ("lse", ctypes.c_void_p),
        *((f"lse_of_{i}", ctypes.c_int64) for i in range(_AXES)),
        ("parts", ctypes.c_void_p),
        ("part_count", ctypes.c_int64),
    )


# At most one merge that is at rest, to be repeated: all layers of a model ask for the same.
_prepared: list[_Merge] = []


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention over the union of disjoint parts of the tokens: `kernels.reference.merge` into given memory.

    Args:
        parts: (out `[..., v_dim]`, lse `[...]`) of each part, both fp32, dim contiguous, at most three leading axes.
        out: the shape of a part's, fp32, bf16 or fp16, dim contiguous; it may be the first part's itself.
        lse: the shape of a part's, fp32: receives the log-sum-exp of all parts; None: it is not returned.

    Returns:
        `out`; zeros where no part saw anything.

    Raises:
        KVTierError: shapes that do not fit each other.
    """
    tensors = [out, *(x for part in parts for x in part)]
    if lse is not None:
        tensors.append(lse)
    # Taken out while it is in use: another thread finds none, and makes its own.
    try:
        call = _prepared.pop()
    except IndexError:
        call = None
    key: list[object] = [len(parts)]
    for x in tensors:
        key += (x.shape, x.stride(), x.dtype, x.is_cpu)
    if call is None or call.key != key:
        call = _Merge(parts, out, lse, key)
    words, problem = call.words, call.problem
    problem.out = out.data_ptr()
    if lse is not None:
        problem.lse = lse.data_ptr()
    at = 0
    for some, weights in parts:
        words[at], words[at + 1] = some.data_ptr(), weights.data_ptr()
        at += _WORDS
    error = call.function(call.reference)
    _prepared.append(call)
    if error:
        check(error)
    return out


class _Merge:
    """Everything but addresses."""

    __slots__ = ("function", "key", "problem", "reference", "words")

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        key: list[object],
    ) -> None:
        shape = out.shape
        pad = _AXES + 1 - len(shape)
        _fit(bool(parts) and 0 <= pad <= _AXES and out.dtype in DTYPES and out.stride(-1) == 1, "out", out)
        words = array("q")
        none = (0,) * pad
        for some, weights in parts:
            _fit(some.shape == shape and some.dtype == torch.float32 and some.stride(-1) == 1, "a part's out", some)
            _fit(weights.shape == shape[:-1] and weights.dtype == torch.float32, "a part's lse", weights)
            words.extend((0, 0, *none, *some.stride()[:-1], *none, *weights.stride()))
        lse_strides: tuple[int, ...] = (0,) * _AXES
        if lse is not None:
            _fit(lse.shape == shape[:-1] and lse.dtype == torch.float32, "lse", lse)
            lse_strides = (*none, *lse.stride())
        sizes = (DTYPES[out.dtype], shape[-1], *(1,) * pad, *shape[:-1])
        strides = (*none, *out.stride()[:-1], 0, *lse_strides)
        self.key = key
        self.words = memoryview(words)
        self.problem = _Problem(*sizes, 0, *strides, words.buffer_info()[0], len(parts))
        self.reference = ctypes.byref(self.problem)
        short = out.numel() * len(parts) <= _SHORT
        self.function = (library_with_gil() if short else library()).kvtier_merge


def _fit(fits: bool, name: str, tensor: torch.Tensor) -> None:
    if not (fits and tensor.is_cpu):
        what = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
        raise KVTierError(f"Merging parts of attention: {name} does not fit the rest; it is {what}.")
