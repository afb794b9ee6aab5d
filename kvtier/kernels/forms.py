"""The launches of paged attention and of merges: compiled variants, numbers of programs, arguments.

A form is what calls of the same shapes have in common. It is computed for a call that was checked, and launches that
call and all others of the form: a decode step repeats each layer's call with other tensors of the same shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtier.kernels import launch, tiles
from kvtier.kernels.launch import Launcher, alignment, device_index, factor
from kvtier.kernels.params import AttentionParams
from kvtier.kernels.tables import AddressTable, Layout
from kvtier.kernels.tiles import Kind, Option

#: Separate tensors that one launch merges at most.
MOST_SEPARATE = 4


def programs() -> Any:
    """The Triton programs; imported at the first launch."""
    from kvtier.kernels import programs

    return programs


# Attention


class Variants:
    """The attention program as it is compiled for calls of one kind on one device.

    Attributes:
        layout: of the blocks.
        group: query heads of a KV head.
        rows: (query, head of a group) rows of a program.
        programs: for each multiprocessor, about, where contexts are split.
    """

    __slots__ = ("_constants", "_launchers", "_options", "group", "layout", "programs", "rows")

    def __init__(self, layout: Layout, group: int, option: Option) -> None:
        tile = option.tile
        self.layout, self.group, self.rows, self.programs = layout, group, tile.rows, option.programs
        k_main, k_rest = tiles.chunks(layout.k_dim)
        v_main, v_rest = tiles.chunks(layout.v_dim)
        self._constants: dict[str, Any] = {
            **{"KV_HEADS": layout.k_heads, "GROUP": group, "SIZE": layout.block_size, "VALUES": layout.k_numel},
            **{"K_DIM": layout.k_dim, "K_MAIN": k_main, "K_REST": k_rest},
            **{"V_DIM": layout.v_dim, "V_MAIN": v_main, "V_REST": v_rest},
            **launch.block_alignment(layout),
            **{"LOW_QUERY": tile.low_query, "ROWS": tile.rows, "TOKENS": tile.tokens},
        }
        self._options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def launcher(self, key: tuple[Any, ...]) -> Launcher:
        """The launcher for calls that share `key`: all that a program is compiled for, beyond what the kind says.

        Args:
            key: dtype and alignment of what the program writes; alignment of the query, and whether it is contiguous in
                the last dimension; whether there are a causal limit, a window and a softcap; the dtypes of `counts`,
                `positions`, `lengths`, `cu_queries`, `mask`, `first_valid`, `sinks` and `slopes`, None for what there
                is not.
        """
        found = self._launchers.get(key)
        if found is None:
            _, out_align, query_align, query_rows, causal, window, softcap, *dtypes = key
            constants = self._constants | {
                **{"O_ALIGN": out_align, "Q_ALIGN": query_align, "Q_ROWS": query_rows},
                **{"CAUSAL": causal, "WINDOW": window, "CAP": softcap},
                "ADDED": dtypes[4] not in (None, torch.bool),
            }
            found = self._launchers[key] = Launcher(programs().attend, constants, **self._options)
        return found


#: By layout, device, group and width.
_variants: dict[tuple[Any, ...], Variants] = {}


def variants_of(layout: Layout, device: torch.device, group: int, width: int) -> Variants:
    """For calls of a kind, with the tile that was chosen for them."""
    key = (layout, device, group, width)
    found = _variants.get(key)
    if found is None:
        option = tiles.chosen(Kind(layout, group, width), device).option
        found = _variants[key] = Variants(layout, group, option)
    return found


class AttendForm:
    """Calls of attention of one form; see the module. The call that it is computed for was checked.

    Args:
        variants: for such calls.
        query, table, lengths, params, cu_queries, max_queries, out, lse, parts: of the call; see `paged.attend`.
        most: the most queries of a row.

    Attributes:
        out_shape, lse_shape: of the results.
    """

    __slots__ = (
        *("_bare", "_blocks", "_busy", "_count", "_cu_queries", "_device", "_dtypes", "_fixed_parts", "_heads"),
        *("_index", "_launcher", "_lse_at", "_max_queries", "_merge", "_most", "_numbers", "_out", "_params"),
        *("_query", "_query_dtype", "_query_at", "_query_key", "_rows", "_scratch", "_table", "_tail", "_tiles"),
        *("_variants", "lse_shape", "out_shape"),
    )

    def __init__(
        self,
        variants: Variants,
        query: torch.Tensor,
        table: AddressTable,
        lengths: torch.Tensor | int,
        params: AttentionParams,
        cu_queries: torch.Tensor | None,
        max_queries: int | None,
        most: int,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: int | None,
    ) -> None:
        group, size = variants.group, variants.rows
        rows, tiles = table.form[1], -(-most * group // size)
        total = rows * most if cu_queries is None else query.shape[0]
        self._variants, self._fixed_parts, self._blocks = variants, parts, -1
        self._device, self._index = query.device, device_index(query.device)
        self._rows, self._heads, self._most, self._tiles = rows, query.shape[1], most, tiles
        self._busy = variants.layout.k_heads * min(rows * tiles, rows + total * group // size)

        # What later calls are compared with.
        align, strides = alignment(query), query.stride()
        self._query, self._query_dtype, self._query_at = (query.shape, strides), query.dtype, query.data_ptr() % 16
        self._table, self._cu_queries, self._max_queries = table.form, cu_queries is not None, max_queries
        self._numbers = (params.scale, float(params.softcap), params.window, params.causal)
        self._params = params if params.mask is None else None  # masks are not kept alive
        given = (lengths, cu_queries, params.mask, params.first_valid, params.sinks, params.slopes)
        self._dtypes = tuple([x.dtype if isinstance(x, torch.Tensor) else None for x in given])
        self._bare = not any(self._dtypes)

        self._query_key = (align, strides[-1] == 1)
        self.out_shape, self.lse_shape = out.shape, lse.shape
        self._out = (out.dtype, alignment(out), out.stride(), lse.stride())
        self._divide(table.blocks)

    def fits(
        self,
        query: torch.Tensor,
        table: AddressTable,
        lengths: torch.Tensor | int,
        params: AttentionParams,
        cu_queries: torch.Tensor | None,
        max_queries: int | None,
    ) -> bool:
        """Whether a call is of this form, and in order. If not, a full check finds what is wrong, if anything is."""
        if (
            query.dtype is not self._query_dtype
            or query.data_ptr() % 16 != self._query_at
            or table.form != self._table
            or (query.shape, query.stride()) != self._query
            or query.device != self._device
        ):
            return False
        if isinstance(lengths, int):
            if self._dtypes[0] is not None:
                return False
        elif not self._is_list(lengths, self._dtypes[0], self._rows):
            return False
        if cu_queries is None:
            if self._cu_queries:
                return False
        elif max_queries != self._max_queries or not self._is_list(cu_queries, self._dtypes[1], self._rows + 1):
            return False
        return params is self._params or self._has(params, lengths)

    def _has(self, params: AttentionParams, lengths: torch.Tensor | int) -> bool:
        mask = params.mask
        return (
            (params.scale, params.softcap, params.window, params.causal) == self._numbers
            and (mask is None if self._dtypes[2] is None else mask is not None and self._is_mask(mask, lengths))
            and self._is_list(params.first_valid, self._dtypes[3], self._rows)
            and self._is_list(params.sinks, self._dtypes[4], self._heads)
            and self._is_list(params.slopes, self._dtypes[5], self._heads)
        )

    def _is_list(self, x: torch.Tensor | None, dtype: torch.dtype | None, count: int) -> bool:
        if x is None or dtype is None:
            return x is None and dtype is None
        return x.dtype is dtype and x.shape == (count,) and x.device == self._device and x.is_contiguous()

    def _is_mask(self, mask: torch.Tensor, lengths: torch.Tensor | int) -> bool:
        # Of a ragged batch, masks are left to the full check.
        if mask.dtype is not self._dtypes[2] or mask.device != self._device or mask.dim() != 4 or self._cu_queries:
            return False
        b, h, q, tokens = mask.shape
        fits = b in (1, self._rows) and h in (1, self._heads) and q in (1, self._most)
        return fits and (not isinstance(lengths, int) or tokens >= lengths)

    def launch(
        self,
        query: torch.Tensor,
        table: AddressTable,
        lengths: torch.Tensor | int,
        params: AttentionParams,
        cu_queries: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Launch a call of this form, with `out` and `lse` laid out as in the first one."""
        if self._index is not None and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(query, table, lengths, params, cu_queries, out, lse)
            return
        if table.blocks != self._blocks:
            self._divide(table.blocks)
        merge, launcher = self._merge, self._launcher
        # Parts of the result, one after the other, in fp32; then parts of the lse.
        scratch = None if merge is None else torch.empty(self._scratch, dtype=torch.float32, device=self._device)
        length, vector = (lengths, None) if isinstance(lengths, int) else (0, lengths)
        mask = params.mask
        pointers: tuple[Any, ...] = _NONE
        if launcher.ready:
            if not self._bare:
                given = (vector, cu_queries, mask, params.first_valid, params.sinks, params.slopes)
                pointers = tuple([None if x is None else x.data_ptr() for x in given])
            if scratch is None:
                pointers = (query.data_ptr(), out.data_ptr(), lse.data_ptr(), *table.pointers, *pointers)
            else:
                at = scratch.data_ptr()
                pointers = (query.data_ptr(), at, at + 4 * self._lse_at, *table.pointers, *pointers)
        else:
            target, target_lse = (out, lse) if scratch is None else (scratch, scratch[self._lse_at :])
            mask_bytes = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
            pointers = (query, target, target_lse, table.addresses, table.counts, table.positions)
            pointers += (vector, cu_queries, mask_bytes, params.first_valid, params.sinks, params.slopes)
        strides = _NO_STRIDES if mask is None else _broadcast_strides(mask)
        launcher(self._count, *pointers, length, table.blocks, *table.strides, *strides, *self._tail)
        if merge is not None and scratch is not None:
            merge.launch(scratch, self._lse_at, out, lse)

    def _divide(self, blocks: int) -> None:
        """Find the program, the number of programs and their constant arguments, for tables of so many blocks."""
        variants, ragged = self._variants, self._cu_queries
        layout, parts = variants.layout, self._fixed_parts
        if parts is None:
            parts = launch.parts_of(self._busy, blocks * layout.block_size, self._device, variants.programs)
        parts = max(1, min(parts, launch.MOST_PARTS))
        dtype, align, out_strides, lse_strides = self._out
        self._merge, out_step, lse_step = None, 0, 0
        if parts > 1:
            out_step, lse_step = self.out_shape.numel(), self.lse_shape.numel()
            self._scratch, self._lse_at = parts * (out_step + lse_step), parts * out_step
            given = (torch.float32, factor(4 * layout.v_dim))
            self._merge = MergeForm(self._device, given, parts, (out_step, lse_step), self.out_shape, *self._out)
            dtype, align = given
            out_strides, lse_strides = _contiguous(self.out_shape), _contiguous(self.lse_shape)
        _, softcap, window, causal = self._numbers
        counts, positions = (torch.int32 if there else None for there in self._table[2:])
        flags = (causal, window > 0, softcap > 0)
        self._launcher = variants.launcher((dtype, align, *self._query_key, *flags, counts, positions, *self._dtypes))
        query_strides = self._query[1]
        self._tail = (
            *(self._most, self._tiles, parts, *_places(query_strides[:-1], ragged), query_strides[-1]),
            *(out_step, *_places(out_strides[:-1], ragged), lse_step, *_places(lse_strides, ragged)),
            *self._numbers[:3],
        )
        self._count = self._rows * parts * layout.k_heads * self._tiles
        self._blocks = blocks


_NONE = (None,) * 6
_NO_STRIDES = (0,) * 4


def _places(strides: tuple[int, ...], ragged: bool) -> tuple[int, ...]:
    """Of rows, heads and queries, from strides whose last are theirs."""
    return (0, strides[-1], strides[-2]) if ragged else strides[-3:]


def _broadcast_strides(mask: torch.Tensor) -> list[int]:
    """Strides of a mask as it is broadcast to all rows, heads and queries."""
    return [0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return tuple(strides)


# Merges


class MergeForm:
    """Merges of parts of one form: of parts in one tensor, the same number of elements apart, or of separate tensors.

    Args:
        device: of everything.
        given: dtype of the parts, and what their rows begin at a multiple of, in bytes.
        parts: how many; of separate tensors at most `MOST_SEPARATE`.
        steps: elements between the begins of the parts of the result, and of the lse; None: separate tensors.
        shape: of the result.
        dtype, align, strides: of the result; contiguous in the last dimension, and where it has more than four, in all.
        lse_strides: of the merged lse.
    """

    __slots__ = ("_count", "_launcher", "_parts", "_steps", "_tail")

    def __init__(
        self,
        device: torch.device,
        given: tuple[torch.dtype, int],
        parts: int,
        steps: tuple[int, int] | None,
        shape: torch.Size,
        dtype: torch.dtype,
        align: int,
        strides: tuple[int, ...],
        lse_strides: tuple[int, ...],
    ) -> None:
        v_dim, rows = shape[-1], tuple(shape[:-1])
        if len(rows) > 3:
            rows, strides, lse_strides = (shape.numel() // v_dim,), (v_dim, 1), (1,)
        missing, pair, separate = 3 - len(rows), parts == 2, steps is None and parts > 2
        columns = min(128, launch.power_of_two(v_dim))
        key = (device, *given, dtype, align, v_dim, pair, separate)
        found = _merges.get(key)
        if found is None:
            # All that are read at a time are under way together: many parts take two rounds at most.
            most, step = (2, 2) if pair else (MOST_SEPARATE, MOST_SEPARATE) if separate else (launch.MOST_PARTS, 64)
            constants = {
                **{"V_DIM": v_dim, "ALIGN": given[1], "O_ALIGN": align, "COLUMNS": columns},
                **{"MOST": most, "STEP": step, "SEPARATE": separate},
            }
            found = _merges[key] = Launcher(programs().merge, constants, num_warps=1 if pair or separate else 8)
        first, second, third = (1,) * missing + rows
        none = (0,) * missing
        self._launcher, self._parts = found, parts
        self._steps = None if steps is None else (*steps, 0, 0, 0, 0)
        self._count = first * second * third * -(-v_dim // columns)
        self._tail = (second, third, *none, *strides[:-1], *none, *lse_strides)

    def launch(
        self,
        outs: torch.Tensor,
        lses: torch.Tensor | int,
        out: torch.Tensor,
        lse: torch.Tensor,
        offsets: tuple[int, ...] | None = None,
    ) -> None:
        """Launch a merge of this form.

        Args:
            outs: that of the first part.
            lses: the same, or elements from `outs` to it.
            out, lse: where to write.
            offsets: of separate tensors, (elements from the first part's out to it, the same of lse) for the second,
                third and fourth part, zeros for those that are not there.
        """
        pointers: tuple[Any, ...]
        if self._launcher.ready:
            at = outs.data_ptr()
            lse_at = at + lses * outs.element_size() if isinstance(lses, int) else lses.data_ptr()
            pointers = (at, lse_at, out.data_ptr(), lse.data_ptr())
        else:
            pointers = (outs, outs[lses:] if isinstance(lses, int) else lses, out, lse)
        self._launcher(self._count, *pointers, self._parts, *(self._steps or offsets or ()), *self._tail)


#: By device, dtypes, alignments, `v_dim`, whether there are two parts, and whether more are separate tensors.
_merges: dict[tuple[Any, ...], Launcher] = {}
