"""`BlockLayout`: the bytes of one block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvtier.errors import MismatchError

_ALIGNMENT = 64


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one block of one layer: keys, then values, heads first, tokens within a head.

    keys `[k_heads, block_size, k_dim]`, values `[v_heads, block_size, v_dim]`. A head's tokens are contiguous, which
    the attention kernels read; a block is contiguous, so that it is one copy over the link. Blocks start at multiples
    of 64 bytes.

    Attributes:
        k_heads, v_heads: heads of the keys and of the values as the model gives them (local heads under tensor
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
        if not (k[1] and k[3] and v[1] and v[3]):
            raise MismatchError(f"Layer {layer}: keys {tuple(k)} and values {tuple(v)} have no heads or no width.")
        if keys.dtype != self.dtype or (k[1], k[3], v[1], v[3]) != (self.k_heads, self.k_dim, self.v_heads, self.v_dim):
            raise MismatchError(
                f"Layer {layer} holds keys [batch, {self.k_heads}, tokens, {self.k_dim}] and values "
                f"[batch, {self.v_heads}, tokens, {self.v_dim}] in {self.dtype}, but was given keys "
                f"{list(keys.shape)} in {keys.dtype} and values {list(values.shape)} in {values.dtype}. A cache serves "
                "one model in one dtype; `reset()` empties it. Of an engine, make a new one."
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
        """Whether keys and values have one shape, end to end: a slot is `[2, heads, block_size, dim]`."""
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


def fits(new: torch.Tensor, held: torch.dtype) -> bool:
    """Whether `new` can be kept in the dtype that is held: in another one only under autocast, which narrows some of
    what a model computes, and only where that holds it exactly. `DynamicCache` widens it likewise."""
    if new.dtype is held:
        return True
    both = {new.dtype, held} <= _FLOATS and torch.is_autocast_enabled(new.device.type)
    return both and torch.promote_types(new.dtype, held) is held


_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
