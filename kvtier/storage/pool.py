"""`BlockPool`: the slots of one layout in one memory. The same type serves every tier."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.kernels import copies, launch
from kvtier.storage.block import BlockLayout
from kvtier.storage.memory import Memory

#: Slots per extent. A new run of blocks begins in an extent that is wholly free, so that its successors find their
#: neighbours free too and a run of blocks is one copy.
EXTENT = 16

_POISON = 0xFF  # NaN in fp32, bf16 and fp16 alike


class Slab:
    """A run of slots in one allocation: numbers `[base, base + slots)`."""

    __slots__ = ("base", "data", "free", "keys", "slots", "values")

    def __init__(self, base: int, data: torch.Tensor, layout: BlockLayout) -> None:
        self.base = base
        self.data = data
        self.slots = data.numel() // layout.nbytes
        self.free = self.slots
        # Views made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.keys, self.values = layout.split(data)


class BlockPool:
    """Slots with reference counts over slabs that come and go.

    A slot number is never used twice for different memory. A slot is free when nobody references it; transfers in
    flight hold references of their own on both ends, so that neither is re-used under them.

    Args:
        layout: of every slot.
        memory: where slabs come from; counts their exact bytes.
        poison: fill every slot with NaN when it becomes free (tests: nobody may read what nobody owns).
    """

    def __init__(self, layout: BlockLayout, memory: Memory, *, poison: bool = False) -> None:
        self.layout = layout
        self.memory = memory
        self.poison = poison
        self.owner: dict[int, object] = {}
        self._refs: dict[int, int] = {}
        self._free: set[int] = set()
        self._slabs: list[Slab] = []
        self._bases: list[int] = []
        self._next_base = 0
        self._nbytes = 0
        # Extents by the number of their free slots; keys are first slots, in the order they became so.
        self._whole: dict[int, None] = {}
        self._partial: dict[int, None] = {}
        self._extent_free: dict[int, int] = {}
        self._extent_size: dict[int, int] = {}
        # What is added to `slot * nbytes` to have its address, by extent: an extent lies in one slab.
        self._origins: dict[int, int] = {}

    # What there is

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return len(self._free) + len(self._refs)

    @property
    def free(self) -> int:
        """Slots that `allocate` can hand out without growing."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that somebody references."""
        return len(self._refs)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self._nbytes

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs, by rising base."""
        return tuple(self._slabs)

    def references(self, slot: int) -> int:
        """How many hold `slot`; 0 when it is free."""
        return self._refs.get(slot, 0)

    # Growing and shrinking

    def grow(self, slots: int) -> int:
        """Allocate one slab of up to `slots` slots, fewer if the budget holds fewer; nothing that exists moves.

        Returns:
            The number of slots gained, possibly 0.
        """
        slots = min(slots, self.memory.budget.free // self.layout.nbytes)
        data = self.memory.allocate(slots * self.layout.nbytes) if slots > 0 else None
        if data is None:
            return 0
        if self.poison:
            data.fill_(_POISON)
        # A gap of one between slabs: neighbouring numbers are neighbouring memory.
        base = -(-self._next_base // EXTENT) * EXTENT + EXTENT
        slab = Slab(base, data, self.layout)
        self._nbytes += data.numel()
        self._next_base = base + slots
        self._slabs.append(slab)
        self._bases.append(base)
        self._free.update(range(base, base + slots))
        for start in range(base, base + slots, EXTENT):
            size = min(EXTENT, base + slots - start)
            self._extent_free[start] = self._extent_size[start] = size
            self._whole[start] = None
            self._origins[start // EXTENT] = data.data_ptr() - base * self.layout.nbytes
        return slots

    def shrink(self, slab: Slab) -> None:
        """Give a slab back of which every slot is free."""
        assert slab.free == slab.slots, "a slab in use cannot be given back"
        i = self._slabs.index(slab)
        del self._slabs[i], self._bases[i]
        self._free.difference_update(range(slab.base, slab.base + slab.slots))
        for start in range(slab.base, slab.base + slab.slots, EXTENT):
            self._whole.pop(start, None)
            self._partial.pop(start, None)
            del self._extent_free[start], self._extent_size[start], self._origins[start // EXTENT]
        data = slab.data
        self._nbytes -= data.numel()
        slab.keys = slab.values = slab.data = None  # type: ignore[assignment]
        self.memory.release(data)

    # Slots

    def allocate(self, near: int | None = None, owner: object = None, avoid: Slab | None = None) -> int | None:
        """Take a free slot with one reference, or None if there is none.

        Args:
            near: prefer the slot behind this one.
            owner: whom the slot belongs to, for those who want to move it.
            avoid: a slab whose slots are not handed out (it is about to be given back).
        """
        if near is not None and near + 1 in self._free and (avoid is None or self.slab(near + 1) is not avoid):
            slot = near + 1
        else:
            picked = self._pick(avoid)
            if picked is None:
                return None
            slot = picked
        self._free.remove(slot)
        self._refs[slot] = 1
        self.owner[slot] = owner
        self.slab(slot).free -= 1
        self._count(slot, -1)
        return slot

    def retain(self, slot: int) -> None:
        """Add a reference to a slot in use."""
        self._refs[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference; the last one frees the slot."""
        refs = self._refs[slot] - 1
        if refs:
            self._refs[slot] = refs
            return
        del self._refs[slot], self.owner[slot]
        slab = self.slab(slot)
        if self.poison:
            self.bytes(slot, 1).fill_(_POISON)
        self._free.add(slot)
        slab.free += 1
        self._count(slot, +1)

    def _pick(self, avoid: Slab | None) -> int | None:
        for extents, last in ((self._whole, False), (self._partial, True)):
            for start in extents:
                if avoid is not None and self.slab(start) is avoid:
                    continue
                span = range(start, start + self._extent_size[start])
                # In an extent that somebody's run is growing through, take from its far end.
                return next(s for s in (reversed(span) if last else span) if s in self._free)
        return None

    def _count(self, slot: int, change: int) -> None:
        slab = self.slab(slot)
        start = slab.base + (slot - slab.base) // EXTENT * EXTENT
        free = self._extent_free[start] = self._extent_free[start] + change
        self._whole.pop(start, None)
        if free == 0:
            self._partial.pop(start, None)
        elif free == self._extent_size[start]:
            self._partial.pop(start, None)
            self._whole[start] = None
        else:
            self._partial[start] = None

    # Bytes

    def slab(self, slot: int) -> Slab:
        """The slab that holds `slot`."""
        return self._slabs[bisect.bisect_right(self._bases, slot) - 1]

    def address(self, slot: int) -> int:
        """Where `slot` lies in memory."""
        return self._origins[slot // EXTENT] + slot * self.layout.nbytes

    def addresses(self, slots: Sequence[int]) -> list[int]:
        """Where slots lie in memory."""
        origins, nbytes = self._origins, self.layout.nbytes
        return [origins[slot // EXTENT] + slot * nbytes for slot in slots]

    def bytes(self, start: int, count: int) -> torch.Tensor:
        """The bytes of `count` neighbouring slots, `uint8`, contiguous."""
        slab, n = self.slab(start), self.layout.nbytes
        return slab.data[(start - slab.base) * n : (start - slab.base + count) * n]

    def keys(self, start: int, count: int) -> torch.Tensor:
        """Keys of `count` neighbouring slots, `[count, k_heads, block_size, k_dim]`, a view."""
        slab = self.slab(start)
        return slab.keys[start - slab.base : start - slab.base + count]

    def values(self, start: int, count: int) -> torch.Tensor:
        """Values of `count` neighbouring slots, `[count, v_heads, block_size, v_dim]`, a view."""
        slab = self.slab(start)
        return slab.values[start - slab.base : start - slab.base + count]

    def is_free(self, slot: int) -> bool:
        """Whether nobody holds a slot."""
        return slot in self._free

    def free_slots(self) -> list[int]:
        """Slots that nobody holds, rising."""
        return sorted(self._free)

    def owned_slots(self) -> list[int]:
        """Slots that belong to somebody, rising."""
        return sorted(slot for slot, owner in self.owner.items() if owner is not None)

    def has_run(self, near: int | None) -> bool:
        """Whether the next slot would continue a run, or begin one with room behind it."""
        return (near is not None and near + 1 in self._free) or bool(self._whole)

    def pairs(self, start: int, count: int) -> torch.Tensor:
        """Keys and values of `count` neighbouring slots of a uniform layout, `[count, 2, heads, block_size, dim]`."""
        layout = self.layout
        shape = (count, 2, layout.k_heads, layout.block_size, layout.k_dim)
        return self.bytes(start, count).view(layout.dtype).view(shape)

    def close(self) -> None:
        """Give every slab back, whoever references it."""
        for slab in self._slabs:
            self.memory.release(slab.data)
        for table in (self._slabs, self._bases, self._free, self._refs, self.owner, self._whole, self._partial):
            table.clear()
        self._nbytes = 0
        for extents in (self._extent_free, self._extent_size, self._origins):
            extents.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + used == total and every count agrees."""
        total = sum(slab.slots for slab in self._slabs)
        assert self._nbytes == sum(slab.data.numel() for slab in self._slabs), "slab bytes are counted wrong"
        assert len(self._free) + len(self._refs) == total, "slots leaked"
        assert not self._free & self._refs.keys(), "a slot is both free and in use"
        assert all(refs > 0 for refs in self._refs.values())
        for slab in self._slabs:
            inside = range(slab.base, slab.base + slab.slots)
            assert slab.free == sum(s in self._free for s in inside), "a slab miscounts its free slots"
        for start, size in self._extent_size.items():
            free = sum(s in self._free for s in range(start, start + size))
            assert self.address(start) == self.bytes(start, 1).data_ptr(), "a slot lies elsewhere"
            assert self._extent_free[start] == free, "an extent miscounts its free slots"
            assert (start in self._whole) == (free == size)
            assert (start in self._partial) == (0 < free < size)


@dataclass(frozen=True, slots=True)
class Tails:
    """The last blocks of some rows, into which the next tokens only need to be written.

    Attributes:
        keys, values: `[slots, heads, block_size, dim]`, these blocks and possibly others.
        slots: which of these they are, `[rows]`; None: there is only one.
        addresses: `[rows, 1]`, where the device has a kernel that writes them all in one launch.
        layout: of each.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor | None
    addresses: torch.Tensor | None
    layout: BlockLayout

    @classmethod
    def of(cls, pool: BlockPool, slots: Sequence[int | None], device: torch.device) -> Tails | None:
        """Slots of each row, all different; None if they must be written one by one."""
        found = [slot for slot in slots if slot is not None]
        if len(found) < len(slots):
            return None
        keys, values = pool.keys(found[0], 1), pool.values(found[0], 1)
        if len(found) == 1:
            return cls(keys, values, None, None, pool.layout)
        # Made outside of inference mode: later calls may be.
        with torch.inference_mode(False):
            if launch.available(device):
                addresses = torch.tensor([[pool.address(slot)] for slot in found], device="cpu")
                if device.type != "cpu":
                    # From page-locked memory, so that nothing waits for the device.
                    addresses = addresses.pin_memory().to(device, non_blocking=True)
                return cls(keys, values, None, addresses, pool.layout)
            slab = pool.slab(found[0])
            if any(pool.slab(slot) is not slab for slot in found):
                return None
            inside = torch.tensor([slot - slab.base for slot in found], device=device)
        return cls(slab.keys, slab.values, inside, None, pool.layout)

    def write(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Write a token of each row, `[rows, heads, 1, dim]`, as number `offset` of its block."""
        if self.addresses is not None:
            copies.append(keys, values, self.addresses, self.layout, offset)
        elif self.slots is None:
            self.keys.narrow(2, offset, 1).copy_(keys)
            self.values.narrow(2, offset, 1).copy_(values)
        else:
            self.keys.select(2, offset).index_copy_(0, self.slots, keys.select(2, 0))
            self.values.select(2, offset).index_copy_(0, self.slots, values.select(2, 0))


def runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """Join neighbours: `(index of the first, first slot, count)` for each maximal run of rising neighbours."""
    start = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            if slots:
                yield start, slots[start], i - start
            start = i
