"""What a step needs, in bytes: the one answer, for admission and for the error. Pure arithmetic.

On a device tier every sealed block can leave for the host, so it needs room only for what cannot: the blocks that are
being filled, what one layer is read through, and one slot through which blocks are sealed, fetched and evicted. The
host needs room for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

#: Slots are multiples of so many bytes.
_GRAIN = 64


@dataclass(frozen=True, slots=True)
class Claim:
    """What one cache may take on one compute device until its next forward begins, in bytes.

    Attributes:
        held: all blocks it will hold, those of layers to come included.
        filling: blocks that are being filled at the same time, at the most: they cannot leave.
        room: what one layer's KV is read through.
        slot: its largest block, if any of its blocks are sealed; else 0.
        smallest, largest: of all its blocks, those that are being filled included.
        room_at: what `room` would be if the tier where blocks begin had so many bytes; None: the same.
    """

    held: int = 0
    filling: int = 0
    room: int = 0
    slot: int = 0
    smallest: int = 0
    largest: int = 0
    room_at: Callable[[int], int] | None = field(default=None, compare=False, repr=False)

    def at(self, limit: int) -> Claim:
        """The same claim, if the tier where blocks begin had so many bytes. Never less room than is promised."""
        return self if self.room_at is None else replace(self, room=max(self.room, self.room_at(limit)))

    def union(self, other: Claim) -> Claim:
        """What is enough for both."""
        held = [x for x in (self, other) if x.held]
        rooms = [x.room_at for x in (self, other) if x.room_at is not None]
        return Claim(
            max(self.held, other.held),
            max(self.filling, other.filling),
            max(self.room, other.room),
            max(self.slot, other.slot),
            min((x.smallest for x in held), default=0),
            max((x.largest for x in held), default=0),
            (lambda limit: max(room(limit) for room in rooms)) if len(rooms) == 2 else None,
        )


@dataclass(slots=True)
class ClaimSum:
    """What the layers of one compute device claim together, added up layer by layer; attributes as of `Claim`."""

    held: int = 0
    filling: int = 0
    slot: int = 0
    smallest: int = 0
    largest: int = 0

    def add(self, nbytes: int, blocks: int, filling: int, *, sealed: bool, layers: int = 1) -> None:
        """Add layers that are alike.

        Args:
            nbytes: of a block.
            blocks: that each of them will hold.
            filling: of these, those that are being filled at the same time, at the most.
            sealed: whether any of them is sealed.
            layers: how many.
        """
        if not (blocks and layers):
            return
        self.held += layers * blocks * nbytes
        self.filling += layers * filling * nbytes
        self.slot = max(self.slot, nbytes) if sealed else self.slot
        self.smallest, self.largest = min(self.smallest or nbytes, nbytes), max(self.largest, nbytes)

    def claim(self, room: int = 0, room_at: Callable[[int], int] | None = None) -> Claim:
        """All of them together, and what one of them is read through."""
        return Claim(self.held, self.filling, room, self.slot, self.smallest, self.largest, room_at)


@dataclass(frozen=True, slots=True)
class Demand:
    """What all claims on one compute device need together.

    Attributes:
        device: bytes of its device tier, at the least.
        host: bytes of the host, given that device tier.
    """

    device: int
    host: int


def demand(claims: Iterable[Claim], device_limit: int | None) -> Demand:
    """What claims on one compute device need.

    Args:
        claims: of every cache that uses it.
        device_limit: bytes of its device tier; None where there is none.
    """
    claims = list(claims)
    held = sum(claim.held for claim in claims)
    room = sum(claim.room for claim in claims)
    if device_limit is None:
        return Demand(0, held + room)
    slot = max((claim.slot for claim in claims), default=0)
    sizes = {size for claim in claims if claim.held for size in (claim.smallest, claim.largest)}
    device = sum(claim.filling for claim in claims) + room + slot
    # All but the slot that blocks pass through holds blocks, but for what is less than a block of the largest size that
    # can leave.
    kept = max(device_limit - room - slot, 0)
    if slot:
        kept = whole_slots(kept, slot) if sizes <= {slot} else max(whole_slots(kept, _GRAIN) - slot + _GRAIN, 0)
    return Demand(device, max(held - kept, 0))


def whole_slots(limit: int, slot: int) -> int:
    """Bytes of a budget in which blocks of `slot` bytes fit."""
    return limit // slot * slot if slot else limit
