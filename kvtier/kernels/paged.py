"""Attention through block tables on the device, and the merge of parts: which programs, how many, and on what.

Paged attention is vLLM's (Kwon et al., SOSP 2023), for any number of queries per sequence as in Pensieve, section 4.4;
contexts are split over programs and merged by log-sum-exp as in flash-decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import launch, reference, tables, tuning
from kvtier.kernels.launch import alignment, available, chunks
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable, Layout

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
    """Attention of the last tokens of each sequence over those of its tokens that lie in a table's blocks.

    Nothing waits for the device, and nothing is compiled again when a context, a batch or a table grows. No gradients.

    Args:
        query: `[rows, heads, queries, k_dim]`, any strides; or `[total_queries, heads, k_dim]`, those of all rows
            one after the other, with `cu_queries`. In the layout's dtype: fp32, bf16 or fp16.
        table: where the blocks lie; a row for each sequence.
        layout: of each block; as many heads of values as of keys, and `heads` a multiple of it.
        lengths: tokens of each sequence, those of this call included, `[rows]` integers on the query's device, or one
            number for all. Tokens at positions from there on do not exist, whatever lies there.
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
    most = shape[2] if cu_queries is None else max(1, min(shape[0], shape[0] if max_queries is None else max_queries))
    if params.mask is not None and 1 < params.mask.shape[2] < most:
        raise MismatchError(f"A mask for {params.mask.shape[2]} queries, where a row may have {most}.")
    if not available(query.device):
        return tables.attend(
            query, table, layout, lengths, params, cu_queries=cu_queries, max_queries=most, out=out, lse=lse
        )
    group = shape[1] // layout.k_heads
    kind = _kind(layout, query.device, group, launch.width(most * group))
    _launch(kind, query, table, layout, lengths, params, cu_queries, most, parts, out, lse)
    return out, lse


def _launch(
    kind: _Kind,
    query: torch.Tensor,
    table: AddressTable,
    layout: Layout,
    lengths: torch.Tensor | int,
    params: AttentionParams,
    cu_queries: torch.Tensor | None,
    most: int,
    parts: int | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """A call that was checked; `most` queries of a row at most."""
    rows, blocks = table.addresses.shape
    ragged = cu_queries is not None
    device, heads, mask = query.device, query.shape[1], params.mask
    group, size = kind.group, kind.rows
    total = query.shape[0] if ragged else rows * most
    tiles = -(-most * group // size)
    if parts is None:
        busy = layout.k_heads * min(rows * tiles, rows + total * group // size)
        parts = launch.parts_of(busy, blocks * layout.block_size, device, kind.programs)
    parts = max(1, min(parts, launch.MOST_PARTS))
    if mask is not None:
        mask = mask.expand(rows, heads, most if mask.shape[2] == 1 else -1, -1)

    # Parts are as the result is, one behind the other, in fp32.
    target, target_lse, out_step, lse_step = out, lse, 0, 0
    if parts > 1:
        target = torch.empty((parts, *out.shape), dtype=torch.float32, device=device)
        target_lse = torch.empty((parts, *lse.shape), dtype=torch.float32, device=device)
        out_step, lse_step = target.stride(0), target_lse.stride(0)
    fixed = None if isinstance(lengths, int) else lengths
    step = query.stride(-1)
    out_align = alignment(target)
    attend = kind.launcher(
        params,
        (target.dtype, out_align, alignment(query), step == 1),
        (fixed, table.counts, table.positions, cu_queries, mask, params.first_valid, params.sinks, params.slopes),
    )
    with launch.on(device):
        attend(
            rows * parts * layout.k_heads * tiles,
            query,
            target,
            target_lse,
            table.addresses,
            table.counts,
            table.positions,
            fixed,
            cu_queries,
            mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
            params.first_valid,
            params.sinks,
            params.slopes,
            lengths if fixed is None else 0,
            most,
            blocks,
            tiles,
            parts,
            *_places(query.stride()[:-1], ragged),
            step,
            out_step,
            *_places(target.stride()[:-1], ragged),
            lse_step,
            *_places(target_lse.stride(), ragged),
            table.addresses.stride(0),
            0 if table.positions is None else table.positions.stride(0),
            *((0, 0, 0, 0) if mask is None else mask.stride()),
            params.scale,
            float(params.softcap),
            params.window,
        )
        if parts > 1:
            _merge(target, target_lse, out_step, lse_step, out_align, parts, out, lse)


class _Kind:
    """Calls over blocks of one layout on one device, of queries that take the same tile, and what was compiled.

    Attributes:
        group: query heads of a KV head.
        rows: (query, head of a group) rows of a program.
        programs: for each multiprocessor, about, where few tiles share a context.
    """

    __slots__ = ("_constants", "_launchers", "_options", "group", "programs", "rows")

    def __init__(self, layout: Layout, group: int, option: tuning.Option) -> None:
        config = option.tile
        self.group, self.rows, self.programs = group, config.rows, option.programs
        k_main, k_rest = chunks(layout.k_dim)
        v_main, v_rest = chunks(layout.v_dim)
        self._constants: dict[str, Any] = {
            **{"KV_HEADS": layout.k_heads, "GROUP": group, "SIZE": layout.block_size, "VALUES": layout.k_numel},
            **{"K_DIM": layout.k_dim, "K_MAIN": k_main, "K_REST": k_rest},
            **{"V_DIM": layout.v_dim, "V_MAIN": v_main, "V_REST": v_rest},
            **launch.block_alignment(layout),
            **{"FEW": config.few, "ROWS": config.rows, "TOKENS": config.tokens},
        }
        self._options = {"num_warps": config.warps, "num_stages": config.stages}
        self._launchers: dict[tuple[Any, ...], launch.Launcher] = {}

    def launcher(
        self,
        params: AttentionParams,
        given: tuple[torch.dtype, int, int, bool],
        optional: tuple[torch.Tensor | None, ...],
    ) -> launch.Launcher:
        """For such a call: all that a program is compiled for beside what this kind has in common.

        Args:
            given: dtype and alignment of the result, alignment of the query, whether it lies as `step` 1.
            optional: all arguments that may be None.
        """
        kinds = [None if x is None else x.dtype for x in optional]
        key = (*given, params.causal, params.window > 0, params.softcap > 0, *kinds)
        found = self._launchers.get(key)
        if found is None:
            constants = self._constants | {
                **{"O_ALIGN": given[1], "Q_ALIGN": given[2]},
                **{"CAUSAL": params.causal, "WINDOW": params.window > 0, "CAP": params.softcap > 0},
                "ADDED": params.mask is not None and params.mask.dtype != torch.bool,
            }
            found = self._launchers[key] = launch.Launcher(programs().attend, constants, **self._options)
        return found


def _kind(layout: Layout, device: torch.device, group: int, width: int) -> _Kind:
    key = (layout, device, group, width)
    found = _kinds.get(key)
    if found is None:
        option = tuning.chosen(layout, device, group, width, _prepare).option
        found = _kinds[key] = _Kind(layout, group, option)
    return found


_kinds: dict[tuple[Any, ...], _Kind] = {}


def choice(layout: Layout, device: torch.device, heads: int, queries: int) -> tuning.Choice:
    """The tile that calls with so many query heads, and queries of a row, take; measured, if it has to be."""
    group = heads // layout.k_heads
    return tuning.chosen(layout, device, group, launch.width(queries * group), _prepare)


def _prepare(trial: tuning.Trial, option: tuning.Option) -> Callable[[], object]:
    """The call of a trial with that tile."""
    _, heads, queries, _ = trial.query.shape
    kind = _Kind(trial.layout, heads // trial.layout.k_heads, option)
    out = torch.empty((1, heads, queries, trial.layout.v_dim), dtype=torch.float32, device=trial.query.device)
    lse = torch.empty((1, heads, queries), dtype=torch.float32, device=trial.query.device)
    given = (trial.query, trial.table, trial.layout, trial.length, trial.params, None, queries, None, out, lse)
    return functools.partial(_launch, kind, *given)


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
    first, first_lse = parts[0]
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
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    merged, merged_lse = first.contiguous(), first_lse.contiguous()
    with launch.on(device):
        for n, (x, x_lse) in enumerate(parts[1:], 2):
            last = n == len(parts)
            target = out if last else torch.empty(shape, dtype=torch.float32, device=device)
            target_lse = lse if last else torch.empty_like(lse)
            x, x_lse = x.to(merged.dtype).contiguous(), x_lse.contiguous()
            # Two tensors are two parts that lie so far from each other.
            step = (x.data_ptr() - merged.data_ptr()) // x.element_size()
            lse_step = (x_lse.data_ptr() - merged_lse.data_ptr()) // 4
            align = min(alignment(merged), alignment(x))
            _merge(merged, merged_lse, step, lse_step, align, 2, target, target_lse)
            merged, merged_lse = target, target_lse
    return out, lse


def _merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out_step: int,
    lse_step: int,
    align: int,
    parts: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge contiguous parts that begin `out_step` and `lse_step` elements apart, rows at multiples of `align`."""
    if out.dim() > 4:
        out, lse = out.flatten(0, -2), lse.flatten()
    missing, v_dim = 4 - out.dim(), out.shape[-1]
    first, second, third = (1,) * missing + out.shape[:-1]
    few = parts == 2
    key = (out.device, outs.dtype, out.dtype, align, alignment(out), v_dim, few)
    found = _merges.get(key)
    if found is None:
        columns = min(128, launch.power_of_two(v_dim))
        constants = {
            **{"V_DIM": v_dim, "ALIGN": align, "O_ALIGN": alignment(out), "COLUMNS": columns},
            # All that are read at a time are under way together: many take two rounds at most.
            **{"MOST": 2 if few else launch.MOST_PARTS, "STEP": 2 if few else 64},
        }
        program = launch.Launcher(programs().merge, constants, num_warps=1 if few else 8)
        found = _merges[key] = program, -(-v_dim // columns)
    merge, pieces = found
    numbers = (parts, out_step, lse_step, second, third)
    none = (0,) * missing
    places = (*none, *out.stride()[:-1], *none, *lse.stride())
    merge(first * second * third * pieces, outs, lses, out, lse, *numbers, *places)


#: By device, dtypes, alignments, `v_dim`, and whether two parts are merged; with the programs for a row.
_merges: dict[tuple[Any, ...], tuple[launch.Launcher, int]] = {}


def programs() -> Any:
    """The Triton programs; imported at the first launch."""
    from kvtier.kernels import programs

    return programs


def _places(strides: tuple[int, ...], ragged: bool) -> tuple[int, ...]:
    """Of rows, heads and queries, from strides whose last are theirs."""
    return (0, strides[-1], strides[-2]) if ragged else strides[-3:]


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
