"""A simulator: policies on a virtual clock, on a machine and a load that are numbers.

The policy is the object that runs in production; what carries its plans out is a model of `forward.schedule` and of
the streams: fetches begin as early as there is room, one after the other on the link; host attention goes on during the
device's; what arrives is waited for as late as possible.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.config import parse_count, parse_number, parse_share
from kvtier.errors import BudgetError, ConfigError
from kvtier.planning.policies.names import name_of, policy_of
from kvtier.planning.policy import Policy, checked_victims
from kvtier.planning.rates import Rates
from kvtier.planning.reports.trace import Event, plan_args, step_args, write_trace
from kvtier.planning.step import LayerPlan, LayerState, StepPlan, StepRecord, StepState, checked

#: What a load counts, at least one of each.
_COUNTED = {
    "layers": "layers",
    "block_bytes": "bytes",
    "block_size": "tokens",
    "sequences": "sequences",
    "device_bytes": "bytes",
    "tokens": "tokens",
}
#: A context is filled in so many portions at the least.
_STRIDE = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What is decoded.

    Attributes:
        layers: of the model.
        linear: seconds of a layer besides attention.
        block_bytes, block_size: of a block of one layer, and its tokens.
        context: tokens per sequence at the beginning.
        sequences: decoded together.
        device_bytes: of the device budget.
        tokens: of each sequence in a step: one, or some that verify a draft.
        kept: parts of the context that layers keep, from 0 to 1, in turn; (): each keeps all of it. A layer that keeps
            nothing has a window, which is a part of the rest, takes none of the budget and never leaves.

    Raises:
        ConfigError: a number that is none, or too small; or no layer keeps anything.
    """

    layers: int
    linear: float
    block_bytes: int
    block_size: int
    context: int
    sequences: int
    device_bytes: int
    tokens: int = 1
    kept: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        parse_number("linear", self.linear, "seconds")
        parse_count("context", self.context, 0, "tokens")
        for name, what in _COUNTED.items():
            parse_count(name, getattr(self, name), 1, what)
        if not isinstance(self.kept, (tuple, list)):
            raise ConfigError(f"kept={self.kept!r}: give a tuple, with a part for each kind of layer.")
        for part in self.kept:
            parse_share("kept", part)
        if not self.tiered:
            raise ConfigError(f"kept={self.kept}: no layer keeps anything that could be spilled.")

    @property
    def tiered(self) -> list[int]:
        """Layers that keep some of the context."""
        return [i for i in range(self.layers) if self._part(i)]

    def sealed(self, layer: int, blocks: int) -> int:
        """Full blocks of a sequence in a layer, once the context is so many."""
        return int(blocks * self._part(layer))

    def _part(self, layer: int) -> float:
        return self.kept[layer % len(self.kept)] if self.kept else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """On what.

    Attributes:
        rates: what is true of it; a policy may think otherwise.
        noise: relative standard deviation of each duration.
        traffic: of somebody else on the link, as a share of its rate, at least 0 and less than 1, by step.

    Raises:
        ConfigError: `rates` are none, `noise` is no number of at least 0, or `traffic` cannot be called.
    """

    rates: Rates
    noise: float = 0.0
    traffic: Callable[[int], float] = lambda step: 0.0

    def __post_init__(self) -> None:
        parse_number("noise", self.noise, "standard deviations, as a share")
        if not isinstance(self.rates, Rates):
            raise ConfigError(f"rates={self.rates!r}: give kvtier.planning.rates.Rates(...).")
        if not callable(self.traffic):
            raise ConfigError(f"traffic={self.traffic!r}: give a function of the step that returns a share.")

    def link_left(self, step: int) -> float:
        """The share of the link that is left in a step. Raises ConfigError: others take all of it, or no share."""
        taken = self.traffic(step)
        if not 0 <= taken < 1:
            raise ConfigError(f"traffic({step}) is {taken!r}: a share of the link, at least 0 and less than 1.")
        return 1 - taken


@dataclass(slots=True)
class _Layer:
    """A layer's blocks, as `Candidate` and as the schedule see them.

    Attributes:
        layer: of the model.
        place: among those that keep some of the context, as plans have them.
    """

    layer: int
    place: int
    resident: int = 0
    spilled: int = 0
    transient: int = 0
    arrival: float = 0.0
    complete: bool = False
    owner: int = 0
    last_used: int = 0

    @property
    def evictable(self) -> int:
        """Blocks that may leave."""
        return self.resident + self.transient


@dataclass
class Simulation:
    """One cache under one policy. `step` it, or `run` it.

    Args:
        policy: an object, or a name, as `TieredKVCache` takes it.
        machine, load: on what, and of what.
        seed: of the noise.
        traced: keep events, for `timeline` and `write_trace`.

    Raises:
        ConfigError: no such policy, no machine or load, or a device budget without room for the blocks that are being
            filled; and what the policy answers is none of that, as from a cache.
        BudgetError: the policy evicts too little.

    Attributes:
        records: of the steps so far.
        events: what a trace shows, if `traced`.
        plans: the plan of each step.
    """

    policy: Policy | str
    machine: Machine
    load: Load
    seed: int = 0
    traced: bool = False
    records: list[StepRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        load = self.load
        if not isinstance(load, Load) or not isinstance(self.machine, Machine):
            raise ConfigError("Simulation(policy, machine, load): give a Machine and a Load, in this order.")
        self._policy = self.policy = policy_of(self.policy)
        self._random = random.Random(self.seed)
        self._layers = [_Layer(layer, place) for place, layer in enumerate(load.tiered)]
        windows = dict.fromkeys(range(load.layers))
        self._forward: list[_Layer | None] = [*(windows | {x.layer: x for x in self._layers}).values()]
        filling = len(self._layers) * load.sequences
        self._slots = load.device_bytes // load.block_bytes - filling
        self._free = self._slots
        self._tokens = load.context
        self._now = self._up = self._down = 0.0
        self._ahead = 0
        self._on_host: set[int] = set()
        self._plan: StepPlan | None = None
        self._record = StepRecord()
        if self._slots < 2:
            least = (filling + 2) * load.block_bytes
            raise ConfigError(
                f"device_bytes={load.device_bytes} has no room for the blocks that are being filled, one in each layer "
                f"of each sequence: give {least} at least."
            )
        blocks, done = load.context // load.block_size, 0
        while done < blocks:
            # A prefill seals many blocks of a layer at once.
            before, done = done, done + max((blocks - done) // _STRIDE, 1)
            for layer in self._layers:
                self._seal(layer, before, done)

    def run(self, steps: int) -> float:
        """Seconds of so many steps. Raises ConfigError: that is no number of steps."""
        parse_count("steps", steps, 0, "steps")
        began = self._now
        for _ in range(steps):
            self.step()
        return self._now - began

    def step(self) -> StepRecord:
        """One step: a token of each sequence, or as many as the load says."""
        load, number = self.load, len(self.records)
        self._record = record = StepRecord(tokens=load.tokens, layers=len(self._layers), cache=1)
        began = self._now
        before, self._tokens = self._tokens, self._tokens + load.tokens
        full = before // load.block_size, self._tokens // load.block_size
        seals = full[0] != full[1]
        if any(x.spilled for x in self._layers):
            self._plan = checked(self._policy.plan(self._state()), len(self._layers))
            if self.traced:
                args = plan_args(self._plan, self._policy, 1, "simulated")
                self.events.append(Event("step", "plan", began, None, {"step": number} | args, "simulated"))
        self.plans.append(self._plan or StepPlan())
        self._begin()
        for i, layer in enumerate(self._forward):
            if layer is None:
                seconds = self._noisy(load.linear)
                if self.traced:
                    self._event("compute", f"layer {i}", self._now, seconds, layer=i)
                self._now += seconds
                continue
            if seals:
                self._seal(layer, *full)
            self._now = self._layer(layer)
            self._after(layer)
        record.seconds = self._now - began
        if self.traced:
            self._event("step", f"step {number}", began, record.seconds, **step_args(record))
        self.records.append(record)
        if self._plan is not None:
            self._policy.observe(record)
        return record

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened so far as a trace file; see `kvtier.planning.reports.trace`. It has to be `traced`.

        Raises:
            ConfigError: it was not traced. OSError: the file cannot be made.
        """
        if not self.traced:
            raise ConfigError("Nothing was recorded: make it with Simulation(..., traced=True).")
        write_trace(path, self.events, {"simulated": True})

    # A layer

    def _layer(self, layer: _Layer) -> float:
        load, rates, record, noisy = self.load, self.machine.rates, self._record, self._noisy
        began, bytes_of = self._now, load.block_bytes
        ready = began + noisy(load.linear)
        own = ready + noisy((layer.resident + load.sequences) * bytes_of / rates.device)
        arrived = max(own, layer.arrival) if layer.transient else own
        ended = arrived + noisy(layer.transient * bytes_of / rates.device)
        blocks = layer.spilled - layer.transient
        host = ready
        if blocks:
            hosted = blocks * bytes_of
            seconds = hosted / rates.host
            busy = min(max(self._up - ready, 0.0) / seconds, 1.0)
            seconds = noisy(seconds / (1 - rates.shared * busy))
            host = ready + noisy(rates.host_overhead) + seconds
            record.host_bytes += hosted
            record.host_blocks += blocks
            record.host_seconds += seconds
        end, stall = max(ended, host), arrived - own  # also while the host attends, as of an engine that measures it
        record.stall_seconds += stall
        if self.traced:
            self._trace(layer, (began, ready, arrived, end), stall, blocks, host - ready)
        return end

    def _trace(
        self, layer: _Layer, times: tuple[float, float, float, float], stall: float, blocks: int, hosted: float
    ) -> None:
        """What a layer did: when it began, had its queries, had what it fetched, and ended."""
        began, ready, arrived, end = times
        i = layer.layer
        self._event("compute", f"layer {i}", began, ready - began, layer=i)
        nbytes = blocks * self.load.block_bytes
        self._event("host", f"layer {i}", ready, hosted, layer=i, blocks=blocks, bytes=nbytes)
        at = arrived - stall
        self._event("compute", f"attention {i}", ready, (at if stall else end) - ready, layer=i)
        if stall:
            self._event("stall", f"layer {i}", at, stall, layer=i)
            self._event("compute", f"attention {i}", arrived, end - arrived, layer=i)

    def _after(self, layer: _Layer) -> None:
        """The layer was read: its fetched blocks leave again, others are fetched."""
        plan = self._plan.layers[layer.place] if self._plan is not None else LayerPlan()
        kept = min(layer.transient, plan.keep)
        layer.resident += kept
        layer.spilled -= kept
        self._free += layer.transient - kept
        left = min(max(plan.leave, 0), layer.resident)
        layer.resident -= left
        layer.spilled += left
        self._free += left
        self._record.evicted += left
        layer.transient = 0
        layer.complete = False
        layer.last_used += 1
        if self._ahead:
            self._advance(layer.place)

    # What is fetched, and what leaves

    def _state(self) -> StepState:
        layers = [
            LayerState(x.layer, self.load.block_bytes, x.resident, x.transient, x.spilled, self.load.sequences, True)
            for x in self._layers
        ]
        last = self.records[-1] if self.records else None
        bytes_of = self.load.block_bytes
        free, budget = self._free * bytes_of, self.load.device_bytes
        state = StepState(self.load.tokens, layers, free, budget, last, 1, "simulated", len(layers))
        if self._policy.by_rows:
            rows = self.load.sequences
            each = sum(x.resident + x.spilled for x in self._layers) // rows * bytes_of
            state.row_bytes = [each] * rows
            # Whole rows first; the rest belongs to all others.
            rest = sum(x.spilled for x in self._layers) * bytes_of - each * len(self._on_host)
            others = max(rows - len(self._on_host), 1)
            state.row_spilled = [each if i in self._on_host else max(rest, 0) // others for i in range(rows)]
        return state

    def _begin(self) -> None:
        if self._plan is None:
            return
        self._ahead = max((x.ahead for x in self._plan.layers if x.fetch), default=0)
        for layer in self._layers:
            layer.complete = False
        if self._plan.on_host is not None:
            self._on_host = set(self._plan.on_host)
            for layer in self._layers:
                self._move_rows(layer)
        there = sum(x.transient for x in self._layers)
        self._make_room(self._plan.reserve // self.load.block_bytes - there)
        if self._ahead:
            self._advance(-1)

    def _move_rows(self, layer: _Layer) -> None:
        """Some rows' blocks are on the host, and all others on the device as far as there is room."""
        rows = self.load.sequences
        target = (layer.resident + layer.spilled) // rows * len(self._on_host)
        left = max(target - layer.spilled, 0)
        layer.resident -= left
        layer.spilled += left
        self._free += left
        self._record.evicted += left
        back = min(max(layer.spilled - target, 0) - layer.transient, self._free)
        if back > 0:
            self._fetch(layer, back)
            layer.transient -= back
            layer.resident += back
            layer.spilled -= back

    def _advance(self, place: int) -> None:
        assert self._plan is not None
        n = len(self._layers)
        for distance in range(1, min(self._ahead, n) + 1):
            layer = self._layers[(place + distance) % n]
            plan = self._plan.layers[layer.place]
            if layer.complete or distance > plan.ahead or not plan.fetch:
                continue
            missing = min(plan.fetch, layer.spilled) - layer.transient
            got = min(missing, self._free)
            if got > 0:
                self._fetch(layer, got)
            if got < missing:
                return
            layer.complete = True

    def _fetch(self, layer: _Layer, blocks: int) -> None:
        rates, record = self.machine.rates, self._record
        nbytes = blocks * self.load.block_bytes
        rate = rates.up * self.machine.link_left(len(self.records))
        seconds = self._noisy(rates.copy_overhead + nbytes / rate)
        begins = max(self._now, self._up)
        self._up = layer.arrival = begins + seconds
        self._free -= blocks
        layer.transient += blocks
        record.bytes_up += nbytes
        record.seconds_up += seconds
        record.fetched += blocks
        if self.traced:
            self._event("up", f"fetch {layer.layer}", begins, seconds, layer=layer.layer, blocks=blocks, bytes=nbytes)

    def _seal(self, layer: _Layer, before: int, after: int) -> None:
        """The context of each sequence has grown from so many full blocks to so many."""
        sealed = self.load.sealed
        blocks = (sealed(layer.layer, after) - sealed(layer.layer, before)) * self.load.sequences
        if not blocks:
            return
        left = blocks
        while left:
            self._make_room(min(left, self._slots))
            part = min(left, self._free)
            if not part:
                raise self._full()
            layer.resident += part
            self._free -= part
            left -= part
        rates, nbytes = self.machine.rates, blocks * self.load.block_bytes
        seconds = rates.copy_overhead + nbytes / rates.down
        begins = max(self._now, self._down)
        self._down = begins + seconds
        self._record.bytes_down += nbytes
        self._record.seconds_down += seconds
        if self.traced:
            name = f"write back {layer.layer}"
            self._event("down", name, begins, seconds, layer=layer.layer, blocks=blocks, bytes=nbytes)

    def _make_room(self, blocks: int) -> None:
        if blocks <= self._free:
            return
        for candidate, count, _ in checked_victims(self._policy.victims(self._layers, blocks - self._free)):
            if not isinstance(candidate, _Layer):
                continue  # it was not asked about that
            count = min(max(count, 0), candidate.evictable)
            fetched = max(count - candidate.resident, 0)
            candidate.transient -= fetched
            candidate.resident -= count - fetched
            candidate.spilled += count - fetched
            self._free += count
            self._record.evicted += count
            if blocks <= self._free:
                return

    def _full(self) -> BudgetError:
        """As a cache refuses a step."""
        budget, missing = self.load.device_bytes, self.load.block_bytes
        return BudgetError(
            f"The device budget of {budget} bytes is full and {missing} more are needed: "
            f"{name_of(self._policy)}.victims names too few blocks to evict.",
            tier="device",
            needed=budget + missing,
            budget=budget,
        )

    def _noisy(self, seconds: float) -> float:
        if not self.machine.noise:
            return seconds
        factor = self._random.gauss(1, self.machine.noise)
        return seconds * factor if factor > 0.1 else seconds * 0.1

    def _event(self, lane: str, name: str, start: float, seconds: float, **args: float) -> None:
        """In a trace, of what took a while."""
        if seconds > 0:
            self.events.append(Event(lane, name, start, seconds, {"step": len(self.records)} | args, "simulated"))
