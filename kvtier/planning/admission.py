"""Whether a step fits, asked before anything of it is done. Pure functions of bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """What a step needs on one device, in bytes.

    Attributes:
        held: blocks of all layers before it.
        coming: blocks that its layers will add, those to come included.
        room: what one layer is read through.
        tails: blocks that will be open after it, which cannot leave the device.
        slot: a block.
        seals: whether there are full blocks, which pass through a slot more on their way down and up.
    """

    held: int
    coming: int
    room: int
    tails: int
    slot: int
    seals: bool

    def alone(self) -> int:
        """Bytes of the only tier there is."""
        return self.held + self.coming + self.room

    def near(self) -> int:
        """Bytes of the device tier, where all that can leave it leaves."""
        return self.room + self.tails + self.seals * self.slot

    def far(self, near_limit: int) -> int:
        """Bytes of the tier below a device tier of `near_limit` bytes, which holds the rest but for one free slot."""
        kept = (near_limit - self.room) // self.slot * self.slot - self.slot
        return self.held + self.coming - kept


def whole_slots(limit: int, slot: int) -> int:
    """Bytes of a budget in which blocks of `slot` bytes fit."""
    return limit // slot * slot
