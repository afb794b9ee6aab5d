"""How the KV of one block lies in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one block of one layer: keys, then values, heads first, tokens within a head.

    keys `[k_heads, block_size, k_dim]`, values `[v_heads, block_size, v_dim]`. A head's tokens are contiguous, which the
    attention kernels read; a block is contiguous, which the link and the disk want. Blocks start at multiples of 64 bytes.

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
