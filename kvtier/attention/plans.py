"""Where attention finds a layer's blocks: found once, then kept up to date as blocks are added and move."""

from __future__ import annotations

from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.kernels.tables import AddressTable
from kvtier.storage.addresses import Addresses
from kvtier.storage.block import Block
from kvtier.storage.gather import Slots
from kvtier.storage.pool import BlockPool
from kvtier.storage.store import LayerStore


def of(layer: LayerStore, length: int) -> Plan:
    """The plan for the first `length` tokens of a layer: the one it has, brought up to date, or a new one."""
    count = -(-length // layer.layout.block_size)
    plan = layer.host_plan
    if isinstance(plan, Plan) and (plan.is_for(layer, count) or plan.follow(layer, count)):
        return plan
    plan = Plan(layer, count)
    layer.host_plan = plan
    layer.moved.clear()
    return plan


class Plan:
    """Where the first `count` blocks of each row of a layer lie, in either tier.

    It changes in place, between calls only: nobody reads host lists behind a call's end, and a device's kernels read
    tables that never change.

    Attributes:
        count: blocks of each row.
        near, far: those with a near slot, and those without one.
        blocks: of the part that the host attends to; None without the native library, or where there is none.
        device: the same for the device's part, where the device is emulated in RAM.
        distinct: blocks that host threads read in one call.
    """

    __slots__ = ("_slots", "_table", "_version", "blocks", "count", "device", "distinct", "far", "near")

    def __init__(self, layer: LayerStore, count: int) -> None:
        near, far = layer.pool, _far(layer)
        known: dict[int, tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]] = {}
        for table in layer.tables():
            blocks = table.blocks[:count]
            here = [b for b in blocks if b.near is not None]
            there = [b for b in blocks if b.near is None] if len(here) < len(blocks) else []
            known[id(table)] = (
                ([b.index for b in here], near.addresses([b.near for b in here])),  # type: ignore[misc]
                ([b.index for b in there], far.addresses([b.far for b in there]) if far else []),  # type: ignore[misc]
            )
        self.near = Addresses([known[id(table)][0] for table in layer.rows])
        self.far = Addresses([known[id(table)][1] for table in layer.rows])
        self.count = count
        self._table: AddressTable | None = None
        self._slots: tuple[Slots, Slots] | None = None
        self.blocks: native.BlockList | None = None
        self.device: native.BlockList | None = None
        self._done(layer)

    def is_for(self, layer: LayerStore, count: int) -> bool:
        """Whether it tells where the first `count` blocks are now."""
        return self._version == layer.version and self.count == count

    def follow(self, layer: LayerStore, count: int) -> bool:
        """Take in what moved and what was added since. False, and nothing done, where a new plan costs less."""
        moved, added = layer.moved, count - self.count
        if added < 0 or len(moved) + added > 4 + count // 16:
            return False
        layer.host_plan = None  # whatever cuts this short, nobody finds half of it
        for index in moved:
            if index < self.count:
                for row, table in enumerate(layer.rows):
                    self._place(layer, row, table.blocks[index])
        moved.clear()
        for index in range(self.count, count):
            new = [table.blocks[index] for table in layer.rows]
            self.near.push([_entry(layer.pool, index, b.near) for b in new])
            self.far.push([None if b.near is not None else _entry(_far(layer), index, b.far) for b in new])
        self.count = count
        self._done(layer)
        layer.host_plan = self
        return True

    def table(self, layer: LayerStore) -> AddressTable:
        """The device's part for the device's kernels, made when it is first asked for."""
        if self._table is None:
            self._table = self.near.table(layer.tiers.device)
        return self._table

    def slots(self, layer: LayerStore) -> tuple[Slots, Slots]:
        """The slots of the blocks in either tier, for those who read them through torch."""
        if self._slots is None:
            rows = [table.blocks[: self.count] for table in layer.rows]
            self._slots = (
                [[(b.index, b.near) for b in row if b.near is not None] for row in rows],
                [[(b.index, b.far) for b in row if b.near is None and b.far is not None] for row in rows],
            )
        return self._slots

    def _place(self, layer: LayerStore, row: int, block: Block) -> None:
        here, there = (self.near, self.far) if block.near is not None else (self.far, self.near)
        there.remove(row, block.index)
        pool, slot = (layer.pool, block.near) if block.near is not None else (_far(layer), block.far)
        entry = _entry(pool, block.index, slot)
        assert entry is not None, "a block has no bytes"
        here.put(row, *entry)

    def _done(self, layer: LayerStore) -> None:
        self._version = layer.version
        self._table = self._slots = None
        on_host = layer.tiers.far is None
        if self.count * layer.layout.block_size >= layer.length:
            self.distinct = layer.count if on_host else layer.missing_count()
        else:  # a view of fewer tokens
            blocks = {b for table in layer.tables() for b in table.blocks[: self.count]}
            self.distinct = sum(on_host or b.near is None for b in blocks)
        if not native.available():
            return
        if on_host:
            self.blocks = _list(self.blocks, self.near, whole=True)
            return
        self.blocks = _list(self.blocks, self.far) if len(self.far) else None
        if layer.tiers.device.type == "cpu" and not launch.available(layer.tiers.device):
            self.device = _list(self.device, self.near)


def _list(old: native.BlockList | None, addresses: Addresses, *, whole: bool = False) -> native.BlockList:
    """The list over `addresses`: the old one for as long as their memory is the same."""
    if old is not None and old.blocks is addresses.blocks:
        return old
    return native.BlockList.over(addresses.begins, addresses.blocks, None if whole else addresses.indices)


def _far(layer: LayerStore) -> BlockPool | None:
    return layer.tiers.far_pool(layer.layout)


def _entry(pool: BlockPool | None, index: int, slot: int | None) -> tuple[int, int] | None:
    return None if pool is None or slot is None else (index, pool.address(slot))
