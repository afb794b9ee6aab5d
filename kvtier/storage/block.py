"""Blocks: how one lies in bytes, where it is, the tables that list them, and which rows of a batch share a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvtier.errors import MismatchError

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.transfer import Transfer

_ALIGNMENT = 64


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one block of one layer: keys, then values, heads first, tokens within a head.

    keys `[k_heads, block_size, k_dim]`, values `[v_heads, block_size, v_dim]`. A head's tokens are contiguous, which
    the attention kernels read; a block is contiguous, which the link and the disk want. Blocks start at multiples of
    64 bytes.

    Attributes:
        k_heads, v_heads: heads of the keys and of the values as the model hands them over (local heads under tensor
            parallelism, one under MLA).
        k_dim, v_dim: head sizes; they may differ.
        block_size: tokens per block.
        dtype: of both.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, block_size: int) -> BlockLayout:
        """The layout that holds `keys` and `values`, each `[batch, heads, tokens, dim]`."""
        return cls(keys.shape[1], values.shape[1], keys.shape[3], values.shape[3], block_size, keys.dtype)

    def check(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Raise `MismatchError` unless `keys` and `values` are `[batch, heads, tokens, dim]` of this layout."""
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[::2] != values.shape[::2]:
            raise MismatchError(
                f"Layer {layer}: keys {tuple(keys.shape)} and values {tuple(values.shape)} must be "
                "[batch, heads, tokens, dim] of the same batch and tokens."
            )
        k, v = keys.shape, values.shape
        if keys.dtype != values.dtype:
            raise MismatchError(
                f"Layer {layer}: keys in {keys.dtype} and values in {values.dtype}. Give both in one dtype."
            )
        if keys.dtype != self.dtype or (k[1], k[3], v[1], v[3]) != (self.k_heads, self.k_dim, self.v_heads, self.v_dim):
            raise MismatchError(
                f"Layer {layer} holds {self.k_heads} heads of {self.k_dim}/{self.v_dim} in "
                f"{self.dtype}, but was given keys {tuple(keys.shape)} in {keys.dtype} and values "
                f"{tuple(values.shape)} in {values.dtype}. A cache serves one model in one dtype; `reset()` empties it."
            )

    @cached_property
    def k_numel(self) -> int:
        """Elements of the keys of one block."""
        return self.k_heads * self.block_size * self.k_dim

    @cached_property
    def v_numel(self) -> int:
        """Elements of the values of one block."""
        return self.v_heads * self.block_size * self.v_dim

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one slot, padding to 64 included."""
        used = (self.k_numel + self.v_numel) * self.dtype.itemsize
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, without padding."""
        return (self.k_heads * self.k_dim + self.v_heads * self.v_dim) * self.dtype.itemsize

    @cached_property
    def uniform(self) -> bool:
        """Whether keys and values have one shape and lie end to end: a slot is `[2, heads, block_size, dim]`."""
        same = (self.k_heads, self.k_dim) == (self.v_heads, self.v_dim)
        return same and 2 * self.k_numel * self.dtype.itemsize == self.nbytes

    def split(self, slab: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View a slab as keys and values.

        Args:
            slab: `uint8`, contiguous, a whole number of slots.

        Returns:
            keys `[slots, k_heads, block_size, k_dim]` and values `[slots, v_heads, block_size, v_dim]`, no copies.
        """
        n = slab.numel() // self.nbytes
        flat = slab.view(self.dtype)
        stride = self.nbytes // self.dtype.itemsize
        offset = flat.storage_offset()
        bs, kd, vd = self.block_size, self.k_dim, self.v_dim
        keys = flat.as_strided((n, self.k_heads, bs, kd), (stride, bs * kd, kd, 1), offset)
        values = flat.as_strided((n, self.v_heads, bs, vd), (stride, bs * vd, vd, 1), offset + self.k_numel)
        return keys, values


def in_one_dtype(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the smallest dtype that holds both exactly: autocast gives them apart, where a norm or a
    rotation makes one of them fp32. `DynamicCache` widens the values likewise."""
    if keys.dtype == values.dtype or not {keys.dtype, values.dtype} <= _FLOATS:
        return keys, values
    wide = torch.promote_types(keys.dtype, values.dtype)
    return keys.to(wide), values.to(wide)


_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


class Block:
    """`block_size` tokens of one layer, in at most one slot per tier.

    Life: FREE -> FILLING (one writer, in the near tier) -> SEALED in {near}, {near, far} or {far} -> FREE. *Near* is
    the tier where attention runs (the device; the host, where there is no device tier), *far* the tier below it.

    Attributes:
        layer: whose block it is.
        index: its place in every table that holds it.
        near: slot in the near pool, or None.
        far: slot in the far pool, or None; its bytes are valid once `pending` is None.
        pending: the write-back under way into `far`.
        refs: how many tables hold the block.
        sealed: full, and never written again.
    """

    __slots__ = ("far", "index", "layer", "near", "pending", "refs", "sealed")

    def __init__(self, layer: LayerStore, index: int) -> None:
        self.layer = layer
        self.index = index
        self.near: int | None = None
        self.far: int | None = None
        self.pending: Transfer | None = None
        self.refs = 1
        self.sealed = False


class Table:
    """The block table of one sequence in one layer: block `i` holds tokens `[i * block_size, (i + 1) * block_size)`.

    All blocks are sealed but possibly the last. A sealed block may appear in several tables; so may an unsealed last
    one until somebody writes to it (copy on write).
    """

    __slots__ = ("blocks",)

    def __init__(self, blocks: list[Block] | None = None) -> None:
        self.blocks: list[Block] = [] if blocks is None else blocks

    def fork(self) -> Table:
        """A second table with the same blocks."""
        for block in self.blocks:
            block.refs += 1
        return Table(list(self.blocks))


class Group:
    """Rows of a batch that are bitwise equal so far and hence share one table.

    Attributes:
        row: the row whose keys and values are written.
        rows: all of them.
        table: the table they continue; None for a new one.
        fork: continue a copy of `table`, because other rows continue it too.
        shared: index of an earlier group whose first blocks are the same, or None.
        shared_blocks: how many.
    """

    __slots__ = ("fork", "row", "rows", "shared", "shared_blocks", "table")

    def __init__(self, row: int, table: Table | None, fork: bool) -> None:
        self.row = row
        self.rows = [row]
        self.table = table
        self.fork = fork
        self.shared: int | None = None
        self.shared_blocks = 0


def group_rows(rows: Sequence[Table], layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor) -> list[Group]:
    """Which rows share a table when `keys` and `values` are appended. Changes nothing.

    Bitwise equal rows share one (beams and several return sequences repeat the prompt's rows), and new rows that begin
    with the same whole blocks share those. Single new tokens are not compared: that is where equal rows part.

    Args:
        rows: the table of each row so far; empty if there is no past.
        layout: of the layer.
        keys: `[batch, k_heads, tokens, k_dim]`.
        values: `[batch, v_heads, tokens, v_dim]`.
    """
    batch, tokens = keys.shape[0], keys.shape[2]
    if batch == 0:
        return []
    if not rows:
        same = _equal_tokens(keys, values, layout.block_size) if batch > 1 else []
        groups = [Group(0, None, False)]
        for row in range(1, batch):
            if same[row - 1] == tokens:
                groups[-1].rows.append(row)
                continue
            groups.append(Group(row, None, False))
            if same[row - 1] >= layout.block_size:
                groups[-1].shared = len(groups) - 2
                groups[-1].shared_blocks = same[row - 1] // layout.block_size
        return groups
    if len(set(rows)) == batch:
        return [Group(row, table, False) for row, table in enumerate(rows)]
    same = _equal_tokens(keys, values, layout.block_size) if tokens > 1 else [0] * (batch - 1)
    groups = []
    latest: dict[Table, Group] = {}
    for row, table in enumerate(rows):
        last = latest.get(table)
        if last is not None and last.rows[-1] == row - 1 and same[row - 1] == tokens:
            last.rows.append(row)
            continue
        latest[table] = Group(row, table, fork=last is not None)
        groups.append(latest[table])
    return groups


def likely_groups(rows: Sequence[Table], tokens: int) -> list[Group]:
    """What `group_rows` will answer for `tokens` new tokens, if rows that are equal so far stay so."""
    groups: list[Group] = []
    seen: set[Table] = set()
    for row, table in enumerate(rows):
        if table not in seen or tokens == 1:
            groups.append(Group(row, table, fork=table in seen))
        seen.add(table)
    return groups


def blocks_needed(groups: Sequence[Group], length: int, tokens: int, block_size: int) -> int:
    """New slots that appending `tokens` to `groups` of `length` tokens takes, copies on write included."""
    total, have = -(-(length + tokens) // block_size), -(-length // block_size)
    needed = 0
    for group in groups:
        if group.table is None:
            needed += total - group.shared_blocks
        else:
            copied = length % block_size and (group.fork or group.table.blocks[-1].refs > 1)
            needed += total - have + bool(copied)
    return needed


def _equal_tokens(keys: torch.Tensor, values: torch.Tensor, probe: int) -> list[int]:
    """For each row but the first, how many leading tokens are bitwise those of the row before.

    Only rows whose first `probe` tokens agree are compared to the end, one pair at a time: batches of different prompts
    cost one small comparison and one synchronisation.
    """
    batch, tokens = keys.shape[0], keys.shape[2]
    if batch == 0:
        return []
    k, v = (x.detach().view(_BITS[x.dtype.itemsize]) for x in (keys, values))
    counts: list[int] = _leading(k[1:, :, :probe], k[:-1, :, :probe], v[1:, :, :probe], v[:-1, :, :probe]).tolist()
    alike = [row for row in range(1, batch) if counts[row - 1] == min(probe, tokens)]
    if alike and tokens > probe:
        whole = torch.stack([_leading(k[r : r + 1], k[r - 1 : r], v[r : r + 1], v[r - 1 : r]) for r in alike])
        for row, count in zip(alike, whole.flatten().tolist(), strict=True):
            counts[row - 1] = count
    return counts


def _leading(k: torch.Tensor, other_k: torch.Tensor, v: torch.Tensor, other_v: torch.Tensor) -> torch.Tensor:
    """Leading tokens in which two stacks of rows `[rows, heads, tokens, dim]` agree in keys and values, `[rows]`."""
    same = (k == other_k).all(-1).all(1) & (v == other_v).all(-1).all(1)
    return same.long().cumprod(1).sum(1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
