"""Copies by address on the device: new tokens into blocks, blocks into dense tensors, whole blocks between tiers."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import tables
from kvtier.kernels.launch import (
    Launcher,
    alignment,
    available,
    block_alignment,
    device_index,
    numbered,
    on,
    power_of_two,
)
from kvtier.kernels.tables import AddressTable, Layout

#: Programs that `copy_blocks` takes at most: so many fill a link, and leave the device to others.
COPY_PROGRAMS = 64

#: 4-byte words that a program copies at a time: 16 bytes for each of 128 threads, eight times.
_WORDS = 4096
#: Bytes of keys or values that a program of `gather` holds in registers: of more, it would spill some.
_TILE_BYTES = 32 * 2**10
_HOST = torch.device("cpu")
#: What is copied here has no meaning: elements are integers of their size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    addresses: torch.Tensor,
    layout: Layout,
    starts: torch.Tensor | int,
    *,
    cu_tokens: torch.Tensor | None = None,
) -> None:
    """Write new tokens of all sequences of a layer into their blocks, in one launch.

    Args:
        keys: `[rows, k_heads, tokens, k_dim]`, any strides; or `[total_tokens, k_heads, k_dim]`, the tokens of all rows
            one after the other, with `cu_tokens`.
        values: the same of `v_heads` and `v_dim`.
        addresses: `[rows, blocks]` int64, multiples of 16: blocks that follow each other in each sequence, with room
            for the tokens. What belongs into a block at address 0 is not written (rows that share a block with one
            that writes it).
        layout: of each block, in the dtype of keys and values.
        starts: `[rows]` integers, or one number for all: tokens before the first new one, counted from the begin of the
            row's first block here.
        cu_tokens: `[rows + 1]` int32, where each row's tokens begin and end, from 0 on; rows may have none. Tokens from
            the last end on belong to no row, and are not written.

    Raises:
        MismatchError: shapes, dtypes or devices that do not fit.
    """
    _check_append(keys, values, addresses, layout, starts, cu_tokens)
    if not keys.shape[0] * keys.shape[-2] or not addresses.shape[0]:
        return
    if not available(keys.device):
        tables.append(keys, values, addresses, layout, starts, cu_tokens=cu_tokens)
        return
    AppendForm(keys, values, addresses, layout, starts, cu_tokens).launch(keys, values, addresses, starts, cu_tokens)


class PreparedAppend:
    """`append` for a caller that repeats it, as each layer does at each step.

    A call like the last one (same shapes, strides, dtypes and device) is checked by comparing, and launched as that
    was; any other is checked and prepared as by `append`. Not for two threads at a time.

    Args:
        layout: of the blocks.
    """

    __slots__ = ("_form", "_layout")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._form: AppendForm | None = None

    def __call__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        addresses: torch.Tensor,
        starts: torch.Tensor | int,
        *,
        cu_tokens: torch.Tensor | None = None,
    ) -> None:
        """See `append`."""
        form = self._form
        if form is None or not form.fits(keys, values, addresses, starts, cu_tokens):
            _check_append(keys, values, addresses, self._layout, starts, cu_tokens)
            served = keys.numel() and addresses.shape[0] and available(keys.device)
            if not served:
                append(keys, values, addresses, self._layout, starts, cu_tokens=cu_tokens)
                return
            form = self._form = AppendForm(keys, values, addresses, self._layout, starts, cu_tokens)
        form.launch(keys, values, addresses, starts, cu_tokens)


class AppendForm:
    """What the launches of appends of one form have in common; see `PreparedAppend`. The call was checked."""

    __slots__ = (
        *("_addresses", "_count", "_cu_tokens", "_device", "_dtype", "_index", "_keys", "_launcher"),
        *("_at", "_numbers", "_room", "_rows", "_starts", "_values"),
    )

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        addresses: torch.Tensor,
        layout: Layout,
        starts: torch.Tensor | int,
        cu_tokens: torch.Tensor | None,
    ) -> None:
        packed = cu_tokens is not None
        rows, tokens = addresses.shape[0], keys.shape[0 if packed else 2]
        size = 1 if tokens == 1 else 16
        tiles = -(-tokens // size)
        # A packed tensor is one row to the program, which finds the rows of its tokens.
        k_at, v_at = (_row_strides(x) for x in (keys, values))
        align = min(alignment(keys), alignment(values))
        self._starts = None if isinstance(starts, int) else starts.dtype
        # All that a program is compiled for.
        key = (layout, keys.device, size, align, k_at[3], v_at[3], self._starts, packed)
        launcher = _appends.get(key)
        if launcher is None:
            constants = _shape(keys, values, layout) | {"TOKENS": size}
            launcher = _appends[key] = Launcher(programs().append, constants, num_warps=1 if size == 1 else 4)
        self._launcher = launcher
        self._count = (1 if packed else rows) * max(layout.k_heads, layout.v_heads) * tiles
        self._numbers = (addresses.stride(0), rows, tokens, tiles, *k_at, *v_at)
        self._dtype, self._device, self._index = keys.dtype, keys.device, device_index(keys.device)
        self._keys, self._values = (keys.shape, keys.stride()), (values.shape, values.stride())
        self._addresses = (addresses.shape, addresses.stride())
        self._rows, self._cu_tokens = rows, packed
        self._at = keys.data_ptr() % 16, values.data_ptr() % 16
        self._room = addresses.shape[1] * layout.block_size - (0 if packed else tokens)

    def fits(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        addresses: torch.Tensor,
        starts: torch.Tensor | int,
        cu_tokens: torch.Tensor | None,
    ) -> bool:
        """Whether a call is of this form, and in order."""
        if (
            keys.dtype is not self._dtype
            or values.dtype is not self._dtype
            or addresses.dtype is not torch.int64
            or (keys.data_ptr() % 16, values.data_ptr() % 16) != self._at
            or (keys.shape, keys.stride()) != self._keys
            or (values.shape, values.stride()) != self._values
            or (addresses.shape, addresses.stride()) != self._addresses
            or not keys.device == values.device == addresses.device == self._device
        ):
            return False
        if isinstance(starts, int):
            if self._starts is not None or not 0 <= starts <= self._room:
                return False
        elif starts.dtype is not self._starts or not self._is_list(starts, self._rows):
            return False
        if cu_tokens is None:
            return not self._cu_tokens
        return self._cu_tokens and cu_tokens.dtype is torch.int32 and self._is_list(cu_tokens, self._rows + 1)

    def _is_list(self, x: torch.Tensor, count: int) -> bool:
        return x.shape == (count,) and x.device == self._device and x.is_contiguous()

    def launch(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        addresses: torch.Tensor,
        starts: torch.Tensor | int,
        cu_tokens: torch.Tensor | None,
    ) -> None:
        """Launch a call of this form."""
        if self._index is not None and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(keys, values, addresses, starts, cu_tokens)
            return
        start, some = (starts, None) if isinstance(starts, int) else (0, starts)
        if self._launcher.ready:
            where = None if some is None else some.data_ptr()
            ends = None if cu_tokens is None else cu_tokens.data_ptr()
            pointers: tuple[Any, ...] = (keys.data_ptr(), values.data_ptr(), addresses.data_ptr(), where, ends)
        else:
            pointers = (*_bits(keys, values), addresses, some, cu_tokens)
        self._launcher(self._count, *pointers, start, *self._numbers)


#: By layout, device, tokens of a program, alignment, strides within a head, the dtype of `starts`, and whether packed.
_appends: dict[tuple[Any, ...], Launcher] = {}


def gather(table: AddressTable, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write the tokens of a table's blocks to where they stand in their sequences, in one launch.

    Args:
        table: whose blocks. Blocks at address 0 are left out.
        layout: of each block.
        keys: `[rows, k_heads, tokens, k_dim]` to write, any strides; tokens that no block of the table holds keep what
            they are, and tokens of blocks from `tokens` on are left out.
        values: `[rows, v_heads, tokens, v_dim]` to write, any strides.

    Raises:
        MismatchError: shapes, dtypes or devices that do not fit.
    """
    _check(keys, values, layout, table.addresses)
    rows, blocks = table.addresses.shape
    tokens = keys.shape[2]
    if not rows * tokens * blocks:
        return
    if not available(keys.device):
        tables.gather(table, layout, keys, values)
        return
    widest = power_of_two(max(layout.k_dim, layout.v_dim)) * layout.dtype.itemsize
    size = max(1, min(32, _TILE_BYTES // widest))
    tiles = -(-blocks * layout.block_size // size)
    with on(keys.device):
        programs().gather[(rows * max(layout.k_heads, layout.v_heads) * tiles,)](
            *_bits(keys, values),
            table.addresses,
            table.counts,
            table.positions,
            blocks,
            tokens,
            tiles,
            table.addresses.stride(0),
            0 if table.positions is None else table.positions.stride(0),
            *keys.stride(),
            *values.stride(),
            **_shape(keys, values, layout),
            TOKENS=size,
            num_warps=4,
        )


def copy_blocks(
    sources: torch.Tensor,
    targets: torch.Tensor,
    nbytes: int,
    *,
    device: torch.device | None = None,
    most_programs: int = COPY_PROGRAMS,
) -> None:
    """Copy `nbytes` bytes from each source to its target, in one launch, 16 bytes at a time.

    Args:
        sources: `[n]` int64, addresses that the device can read, page-locked memory of the host included; multiples
            of 16.
        targets: `[n]` int64, the same for writing; no target overlaps another, or any source.
        nbytes: a multiple of 16.
        device: that copies; None: that of sources and targets. They may be in page-locked memory of the host instead:
            then they are read while the launch runs, and must stay as they are until it has ended.
        most_programs: that work at the same time.

    Raises:
        MismatchError: shapes, dtypes, devices or sizes that do not fit.
    """
    for x in (sources, targets):
        if x.dim() != 1 or x.dtype != torch.int64 or x.shape != sources.shape or not x.is_contiguous():
            raise MismatchError(f"Sources and targets are [n] int64, not {list(x.shape)} {x.dtype}.")
    device = sources.device if device is None else numbered(device)
    if sources.device != targets.device or sources.device not in (device, _HOST):
        raise MismatchError(f"Sources are on {sources.device}, targets on {targets.device}, for copies by {device}.")
    if nbytes % 16 or nbytes < 0:
        raise MismatchError(f"Blocks of {nbytes} bytes: a multiple of 16 is copied.")
    n = sources.shape[0]
    if not n * nbytes:
        return
    if not available(device):
        tables.copy_blocks(sources, targets, nbytes, device=device)
        return
    chunks = -(-nbytes // (4 * _WORDS))
    count = max(1, min(n * chunks, most_programs))
    launcher = _copies.get(device)
    if launcher is None:
        launcher = _copies[device] = Launcher(programs().copy, {"WORDS": _WORDS}, num_warps=4)
    with on(device):
        launcher(count, sources, targets, n, nbytes // 16, chunks, count)


_copies: dict[torch.device, Launcher] = {}


def programs() -> Any:
    """The Triton programs; imported at the first launch."""
    from kvtier.kernels import copy_programs

    return copy_programs


def _bits(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = _BITS[keys.element_size()]
    return keys.detach().view(bits), values.detach().view(bits)


def _shape(keys: torch.Tensor, values: torch.Tensor, layout: Layout) -> dict[str, int]:
    return {
        "K_HEADS": layout.k_heads,
        "V_HEADS": layout.v_heads,
        "K_DIM": layout.k_dim,
        "K_WIDTH": power_of_two(layout.k_dim),
        "V_DIM": layout.v_dim,
        "V_WIDTH": power_of_two(layout.v_dim),
        "SIZE": layout.block_size,
        "VALUES": layout.k_numel,
        **block_alignment(layout),
        "DENSE_ALIGN": min(alignment(keys), alignment(values)),
    }


def _row_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of rows, heads, tokens and dimensions; of `[tokens, heads, dim]`, the first is 0."""
    if x.dim() == 4:
        return x.stride()
    token, head, dim = x.stride()
    return 0, head, token, dim


def _check_append(
    keys: torch.Tensor,
    values: torch.Tensor,
    addresses: torch.Tensor,
    layout: Layout,
    starts: torch.Tensor | int,
    cu_tokens: torch.Tensor | None,
) -> None:
    if addresses.dim() != 2 or addresses.dtype != torch.int64 or (addresses.numel() and addresses.stride(1) != 1):
        raise MismatchError(f"Addresses are [rows, blocks] int64 with rows contiguous, not {list(addresses.shape)}.")
    rows, blocks = addresses.shape
    _check(keys, values, layout, addresses, packed=cu_tokens is not None)
    if cu_tokens is not None:
        if cu_tokens.shape != (rows + 1,) or cu_tokens.dtype != torch.int32 or not cu_tokens.is_contiguous():
            raise MismatchError(f"cu_tokens is [{rows + 1}] int32, not {list(cu_tokens.shape)} {cu_tokens.dtype}.")
        if cu_tokens.device != keys.device:
            raise MismatchError(f"cu_tokens on {cu_tokens.device}, keys on {keys.device}.")
    tokens = 0 if cu_tokens is not None else keys.shape[2]
    if isinstance(starts, torch.Tensor):
        if starts.shape != (rows,) or starts.device != keys.device or not starts.is_contiguous():
            raise MismatchError(f"starts is [{rows}] on {keys.device}, not {list(starts.shape)}.")
    elif not 0 <= starts <= blocks * layout.block_size - tokens:
        raise MismatchError(f"{tokens} tokens from {starts} on do not fit {blocks} blocks.")


def _check(
    keys: torch.Tensor, values: torch.Tensor, layout: Layout, addresses: torch.Tensor, *, packed: bool = False
) -> None:
    rows = addresses.shape[0]
    for x, heads, dim in ((keys, layout.k_heads, layout.k_dim), (values, layout.v_heads, layout.v_dim)):
        shape = x.shape
        if packed:
            fits, form = len(shape) == 3 and shape[1:] == (heads, dim) and shape[0] == keys.shape[0], "tokens, {}, {}"
        else:
            fits = len(shape) == 4 and (shape[0], shape[1], shape[3]) == (rows, heads, dim)
            fits, form = fits and shape[2] == keys.shape[2], f"{rows}, {{}}, tokens, {{}}"
        if not fits:
            raise MismatchError(f"Keys or values of [{form.format(heads, dim)}] were given as {list(shape)}.")
        if x.dtype != layout.dtype or x.element_size() not in _BITS:
            raise MismatchError(f"Keys or values in {x.dtype} for blocks in {layout.dtype}.")
        if x.device != addresses.device:
            raise MismatchError(f"Keys or values on {x.device}, addresses on {addresses.device}.")
