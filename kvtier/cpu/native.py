"""The native library: found, loaded at first use, and called. A call gives the GIL back while it runs."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from pathlib import Path

import torch

from kvtier.cpu import build
from kvtier.cpu.blocks import BlockList as BlockList
from kvtier.cpu.blocks import Shape as Shape
from kvtier.errors import ConfigError, KVTierError
from kvtier.kernels.params import AttentionParams

#: Forces an instruction set ("avx512_bf16", "avx512", "avx2", "portable"), or "none": the torch reference.
VARIABLE = "KVTIER_CPU"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASKS = DTYPES | {torch.bool: 3}
_NONE = -1

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Problem(ctypes.Structure):
    # As in src/attention.h.
    _fields_ = (
        ("dtype", _i32),
        ("out_dtype", _i32),
        ("sequences", _i32),
        ("heads", _i32),
        ("kv_heads", _i32),
        ("queries", _i32),
        ("k_dim", _i32),
        ("v_dim", _i32),
        ("block_size", _i32),
        ("causal", _i32),
        ("window", _i32),
        ("mask_dtype", _i32),
        ("scale", _f32),
        ("softcap", _f32),
        ("query", _pointer),
        ("query_strides", _i64 * 3),
        ("out", _pointer),
        ("out_strides", _i64 * 3),
        ("lse", _pointer),
        ("blocks", _pointer),
        ("indices", _pointer),
        ("begins", _pointer),
        ("lengths", _pointer),
        ("first_valid", _pointer),
        ("mask", _pointer),
        ("mask_strides", _i64 * 3),
        ("sinks", _pointer),
        ("slopes", _pointer),
    )


class Future:
    """The result of `submit`. `wait` for it: it holds on to everything that the threads read and write.

    Any thread may wait, several at once too.
    """

    __slots__ = ("_error", "_job", "_keep", "_lock", "lse", "out")

    def __init__(self, out: torch.Tensor, lse: torch.Tensor | None, keep: object) -> None:
        # Written and cleared by the library: a Ctrl-C between its return and an assignment here would lose the job.
        self._job = _pointer()
        # Waiting frees the job. A signal handler may wait again on the thread that waits.
        self._lock = threading.RLock()
        self._error = 0
        self._keep = keep
        self.out = out
        self.lse = lse

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody waits still
        try:
            return not self._job or bool(library().kvtier_done(self._job))
        finally:
            self._lock.release()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Help with what is left, wait for the rest, and give (out, lse). May be called again."""
        with self._lock:
            if self._job:
                self._error = library().kvtier_wait(ctypes.byref(self._job)) or self._error
                self._keep = None
        _check(self._error)
        return self.out, self.lse

    def __del__(self) -> None:
        # The threads would go on to read what this object keeps alive.
        if self._job:
            library().kvtier_wait(ctypes.byref(self._job))


def attend(
    shape: Shape,
    query: torch.Tensor,
    blocks: BlockList,
    params: AttentionParams,
    *,
    threads: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` over blocks where they lie.

    Args:
        shape: of the blocks.
        query: `[batch, heads, queries, k_dim]`, the last tokens of each sequence.
        blocks: of each sequence; `lengths` are its tokens, and nothing behind them is read.
        params: scale, masks and the like.
        threads: at most so many, the caller's among them.
        out: `[batch, heads, queries, v_dim]`, fp32, bf16 or fp16, dim contiguous; None: new, in the query's dtype.
            Zeros where a query sees nothing.
        lse: `[batch, heads, queries]` fp32, contiguous, filled with the natural log of the sum of exp; -inf where a
            query sees nothing.

    Returns:
        `out`.

    Raises:
        KVTierError: shapes that do not fit each other, or no memory left.
    """
    # Between two calls a model reads all of its weights, so that none of this is in a cache when it runs: what a step
    # repeats from the one before is looked up at once instead of being checked and converted again.
    if not (out is None and lse is None and params.plain and query.stride(-1) == 1):
        return Call(shape, query, blocks, params, out, lse).run(threads)
    key = (shape, query.shape, query.stride(), query.dtype, query.device, params.scale, params.causal, params.window)
    # Taken out while it is in use: another thread finds none, and makes its own.
    found = blocks.prepared.pop(0, None)
    if found is not None and found[0] == key:
        problem = found[1]
        batch, heads, queries, _ = query.shape
        out = query.new_empty((batch, queries, heads, shape.v_dim)).transpose(1, 2)
        problem.query = query.data_ptr()
        problem.out = out.data_ptr()
    else:
        problem, out, _keep = _problem(shape, query, blocks, params, None, None)
    _check(library().kvtier_attend(ctypes.byref(problem), threads))
    blocks.prepared[0] = (key, problem)
    return out


class Call:
    """A call over blocks, checked and converted once, that may be repeated with other numbers in the same tensors.

    Args: as for `attend`.

    Attributes:
        out, lse: what is written.
        blocks: what is read.
    """

    __slots__ = ("_keep", "blocks", "lse", "out", "problem")

    def __init__(
        self,
        shape: Shape,
        query: torch.Tensor,
        blocks: BlockList,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        self.problem, self.out, self._keep = _problem(shape, query, blocks, params, out, lse)
        self.blocks = blocks
        self.lse = lse

    def run(self, threads: int) -> torch.Tensor:
        """Attend now, with up to so many threads, the caller's among them. Returns `out`."""
        _check(library().kvtier_attend(ctypes.byref(self.problem), threads))
        return self.out

    def submit(self, threads: int) -> Future:
        """Attend on threads of the library's own; returns at once. Not again before that future was waited for."""
        future = Future(self.out, self.lse, self)
        _check(library().kvtier_submit(ctypes.byref(self.problem), threads, ctypes.byref(future._job)))
        return future


def submit(
    shape: Shape,
    query: torch.Tensor,
    blocks: BlockList,
    params: AttentionParams,
    *,
    threads: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Future:
    """Like `attend`, on threads of the library's own; returns at once."""
    return Call(shape, query, blocks, params, out, lse).submit(threads)


def _problem(
    shape: Shape,
    query: torch.Tensor,
    blocks: BlockList,
    params: AttentionParams,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[_Problem, torch.Tensor, object]:
    batch, heads, queries, k_dim = query.shape
    _fit(query.dtype == shape.dtype and k_dim == shape.k_dim and batch == blocks.sequences, "query", query)
    if query.stride(3) != 1:
        query = query.contiguous()
    if out is None:
        out = query.new_empty((batch, queries, heads, shape.v_dim)).transpose(1, 2)
    elif out.shape != (batch, heads, queries, shape.v_dim) or out.stride(3) != 1 or out.dtype not in DTYPES:
        _fit(False, "out", out)
    if lse is not None:
        _fit(lse.shape == (batch, heads, queries) and lse.dtype == torch.float32 and lse.is_contiguous(), "lse", lse)
    problem = _Problem(
        DTYPES[shape.dtype],
        DTYPES[out.dtype],
        batch,
        heads,
        shape.kv_heads,
        queries,
        shape.k_dim,
        shape.v_dim,
        shape.block_size,
        params.causal,
        params.window,
        _NONE,
        params.scale,
        params.softcap,
        query.data_ptr(),
        query.stride()[:3],
        out.data_ptr(),
        out.stride()[:3],
        None if lse is None else lse.data_ptr(),
        blocks.blocks.data_ptr(),
        None if blocks.indices is None else blocks.indices.data_ptr(),
        blocks.begins.data_ptr(),
        blocks.lengths.data_ptr(),
    )
    mask = params.mask
    if mask is not None:
        fits = all(n in (1, want) for n, want in zip(mask.shape[:-1], (batch, heads, queries), strict=True))
        wide = not batch or mask.shape[3] >= int(blocks.lengths.max())
        _fit(fits and wide and mask.dtype in MASKS, "mask", mask)
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        problem.mask_dtype = MASKS[mask.dtype]
        problem.mask = mask.data_ptr()
        problem.mask_strides = tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3))
    for name, count, dtype in (
        ("first_valid", batch, torch.int64),
        ("sinks", heads, torch.float32),
        ("slopes", heads, torch.float32),
    ):
        extra = getattr(params, name)
        if extra is not None:
            _fit(extra.shape == (count,) and extra.dtype == dtype and extra.is_contiguous(), name, extra)
            setattr(problem, name, extra.data_ptr())
    return problem, out, (query, mask, params, lse)


def _fit(fits: bool, name: str, tensor: torch.Tensor) -> None:
    # The library is given bare addresses: what it would read or write amiss is noticed here or never.
    if not (fits and tensor.is_cpu):
        what = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
        raise KVTierError(f"Attention on the host: `{name}` does not fit the rest; it is {what}.")


def _check(error: int) -> None:
    if error:
        what = {
            1: "shapes that do not fit each other",
            2: "no memory left",
            3: "it was submitted before this process was forked off",
        }.get(error, f"error {error}")
        raise KVTierError(f"Attention on the host failed: {what}.")


# Loading


@functools.cache
def _load() -> ctypes.CDLL | None:
    forced = os.environ.get(VARIABLE, "")
    if forced == "none":
        return None
    why = None
    # An installed package has no sources that its library could be older than, nor could it be compiled there.
    in_tree = build.SOURCE.is_dir()
    if not build.TARGET.exists():
        why = "it was not compiled"
    else:
        try:
            library = ctypes.CDLL(str(build.TARGET))
        except OSError as error:
            why = f"it cannot be loaded ({error})"
        else:
            library.kvtier_source.restype = ctypes.c_char_p
            if in_tree and library.kvtier_source().decode() != build.digest():
                why = "it was compiled from other sources"
    if why is not None:
        cure = "`python -m kvtier.cpu.build` compiles it." if in_tree else "Install a C++ compiler, then kvtier again."
        if forced:
            raise ConfigError(f"{VARIABLE}={forced} asks for the native kernel, but {why}. {cure}")
        warnings.warn(
            f"kvtier's native kernel is not used: {why}. Attention on the host runs on torch, several times slower. "
            f"{cure} {VARIABLE}=none asks for that, without a warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library.kvtier_done.argtypes = [_pointer]
    library.kvtier_use_team.argtypes = [_pointer]
    library.kvtier_use_team.restype = library.kvtier_shutdown.restype = None
    library.kvtier_instruction_set.restype = ctypes.c_char_p
    if forced and library.kvtier_use_instruction_set(forced.encode()):
        raise ConfigError(f"{VARIABLE}={forced}: this CPU, or this library, does not have it.")
    library.kvtier_use_team(_torch_team())
    return library


def _torch_team() -> int | None:
    """The address of the entry into the OpenMP runtime that torch uses, if that is GNU's."""
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rsplit(" ", 1)[-1]
            if "libgomp" in path.rsplit("/", 1)[-1]:
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, _pointer).value
    except (OSError, AttributeError):
        pass
    return None


def available() -> bool:
    """Whether the native library is there. Warns, once, if it is not. Raises `ConfigError` if it was asked for."""
    return _load() is not None


def library() -> ctypes.CDLL:
    """The loaded library; only where `available()`."""
    found = _load()
    assert found is not None
    return found


def instruction_set() -> str:
    """The one in use."""
    return library().kvtier_instruction_set().decode()


def use_instruction_set(name: str) -> None:
    """Use another one from now on. Raises `ConfigError` where this CPU lacks it."""
    if library().kvtier_use_instruction_set(name.encode()):
        raise ConfigError(f"This CPU, or this library, does not have {name!r}.")
