"""Blocks, and the tables that list them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.storage.store import LayerStore
    from kvtier.storage.transfer import Transfer


class Block:
    """`block_size` tokens of one layer, in at most one slot per tier.

    Life: FREE -> FILLING (one writer, in the near tier) -> SEALED in {near}, {near, far} or {far} -> FREE. *Near* is the
    tier where attention runs (the device; the host, where there is no device tier), *far* the tier below it.

    Attributes:
        layer: whose block it is.
        near: slot in the near pool, or None.
        far: slot in the far pool, or None; its bytes are valid once `pending` is None.
        pending: the write-back under way into `far`.
        refs: how many tables hold the block.
        sealed: full, and never written again.
    """

    __slots__ = ("far", "layer", "near", "pending", "refs", "sealed")

    def __init__(self, layer: LayerStore, near: int) -> None:
        self.layer = layer
        self.near: int | None = near
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
