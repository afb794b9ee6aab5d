"""`BlockPool`: the slots of one layout in one tier, handed out as ranges of neighbours."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator
from typing import Protocol

import torch

from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.slabs import POISON, SlabAllocator
from kvtier.transfer.copies import Span
from kvtier.transfer.engine import Event

#: Slots that a new run of blocks leaves free before it, at most, so that the run that ends there can grow.
EXTENT = 16


class Fence(Protocol):
    """Something that slots wait for before they are written again: their last readers, or a copy in flight."""

    @property
    def event(self) -> Event | None:
        """A point of the compute stream behind which the slots may be written; None: only once it has passed."""

    def passed(self) -> bool:
        """Whether it is over. Never blocks."""

    def settle(self) -> None:
        """Block the CPU until what a device does about it has ended. For calls of other threads, see `Readers.wait`."""


class Slab:
    """Slots `[base, base + slots)` in one allocation."""

    __slots__ = ("base", "data", "keys", "mapped", "slots", "values")

    def __init__(self, base: int, data: torch.Tensor, layout: BlockLayout, mapped: bool) -> None:
        self.base = base
        self.data = data
        self.mapped = mapped
        self.slots = data.numel() // layout.nbytes
        # Views made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.keys, self.values = layout.split(data)


class BlockPool:
    """Ranges of slots over slabs that come and go.

    A slot number is never used twice for different memory; neighbouring numbers are neighbouring memory. Every slot is
    free, used, or held: given back, but not to be used again before a fence has passed.

    Args:
        layout: of every slot.
        slabs: where slabs come from; counts their exact bytes.
        poison: fill every slot with NaN when it becomes free (tests: nobody may read what nobody owns).
    """

    def __init__(self, layout: BlockLayout, slabs: SlabAllocator, *, poison: bool = False) -> None:
        self.layout = layout
        self.allocator = slabs
        self.poison = poison
        self.free = 0
        self.nbytes = 0
        self.slots = 0
        # Replaced, not changed: who reads slots without the lock looks up their slab while others come and go.
        self._slabs: tuple[tuple[int, ...], tuple[Slab, ...]] = ((), ())
        self._next_base = 0
        # Free ranges: first slot -> count, no two of them neighbours, and the first slots in rising order.
        self._ranges: dict[int, int] = {}
        self._starts: list[int] = []
        self._held: list[tuple[Fence, int, int]] = []

    @property
    def slabs(self) -> list[Slab]:
        """In rising order of their slots."""
        return list(self._slabs[1])

    @property
    def held(self) -> int:
        """Slots that wait for a fence."""
        return sum([count for _, _, count in self._held])

    @property
    def used(self) -> int:
        """Slots that somebody owns."""
        return self.slots - self.free - self.held

    # Growing and shrinking

    def grow(self, slots: int, *, optional: bool = False) -> int:
        """Allocate one slab of up to `slots` slots, fewer if the budget holds fewer; nothing that exists moves.

        Returns:
            The number of slots gained, possibly 0.
        """
        slots = min(slots, self.allocator.budget.free // self.layout.nbytes)
        data = self.allocator.allocate(slots * self.layout.nbytes, optional=optional) if slots > 0 else None
        if data is None:
            return 0
        # A gap between slabs: no range crosses from one into the next.
        base = self._next_base + 1
        try:
            if self.poison:
                data.fill_(POISON)
            slab = Slab(base, data, self.layout, self.allocator.is_mapped(data))
            self._set_slabs([*self.slabs, slab])
        except Exception:
            self.allocator.release(data)
            raise
        self._next_base = base + slots
        self.slots += slots
        self.nbytes += data.numel()
        self._add(base, slots)
        return slots

    def _set_slabs(self, slabs: list[Slab]) -> None:
        self._slabs = tuple(slab.base for slab in slabs), tuple(slabs)

    def is_free(self, slab: Slab) -> bool:
        """Whether nobody owns a slot of this slab, and none waits for a fence."""
        return self._ranges.get(slab.base) == slab.slots

    def retire(self, slab: Slab) -> None:
        """Give a slab back of which every slot is free."""
        assert self.is_free(slab), "a slab in use cannot be given back"
        self._set_slabs([each for each in self.slabs if each is not slab])
        self._remove(slab.base)
        self.slots -= slab.slots
        data = slab.data
        self.nbytes -= data.numel()
        slab.keys = slab.values = slab.data = None  # type: ignore[assignment]
        self.allocator.release(data)

    def cut(self, slab: Slab, slots: int) -> None:
        """Give all but the first `slots` slots of a slab back, which are free; see `SlabAllocator.cut`."""
        assert 0 < slots < slab.slots
        self._cut(slab.base + slots, slab.slots - slots)
        data = self.allocator.cut(slab.data, slots * self.layout.nbytes)
        left = Slab(slab.base, data, self.layout, self.allocator.is_mapped(data))
        self._set_slabs([left if each is slab else each for each in self.slabs])
        self.nbytes -= (slab.slots - slots) * self.layout.nbytes
        self.slots -= slab.slots - slots

    def retire_free(self) -> int:
        """Give back every slab that is wholly free. Returns the bytes that became free in the budget."""
        before = self.nbytes
        for slab in [slab for slab in self.slabs if self.is_free(slab)]:
            self.retire(slab)
        return before - self.nbytes

    # Slots

    def take(
        self,
        count: int,
        after: int | None = None,
        *,
        avoid: Slab | None = None,
        behind: list[Event] | None = None,
    ) -> tuple[int, int] | None:
        """Take at least one and at most `count` neighbouring slots.

        Args:
            count: slots needed.
            after: prefer those behind this slot.
            avoid: a slab whose slots are not handed out, for it is about to be given back.
            behind: the caller orders its writes behind points of the compute stream: where nothing is free, slots held
                for such a point are handed out, and the point is added here.

        Returns:
            The first slot and how many; None if there is none.
        """
        if after is not None and after + 1 in self._ranges and (avoid is None or self.slab(after + 1) is not avoid):
            found: tuple[int, int] | None = after + 1, self._ranges[after + 1]
        else:
            found = self._pick(count, avoid)
        if found is None:
            return None if behind is None else self._take_held(count, avoid, behind)
        start, count = found[0], min(count, found[1])
        self._cut(start, count)
        return start, count

    def _take_held(self, count: int, avoid: Slab | None, behind: list[Event]) -> tuple[int, int] | None:
        for i, (fence, start, n) in enumerate(self._held):
            event = fence.event
            if event is None or (avoid is not None and self.slab(start) is avoid):
                continue
            if n > count:
                self._held[i] = (fence, start + count, n - count)
            else:
                del self._held[i]
            if event not in behind:
                behind.append(event)
            return start, min(n, count)
        return None

    def obtainable(self, *, ordered: bool) -> int:
        """Slots to be had without growing; `ordered`: by a caller that orders its writes, see `take`."""
        if not ordered or not self._held:
            return self.free
        return self.free + sum([n for fence, _, n in self._held if fence.event is not None])

    def give(self, start: int, count: int, fence: Fence | None = None) -> None:
        """Give slots back; with a fence they become free when it has passed, as a later `poll` finds."""
        if fence is None:
            self._release(start, count)
        else:
            self._held.append((fence, start, count))

    def claim(self, start: int, count: int) -> None:
        """Take exactly these slots, which are free."""
        self._cut(start, count)

    def free_in(self, slab: Slab) -> int:
        """Free slots of a slab."""
        return sum([n for start, n in self._ranges.items() if slab.base <= start < slab.base + slab.slots])

    def poll(self) -> None:
        """Free the slots whose fence has passed."""
        if not self._held:
            return
        held, self._held = self._held, []
        while held:
            fence, start, count = held.pop()
            if fence.passed():
                self._release(start, count)
            else:
                self._held.append((fence, start, count))

    def fences(self) -> list[Fence]:
        """What slots wait for."""
        return [fence for fence, _, _ in self._held]

    def reset(self, used: list[tuple[int, int]]) -> None:
        """Let exactly these ranges be used, whatever was: after an interrupt, what nobody owns becomes free, and what
        is counted is counted again."""
        self._held.clear()
        self._ranges.clear()
        self._starts.clear()
        self.free = 0
        slabs = self.slabs
        self._next_base = max([self._next_base, *(slab.base + slab.slots for slab in slabs)])
        self.slots = sum([slab.slots for slab in slabs])
        self.nbytes = sum([slab.data.numel() for slab in slabs])
        for slab in slabs:
            slab.mapped = self.allocator.is_mapped(slab.data)
            self._add(slab.base, slab.slots)
        for start, count in used:
            self._cut(start, count)

    def _release(self, start: int, count: int) -> None:
        if self.poison:
            self.bytes(start, count).fill_(POISON)
        self._add(start, count)

    def _pick(self, count: int, avoid: Slab | None) -> tuple[int, int] | None:
        """The first slot of a free range for a new run, and how many are free from there on."""
        ranges = self._ranges.items()
        if avoid is not None:
            inside = range(avoid.base, avoid.base + avoid.slots)
            ranges = [(start, n) for start, n in ranges if start not in inside]  # type: ignore[assignment]
        if not ranges:
            return None
        start, n = max(ranges, key=operator.itemgetter(1))
        # A run that will grow begins away from whoever ends before this range.
        spare = min(EXTENT, self.free // 64, n - count)
        if count < EXTENT and spare > 0:
            return start + spare, n - spare
        fitting = [x for x in ranges if x[1] >= count]
        return min(fitting, key=operator.itemgetter(1)) if fitting else (start, n)

    def _add(self, start: int, count: int) -> None:
        """Make slots free; ranges that become neighbours become one."""
        self.free += count
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + count:
            count += self._ranges.pop(start + count)
            del self._starts[at]
        if at:
            before = self._starts[at - 1]
            assert before + self._ranges[before] <= start, "slots given back twice"
            if before + self._ranges[before] == start:
                self._ranges[before] += count
                return
        self._ranges[start] = count
        self._starts.insert(at, start)

    def _remove(self, start: int) -> int:
        count = self._ranges.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        self.free -= count
        return count

    def _cut(self, start: int, count: int) -> None:
        """Take `[start, start + count)` out of the free range that holds it."""
        first = self._starts[bisect.bisect_right(self._starts, start) - 1]
        size = self._remove(first)
        assert first <= start, "slots that are not free"
        assert start + count <= first + size, "slots that are not free"
        self.free += size - count
        for begin, n in ((first, start - first), (start + count, first + size - start - count)):
            if n:
                self._ranges[begin] = n
                bisect.insort(self._starts, begin)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Free ranges in rising order: first slot and count."""
        for start in self._starts:
            yield start, self._ranges[start]

    def held_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges that wait for a fence: first slot and count."""
        return ((start, count) for _, start, count in self._held)

    # Bytes

    def slab(self, slot: int) -> Slab:
        """The slab that holds `slot`. For whoever owns or reads that, with the lock or without."""
        bases, slabs = self._slabs
        return slabs[bisect.bisect_right(bases, slot) - 1]

    def address(self, slot: int) -> int:
        """Of the first byte of `slot`."""
        slab = self.slab(slot)
        return slab.data.data_ptr() + (slot - slab.base) * self.layout.nbytes

    def span(self, start: int, count: int) -> Span:
        """`count` neighbouring slots, as transfers name them."""
        slab, n = self.slab(start), self.layout.nbytes
        return Span(slab.data, (start - slab.base) * n, count * n, n, slab.mapped)

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

    def pairs(self, start: int, count: int) -> torch.Tensor:
        """Keys and values of `count` neighbouring slots of a uniform layout, `[count, 2, heads, block_size, dim]`."""
        layout = self.layout
        shape = (count, 2, layout.k_heads, layout.block_size, layout.k_dim)
        return self.bytes(start, count).view(layout.dtype).view(shape)

    def close(self) -> None:
        """Give every slab back, whoever owns its slots."""
        slabs = self.slabs
        self._set_slabs([])
        for each in (self._ranges, self._starts, self._held):
            each.clear()
        self.slots = self.free = self.nbytes = 0
        for slab in slabs:
            self.allocator.release(slab.data)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held + used == total and every count agrees."""
        assert self.slots == sum(slab.slots for slab in self.slabs), "slots are counted wrong"
        assert self.nbytes == sum(slab.data.numel() for slab in self.slabs), "slab bytes are counted wrong"
        bases = self._slabs[0]
        assert list(bases) == [slab.base for slab in self.slabs] == sorted(bases), "slabs are listed wrong"
        assert all(slab.base + slab.slots <= self._next_base for slab in self.slabs), "a slot has two numbers"
        assert self._starts == sorted(self._ranges), "free ranges are listed wrong"
        assert self.free == sum(self._ranges.values()), "free slots are counted wrong"
        given = sorted([*self._ranges.items(), *self.held_ranges()])
        for (start, count), (following, _) in itertools.pairwise(given):
            assert start + count <= following, "a slot is free twice"
        for start, count in given:
            slab = self.slab(start)
            assert slab.base <= start < start + count <= slab.base + slab.slots, "a range leaves its slab"
        for start in self._starts:
            assert start + self._ranges[start] not in self._ranges, "neighbouring ranges are not joined"
