"""`TieredMemory`: budgets, pools and transfers, shared by any number of caches. It knows no sequence and no model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from kvtier import profile
from kvtier.config import MemoryOptions, Size, checks_names
from kvtier.cpu import loader
from kvtier.errors import ClosedError, ConfigError, MemoryInUseError
from kvtier.forks import heed, inherited
from kvtier.memory import integrity, limits, measured, usage
from kvtier.memory.access.change import Change, ask
from kvtier.memory.access.lock import new_lock
from kvtier.memory.access.readers import Readers
from kvtier.memory.admission import Admission
from kvtier.memory.blocks.audit import Audit
from kvtier.memory.blocks.block import BlockSet, State
from kvtier.memory.owner import Owner
from kvtier.memory.recovery import Recovery
from kvtier.memory.storage.buffers import IoBuffers, Workspace
from kvtier.memory.storage.layout import BlockLayout
from kvtier.memory.storage.pool import BlockPool
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.memory.tiers.host import HostTier, Parked
from kvtier.planning.admission import Claim
from kvtier.planning.policies.names import PolicyName, policy_of
from kvtier.planning.policy import Policy
from kvtier.planning.rates import Rates
from kvtier.stats import CacheStats, Counters, TierStats
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import InlineTransfers, TransferEngine

EngineFactory = Callable[[torch.device], TransferEngine]

#: Of owners, unique in a process: a policy object may be given to several memories.
_numbers = itertools.count()


def default_engine(device: torch.device) -> TransferEngine:
    """CUDA streams on a CUDA device; inline copies elsewhere."""
    return CudaTransfers(device) if device.type == "cuda" else InlineTransfers(device)


class TieredMemory:
    """Memory for KV in two tiers, device and host, under hard budgets. Several caches may use it, from several threads.

        memory = kvtier.TieredMemory(device_budget="8GiB", host_budget="64GiB")
        first = TieredKVCache(model.config, memory=memory)
        second = TieredKVCache(other.config, memory=memory)

    The caches may be of any models, layouts and block sizes; a block leaves the device for whoever needs the room, as
    the policy says. A cache that is closed gives back what it held. Nothing is allocated before the first forward.

    Args:
        device_budget: bytes of device memory for KV, fetched blocks and workspaces: an int, a string (`"4GiB"`), a
            share of what is free (`0.5`), `"auto"` (what is free less a fifth, at least 1 GiB), or a mapping from
            device (`"cuda:0"`) to any of these. The default is `"auto"` on an accelerator, and on the CPU no device
            tier at all; a budget there emulates one in RAM.
        host_budget: bytes of host memory, written the same way; `"auto"` leaves a fifth, at least 2 GiB.
        policy: decides what is fetched, evicted and written back; see `kvtier.Policy`; or a name, as `TieredKVCache`'s.
        audit: whether blocks in host memory are compared with what was written there: "sampled" one in 64 that move or
            are continued, and one in 64 calls that read them in place; "full" all of them, at every call; "off" none.
            One that differs is a `CorruptionError`, and is not read again.

    Raises:
        ConfigError: an option that is malformed.
    """

    @checks_names
    def __init__(
        self,
        *,
        device_budget: Size | Mapping[str, Size] | None = None,
        host_budget: Size = "auto",
        policy: Policy | PolicyName | None = None,
        audit: Literal["off", "sampled", "full"] = "sampled",
    ) -> None:
        self._setup(MemoryOptions.parse(device_budget, host_budget, audit), policy_of(policy))

    @classmethod
    def of_one_cache(cls, options: MemoryOptions, policy: Policy) -> TieredMemory:
        """A memory that a cache makes for itself, with options that are checked already."""
        self = cls.__new__(cls)
        self._setup(options, policy)
        self.private = True
        return self

    def alike(self, **budgets: int) -> TieredMemory:
        """Another memory with the options of this one, but for some budgets."""
        new = TieredMemory.__new__(TieredMemory)
        new._setup(replace(self.options, **budgets), copy.deepcopy(self.policy))
        return new

    def _setup(
        self, options: MemoryOptions, policy: Policy, engine: EngineFactory = default_engine, *, poison: bool = False
    ) -> None:
        limits.warn_if_beyond_the_host(options)
        self.options = options
        self.policy = policy
        self.lock = new_lock()
        self.readers = Readers(self.lock, self.follow)
        #: Compares blocks in host memory with what was written; None: nobody does.
        self.audit = Audit(options.audit) if options.audit else None
        self.closed = False
        #: Made by one cache for itself, which refuses a second thread: nobody reads while another thread changes it.
        self.private = False
        #: Blocks that nobody is promised, which go where room is needed.
        self.parked: list[Parked] = []
        #: Who claims what it can do without: asked, under the lock, before anybody else is refused. Says whether it
        #: concedes that; it wakes those that wait for readers then.
        self.conceding: list[Callable[[], bool]] = []
        #: Rises with every forward: for policies, see `BlockSet.last_used`.
        self.clock = 0
        #: Whose forward began last.
        self.turn: weakref.ref[Any] | None = None
        self._engine = engine
        self._poison = poison
        self._owners: dict[int, Owner] = {}
        self._devices: dict[torch.device, ComputeDevice] = {}
        #: By the name of a device, what is stored of it: what `calibrate` has measured; None: nothing.
        self.rates: dict[str, Rates | None] = {}
        self._totals = Counters()
        self._peaks: dict[str, TierStats] = {}
        self._host: HostTier | None = None
        self._admission = Admission(self._devices, self._owners, self.parked, self.conceding, self.readers)
        #: What dropped caches held, and what was cut short.
        self.recovery = Recovery(self.lock, self.readers, lambda: self._host, self._devices, self._owners, self.parked)
        #: Around a change that no `Guard` is around, within the lock; it collects first.
        self.change = Change(self.recovery, self.follow)
        heed(self)

    def forked(self) -> None:
        """As of `Inherited`: a thread that is not here may be at a change."""
        before, self.lock = self.lock, inherited(self.lock, new_lock)
        self.recovery.lock = self.lock
        self.readers.forked(self.lock)
        for device in self._devices.values():
            device.engine.forked()
        if self.change.forked() or self.lock is not before:
            self.recovery.interrupted = True

    def set_up(self, engine: EngineFactory, *, poison: bool = False) -> None:
        """Use other transfer engines, and poison free slots, from the first use on (tests)."""
        assert not self._devices, "the memory is in use"
        assert self._host is None
        self._engine, self._poison = engine, poison

    # Owners

    def new_owner(self) -> Owner:
        """An owner that has not joined yet."""
        return Owner(next(_numbers))

    def join(self, owner: Owner | None = None) -> Owner:
        """Let an owner in. Raises `ClosedError`.

        Args:
            owner: who has it lets it leave again, even if this is cut short; None: a new one.
        """
        owner = self.new_owner() if owner is None else owner
        with self.lock:
            return self.enter(owner)

    def enter(self, owner: Owner) -> Owner:
        """Let an owner in. The caller holds the lock. Raises `ClosedError`."""
        self.check_open()
        self._owners[owner.number] = owner
        return owner

    @property
    def owners(self) -> list[Owner]:
        """All that were let in. The caller holds the lock."""
        return list(self._owners.values())

    def others(self, owner: Owner) -> int | None:
        """Who claims room besides an owner; None: a cache made this memory for itself. The caller holds the lock."""
        return None if self.private else sum(bool(x.claims) for x in self._owners.values() if x is not owner)

    def leave(self, owner: Owner) -> None:
        """An owner whose sets are empty gives back everything else. The caller holds the lock."""
        mine: list[Workspace | IoBuffers] = [*owner.workspaces.values(), *owner.io_buffers.values()]
        for each in mine:
            each.release()
        for reclaimable in (x.reclaimable for x in (*self._devices.values(), self._host) if x is not None):
            reclaimable[:] = [each for each in reclaimable if each not in mine]
        owner.claims.clear()
        if self._owners.pop(owner.number, None) is not None:
            self._totals.add(owner.counters)
        owner.release = None  # it refers to who has it
        self.trim(all_free=True)

    def mend(self) -> None:
        """As `Recovery.collect` after an interrupt, for those who are about to read, or to change blocks of their own;
        not while they read, for it would free what they read. The caller holds the lock."""
        self.follow()
        if self.recovery.interrupted and not self.readers.mine():
            with self.change:
                pass  # it collects first

    def follow(self) -> None:
        """Let what this thread does on devices come behind all that was done there for this memory, on whatever stream.
        Whoever reads or changes blocks calls this first. The caller holds the lock."""
        for device in self._devices.values():
            device.engine.follow()

    # Devices

    def on(self, device: torch.device) -> ComputeDevice:
        """The compute device for layers on `device`, made on first use. The caller holds the lock.

        Raises:
            ConfigError: the options have no budget for it, or one number for an emulated device and a real one.
        """
        found = self._devices.get(device)
        if found is None:
            self.check_open()
            profile.enabled()  # a wrong setting is an error here, not in the middle of a forward
            limit = limits.of_device(device, self.options, self._devices)
            host = self.host
            if device.type == "cuda" and host.slabs.lock_for is None:
                host.slabs.lock_for = device
            engine = self._engine(device)
            found = self._devices[device] = ComputeDevice(
                device, limit, host, engine, self.policy, self.readers, audit=self.audit, poison=self._poison
            )
            found.engine.follow()
        return found

    @property
    def devices(self) -> list[ComputeDevice]:
        """The compute devices in use."""
        return list(self._devices.values())

    @property
    def host(self) -> HostTier:
        """The host tier, made on first use."""
        if self._host is None:
            self._host = HostTier(limits.of_host(self.options, 0), self.readers, poison=self._poison)
            self._host.promote = lambda layout: any(device.promote(layout) for device in self.devices)
            self._host.drain = self._drain
            self._host.parked = self.parked
        return self._host

    def block_set(self, owner: Owner, device: ComputeDevice, layout: BlockLayout, layer: int) -> BlockSet:
        """A new set of blocks of an owner."""
        if device.slabs is not None and device.name not in self.rates:
            rates = measured.rates(device.device, layout)
            emulated = getattr(self._engine, "rates", None)
            if emulated is not None:  # a test double of another machine
                rates = emulated(rates)
            self.rates[device.name] = rates
            if rates is not None:
                ask(self.policy.use_rates, device.name, rates)
        blocks = device.block_set(layout, layer, owner.number, owner.counters)
        owner.sets.append(blocks)
        return blocks

    def drop_set(self, owner: Owner, device: ComputeDevice, blocks: BlockSet) -> None:
        """Free whatever is left in a set of an owner, and the set."""
        for run in list(blocks.runs):
            if run.state is not State.FREE:
                device.free(run)
        if blocks in device.sets:
            device.drop_set(blocks)
        if blocks in owner.sets:
            owner.sets.remove(blocks)

    def workspace(self, owner: Owner, device: ComputeDevice) -> Workspace:
        """The memory in which an owner lays out one layer's KV."""
        found = owner.workspaces.get(device)
        if found is None:
            found = owner.workspaces[device] = Workspace(device.home, device.make_room)
            (self.host if device.slabs is None else device).reclaimable.append(found)
        return found

    def io_buffers(self, owner: Owner, device: ComputeDevice, number: int = 0) -> IoBuffers:
        """The memory through which queries and results of an owner pass between device and host; calls that go on at
        the same time are numbered."""
        found = owner.io_buffers.get((device, number))
        if found is None:
            found = owner.io_buffers[device, number] = IoBuffers(self.host.slabs)
            self.host.reclaimable.append(found)
        return found

    # Admission

    def admit(
        self,
        owner: Owner,
        device: ComputeDevice,
        claim: Callable[[int], Claim],
        *,
        take: bool = True,
        concede: bool = True,
    ) -> tuple[SlabAllocator, int] | None:
        """Let an owner take what it claims on a device until its next claim, if the budgets hold all claims together.

        Args:
            owner: whose claim it is, in place of its last one.
            device: whose budget, and the host's, it is a claim on.
            claim: what it claims, if the tier where blocks begin has so many bytes: what a layer is read through may
                grow with that.
            take: False: only see whether it could, if the owner had nothing else: what is parked and it continues is
                not claimed then.
            concede: whether those who can do with less are asked for it, and waited for.

        Returns:
            None; or, and nothing is changed, the memory that is too small, and the smallest limit with which the claim
            is admitted.
        """
        return self._admission.admit(owner, device, claim, take=take, concede=concede)

    @checks_names
    def resize(
        self, *, device_budget: Size | Mapping[str, Size] | None = None, host_budget: Size | None = None
    ) -> None:
        """Give other budgets while caches are in use. Blocks leave the device where its budget falls.

        Args:
            device_budget, host_budget: as at construction; None: as it is.

        Raises:
            ConfigError: malformed.
            BudgetError: what the caches hold does not fit; names the smallest that works. Nothing was changed.
            CorruptionError, TransferError: a block that was to move cannot. The budgets are as they were, or as a
                note of the error says.
        """
        options = self.options.with_budgets(device_budget, host_budget)
        if host_budget is not None:
            limits.warn_if_beyond_the_host(options)
        with self.lock, self.change:
            while any(slabs.budget.goal is not None for slabs in self._tier_slabs()):
                self.readers.pause()  # another thread gives budgets, and waits for readers
            self.check_open()
            self.recovery.collect()
            given: dict[SlabAllocator, int] = {}
            if device_budget is not None:
                given |= limits.of_devices(options, device_budget, self._devices)
            if host_budget is not None and self._host is not None:
                given[self._host.slabs] = limits.of_host(options, self._host.slabs.budget.used)
            self._admission.resize(given, self._host)
            self.options = options

    def trim(self, *, all_free: bool = False) -> None:
        """Give back slabs that are wholly free: all, or where much is free. The caller holds the lock."""
        if self._host is None:
            return
        for device in self._devices.values():
            device.poll()
        for pool in self._all_pools():
            if all_free or pool.free > max(pool.used // 4, 8):
                pool.retire_free()

    # The end

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self.closed:
            raise ClosedError("This TieredMemory was closed. Make a new one.")

    def close(self) -> None:
        """Give all memory, streams and registrations back. Idempotent.

        Raises:
            MemoryInUseError: caches use it: close them first.
        """
        with self.lock, self.change:
            if self.closed:
                return
            if self._owners:
                self.recovery.find_abandoned()
                self.recovery.collect()
            if self._owners:
                raise MemoryInUseError(
                    f"This TieredMemory is in use: caches, stores, engines that are not closed: {len(self._owners)}. "
                    "Close them first: `close()`, or a `with` block. Nothing was changed."
                )
            self.reset()
            self.closed = True

    def reset(self) -> None:
        """Give everything back; budgets are found out again at the next use. The caller holds the lock, no owner any
        blocks."""
        self._peaks = self._tiers()
        for device in self._devices.values():
            device.close()
        self._devices.clear()
        if self._host is not None:
            for pool in self._host.pools.values():
                pool.close()
        self._host = None

    def __del__(self) -> None:
        # Copies under way use what would be gone, and what is page-locked has to be said to CUDA. Nobody else has it.
        if not sys.is_finalizing() and vars(self).get("closed") is False:
            pools = () if self._host is None else self._host.pools.values()
            for each in (*self._devices.values(), *pools):
                with contextlib.suppress(Exception):  # of a device that has failed, or that is not this process's
                    each.close()

    def reset_if_unused(self) -> None:
        """Give everything back, as `reset` does, if no cache uses it. For an owner that makes caches one by one."""
        with self.lock, self.change:
            if not (self.closed or self._owners or self.parked):
                self.reset()

    def __enter__(self) -> TieredMemory:
        self.check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except MemoryInUseError as in_use:
            if error is None:
                raise
            error.add_note(str(in_use))  # what went wrong first is what counts

    def drain(self) -> None:
        """Block until no copy is under way, and give back what is free then."""
        with self.lock, self.change:
            self._drain()
            self.trim(all_free=True)

    def give_back(self) -> None:
        """Give back what is free, slots that copies still use included: it waits for copies where there are such."""
        with self.lock, self.change:
            for device in self._devices.values():
                device.poll()
            if any(pool.held for pool in self._all_pools()):
                self._drain()
            self.trim(all_free=True)

    def _drain(self) -> None:
        for device in self._devices.values():
            device.engine.drain()

    def _tier_slabs(self) -> list[SlabAllocator]:
        found = [device.slabs for device in self._devices.values() if device.slabs is not None]
        return found if self._host is None else [*found, self._host.slabs]

    def _all_pools(self) -> list[BlockPool]:
        pools = [] if self._host is None else list(self._host.pools.values())
        return pools + [pool for device in self._devices.values() for pool in device.device_pools]

    # What a user sees

    @property
    def stats(self) -> CacheStats:
        """Bytes and blocks per tier, and what was done for all caches: a snapshot."""
        with self.lock:
            return self.snapshot(self._sum())

    def totals(self) -> Counters:
        """What was done for all caches, those that are closed included."""
        with self.lock:
            return self._sum()

    def _sum(self) -> Counters:
        total = Counters()
        total.add(self._totals)
        for owner in self._owners.values():
            total.add(owner.counters)
        return total

    def snapshot(self, counters: Counters, resident_bytes: int = 0) -> CacheStats:
        """A snapshot of the tiers with these counters."""
        stats = CacheStats()
        stats.add(counters)
        tiers = self._tiers()
        stats.device, stats.host, stats.resident_bytes = tiers["device"], tiers["host"], resident_bytes
        stats.native_missing = loader.missing()
        return stats

    def _tiers(self) -> dict[str, TierStats]:
        if self._host is None:
            return usage.unused(self.options, self._peaks, closed=self.closed)
        device, host = usage.tiers(self._host, self.devices, self.owners)
        if not device.budget and (given_bytes := self.options.device_bytes()):
            device = replace(device, budget=given_bytes)
        return {"device": device, "host": host}

    def __repr__(self) -> str:
        if self.closed:
            return "TieredMemory(closed)"
        return f"TieredMemory({', '.join([f'{len(self._owners)} caches', *self.stats.tiers()])})"

    def __getstate__(self) -> Any:
        raise ConfigError("A TieredMemory cannot be copied or pickled: make a new one.")

    def check_integrity(self) -> None:
        """Raise AssertionError unless all counts agree. For tests and debugging; walks every run."""
        with self.lock, self.change:
            integrity.check(self._host, list(self._devices.values()), self._owners, self.readers)
