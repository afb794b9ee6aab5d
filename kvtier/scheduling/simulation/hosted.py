"""`Hosted`: an engine in simulation whose sequences decode on the host where the device has no room (Neo, section 3).

A sequence is wholly on the device or wholly on the host. It begins on the device; where that is full, the youngest ones
that decode leave it, and come back while there is ample room. What a step takes, and whether rows on the host have a
part in it, says `planning/sub_batches`, as in an engine: one forward, two that take turns, or one without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtier.planning.hardware.machines import COPY, OF_DEVICE_MEMORY, OF_HOST_MEMORY, ROUND_TRIP
from kvtier.planning.sub_batches import Choice, Rates, Row, choose, stage
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.simulation.outcome import Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import Simulation, Working

#: Of the device's blocks, what stays free when a sequence comes back to it.
AMPLE = 32
#: Steps over which is averaged what device and host do.
RECENT = 16


class Hosted(Simulation):
    """A simulation in which blocks on the host count as room.

    Args:
        requests, profile, scheduler, options: as of `Simulation`.

    Attributes:
        steps_by_way: how often each way was taken.
        hosted: sum over all steps of the rows that had their blocks on the host.
    """

    def __init__(self, requests: Sequence[Request], profile: Profile, scheduler: Scheduler, **options: Any) -> None:
        whole = replace(
            profile, device_blocks=profile.device_blocks + profile.host_blocks, host_blocks=0, write_through=False
        )
        super().__init__(requests, whole, scheduler, ways="recompute", **options)
        self.steps_by_way: Counter[str] = Counter()
        self.hosted = 0
        self._device = profile.device_blocks
        self._away: dict[Working, None] = {}
        self._left: Counter[Working] = Counter()
        self._device_seconds = self._host_seconds = 0.0  # of a layer, on average
        layers, machine = profile.model.layers, profile.machine
        self._times = Rates(
            layers,
            lambda tokens: profile.linear(tokens) / layers,
            device_rate=machine.device_memory * OF_DEVICE_MEMORY,
            host_rate=machine.host_memory * OF_HOST_MEMORY,
            host_overhead=ROUND_TRIP,
        )

    def _compute(self, work: Sequence[tuple[Working, int]]) -> None:
        profile, layers = self.profile, self._times.layers
        moved = self._place(work)
        rows = []
        for x, tokens in work:
            if x in self._away and tokens == 1:
                rows.append(Row(1, 0.0, x.job.cached * profile.kv_bytes / layers, self._left[x]))
            else:
                seconds = profile.attention(tokens, x.job.cached)
                rows.append(Row(tokens, seconds * self._times.device_rate / layers))
        choice = choose(rows, self._times, may_leave=True)
        self._balance(rows, choice)
        done = [work[i] for i in choice.rows]
        there = set(choice.rows)
        for i, (x, _) in enumerate(work):
            if i not in there:  # what it was to grow by
                self.free += x.job.blocks - self._blocks(x.job.cached)
                x.job.blocks = self._blocks(x.job.cached)
        self._left = Counter({x: self._left[x] + 1 for i, (x, _) in enumerate(work) if i not in there})
        self.steps_by_way[choice.name] += 1
        self.hosted += sum(rows[i].host_bytes > 0 for i in choice.rows)
        device = choice.seconds + profile.overhead * (1 + bool(choice.second))
        link = COPY + moved * profile.token_copy if moved else 0.0
        self._pass(done, device, max(device, link))

    def _balance(self, rows: Sequence[Row], choice: Choice) -> None:
        """Keep up with what the device does in a step, and with what the host would for all rows that it has."""
        parts = [[rows[i] for i in choice.rows if (i in choice.second) is second] for second in (False, True)]
        stages = [stage(some, self._times) for some in parts if some]
        of_device = sum([each.linear + each.device for each in stages])
        of_host = stage(rows, self._times).host
        self._device_seconds += (of_device - self._device_seconds) / RECENT
        self._host_seconds += (of_host - self._host_seconds) / RECENT

    def _most_running(self) -> int:
        """Where the host has as much to do as the device, nobody is let in before its rows are back on the device, and
        then for the device only (Neo, section 3.2: "balancing", "hiding CPU")."""
        if self._host_seconds < self._device_seconds or not self._waiting:
            return self.max_running
        here = sum([x.job.blocks for x in self._running.values()])
        fits = not self._away and here + self._blocks(next(iter(self._waiting)).tokens) < self._device
        return min(len(self._running) + fits, self.max_running) or 1

    def _place(self, work: Sequence[tuple[Working, int]]) -> int:
        """Let sequences go to the host, or come back. Returns the tokens that cross the link, the more of both ways."""
        running = list(self._running.values())
        self._away = {x: None for x in self._away if self._running.get(x.job) is x}
        free = self._device - sum([x.job.blocks for x in running if x not in self._away])
        down = up = 0
        prompts = {x for x, tokens in work if tokens > 1}
        for some in (lambda x: x not in prompts, lambda x: True):
            for x in reversed(running):
                if free < 0 and x not in self._away and some(x):
                    self._away[x] = None
                    free += x.job.blocks
                    down += x.job.cached
        for x in sorted(self._away, key=lambda x: x.job.blocks):
            if x.job.blocks > free - self._device // AMPLE or down:
                break
            del self._away[x]
            free -= x.job.blocks
            up += x.job.cached
        return max(down, up)

    def check_integrity(self) -> None:
        """See `Simulation`. Unless all are on the host, what is on the device fits there."""
        super().check_integrity()
        here = [x for x in self._running.values() if x not in self._away]
        # Blocks that were added in the step that is over are placed by the next one.
        assert sum(x.job.blocks - 1 for x in here) <= self._device, "more is on the device than fits"
