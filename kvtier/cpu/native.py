"""Attention on the host by the native library. A call gives the GIL back while it runs."""

from __future__ import annotations

import ctypes
import itertools
import threading
from array import array
from collections.abc import Sequence

import torch

from kvtier.cpu.append import Appender as Appender
from kvtier.cpu.append import TokenWriter as TokenWriter
from kvtier.cpu.blocks import Sequences as Sequences
from kvtier.cpu.blocks import Shape as Shape
from kvtier.cpu.loader import VARIABLE as VARIABLE
from kvtier.cpu.loader import available as available
from kvtier.cpu.loader import check
from kvtier.cpu.loader import check_environment as check_environment
from kvtier.cpu.loader import instruction_set as instruction_set
from kvtier.cpu.loader import library as library
from kvtier.cpu.loader import serves_prompts as serves_prompts
from kvtier.cpu.loader import torch_team as torch_team
from kvtier.cpu.loader import use_instruction_set as use_instruction_set
from kvtier.cpu.loader import use_prefetch as use_prefetch
from kvtier.cpu.merge import DTYPES as DTYPES
from kvtier.cpu.merge import merge as merge
from kvtier.errors import KVTierError
from kvtier.kernels.params import AttentionParams

MASKS = DTYPES | {torch.bool: 3}
_NONE = -1

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Problem(ctypes.Structure):
    # As in src/attention.h, arrays of strides one by one: so they are set sooner.
    _fields_ = (
        ("dtype", _i32),
        ("out_dtype", _i32),
        ("sequence_count", _i32),
        ("heads", _i32),
        ("kv_heads", _i32),
        ("k_dim", _i32),
        ("v_dim", _i32),
        ("block_size", _i32),
        ("causal", _i32),
        ("window", _i32),
        ("mask_dtype", _i32),
        ("scale", _f32),
        ("softcap", _f32),
        ("block_stride", _i64),
        ("sequences", _pointer),
        ("queries", _pointer),
        ("query", _pointer),
        ("query_of_head", _i64),
        ("query_of_token", _i64),
        ("out", _pointer),
        ("out_of_head", _i64),
        ("out_of_token", _i64),
        ("lse", _pointer),
        ("lse_of_head", _i64),
        ("lse_of_token", _i64),
        ("first_valid", _pointer),
        ("mask", _pointer),
        ("mask_of_row", _i64),
        ("mask_of_head", _i64),
        ("mask_of_query", _i64),
        ("sinks", _pointer),
        ("slopes", _pointer),
    )


class Future:
    """The result of `submit`. `wait` for it: it holds on to everything that the threads read and write.

    Any thread may wait, several at once too.
    """

    __slots__ = ("_error", "_job", "_keep", "_library", "_lock", "_seconds", "lse", "out")

    def __init__(self, out: torch.Tensor, lse: torch.Tensor | None, keep: object) -> None:
        # Written and cleared by the library: a Ctrl-C between its return and an assignment here would lose the job.
        self._job = _pointer()
        self._seconds = ctypes.c_double()
        self._library = library()
        # Waiting frees the job. A signal handler may wait again on the thread that waits.
        self._lock = threading.RLock()
        self._error = 0
        self._keep = keep
        self.out = out
        self.lse = lse

    @property
    def seconds(self) -> float:
        """From the start of the job's first task to the end of its last; 0.0 before `wait` has returned."""
        return self._seconds.value

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread is waiting
        try:
            return not self._job or bool(self._library.kvtier_done(self._job))
        finally:
            self._lock.release()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Help with what is left, wait for the rest, and return (out, lse). May be called again."""
        with self._lock:
            if self._job:
                self._error = self._wait() or self._error
                self._keep = None
        check(self._error)
        return self.out, self.lse

    def _wait(self) -> int:
        return self._library.kvtier_wait(ctypes.byref(self._job), ctypes.byref(self._seconds))

    def __del__(self) -> None:
        # The threads would go on to read what this object keeps alive. Cut short, `__init__` has made no job.
        if getattr(self, "_job", None):
            self._wait()


def attend(
    shape: Shape,
    query: torch.Tensor,
    sequences: Sequences,
    params: AttentionParams,
    *,
    threads: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    cu_queries: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attention of `query` over blocks in host memory.

    Args:
        shape: of the blocks.
        query: `[rows, heads, queries, k_dim]`, the last tokens of each sequence; with `cu_queries`, those of all
            sequences end to end, `[total, heads, k_dim]` or `[1, heads, total, k_dim]`.
        sequences: blocks and lengths; memory behind a length is never read.
        params: scale, masks and the like; queries of a mask count from the first new token of each sequence.
        threads: at most so many, the caller's among them.
        out: the shape of `query` with v_dim, fp32, bf16 or fp16, dim contiguous; None: new, in the query's dtype.
            Zeros where a query sees nothing.
        lse: the shape of `query` without dim, fp32, any strides: receives the natural log of the sum of exp; -inf where
            a query sees nothing.
        cu_queries: `[rows + 1]` ints on the host, where the new tokens of each sequence begin and end; a sequence may
            have none.

    Returns:
        `out`.

    Raises:
        KVTierError: shapes that do not fit each other, or no memory left.
    """
    # Between two calls a model reads all of its weights, so none of this is in a cache when it runs: what a step
    # repeats from the one before is recognised instead of being checked and converted again. The call is taken out
    # while it is in use: another thread finds none, and makes its own.
    try:
        call = sequences.prepared.pop()
    except IndexError:
        call = None
    if call is not None and call._repeats(shape, query, params, out, lse, cu_queries):
        if out is None:
            out = call.new_out(query)
        problem = call.problem
        problem.query = query.data_ptr()
        problem.out = out.data_ptr()
        if lse is not None:
            problem.lse = lse.data_ptr()
        if call._vectors or params.sinks is not None or params.slopes is not None or params.first_valid is not None:
            call._set_vectors(params)
    else:
        call = Call(shape, query, sequences, params, out, lse, cu_queries=cu_queries)
        out = call.out
    error = call.function(call.reference, threads)
    if error:
        check(error)
    if call._repeatable:
        call._keep = call.out = call.lse = None  # the tensors of this turn
        sequences.prepared.append(call)
    return out


class Call:
    """A call over sequences, checked and converted once, that may be repeated with other numbers in the same tensors.

    Args: as for `attend`.

    Attributes:
        shape, query, sequences: what is read.
        out, lse: what is written.
        out_shape, out_strides: of `out`; the strides are None where those of `empty_like(query)` are as good.
        function, reference, problem: of the library, what it is given, and that as a structure.
    """

    __slots__ = (
        *("_cu_queries", "_keep", "_params", "_queries", "_query_shape", "_query_strides", "_repeatable", "_results"),
        *("_vectors", "function", "lse", "out", "out_shape", "out_strides", "problem", "reference", "sequences"),
        "shape",
    )

    def __init__(
        self,
        shape: Shape,
        query: torch.Tensor,
        sequences: Sequences,
        params: AttentionParams,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        cu_queries: Sequence[int] | None = None,
    ) -> None:
        sizes, rows, steps = query.shape, sequences.rows, query.stride()
        packed, dims = cu_queries is not None, len(sizes)
        fits = (dims == 4 and sizes[0] == (1 if packed else rows)) or (packed and dims == 3)
        _fit(fits and query.dtype == shape.dtype in DTYPES and sizes[-1] == shape.k_dim, "query", query)
        tokens = 2 if dims == 4 else 0  # the axis of queries
        first = tokens if packed else 0  # the axis along which sequences follow each other
        heads = sizes[1]
        self.shape, self.sequences, self._params = shape, sequences, params
        self._query_shape, self._query_strides = sizes, steps
        self._repeatable = steps[-1] == 1 and params.mask is None
        if steps[-1] != 1:
            query = query.contiguous()
            steps = query.stride()
        self._results = None if out is None and lse is None else _described(out, lse)
        self.out_shape, self.out_strides = (*sizes[:-1], shape.v_dim), None
        if out is None:
            out = _new_out(query, self.out_shape)
            out_steps = out.stride()
            same = (n == 1 or a == b for n, a, b in zip(sizes, steps, out_steps, strict=True))
            if shape.v_dim != shape.k_dim or not all(same):
                self.out_strides = out_steps  # else `empty_like` gives the same, sooner
        else:
            out_steps = out.stride()
            _fit(out.shape == self.out_shape and out_steps[-1] == 1 and out.dtype in DTYPES, "out", out)
        lse_steps, lse_address = (0,) * dims, None
        if lse is not None:
            _fit(lse.shape == sizes[:-1] and lse.dtype == torch.float32, "lse", lse)
            lse_steps, lse_address = lse.stride(), lse.data_ptr()
        self.out, self.lse = out, lse
        self._cu_queries = None if cu_queries is None else _checked(list(cu_queries), rows, sizes[tokens])
        self._queries = _queries(
            self._cu_queries, rows, sizes[tokens], (steps[first], out_steps[first], lse_steps[first])
        )
        mask = params.mask
        mask_steps: tuple[int, ...] = (0, 0, 0)
        if mask is not None:
            mask, mask_steps = _fitting_mask(mask, sequences, (rows, heads, max(self._queries[::4], default=0)))
        vectors = _vectors(params, rows, heads)
        self._vectors = any(vectors)
        self.problem = _Problem(
            DTYPES[shape.dtype],
            DTYPES[out.dtype],
            rows,
            heads,
            shape.kv_heads,
            shape.k_dim,
            shape.v_dim,
            shape.block_size,
            params.causal,
            params.window,
            _NONE if mask is None else MASKS[mask.dtype],
            params.scale,
            params.softcap,
            sequences.block_stride,
            sequences.address,
            self._queries.buffer_info()[0],
            query.data_ptr(),
            steps[1],
            steps[tokens],
            out.data_ptr(),
            out_steps[1],
            out_steps[tokens],
            lse_address,
            lse_steps[1],
            lse_steps[tokens],
            vectors[0],
            None if mask is None else mask.data_ptr(),
            *mask_steps,
            *vectors[1:],
        )
        self.reference = ctypes.byref(self.problem)
        self.function = library().kvtier_attend
        self._keep = (query, mask)

    @property
    def query(self) -> torch.Tensor:
        """What attends, with a contiguous dim."""
        return self._keep[0]

    def new_out(self, query: torch.Tensor) -> torch.Tensor:
        """Memory for the result of another query of the same shape and strides, uninitialised."""
        strides = self.out_strides
        return torch.empty_like(query) if strides is None else query.new_empty_strided(self.out_shape, strides)

    def run(self, threads: int) -> torch.Tensor:
        """Attend now, with up to so many threads, the caller's among them. Returns `out`."""
        check(self.function(self.reference, threads))
        return self.out

    def was_for(self, query: torch.Tensor, params: AttentionParams) -> bool:
        """Whether it was made with these, with nothing but addresses to be set for the next one like it."""
        return (
            query.shape == self._query_shape
            and query.stride() == self._query_strides
            and params is self._params
            and self._results is None
            and self._cu_queries is None
            and not self._vectors
        )

    def submit(self, threads: int) -> Future:
        """Attend on threads of the library's own; returns at once. Not again before that future was waited for."""
        future = Future(self.out, self.lse, self)
        check(library().kvtier_submit(self.reference, threads, ctypes.byref(future._job)))
        return future

    def _repeats(
        self,
        shape: Shape,
        query: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        cu_queries: Sequence[int] | None,
    ) -> bool:
        """Whether a call with these is the same but for the addresses of its tensors."""
        mine = self._params
        return (
            query.shape == self._query_shape
            and query.stride() == self._query_strides
            and query.dtype is shape.dtype
            and query.is_cpu
            and (shape is self.shape or shape == self.shape)
            and (params is mine or _same_numbers(params, mine))
            and (cu_queries is None) is (self._cu_queries is None)
            and (cu_queries is None or list(cu_queries) == self._cu_queries)
            and (None if out is None and lse is None else _described(out, lse)) == self._results
        )

    def _set_vectors(self, params: AttentionParams) -> None:
        problem, found = self.problem, _vectors(params, self.sequences.rows, self._query_shape[1])
        problem.first_valid, problem.sinks, problem.slopes = found
        self._vectors = any(found)


def submit(
    shape: Shape,
    query: torch.Tensor,
    sequences: Sequences,
    params: AttentionParams,
    *,
    threads: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    cu_queries: Sequence[int] | None = None,
) -> Future:
    """Like `attend`, on threads of the library's own; returns at once."""
    return Call(shape, query, sequences, params, out, lse, cu_queries=cu_queries).submit(threads)


def _same_numbers(a: AttentionParams, b: AttentionParams) -> bool:
    return (
        a.scale == b.scale
        and a.causal == b.causal
        and a.window == b.window
        and a.softcap == b.softcap
        and a.mask is None
        and b.mask is None
    )


def _vectors(params: AttentionParams, rows: int, heads: int) -> tuple[int | None, int | None, int | None]:
    """Addresses of first_valid, sinks and slopes."""
    first_valid, sinks, slopes = params.first_valid, params.sinks, params.slopes
    if first_valid is None and sinks is None and slopes is None:
        return None, None, None
    for name, x, count, dtype in (
        ("first_valid", first_valid, rows, torch.int64),
        ("sinks", sinks, heads, torch.float32),
        ("slopes", slopes, heads, torch.float32),
    ):
        if x is not None:
            _fit(x.shape == (count,) and x.dtype == dtype and x.is_contiguous(), name, x)
    return tuple(None if x is None else x.data_ptr() for x in (first_valid, sinks, slopes))  # type: ignore[return-value]


def _described(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.is_cpu) for x in tensors)


def _new_out(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised, with heads within tokens, as the projection behind attention reads them."""
    if len(shape) == 3:
        return query.new_empty(shape)
    return query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)


def _checked(cu_queries: list[int], rows: int, total: int) -> list[int]:
    steps = (b >= a for a, b in itertools.pairwise(cu_queries))
    if len(cu_queries) != rows + 1 or cu_queries[0] != 0 or cu_queries[-1] != total or not all(steps):
        raise KVTierError(
            f"Attention on the host: `cu_queries` must be {rows + 1} numbers that rise from 0 to {total}; "
            f"they are {cu_queries}."
        )
    return cu_queries


def _queries(cu_queries: list[int] | None, rows: int, count: int, strides: tuple[int, int, int]) -> array[int]:
    """As in src/attention.h: for each row its queries, and where they begin in query, out and lse."""
    words = array("q")
    a, b, c = strides
    for row in range(rows):
        if cu_queries is None:
            words.extend((count, row * a, row * b, row * c))
        else:
            at = cu_queries[row]
            words.extend((cu_queries[row + 1] - at, at * a, at * b, at * c))
    return words


def _fitting_mask(
    mask: torch.Tensor, sequences: Sequences, want: tuple[int, int, int]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The mask with contiguous tokens, and the strides of the other axes."""
    fits = len(mask.shape) == 4 and all(n in (1, size) for n, size in zip(mask.shape, want, strict=False))
    wide = mask.shape[-1] >= max(sequences.lengths, default=0)
    _fit(fits and wide and mask.dtype in MASKS, "mask", mask)
    if mask.stride(3) != 1:
        mask = mask.contiguous()
    return mask, tuple(0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3))


def _fit(fits: bool, name: str, tensor: torch.Tensor) -> None:
    # The library is given bare addresses: a tensor that does not fit is noticed here or never.
    if not (fits and tensor.is_cpu):
        what = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
        raise KVTierError(f"Attention on the host: `{name}` does not fit the rest; it is {what}.")
