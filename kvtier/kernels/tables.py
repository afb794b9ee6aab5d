"""Blocks named by address: the table that kernels read, and in plain torch what the Triton programs do with it.

Every function here has the signature and the results of its namesake in `paged` or `copies`, which document them.
They read addresses on the host, so on a CUDA device they wait for it: they are for machines and tests without Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from kvtier.errors import MismatchError
from kvtier.kernels import reference
from kvtier.kernels.params import AttentionParams


class Layout(Protocol):
    """A block in memory: keys `[k_heads, block_size, k_dim]`, then values `[v_heads, block_size, v_dim]`."""

    @property
    def k_heads(self) -> int: ...
    @property
    def v_heads(self) -> int: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def k_numel(self) -> int:
        """Elements from the begin of the keys to that of the values."""


@dataclass(frozen=True, slots=True)
class AddressTable:
    """Some blocks of each sequence of a batch, on the device that reads them. It never changes.

    Attributes:
        addresses: `[rows, blocks]` int64, where the blocks begin, in memory that the device can read: its own, or
            page-locked memory of the host. Multiples of 16.
        counts: `[rows]` int32, how many of a row's addresses count; None: all. The others are not looked at.
        positions: `[rows, blocks]` int32, which block of its sequence each is, rising: token `t` of a block at
            position `i` is token `i * block_size + t` of the sequence. None: 0, 1, 2, ...
        blocks: of each row, those that do not count included.
        form: (device, rows, whether there are counts, whether there are positions): what a launch depends on.
        pointers: where addresses, counts and positions begin in memory; None for what there is not.
        strides: from row to row of addresses and positions, in elements.
    """

    addresses: torch.Tensor
    counts: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    blocks: int = field(init=False, repr=False, compare=False)
    form: tuple[torch.device, int, bool, bool] = field(init=False, repr=False, compare=False)
    pointers: tuple[int, int | None, int | None] = field(init=False, repr=False, compare=False)
    strides: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        a = self.addresses
        if a.dim() != 2 or a.dtype != torch.int64 or (a.numel() and a.stride(1) != 1):
            raise MismatchError(f"Addresses are [rows, blocks] int64 with rows contiguous, not {_shown(a)}.")
        for name, shape in (("counts", a.shape[:1]), ("positions", a.shape)):
            x = getattr(self, name)
            if x is None:
                continue
            if x.shape != shape or x.dtype != torch.int32 or x.device != a.device or (x.numel() and x.stride(-1) != 1):
                raise MismatchError(
                    f"{name.capitalize()} are {list(shape)} int32 on {a.device} with rows contiguous, not {_shown(x)}."
                )
        counts, positions = self.counts, self.positions
        found = {
            "blocks": a.shape[1],
            "form": (a.device, a.shape[0], counts is not None, positions is not None),
            "pointers": (a.data_ptr(), *(None if x is None else x.data_ptr() for x in (counts, positions))),
            "strides": (a.stride(0), 0 if positions is None else positions.stride(0)),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `paged.attend`."""
    rows = table.addresses.shape[0]
    ragged = cu_queries is not None
    bounds = cu_queries.tolist() if cu_queries is not None else None
    shape = (*query.shape[:-1], layout.v_dim)
    out = torch.empty(shape, dtype=torch.float32, device=query.device) if out is None else out
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=query.device) if lse is None else lse
    for row in range(rows):
        length = int(lengths if isinstance(lengths, int) else lengths[row])
        own, left = slice(None), 0
        if bounds is not None:
            begin, end = bounds[row], bounds[row + 1]
            answered = end if max_queries is None else min(end, begin + max_queries)
            own, left = slice(begin, answered), end - answered
        q = query[own].transpose(0, 1) if ragged else query[row]
        keys, values, positions = _tokens(table, layout, row, length, query.device)
        # To the reference, a length says where the queries stand: `left` tokens before the end.
        result = reference.attend(
            q[None].float(), keys, values, _of_row(params, row, q.shape[1]), length=length - left, positions=positions
        )
        for target, part in zip((out, lse), result, strict=True):
            if ragged:
                target[own].copy_(part[0].transpose(0, 1))
            else:
                target[row].copy_(part[0])
    return out, lse


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    addresses: torch.Tensor,
    layout: Layout,
    starts: torch.Tensor | int,
    *,
    cu_tokens: torch.Tensor | None = None,
) -> None:
    """See `copies.append`."""
    bounds = None if cu_tokens is None else cu_tokens.tolist()
    for row, blocks in enumerate(addresses.tolist()):
        start = int(starts if isinstance(starts, int) else starts[row])
        if bounds is None:
            new_keys, new_values = keys[row], values[row]
        else:
            new_keys, new_values = (x[bounds[row] : bounds[row + 1]].transpose(0, 1) for x in (keys, values))
        for token, index, inner, count in _spans(start, new_keys.shape[1], layout.block_size):
            if blocks[index]:
                k, v = block_at(blocks[index], layout, addresses.device)
                k[:, inner : inner + count] = new_keys[:, token : token + count]
                v[:, inner : inner + count] = new_values[:, token : token + count]


def gather(table: AddressTable, layout: Layout, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See `copies.gather`."""
    size, tokens = layout.block_size, keys.shape[2]
    for row, blocks in enumerate(_blocks(table)):
        for position, address in blocks:
            count = min(size, tokens - position * size)
            if count > 0 and address:
                k, v = block_at(address, layout, keys.device)
                span = slice(position * size, position * size + count)
                keys[row, :, span], values[row, :, span] = k[:, :count], v[:, :count]


def copy_blocks(
    sources: torch.Tensor, targets: torch.Tensor, nbytes: int, *, device: torch.device | None = None
) -> None:
    """See `copies.copy_blocks`."""
    device = sources.device if device is None else device
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        memory_at(target, nbytes, device).copy_(memory_at(source, nbytes, device))


# Memory


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The `nbytes` bytes at an address of the host, or of a CUDA device, `uint8`; the caller keeps them alive."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaMemory(address, nbytes), device=device)


def block_at(address: int, layout: Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[k_heads, block_size, k_dim]` and values `[v_heads, block_size, v_dim]` of the block there, no copies."""
    v_numel = layout.v_heads * layout.block_size * layout.v_dim
    data = memory_at(address, (layout.k_numel + v_numel) * layout.dtype.itemsize, device).view(layout.dtype)
    keys = data[: layout.k_heads * layout.block_size * layout.k_dim]
    values = data[layout.k_numel : layout.k_numel + v_numel]
    return keys.view(layout.k_heads, -1, layout.k_dim), values.view(layout.v_heads, -1, layout.v_dim)


class _CudaMemory:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


# Tables


def _blocks(table: AddressTable) -> Iterator[list[tuple[int, int]]]:
    """For each row, (position, address) of its blocks."""
    counts = None if table.counts is None else table.counts.tolist()
    positions = None if table.positions is None else table.positions.tolist()
    for row, addresses in enumerate(table.addresses.tolist()):
        count = len(addresses) if counts is None else counts[row]
        where = range(count) if positions is None else positions[row][:count]
        yield list(zip(where, addresses[:count], strict=True))


def _tokens(
    table: AddressTable, layout: Layout, row: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys `[1, heads, tokens, k_dim]`, values and positions `[tokens]` of the blocks of one row."""
    size = layout.block_size
    one = AddressTable(
        table.addresses[row : row + 1],
        None if table.counts is None else table.counts[row : row + 1],
        None if table.positions is None else table.positions[row : row + 1],
    )
    options: dict[str, Any] = {"dtype": layout.dtype, "device": device}
    keys = [torch.empty((layout.k_heads, 0, layout.k_dim), **options)]
    values = [torch.empty((layout.v_heads, 0, layout.v_dim), **options)]
    positions = [torch.empty(0, dtype=torch.int64, device=device)]
    for position, address in next(_blocks(one)):
        count = min(size, length - position * size)
        if count > 0:
            k, v = block_at(address, layout, device)
            keys.append(k[:, :count])
            values.append(v[:, :count])
            positions.append(torch.arange(position * size, position * size + count, device=device))
    return torch.cat(keys, 1)[None], torch.cat(values, 1)[None], torch.cat(positions)


def _of_row(params: AttentionParams, row: int, queries: int) -> AttentionParams:
    mask = params.mask
    if mask is not None:
        mask = mask if mask.shape[0] == 1 else mask[row : row + 1]
        mask = mask if mask.shape[2] == 1 else mask[:, :, :queries]
    return replace(
        params, mask=mask, first_valid=None if params.first_valid is None else params.first_valid[row : row + 1]
    )


def _spans(start: int, count: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Tokens [0, count) put at slot `start` on, by block: (first token, block, slot within it, tokens)."""
    done = 0
    while done < count:
        block, inner = divmod(start + done, size)
        here = min(size - inner, count - done)
        yield done, block, inner, here
        done += here


def _shown(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}, strides {list(x.stride())}"
