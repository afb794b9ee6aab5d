"""Copies by address on the device: new tokens into blocks, blocks into dense tensors, whole blocks between tiers."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import tables
from kvtier.kernels.launch import Launcher, alignment, available, block_alignment, numbered, on, power_of_two
from kvtier.kernels.tables import AddressTable, Layout

#: Programs that `copy_blocks` takes at most: few fill a link, and leave the device to others.
COPY_PROGRAMS = 64

#: 4-byte words that a program copies at a time: 16 bytes for each of 128 threads, eight times.
_WORDS = 4096
_HOST = torch.device("cpu")
#: What is copied here has no meaning: elements are integers of their size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def append(
    keys: torch.Tensor, values: torch.Tensor, addresses: torch.Tensor, layout: Layout, starts: torch.Tensor | int
) -> None:
    """Write new tokens of all sequences of a layer into their blocks, in one launch.

    Args:
        keys: `[rows, k_heads, tokens, k_dim]`, any strides.
        values: `[rows, v_heads, tokens, v_dim]`, any strides.
        addresses: `[rows, blocks]` int64, multiples of 16: blocks that follow each other in each sequence, with room
            for the tokens. What belongs into a block at address 0 is not written (rows that share a block with one
            that writes it).
        layout: of each block, in the dtype of keys and values.
        starts: `[rows]` integers, or one number for all: tokens before the first new one, counted from the begin of the
            row's first block here.

    Raises:
        MismatchError: shapes, dtypes or devices that do not fit.
    """
    _check(keys, values, layout, addresses)
    AddressTable(addresses)
    if isinstance(starts, torch.Tensor):
        if starts.shape != (keys.shape[0],) or starts.device != keys.device or not starts.is_contiguous():
            raise MismatchError(f"starts is [{keys.shape[0]}] on {keys.device}, not {list(starts.shape)}.")
    elif not 0 <= starts <= addresses.shape[1] * layout.block_size - keys.shape[2]:
        raise MismatchError(f"{keys.shape[2]} tokens from {starts} on do not fit {addresses.shape[1]} blocks.")
    rows, tokens = keys.shape[0], keys.shape[2]
    if not rows * tokens:
        return
    if not available(keys.device):
        tables.append(keys, values, addresses, layout, starts)
        return
    size = 1 if tokens == 1 else 16
    tiles = -(-tokens // size)
    fixed = None if isinstance(starts, int) else starts
    k_at, v_at = keys.stride(), values.stride()
    # All that a program is compiled for.
    align = min(alignment(keys), alignment(values))
    key = (layout, keys.device, size, align, k_at[3], v_at[3], None if fixed is None else fixed.dtype)
    launcher = _appends.get(key)
    if launcher is None:
        constants = _shape(keys, values, layout) | {"TOKENS": size}
        launcher = _appends[key] = Launcher(programs().append, constants, num_warps=1 if size == 1 else 4)
    count = rows * max(layout.k_heads, layout.v_heads) * tiles
    numbers = (starts if fixed is None else 0, tokens, tiles, addresses.stride(0))
    with on(keys.device):
        launcher(count, *_bits(keys, values), addresses, fixed, *numbers, *k_at, *v_at)


#: By layout, device, tokens of a program, alignment, strides within a head and the dtype of `starts`.
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
    size = 32
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
        device: that copies; None: where sources and targets lie. They may lie in page-locked memory of the host
            instead: then they are read while the launch runs, and must stay as they are until it has ended.
        most_programs: that work at the same time. Over a link, few are enough.

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


def _check(keys: torch.Tensor, values: torch.Tensor, layout: Layout, addresses: torch.Tensor) -> None:
    rows = addresses.shape[0]
    for x, heads, dim in ((keys, layout.k_heads, layout.k_dim), (values, layout.v_heads, layout.v_dim)):
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (rows, heads, dim) or x.shape[2] != keys.shape[2]:
            raise MismatchError(f"Keys or values of [{rows}, {heads}, tokens, {dim}] were given as {list(x.shape)}.")
        if x.dtype != layout.dtype or x.element_size() not in _BITS:
            raise MismatchError(f"Keys or values in {x.dtype} for blocks in {layout.dtype}.")
        if x.device != addresses.device:
            raise MismatchError(f"Keys or values on {x.device}, addresses on {addresses.device}.")
