"""A model of an engine on a virtual clock, with the schedulers that run in production.

Requests come, wait, are computed in steps, give up their blocks and come back, and end. What a step takes is said by a
`Profile`. A step lasts as long as the device computes, or as copies take if these are longer and go on meanwhile.
All of it is numbers: the same requests give the same figures on every machine.

Device blocks are free, of one sequence, or kept by key: full blocks of a prompt, and what was generated, that later
requests begin with. Kept blocks that nobody uses make room, the longest unused first, and the end of a prompt before
its beginning.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import COPY
from kvtier.scheduling.job import Job, Load, Ways
from kvtier.scheduling.prices import SWAP, Always
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.shares import Shares
from kvtier.scheduling.simulation.outcome import Outcome, Request, Served
from kvtier.scheduling.simulation.profile import Profile

#: Waiting jobs of which a step looks up what they begin with.
_LOOKED_UP = 32


@dataclass(slots=True)
class _Kept:
    """A block that is known by its key."""

    device: bool = False
    host: bool = False
    users: int = 0


@dataclass(slots=True, eq=False)
class Working:
    """A request in the engine."""

    index: int
    request: Request
    served: Served
    job: Job
    #: Its first blocks are kept ones, by key; the others are its own.
    shared: list[Hashable] = field(default_factory=list)
    #: Blocks that it has on the host while it waits.
    on_host: int = 0


class Simulation:
    """An engine, its requests, and a clock.

    Args:
        requests: `after` names an earlier one of them.
        profile: what steps take.
        scheduler: decides. The object is used as it is, and is asked at each step.
        ways: how jobs come back that give up their blocks; None: by price; "swap", "recompute": always.
        stateful: whether what was computed is kept for later requests, as long as there is room.
        max_tokens, max_running: of a step.
        shares: counts what tenants are served.
        check: whether all counts are checked at each step.

    Raises:
        ConfigError: a request can never fit.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        profile: Profile,
        scheduler: Scheduler,
        *,
        ways: Ways | str | None = None,
        stateful: bool = False,
        max_tokens: int = 2048,
        max_running: int = 256,
        shares: Shares | None = None,
        check: bool = False,
    ) -> None:
        self.profile, self.scheduler, self.stateful = profile, scheduler, stateful
        self.max_tokens, self.max_running = max_tokens, max_running
        self.ways = profile.prices(max_tokens) if ways is None else Always(ways) if isinstance(ways, str) else ways
        self.shares = Shares() if shares is None else shares
        self.now = 0.0
        self.free, self.free_host = profile.device_blocks, profile.host_blocks
        self._check = check
        self._kept: dict[Hashable, _Kept] = {}
        self._unused: OrderedDict[Hashable, None] = OrderedDict()  # on the device, nobody uses it
        self._on_host: OrderedDict[Hashable, None] = OrderedDict()
        self._waiting: dict[Job, Working] = {}
        self._running: dict[Job, Working] = {}
        self._active: dict[str, int] = {}
        self._up = self._down = 0.0  # tokens to copy in this step
        self._backlog = 0.0  # tokens that are still to be written through
        self._turn = self._arrived = 0
        self._rate = 1000.0
        self._requests = requests
        self.outcome = Outcome([])
        self._followers: dict[int, list[int]] = {}
        self._arrivals: list[tuple[float, int]] = []
        for i, request in enumerate(requests):
            if self._blocks(request.prompt + request.output) > profile.device_blocks:
                raise ConfigError(
                    f"Request {i}, of {request.prompt + request.output:,} tokens, takes more blocks than the "
                    f"{profile.device_blocks} of the device: give the device more, or shorter requests."
                )
            if request.prompt < 1 or request.output < 1:
                raise ConfigError(f"Request {i}: a prompt and an output have at least one token.")
            self.outcome.requests.append(Served(request.arrived, request.prompt, request.output, request.tenant))
            if request.after is None:
                self._arrivals.append((request.arrived, i))
            else:
                self._followers.setdefault(request.after, []).append(i)
        heapq.heapify(self._arrivals)

    def run(self, until: float = math.inf) -> Outcome:
        """Until all requests have ended, or the clock shows so much."""
        while (self._arrivals or self._waiting or self._running) and self.now < until:
            if not self._waiting and not self._running:
                self.now = max(self.now, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._arrive(*heapq.heappop(self._arrivals))
            self._step()
            if self._check:
                self.check_integrity()
        self.outcome.seconds = self.now
        return self.outcome

    # A step

    def _arrive(self, time: float, index: int) -> None:
        request = self._requests[index]
        if not self._active.get(request.tenant):
            self.shares.arrives(request.tenant, [x for x, count in self._active.items() if count])
        self._active[request.tenant] = self._active.get(request.tenant, 0) + 1
        served = self.outcome.requests[index]
        served.arrived = time
        self._arrived += 1
        job = Job(self._arrived, time, request.prompt, request.prompt + request.output, priority=request.priority)
        job.tenant = request.tenant
        self._waiting[job] = Working(index, request, served, job)

    def _step(self) -> None:
        if self.stateful:
            self._look_up()
        load = Load(
            self.now,
            list(self._running),
            list(self._waiting),
            self.free + len(self._unused),
            self.profile.block_size,
            self.max_tokens,
            self._most_running(),
            True,
            self._rate,
            self.free_host + len(self._on_host),
            self.ways,
            self.shares.served,
        )
        step = self.scheduler.plan(load)
        self._up = self._down = 0.0
        for job in step.preempt:
            self._preempt(self._running[job], step.ways.get(job, "recompute"))
        work: list[tuple[Working, int]] = []
        for job, tokens in step.tokens.items():
            sequence = self._running.get(job) or self._admit(job, tokens)
            if sequence is not None:
                tokens = min(tokens, job.left)
                self._grow(sequence, self._blocks(job.cached + tokens))
                work.append((sequence, tokens))
        if work or self._up or self._down:
            self._compute(work)
        elif not step.preempt:
            if not self._arrivals:
                raise ConfigError(
                    f"At {self.now:g} s the scheduler gives no job a part in a step, and none is to come."
                )
            self.now = max(self.now, self._arrivals[0][0])

    def _most_running(self) -> int:
        """Jobs that may run in the next step."""
        return self.max_running

    def _compute(self, work: Sequence[tuple[Working, int]]) -> None:
        profile = self.profile
        total = sum(tokens for _, tokens in work)
        device = profile.overhead + profile.linear(total)
        device += sum(profile.attention(tokens, x.job.cached) for x, tokens in work)
        overlaps = profile.machine.overlaps
        if profile.write_through:
            size = profile.block_size
            full = size * sum((x.job.cached + tokens) // size - x.job.cached // size for x, tokens in work)
            if overlaps:
                self._backlog += full
            else:
                self._down += full
        up, down = (COPY + x * profile.token_copy if x else 0.0 for x in (self._up, self._down))
        seconds = max(device, up, down) if overlaps else device + up + down
        # Nobody waits for what is written through: it takes what others leave of the link.
        self._backlog = max(self._backlog - (seconds - down) / profile.token_copy, 0.0)
        self._pass(work, device, seconds)

    def _pass(self, work: Sequence[tuple[Working, int]], device: float, seconds: float) -> None:
        """A step is over after so many seconds, in which the device computed for some: its tokens are there."""
        total = sum(tokens for _, tokens in work)
        self.now += seconds
        outcome = self.outcome
        outcome.steps += 1
        outcome.computed += total
        outcome.device += device
        outcome.link += seconds - device
        outcome.rows += len(work)
        if total >= 64:
            self._rate = 0.8 * self._rate + 0.2 * total / seconds
        for sequence, tokens in work:
            job = sequence.job
            prompt = min(tokens, max(sequence.request.prompt - job.cached, 0))
            job.cached += tokens
            given = job.cached == job.tokens
            self.shares.serve(job.tenant, prompt, int(given))
            if given:
                self._give(sequence)

    def _give(self, sequence: Working) -> None:
        """A new token."""
        job, served = sequence.job, sequence.served
        if math.isnan(served.first):
            served.first = self.now
            self._keep(sequence)
        job.tokens += 1
        if job.tokens < job.most:
            return
        self._keep(sequence)
        served.finished = self.now
        del self._running[job]
        self._release(sequence)
        self._active[job.tenant] -= 1
        for i in self._followers.get(sequence.index, ()):
            heapq.heappush(self._arrivals, (self.now + self._requests[i].arrived, i))

    # Blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_size)

    def _hits(self, sequence: Working) -> tuple[int, int]:
        """Blocks that it begins with: in use on the device, and in all. The last token is always computed."""
        limit = (sequence.job.tokens - 1) // self.profile.block_size
        used = found = 0
        for key in sequence.request.keys[:limit]:
            kept = self._kept.get(key)
            if kept is None:
                break
            found += 1
            used += found == used + 1 and kept.users > 0
        return used, found

    def _look_up(self) -> None:
        """What waiting jobs begin with. Of many, those in front and some of the others."""
        jobs = list(self._waiting)
        if len(jobs) > 2 * _LOOKED_UP:
            start = self._turn = (self._turn + _LOOKED_UP) % len(jobs)
            jobs = jobs[:_LOOKED_UP] + jobs[max(start, _LOOKED_UP) : start + _LOOKED_UP]
        size = self.profile.block_size
        for job in jobs:
            sequence = self._waiting[job]
            used, found = self._hits(sequence)
            own = job.cached if sequence.on_host else 0
            job.reusable, job.swapped = used * size, max(found * size, own)

    def _admit(self, job: Job, tokens: int) -> Working | None:
        """It runs from now on, if there is room for what it is given."""
        sequence = self._waiting[job]
        size = self.profile.block_size
        _, found = self._hits(sequence) if self.stateful else (0, 0)
        there = max(found * size, job.cached if sequence.on_host else 0)
        keys = sequence.request.keys[:found]
        unused = sum(self._kept[key].users == 0 and self._kept[key].device for key in keys)
        on_device = sum(self._kept[key].device for key in keys)
        need = self._blocks(there + min(tokens, job.tokens - there)) - on_device
        if need > self.free + len(self._unused) - unused:
            return None
        del self._waiting[job]
        self._running[job] = sequence
        for key in keys:
            kept = self._kept[key]
            if kept.users == 0:
                self._unused.pop(key, None)
            kept.users += 1
        for key in keys:
            kept = self._kept[key]
            if not kept.device:
                self._take(1)
                kept.device = True
                self._up += size
            if kept.host:
                self._on_host.move_to_end(key)
        sequence.shared = list(keys)
        job.running, job.blocks, job.reusable, job.swapped = True, found, 0, 0
        if sequence.on_host:
            self._up += max(there - found * size, 0)
            self.free_host += sequence.on_host
            sequence.on_host = 0
        self._grow(sequence, self._blocks(there))
        job.cached = there
        if math.isnan(sequence.served.scheduled):
            sequence.served.scheduled = self.now
            sequence.served.reused = min(there, sequence.request.prompt)
        return sequence

    def _preempt(self, sequence: Working, way: str) -> None:
        job = sequence.job
        del self._running[job]
        blocks = self._blocks(job.cached)
        if way == SWAP and job.cached and self._make_room_on_host(blocks):
            sequence.served.swapped += 1
            self.free_host -= blocks
            sequence.on_host = blocks
            size = self.profile.block_size
            late = job.cached % size + self._backlog if self.profile.write_through else job.cached
            self._down += min(late, job.cached)
            job.swapped = job.cached
        else:
            sequence.served.recomputed += 1
            if self.stateful:
                self._keep(sequence)
            job.swapped = 0
        cached = job.cached
        self._release(sequence)
        job.cached = cached if sequence.on_host else 0
        self._waiting[job] = sequence

    def _grow(self, sequence: Working, blocks: int) -> None:
        more = blocks - sequence.job.blocks
        if more > 0:
            self._take(more)
            sequence.job.blocks = blocks

    def _take(self, blocks: int) -> None:
        """So many free blocks are used; kept ones make room."""
        while self.free < blocks:
            assert self._unused, "a step takes more blocks than there are"
            key, _ = self._unused.popitem(last=False)
            kept = self._kept[key]
            kept.device = False
            self.free += 1
            if not kept.host:
                del self._kept[key]
        self.free -= blocks

    def _release(self, sequence: Working) -> None:
        """It gives up its blocks. Kept ones stay until somebody needs the room."""
        job = sequence.job
        self.free += job.blocks - len(sequence.shared)
        for key in reversed(sequence.shared):  # the end goes first
            kept = self._kept[key]
            kept.users -= 1
            if not kept.users:
                self._unused[key] = None
        sequence.shared = []
        job.running, job.blocks, job.cached = False, 0, 0

    def _keep(self, sequence: Working) -> None:
        """Its full blocks are known by their keys from now on."""
        if not self.stateful:
            return
        keys = sequence.request.keys
        for i in range(len(sequence.shared), min(sequence.job.cached // self.profile.block_size, len(keys))):
            key = keys[i]
            kept = self._kept.get(key)
            if kept is not None and kept.device:  # somebody computed it as well: its own copy is given back
                self._unused.pop(key, None)
                self.free += 1
            elif kept is None:
                kept = self._kept[key] = _Kept()
            kept.device = True
            kept.users += 1
            sequence.shared.append(key)
            if not kept.host and self.profile.host_blocks and self._make_room_on_host(1):
                kept.host = True
                self._on_host[key] = None
                self.free_host -= 1
                if not self.profile.write_through:
                    self._backlog += self.profile.block_size
        for key in reversed(sequence.shared):
            if key in self._on_host:
                self._on_host.move_to_end(key)

    def _make_room_on_host(self, blocks: int) -> bool:
        """Whether the host has so many blocks free, after the longest unused have gone."""
        while self.free_host < blocks and self._on_host:
            key, _ = self._on_host.popitem(last=False)
            kept = self._kept[key]
            kept.host = False
            self.free_host += 1
            if not kept.device:
                del self._kept[key]
        return self.free_host >= blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless all blocks and tokens are accounted for."""
        own = sum(x.job.blocks - len(x.shared) for x in self._running.values())
        kept = sum(x.device for x in self._kept.values())
        assert self.free >= 0, "the device has less than no block"
        assert self.free + own + kept == self.profile.device_blocks, "device blocks are lost"
        waiting = sum(x.on_host for x in self._waiting.values())
        assert self.free_host >= 0, "the host has less than no block"
        assert self.free_host + waiting + len(self._on_host) == self.profile.host_blocks, "host blocks are lost"
        assert {key for key, x in self._kept.items() if x.host} == self._on_host.keys()
        assert {key for key, x in self._kept.items() if x.device and not x.users} == self._unused.keys()
        users = sum(len(x.shared) for x in self._running.values())
        assert users == sum(x.users for x in self._kept.values()), "users of kept blocks are counted wrong"
        for job, sequence in self._running.items():
            assert job.running
            assert job.blocks == self._blocks(job.cached), (job, sequence)
            assert job.cached < job.tokens <= job.most
        for job in self._waiting:
            assert not job.running
            assert job.blocks == 0


def simulate(requests: Sequence[Request], profile: Profile, scheduler: Scheduler, **options: Any) -> Outcome:
    """What becomes of requests. See `Simulation` for options."""
    return Simulation(requests, profile, scheduler, **options).run()
