"""Attention through block tables on the device, and the merge of parts: checks, allocates, launches.

Paged attention is vLLM's (Kwon et al., SOSP 2023), for any number of queries per sequence as in Pensieve, section 4.4;
contexts are split over programs and merged by log-sum-exp as in flash-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import forms, launch, reference, tables, tiles
from kvtier.kernels.forms import AttendForm, MergeForm, Variants
from kvtier.kernels.launch import alignment, available
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable, Layout
from kvtier.kernels.tiles import Choice, Kind, Option

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (torch.bool, *DTYPES)


def attend(
    query: torch.Tensor,
    table: AddressTable,
    layout: Layout,
    lengths: torch.Tensor | int,
    params: AttentionParams,
    *,
    cu_queries: torch.Tensor | None = None,
    max_queries: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    parts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over those of its tokens that are in a table's blocks.

    Nothing waits for the device, and nothing is compiled again when a context, a batch or a table grows. No gradients.

    Args:
        query: `[rows, heads, queries, k_dim]`, any strides; or `[total_queries, heads, k_dim]`, those of all rows
            one after the other, with `cu_queries`. In the layout's dtype: fp32, bf16 or fp16.
        table: the blocks; a row for each sequence.
        layout: of each block; as many heads of values as of keys, and `heads` a multiple of it.
        lengths: tokens of each sequence, those of this call included, `[rows]` integers on the query's device, or one
            number for all. What the blocks hold at positions from there on is not read.
        params: scale, masks and biases; tensors on the query's device. `mask` has room for the longest sequence, and
            in a ragged batch for `max_queries` queries, each row's from the first on. Sinks are counted once: in one
            of several calls over parts of the same sequences only.
        cu_queries: `[rows + 1]` int32, where each row's queries begin and end; rows may have none.
        max_queries: with `cu_queries`, the most queries of a row: those beyond are not answered, and what their
            results hold means nothing. None: taken to be all of them.
        out: where to write, `[rows, heads, queries, v_dim]` or `[total_queries, heads, v_dim]`, fp32, bf16 or fp16,
            contiguous in the last dimension; None: a new fp32 tensor.
        lse: the same for `[rows, heads, queries]` or `[total_queries, heads]`, fp32.
        parts: programs that share a sequence, at most 128; None: chosen by the shapes, so that the device is full.
            Each but the only one takes the memory of another fp32 result while the call runs.

    Returns:
        out and lse: natural log of the sum of exp. Zeros and -inf where a query sees nothing.

    Raises:
        MismatchError: shapes, dtypes or devices that do not fit.
    """
    _check(query, table, layout, lengths, params, cu_queries)
    most = _most_queries(query, params, cu_queries, max_queries)
    shape = (*query.shape[:-1], layout.v_dim)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=query.device)
    if lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=query.device)
    if out.shape != shape or out.dtype not in DTYPES or (out.numel() and out.stride(-1) != 1):
        raise MismatchError(f"out is {list(shape)}, contiguous in the last dimension, not {list(out.shape)}.")
    if lse.shape != shape[:-1] or lse.dtype != torch.float32:
        raise MismatchError(f"lse is {list(shape[:-1])} float32, not {list(lse.shape)} {lse.dtype}.")
    if not out.numel():
        return out, lse
    if not available(query.device):
        return tables.attend(
            query, table, layout, lengths, params, cu_queries=cu_queries, max_queries=most, out=out, lse=lse
        )
    variants = _variants_of(layout, query, most)
    form = AttendForm(variants, query, table, lengths, params, cu_queries, max_queries, most, out, lse, parts)
    form.launch(query, table, lengths, params, cu_queries, out, lse)
    return out, lse


class Prepared:
    """`attend` for a caller that repeats it, as each layer does at each step.

    A call like the last one (same shapes, strides, dtypes, device, scale, and the same arguments None) is checked by
    comparing, and launched as that was; any other is checked and prepared as by `attend`. Tables, lengths,
    masks and the contents of all tensors may differ. Not for two threads at a time.

    Args:
        layout: of the blocks.
        dtype: of the results: fp32, bf16 or fp16.
        option: the tile; None: what is chosen for such calls.
    """

    __slots__ = ("_dtype", "_form", "_layout", "_option")

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32, *, option: Option | None = None) -> None:
        self._layout, self._dtype, self._option = layout, dtype, option
        self._form: AttendForm | None = None

    def __call__(
        self,
        query: torch.Tensor,
        table: AddressTable,
        lengths: torch.Tensor | int,
        params: AttentionParams,
        *,
        cu_queries: torch.Tensor | None = None,
        max_queries: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `attend`: out, in the dtype that was given, and lse, both new tensors."""
        form = self._form
        fits = form is not None and form.fits(query, table, lengths, params, cu_queries, max_queries)
        if form is None or not fits:
            return self._prepare(query, table, lengths, params, cu_queries, max_queries)
        out = torch.empty(form.out_shape, dtype=self._dtype, device=query.device)
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=query.device)
        form.launch(query, table, lengths, params, cu_queries, out, lse)
        return out, lse

    def _prepare(
        self,
        query: torch.Tensor,
        table: AddressTable,
        lengths: torch.Tensor | int,
        params: AttentionParams,
        cu_queries: torch.Tensor | None,
        max_queries: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self._layout
        out = torch.empty((*query.shape[:-1], layout.v_dim), dtype=self._dtype, device=query.device)
        if not out.numel() or not available(query.device):
            ragged = {"cu_queries": cu_queries, "max_queries": max_queries}
            return attend(query, table, layout, lengths, params, out=out, **ragged)  # type: ignore[arg-type]
        _check(query, table, layout, lengths, params, cu_queries)
        most = _most_queries(query, params, cu_queries, max_queries)
        if self._option is None:
            variants = _variants_of(layout, query, most)
        else:
            variants = Variants(layout, query.shape[1] // layout.k_heads, self._option)
        lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=query.device)
        form = AttendForm(variants, query, table, lengths, params, cu_queries, max_queries, most, out, lse, None)
        form.launch(query, table, lengths, params, cu_queries, out, lse)
        self._form = form
        return out, lse


def _most_queries(
    query: torch.Tensor, params: AttentionParams, cu_queries: torch.Tensor | None, max_queries: int | None
) -> int:
    """The most queries of a row that are answered."""
    if cu_queries is None:
        return query.shape[2]
    total = query.shape[0]
    most = max(1, min(total, total if max_queries is None else max_queries))
    if params.mask is not None and 1 < params.mask.shape[2] < most:
        raise MismatchError(f"A mask for {params.mask.shape[2]} queries, where a row may have {most}.")
    return most


def _variants_of(layout: Layout, query: torch.Tensor, most: int) -> Variants:
    group = query.shape[1] // layout.k_heads
    return forms.variants_of(layout, query.device, group, tiles.width(most * group))


def choice(layout: Layout, device: torch.device, heads: int, queries: int) -> Choice:
    """The tile that calls with so many query heads, and queries of a row, take."""
    group = heads // layout.k_heads
    return tiles.chosen(Kind(layout, group, tiles.width(queries * group)), device)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint parts of the tokens (log-sum-exp; FlashAttention, flash-decoding).

    Args:
        parts: (out `[..., queries, v_dim]`, lse `[..., queries]` fp32) of each part, all of one shape, dtype, device.
        dtype: of the result; None: that of the parts.
        out: where to write, contiguous in the last dimension and with at most three before it, or contiguous; its
            dtype is that of the result.

    Returns:
        out and lse of all parts together; zeros and -inf where no part saw anything.

    Raises:
        MismatchError: parts that do not fit each other, or `out` that does not fit them.
    """
    first = parts[0][0]
    shape, device = first.shape, first.device
    for x, x_lse in parts:
        if x.shape != shape or x.dtype != first.dtype or x_lse.shape != shape[:-1]:
            raise MismatchError(f"Parts {list(x.shape)} with {list(x_lse.shape)} and {list(shape)} do not fit.")
        if x.device != device or x_lse.device != device:
            raise MismatchError(f"Parts on {x.device} and {device}: bring them together first.")
    if out is None:
        out = torch.empty(shape, dtype=dtype or first.dtype, device=device)
    elif out.shape != shape or out.device != device or (out.numel() and out.stride(-1) != 1):
        raise MismatchError(f"out is {list(shape)}, contiguous in the last dimension, not {list(out.shape)}.")
    elif out.dim() > 4 and not out.is_contiguous():
        raise MismatchError(f"out of {out.dim()} dimensions is contiguous.")
    served = first.dtype in DTYPES and out.dtype in DTYPES and all([x.dtype == torch.float32 for _, x in parts])
    if len(parts) == 1 or not first.numel() or not served or not available(device):
        result, lse = reference.merge(parts)
        return out.copy_(result), lse
    if len(parts) > forms.MOST_SEPARATE:
        some = merge(parts[: forms.MOST_SEPARATE], dtype=torch.float32)
        others = [(x.to(torch.float32), x_lse) for x, x_lse in parts[forms.MOST_SEPARATE :]]
        return merge([some, *others], out=out)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    outs, lses = [x.contiguous() for x, _ in parts], [x.contiguous() for _, x in parts]
    # Separate tensors are parts so many elements from the first one.
    begin, lse_begin, size = outs[0].data_ptr(), lses[0].data_ptr(), first.element_size()
    offsets = [0] * (2 * forms.MOST_SEPARATE - 2)
    align = alignment(outs[0])
    for i, (x, x_lse) in enumerate(zip(outs[1:], lses[1:], strict=True)):
        offsets[2 * i : 2 * i + 2] = (x.data_ptr() - begin) // size, (x_lse.data_ptr() - lse_begin) // 4
        align = min(align, alignment(x))
    given = (first.dtype, align)
    form = MergeForm(device, given, len(parts), None, shape, out.dtype, alignment(out), out.stride(), lse.stride())
    with launch.on(device):
        form.launch(outs[0], lses[0], out, lse, tuple(offsets))
    return out, lse


def _check(
    query: torch.Tensor,
    table: AddressTable,
    layout: Layout,
    lengths: torch.Tensor | int,
    params: AttentionParams,
    cu_queries: torch.Tensor | None,
) -> None:
    shape, rows, device, dtype = query.shape, table.addresses.shape[0], query.device, query.dtype
    if len(shape) != (4 if cu_queries is None else 3) or shape[-1] != layout.k_dim:
        raise MismatchError(
            f"Queries of {layout.k_dim} are [rows, heads, queries, k_dim], or [total, heads, k_dim] with cu_queries, "
            f"not {list(shape)}."
        )
    if dtype != layout.dtype or dtype not in DTYPES:
        raise MismatchError(f"Queries in {dtype} over blocks in {layout.dtype}: fp32, bf16 or fp16, and the same.")
    heads = shape[1]
    if layout.k_heads != layout.v_heads or heads % layout.k_heads:
        raise MismatchError(f"{heads} heads of queries, {layout.k_heads} of keys, {layout.v_heads} of values.")
    if cu_queries is None and shape[0] != rows:
        raise MismatchError(f"{shape[0]} rows of queries, {rows} of the table.")
    mask = params.mask
    if mask is not None:
        b, h, q, tokens = mask.shape if mask.dim() == 4 else (0, 0, 0, 0)
        asked = q if cu_queries is not None else shape[2]
        least = lengths if isinstance(lengths, int) else tokens
        if b not in (1, rows) or h not in (1, heads) or q not in (1, asked) or tokens < least:
            raise MismatchError(f"A mask is [rows or 1, heads or 1, queries or 1, tokens], not {list(mask.shape)}.")
        if mask.dtype not in MASKS:
            raise MismatchError(f"A mask is bool, fp32, bf16 or fp16, not {mask.dtype}.")
    others: tuple[torch.Tensor | None, ...] = (table.addresses, mask)
    for name, x, count in (
        ("cu_queries", cu_queries, rows + 1),
        ("lengths", None if isinstance(lengths, int) else lengths, rows),
        ("first_valid", params.first_valid, rows),
        ("sinks", params.sinks, heads),
        ("slopes", params.slopes, heads),
    ):
        if x is not None:
            if x.shape != (count,) or not x.is_contiguous():
                raise MismatchError(f"{name} is [{count}], contiguous, not {list(x.shape)}.")
            others = (*others, x)
    for x in others:
        if x is not None and x.device != device:
            raise MismatchError(f"Queries are on {device}, something else of the call is on {x.device}.")
