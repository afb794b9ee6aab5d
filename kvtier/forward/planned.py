"""`PlannedForward`: what forwards of a cache and of an engine have in common: what they hold of a memory, and the plan
and the record of the step under way."""

from __future__ import annotations

import logging
import operator
import time
import weakref
from collections import deque
from typing import Any

from kvtier import tracing
from kvtier.attention.reader import LayerReader
from kvtier.config import CacheOptions
from kvtier.forward.held import Held
from kvtier.forward.schedule import Schedule
from kvtier.memory.access.change import ask
from kvtier.memory.tiered import TieredMemory
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.policy import checked_prediction
from kvtier.planning.reports.trace import plan_args
from kvtier.planning.step import StepRecord, StepState, checked
from kvtier.stats import CacheStats, Counters

#: What a cache counts, and what a `StepRecord` calls that.
_MEASURED = {
    name: name
    for name in (
        *("bytes_up", "bytes_down", "seconds_up", "seconds_down", "stall_seconds"),
        *("host_seconds", "host_blocks", "host_bytes"),
    )
} | {"block_fetches": "fetched", "evictions": "evicted"}
_totals = operator.attrgetter(*_MEASURED)
#: Steps of which what was expected and seen is kept.
HISTORY = 64
#: New tokens of a forward from which on it is told of: by a line in the log, and to a progress hook.
LONG_PROMPT = 1024

#: Plans of steps at DEBUG, long prompts at INFO. Looked at once for each step.
log = logging.getLogger("kvtier.forward")


class PlannedForward:
    """Steps that a policy plans, and learns from.

    Args:
        memory: that blocks are in.
        options: checked options.

    Attributes:
        readers: the layers by index, as attention reads them.
        history: the last steps, each with the seconds that were expected.
    """

    def __init__(self, memory: TieredMemory, options: CacheOptions) -> None:
        self.memory = memory
        self.options = options
        self._held = Held(memory)
        # Not this object: what it holds is given back when nobody uses it any more, layers and views included. Made
        # before anything is held, for this may be cut short.
        self._finalizer = weakref.finalize(self, memory.recovery.abandon, self._held.release)
        self._finalizer.atexit = False  # the process gives its memory back anyway
        # An interrupt in the midst of the finalizer, which is Python, costs it: the memory looks itself then.
        self._held.user = weakref.ref(self)
        self._held.join()
        self.readers = self._held.readers
        self._schedules: dict[ComputeDevice, Schedule] = {}
        self._rooms: dict[ComputeDevice, int] = {}
        self._record = StepRecord()
        self._began = 0.0
        self._ended: float | None = None
        self._last: StepRecord | None = None
        #: What the policy expects of the step under way, by device.
        self._expected: dict[ComputeDevice, float] = {}
        self.history: deque[tuple[StepRecord, float | None]] = deque(maxlen=HISTORY)
        #: The totals when the step under way began, from the first step on that a policy has planned.
        self._before: tuple[float, ...] | None = None
        #: Plans that the log has not been told of, by step and device: of those that were made again, the last.
        self._planned: dict[tuple[int, str], tuple[int, Any]] = {}

    @property
    def counters(self) -> Counters:
        """What was done for this cache."""
        return self._held.owner.counters

    @property
    def number(self) -> int:
        """Of the cache, for policies."""
        return self._held.owner.number

    def stats(self, resident_bytes: int) -> CacheStats:
        """A snapshot of all counters, and of the memory's tiers."""
        with self.memory.lock, self.memory.change:
            return self.memory.snapshot(self.counters, resident_bytes)

    # The plan and the record of a step

    def count_step(self) -> None:
        """A forward begins: count it, and tell the log of the last one."""
        self.counters.steps += 1
        if self._planned or self._record.tokens >= LONG_PROMPT:
            self._log("the next forward")

    def uncount_step(self) -> None:
        """The forward that has just begun was refused, and nothing is changed."""
        self.counters.steps -= 1

    def _log(self, until: str) -> None:
        """Tell the log of the last step. Nothing is locked: handlers have locks of their own, and may ask for this."""
        planned, self._planned = self._planned, {}
        for (step, device), (tokens, said) in planned.items():
            what = ", ".join(f"{name} {value}" for name, value in said)
            log.debug("cache %d, step %d on %s, %d new tokens: %s", self.number, step, device, tokens, what)
        tokens = self._record.tokens
        if tokens < LONG_PROMPT or not log.isEnabledFor(logging.INFO):
            return
        seconds, stats = time.perf_counter() - self._began, self.stats(0)
        total = max((reader.layer.length for reader in self.readers.values()), default=tokens)
        log.info(
            "cache %d: %d tokens behind %d, %.3g s until %s; %s; waited %.3g s for copies so far",
            *(
                self.number,
                tokens,
                max(total - tokens, 0),
                seconds,
                until,
                ", ".join(stats.tiers()),
                stats.stall_seconds,
            ),
        )

    def _forget_steps(self) -> None:
        """All layers have ended: no step was planned for the next ones, and none is told to a policy."""
        self._schedules.clear()
        self._rooms.clear()
        self._record, self._last, self._before = StepRecord(), None, None
        self._expected.clear()

    def _begin_record(self, tokens: int) -> None:
        """A step begins: the last one is over, and its record is made."""
        now = time.perf_counter()
        self.memory.clock += 1
        self._take_turn(now)
        record = self._record
        if self._before is not None:
            self._observe(self._before, now)
            record = self._record = StepRecord()  # the policy may keep that one
        record.tokens, record.layers, record.cache = tokens, 0, self._held.owner.number
        self._expected.clear()
        self._began, self._ended = now, None
        self._before = _totals(self.counters) if self._schedules else None
        tracer = tracing.active  # another thread may end it meanwhile
        if tracer is not None:
            self._trace_step(tracer, tokens, now)

    def _take_turn(self, now: float) -> None:
        """The step of another cache that came last ends here, if all of its layers have had their tokens: what follows
        is not time that it takes, and hides no copies of it. Of two threads' steps neither ends before its next one."""
        memory, before = self.memory, None if self.memory.turn is None else self.memory.turn()
        if before is not self:
            memory.turn = weakref.ref(self)
            if before is not None and before._ended is None and before._record.layers >= len(before.readers):
                before._ended = now

    def _trace_step(self, tracer: tracing.Trace, tokens: int, now: float) -> None:
        for reader in self.readers.values():
            reader.repeat = None  # repeated calls tell nobody
        device = next((reader.device.name for reader in self.readers.values()), "")
        tracer.step(self.counters, tokens, now, device, self.memory)

    def _observe(self, before: tuple[float, ...], now: float) -> None:
        """Tell the policy what the last step took."""
        record = self._record
        if not record.tokens:
            return
        record.seconds = (now if self._ended is None else self._ended) - self._began
        for name, was, total in zip(_MEASURED.values(), before, _totals(self.counters), strict=True):
            setattr(record, name, total - was)
        self._last = record
        # Of some devices alone a prediction is not one of the step.
        whole = bool(self._expected) and self._expected.keys() == self._rooms.keys()
        self.history.append((record, sum(self._expected.values()) if whole else None))
        ask(self.memory.policy.observe, record)

    def _plan(self, device: ComputeDevice, tokens: int) -> None:
        """Let the policy plan the step on a device where anything is spilled.

        Raises:
            ConfigError: its answer is no plan of these layers; nothing has begun.
        """
        if not device.spilled:
            return
        if self._before is None:
            self._before = _totals(self.counters)
        schedule = self._schedules.get(device)
        if schedule is None:
            schedule = self._schedules[device] = Schedule(self._readers_on(device))
        policy, state = self.memory.policy, self._state(schedule, device, tokens)
        plan = checked(ask(policy.plan, state), len(schedule.readers))
        expected = checked_prediction(ask(policy.prediction, state.cache, state.device))
        if expected is not None:
            self._expected[device] = expected.seconds
        tracer = tracing.active
        if tracer is not None:
            tracer.plan(self.counters, plan_args(plan, policy, state.cache, state.device))
        if log.isEnabledFor(logging.DEBUG):
            said = plan_args(plan, policy, state.cache, state.device).items()
            self._planned[self.counters.steps, state.device] = tokens, said
        schedule.begin(plan)

    def _readers_on(self, device: ComputeDevice) -> list[LayerReader]:
        return sorted((x for x in self.readers.values() if x.device is device), key=lambda x: x.layer.index)

    def _state(self, schedule: Schedule, device: ComputeDevice, tokens: int) -> StepState:
        """What a policy sees of a step on a device."""
        state = schedule.state(tokens, self._in_place(schedule, tokens), self._last, by_rows=self.memory.policy.by_rows)
        state.cache, state.device, state.model_layers = self._held.owner.number, device.name, len(self.readers)
        state.overlaps = device.engine.asynchronous
        return state

    def states(self) -> list[StepState]:
        """What a policy would see of a step of one token, on each device that has a tier and layers."""
        with self.memory.lock:
            found = {device: self._readers_on(device) for device in self.memory.devices if device.slabs is not None}
            return [
                self._state(self._schedules.get(device) or Schedule(readers), device, 1)
                for device, readers in found.items()
                if readers
            ]

    def _in_place(self, schedule: Schedule, tokens: int) -> list[bool]:
        """For each layer, whether what is on the host need not be fetched: host threads attend to it, or nobody reads
        it."""
        raise NotImplementedError

    def _advance(self, reader: LayerReader) -> None:
        """A layer was attended to: do what its schedule has for that, if anything."""
        schedule = self._schedules.get(reader.device)
        if schedule is not None and (schedule.active or reader.fetched):
            self._after(reader)

    def _rest(self, device: ComputeDevice) -> None:
        """Fewer blocks are held on a device: fetch and lay out no more as it was planned, and claim no more than what
        is held."""
        workspace = self._held.owner.workspaces.get(device)
        if workspace is not None:
            workspace.plans.clear()  # they refer to slabs that are given back
        schedule = self._schedules.get(device)
        if schedule is not None:
            schedule.drop()
        self._held.rest(device, self._rooms.get(device, 0))

    def _after(self, reader: LayerReader) -> None:
        schedule = self._schedules.get(reader.device)
        if schedule is not None:
            with self.memory.lock:
                self.memory.mend()
                schedule.after(reader)
