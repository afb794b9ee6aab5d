"""`Admission`: the budgets hold what owners claim, whoever claims more and whichever budget changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch

from kvtier.errors import KVTierError
from kvtier.memory.access.readers import Readers
from kvtier.memory.owner import Owner
from kvtier.memory.storage import shortage
from kvtier.memory.storage.slabs import Limits, SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier, Parked
from kvtier.planning.admission import Claim, demand


class Admission:
    """Compares the claims of all owners with the budgets: before one claims more, and before a budget falls.

    The caller of every method holds the memory's lock.

    Args:
        devices: those in use.
        owners: those that were let in, by number.
        parked: blocks that nobody is promised.
        conceding: asked before anybody is refused, see `TieredMemory`.
        readers: attention calls under way.
    """

    def __init__(
        self,
        devices: Mapping[torch.device, ComputeDevice],
        owners: Mapping[int, Owner],
        parked: Sequence[Parked],
        conceding: Sequence[Callable[[], bool]],
        readers: Readers,
    ) -> None:
        self._devices = devices
        self._owners = owners
        self._parked = parked
        self._conceding = conceding
        self._readers = readers

    def admit(
        self,
        owner: Owner,
        device: ComputeDevice,
        claim: Callable[[int], Claim],
        *,
        take: bool = True,
        concede: bool = True,
    ) -> tuple[SlabAllocator, int] | None:
        """See `TieredMemory.admit`."""
        if self._admit(owner, device, claim, take) is None:
            return None
        try:
            return self._admit_with_less(owner, device, claim, take, concede)
        finally:
            if not take:
                self._relax()

    def _admit_with_less(
        self, owner: Owner, device: ComputeDevice, claim: Callable[[int], Claim], take: bool, concede: bool
    ) -> tuple[SlabAllocator, int] | None:
        """As `admit`, where others claim no more than they must."""
        without = None if take else owner.number
        while True:
            self._relax(without)
            refused = self._admit(owner, device, claim, take)
            # Without an owner it is asked what is promised already.
            if refused is None or not concede or owner.number < 0:
                return refused
            self._relax()  # whoever is asked, or comes while this waits, sees all that is claimed
            if not any([ask() for ask in self._conceding]):
                return refused
            self._readers.pause()
            if self._admit(owner, device, claim, take) is None:
                return None

    def _relax(self, without: int | None = None) -> None:
        """See `Parked.relax`."""
        for each in self._parked:
            each.relax(without)

    def _admit(
        self, owner: Owner, device: ComputeDevice, claim: Callable[[int], Claim], take: bool
    ) -> tuple[SlabAllocator, int] | None:
        home = device.home
        if device.slabs is not None:
            device.slabs.recover()

        def demanded(limit: int) -> int:
            return self._demand(owner, device, claim(limit), limit)[device.slabs is None]

        limit = home.budget.lasting
        if demanded(limit) > limit:
            needed = _fixed_point(demanded, limit)
            goal = home.budget.goal
            if device.slabs is None or (goal is not None and needed > goal) or not device.slabs.allow(needed):
                return home, needed
        mine, host = claim(home.budget.lasting), device.host.slabs
        needed = self._demand(owner, device, mine, home.budget.lasting)[1]
        if needed > host.budget.lasting:
            return host, needed
        if take:
            owner.claims[device] = mine
        return None

    def _demand(self, owner: Owner, device: ComputeDevice, mine: Claim, limit: int) -> tuple[int, int]:
        """Bytes that a device's tier, and the host, need at the least for one claim and all others, if the tier where
        the device's blocks begin has `limit`."""
        host, own = 0, 0
        for each in self._devices.values():
            claims = [x.claims[each] for x in self._owners.values() if each in x.claims and x is not owner]
            if each is device:
                # With another budget, what the others read through would be another, too.
                claims = [*(x.at(limit) for x in claims), mine]
            elif each in owner.claims:
                claims.append(owner.claims[each])
            budget = None if each.slabs is None else each.slabs.budget.lasting
            found = demand(claims, limit if each is device and each.slabs is not None else budget)
            host += found.host
            if each is device:
                own = found.device
        return own, host

    def resize(self, limits: Mapping[SlabAllocator, int], host: HostTier | None) -> None:
        """Give other budgets. Blocks leave where a budget falls.

        Args:
            limits: bytes, of every memory whose budget changes.
            host: the host tier, if it is in use.

        Raises:
            BudgetError: what the owners hold does not fit; names the smallest that works. Nothing was changed.
            CorruptionError, TransferError: a block that was to move cannot. The budgets are as they were, or as a
                note of the error says.
        """
        before = {slabs: slabs.limits for slabs in limits}
        try:
            for slabs, limit in limits.items():
                slabs.resize(limit)
            for device in self._devices.values():
                refused = self.admit(Owner(-1), device, lambda limit: Claim())
                if refused is not None:
                    raise shortage.too_small(*refused, "What the caches hold needs")
            # What leaves one tier may need what another one gains. Readers are waited for: who is admitted meanwhile is
            # promised no more than there will be.
            for slabs, limit in limits.items():
                slabs.budget.goal = limit
                slabs.resize(max(limit, before[slabs].limit))
            for slabs, limit in limits.items():
                self._vacate(slabs, limit, host)
                slabs.resize(limit)  # at once: waiting for readers lets other threads in
        except BaseException as error:
            self._restore(before, host, error)
            raise
        finally:
            for slabs in limits:
                slabs.budget.goal = None
            self._readers.resume()
        for slabs, limit in limits.items():
            slabs.resize(limit)

    def _restore(self, before: Mapping[SlabAllocator, Limits], host: HostTier | None, error: BaseException) -> None:
        """Give the budgets back that there were. What has moved to a tier that was to gain room goes back. What does
        not come back, for a block is corrupt, or nothing is moved behind an interrupt, has a budget that holds it, and
        the error says so."""
        for slabs, was in before.items():
            slabs.resize(max(slabs.budget.limit, was.limit))
            slabs.budget.goal = was.limit
        for slabs, was in before.items():
            if isinstance(error, Exception):
                with contextlib.suppress(KVTierError):
                    self._vacate(slabs, was.limit, host)
            used, tier = slabs.budget.used, slabs.budget.tier
            if used <= was.limit:
                slabs.limits = was
                continue
            slabs.limits = Limits(used, max(used, was.given))
            error.add_note(
                f"The {tier} budget is {used} bytes now, not the {was.limit} that it was: blocks that have moved there "
                f"do not go back. `resize(host_budget=..., device_budget=...)` gives another one."
            )

    def _vacate(self, slabs: SlabAllocator, limit: int, host: HostTier | None) -> None:
        """Give memory back until no more than `limit` bytes are taken."""
        budget = slabs.budget
        if budget.used <= limit:
            return
        for device in self._devices.values():
            if device.slabs is slabs:
                device.make_room(budget.limit - limit)
                return
        assert host is not None
        if not host.make_room(budget.limit - limit):
            raise shortage.not_vacated(budget, limit)


def _fixed_point(demanded: Callable[[int], int], limit: int) -> int:
    """The smallest number above `limit`, for which too much is demanded, for which no more is demanded than itself."""
    # What is demanded never falls with the limit, so that no smaller number is passed over.
    while (needed := demanded(limit)) > limit:
        limit = needed
    return limit
