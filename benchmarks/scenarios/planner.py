"""Milliseconds of a decode step under each policy, over a link and a device of given speeds, on a machine with no GPU.

Copies and compute take real time: an emulated device computes while blocks cross a throttled link and host threads
attend (`kvtier.testing`). Policies take turns. A fixed share fetches that part of what is spilled in each step.

shares    a quarter of the KV on the device: every policy and fixed shares, at three speeds of the link
hidden    so little is spilled that a step's compute hides all of it: against everything resident
resident  everything fits, and nothing is emulated: what the planner itself takes
own       microseconds of a step in which the planner of 64 layers looks, decides and learns, by context
change    the link's speed halves in the middle of `generate`
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

import kvtier
from benchmarks.contenders import Case, fill
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.records import number, size, table
from benchmarks.targets import Target, table_of
from benchmarks.turns import Outcome, Start
from kvtier import Policy, TieredKVCache
from kvtier.planning.hardware.machines import ModelSize
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.policies.shares import FixedShare
from kvtier.planning.reports.trace import Event, read_trace
from kvtier.testing import Throttled, emulated_device, throttled, with_doubles

SUMMARY = "ms per decode step under each policy, with an emulated device and link (CPU only)"
MODEL = "llama-6x32"
CONTEXTS = (2048, 4096)
CASES = ("shares", "hidden", "resident", "own", "change")
#: A hundredth of a machine with a GPU, so that what the CPU really computes and copies is little against it. Bytes per
#: second: of the link, of attention on the host and on the device; and seconds of a layer besides attention.
LINKS = (0.04e9, 0.08e9, 0.16e9)
HOST, DEVICE, LINEAR, LATENCY = 0.15e9, 3e9, 3e-3, 20e-6
BLOCK, ON_DEVICE = 64, 0.25
POLICIES = ("adaptive", "default", "all-attend", "all-fetch")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
#: Steps before the first turn: what a policy that learns takes, and what blocks take to move.
LEARN, SETTLE = 96, 8
TURN_SECONDS = 1.5
#: Of `change`: steps of one `generate`, the speed before it halves, and steps of which a median is shown.
STEPS, LINK, SHOWN = 240, 0.08e9, 10
CHANGE_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
#: Of `hidden`: shares of the KV that are on the device.
HIDDEN = (0.9, 0.8)
#: Of `own`: a model of 64 layers, contexts, and the model and the machine whose step it is compared with.
DEEP, DEEP_CONTEXTS = "llama-64x32", (1024, 4096, 16384)
LIKE, LIKE_MACHINE = ModelSize(64, 5120, 40, 128, 8, 32_500_000_000, 32_500_000_000), "h100"


@dataclass(frozen=True)
class Machine:
    """Speeds in bytes per second, and seconds of a layer besides attention; see `kvtier.testing`."""

    link: float
    host: float | None = HOST
    device: float = DEVICE
    linear: float = LINEAR

    def make(self) -> Throttled:
        """The link."""
        return throttled(self.link, latency=LATENCY, host=self.host)

    def fields(self) -> dict[str, Any]:
        """For a record."""
        return {"link": self.link, "host_rate": self.host, "device_rate": self.device, "linear": self.linear}


def fixed(share: float) -> str:
    """The name of a fixed share."""
    return f"share {share:.0%}"


def policy_of(name: str) -> Policy | str:
    """A policy by its name here."""
    return FixedShare(float(name[6:-1]) / 100) if name.startswith("share ") else name


class StepsSession:
    """A cache full of random KV on an emulated machine; a turn's value is the median of its steps.

    Args:
        policy: by name.
        case, model: what decodes.
        machine: None: the CPU as it is, and no link.
        on_device: share of the KV that the device budget holds; 1: all of it, and more.
        tokens: decoded in a turn.
    """

    def __init__(
        self, policy: str, case: Case, model: PreTrainedModel, machine: Machine | None, on_device: float, tokens: int
    ) -> None:
        self.machine, self.model, self.tokens = machine, model, tokens
        budget = case.resident_bytes if on_device == 1 else int(case.kv_bytes * on_device)
        self.policy = policy_of(policy)
        self.cache = TieredKVCache(case.config, device_budget=budget, block_size=BLOCK, policy=self.policy)
        self.emulated: Throttled | None = None
        if machine is not None:
            self.emulated = machine.make()
            with_doubles(self.cache, self.emulated, poison=False)
        self.token = torch.zeros((1, 1), dtype=torch.long)
        self.steps, self.idle = 0, 0.0
        before = LEARN if policy == "adaptive" and machine is not None else SETTLE
        try:
            fill(self.cache, replace(case, context=case.context - before))  # all begin their turns with as many tokens
            self.run(before)
        except BaseException:
            self.close()
            raise
        self.before, self.steps, self.idle = self.cache.stats, 0, 0.0

    def run(self, tokens: int, limit: float = float("inf")) -> list[float]:
        """Decode; returns seconds of each step."""
        if self.emulated is None or self.machine is None:
            return self._run(tokens, limit)
        with emulated_device(
            self.model, self.emulated, linear=self.machine.linear, device_rate=self.machine.device
        ) as clock:
            before = clock.idle
            clock.ends = 0.0  # what passed since the last turn is not the device's
            found = self._run(tokens, limit)
            self.idle += clock.idle - before
            return found

    def _run(self, tokens: int, limit: float) -> list[float]:
        times = [time.perf_counter()]
        while len(times) <= tokens and times[-1] - times[0] < limit:
            logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
            self.token = logits[:, -1:].argmax(-1)
            times.append(time.perf_counter())
        self.steps += len(times) - 1
        return [b - a for a, b in itertools.pairwise(times)]

    def measure(self) -> float:
        """Milliseconds of the median step of a turn."""
        return 1e3 * statistics.median(self.run(self.tokens, TURN_SECONDS))

    def facts(self) -> dict[str, Any]:
        """What a step fetched, attended to on the host and waited for, on average."""
        now, steps = self.cache.stats, max(self.steps, 1)
        found = {
            f"{name}_per_step": (getattr(now, name) - getattr(self.before, name)) / steps
            for name in ("bytes_up", "bytes_down", "host_bytes", "host_seconds", "seconds_up", "stall_seconds")
        }
        return found | {"idle_seconds_per_step": self.idle / steps, "steps": self.steps}

    def close(self) -> None:
        """Drop the cache."""
        self.cache.close()


class ChangeSession:
    """One `generate` in whose middle the link's speed halves. The value is the median step of its last third.

    Args:
        policy, case, model, machine: as of `StepsSession`.
        keep: is given the seconds of all steps.
        trace: where a trace of it is written; None: nowhere.
    """

    def __init__(
        self,
        policy: str,
        case: Case,
        model: PreTrainedModel,
        machine: Machine,
        keep: Callable[[list[float]], None],
        trace: Path | None = None,
    ) -> None:
        self.args, self.keep, self.trace = (policy, case, model, machine, ON_DEVICE, 0), keep, trace
        self.found: dict[str, Any] = {}

    def measure(self) -> float:
        """Milliseconds."""
        session = StepsSession(*self.args)
        try:
            return self._measure(session, self.args[1], self.args[3])
        finally:
            session.close()

    def _measure(self, session: StepsSession, case: Case, machine: Machine) -> float:
        emulated = session.emulated
        assert emulated is not None
        clock = Streamer(STEPS // 2, lambda: setattr(emulated.link, "up", emulated.link.up / 2))
        ids = torch.zeros((1, session.cache.get_seq_length() + 1), dtype=torch.long)
        config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0, disable_compile=True)
        with (
            nullcontext() if self.trace is None else kvtier.trace(self.trace),
            emulated_device(session.model, emulated, linear=machine.linear, device_rate=machine.device),
        ):
            session.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=session.cache,
                generation_config=config,
                max_new_tokens=STEPS + 2,
                streamer=clock,
            )
        seconds = clock.seconds
        self.keep(seconds)
        self.found = {"before_ms": 1e3 * statistics.median(seconds[STEPS // 4 : STEPS // 2])}
        return 1e3 * statistics.median(seconds[-STEPS // 3 :])

    def facts(self) -> dict[str, Any]:
        """The median step of the quarter before the change."""
        return self.found

    def close(self) -> None:
        """Nothing is kept from turn to turn."""


class Streamer:
    """Looks at the clock at each token of `generate`, and acts at one of them."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        self._at, self._act = at, act
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, or at first the prompt."""
        self._times.append(time.perf_counter())
        if len(self._times) == self._at + 2:
            self._act()

    def end(self) -> None:
        """There are no more."""

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first."""
        return [b - a for a, b in itertools.pairwise(self._times[1:])]


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        print("planner: not measured, for a device is emulated on the CPU\n", flush=True)
        return
    with torch_threads(1):  # the cores are for the host's attention and for copies
        for model in bench.model_names(MODEL):
            parts = {"shares": compare_shares, "hidden": compare_hidden, "resident": compare_resident}
            for name, part in parts.items():
                if bench.selected(name):
                    for case in bench.cases("planner", model, CONTEXTS, LEARN + bench.rounds(5) * bench.tokens(40)):
                        part(bench, model, case)
            if bench.selected("own"):
                measure_own(bench)
            if bench.selected("change"):
                for case in bench.cases("planner", model, CONTEXTS[:1], LEARN + STEPS + 2):
                    compare_change(bench, model, case)


def compare_steps(
    bench: Bench, model: str, case: Case, names: Mapping[str, tuple[str, float]], machine: Machine | None, base: str
) -> dict[str, Outcome]:
    """Compare policies, given for each name with the share of the KV on the device."""
    loaded = bench.model(model)
    # Where nothing is emulated a step is short: as many of them in more turns.
    rounds, tokens = (5, 40) if machine is not None else (25, 8)
    starts: dict[str, Start] = {
        name: partial(StepsSession, policy, case, loaded, machine, share, bench.tokens(tokens))
        for name, (policy, share) in names.items()
    }
    link = "nothing emulated" if machine is None else f"link {number(machine.link / 1e9)} GB/s"
    return bench.compare_plain(
        "planner",
        f"{case.context:,} tokens, {size(case.kv_bytes)} · {link}",
        starts,
        unit="ms/step",
        rounds=bench.rounds(rounds),
        base=base,
        note=note,
        workload={"model": model, "context": case.context, "kv_bytes": case.kv_bytes, "block_size": BLOCK}
        | ({} if machine is None else machine.fields()),
    )


def note(facts: dict[str, Any]) -> str:
    """What a step does."""
    if not facts.get("bytes_up_per_step") and not facts.get("host_bytes_per_step"):
        return ""
    fetched, hosted, stalled = (facts[f"{x}_per_step"] for x in ("bytes_up", "host_bytes", "stall_seconds"))
    return f"{size(fetched)} fetched, {size(hosted)} on the host, stalls {1e3 * stalled:.1f} ms"


def report(bench: Bench, case: Case, targets: list[Target], **workload: Any) -> None:
    """Print and record figures."""
    print(table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record("planner", workload={"context": case.context} | workload, **target.fields())


def ratio(outcomes: Mapping[str, Outcome], name: str, to: str | None) -> float | None:
    """The median ratio within rounds."""
    found = outcomes[name].ratio(outcomes[to]) if to in outcomes and name in outcomes else None
    return found.median if found else None


def best_fixed(outcomes: Mapping[str, Outcome]) -> str | None:
    """Of the policies that do the same in all steps the fastest."""
    medians = {
        name: statistics.median(x.values.values()) for name, x in outcomes.items() if x.values and name != "adaptive"
    }
    return min(medians, key=lambda name: medians[name], default=None)


def compare_shares(bench: Bench, model: str, case: Case) -> None:
    """All policies at each speed of the link, and how far the adaptive one is from the best of the others."""
    names = (*POLICIES, *map(fixed, SHARES[1::3] if bench.settings.quick else SHARES))
    rows = []
    for link in LINKS[:1] if bench.settings.quick else LINKS:
        found = compare_steps(
            bench, model, case, {name: (name, ON_DEVICE) for name in names}, Machine(link), "adaptive"
        )
        best = best_fixed(found)
        if best is None:
            continue
        target = Target(
            f"link {number(link / 1e9)} GB/s: a step, of {best}'s", ratio(found, "adaptive", best), "<=", 1.05
        )
        report(bench, case, [target], part="shares", link=link, best=best)
        ms = [statistics.median(found[name].values.values()) for name in POLICIES]
        least = statistics.median(found[best].values.values())
        rows.append([number(link / 1e9), *map(number, ms), f"{number(least)} ({best})", number(target.figure or 0)])
    if rows:
        print(f"planner · {case.context:,} tokens · median ms/step by the link's GB/s")
        print(table(["link", *POLICIES, "best fixed", "adaptive / best"], rows, left=()) + "\n", flush=True)


def compare_hidden(bench: Bench, model: str, case: Case) -> None:
    """What is spilled crosses the link in less than a step: the slowdown against everything resident."""
    # Twice as fast as it need be for the most that is spilled: at the end, when all new tokens' KV is too.
    new = case.new_tokens * case.geometry.layers * case.geometry.token_bytes
    spilled = (1 - min(HIDDEN)) * case.kv_bytes + new
    machine = Machine(2 * spilled / (case.geometry.layers * LINEAR))
    names = {"resident": ("default", 1.0)}
    names |= {f"{name}, {share:.0%}": (name, share) for share in HIDDEN for name in ("adaptive", "all-fetch")}
    found = compare_steps(bench, model, case, names, machine, "resident")
    targets = [
        Target(f"{share:.0%} on the device: a step, of everything resident's", figure, "<=", 1.05)
        for share in HIDDEN
        for figure in [ratio(found, f"adaptive, {share:.0%}", "resident")]
    ]
    report(bench, case, targets, part="hidden", link=machine.link)


def compare_resident(bench: Bench, model: str, case: Case) -> None:
    """Everything fits: speed with the planner, of that without."""
    names = {"default": ("default", 1.0), "adaptive": ("adaptive", 1.0)}
    found = compare_steps(bench, model, case, names, None, "default")
    report(bench, case, [Target("all fits: speed, of default's", ratio(found, "default", "adaptive"), ">=", 0.99)])


def measure_own(bench: Bench) -> None:
    """What the planner itself takes of a step. It does not depend on the link, and should not on the context."""
    linear = HardwareProfile.estimate(LIKE_MACHINE, LIKE).linear
    assert linear is not None
    step = LIKE.layers * linear.seconds(1)
    rows, means = [], []
    for case in bench.cases("planner", DEEP, DEEP_CONTEXTS, LEARN + bench.tokens(40)):
        # A device with no time of its own: only what the policy takes is looked at.
        machine = Machine(1e9, host=None, device=1e15, linear=0.0)
        session = StepsSession("adaptive", case, bench.model(DEEP), machine, ON_DEVICE, bench.tokens(40))
        try:
            own = Own(session.cache)
            session.run(bench.tokens(40))
        finally:
            session.close()
        # The mean has the looks at the choice, which come in every eighth step; the median has none of them.
        micro = sorted(1e6 * x for x in own.steps[1:])
        means.append(statistics.fmean(micro))
        late = micro[len(micro) * 99 // 100]
        rows.append([f"{case.context:,}", *map(number, (means[-1], statistics.median(micro), late, micro[-1]))])
        bench.record(
            "planner",
            contender="adaptive",
            workload={"context": case.context, "layers": case.geometry.layers, "part": "own"},
            unit="us/step",
            median=statistics.median(micro),
            min=micro[0],
            max=micro[-1],
            n=len(micro),
            facts={"mean": means[-1], "p99": late},
        )
    if not rows:
        return
    print("planner · microseconds of a step in which 64 layers are planned")
    print(table(["tokens", "mean", "median", "p99", "max"], rows, left=()) + "\n", flush=True)
    like = f"own time, of a step of 64 layers on one {LIKE_MACHINE} ({1e3 * step:.0f} ms)"
    targets = [Target(like, max(means) / 1e6 / step, "<=", 0.01)]
    if len(means) > 1:
        targets.append(
            Target("own time at the longest context, of that at the shortest", means[-1] / means[0], "<=", 1.2)
        )
    report(bench, case, targets, part="own")


class Own:
    """Adds up what planning takes in each step of a cache: to look at the layers, to decide and to learn."""

    def __init__(self, cache: TieredKVCache) -> None:
        self.steps: list[float] = []
        forward = cache._forward
        policy = forward.memory.policy
        self._clock(forward, "_state", first=True)
        for name in ("plan", "prediction", "observe"):
            self._clock(policy, name)

    def _clock(self, owner: Any, name: str, first: bool = False) -> None:
        do = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = do(*args, **options)
            if first:
                self.steps.append(0.0)
            if self.steps:
                self.steps[-1] += time.perf_counter() - began
            return found

        setattr(owner, name, timed)


def compare_change(bench: Bench, model: str, case: Case) -> None:
    """The link's speed halves: steps until the adaptive policy is within 5% of the new best fixed share."""
    machine, steps = Machine(LINK), dict[str, list[list[float]]]()
    loaded = bench.model(model)
    names = ("adaptive", *map(fixed, CHANGE_SHARES[1::2] if bench.settings.quick else CHANGE_SHARES))
    starts: dict[str, Start] = {
        name: partial(ChangeSession, name, case, loaded, machine, steps.setdefault(name, []).append) for name in names
    }
    found = bench.compare_plain(
        "planner",
        f"{case.context:,} tokens · the link's {number(LINK / 1e9)} GB/s halve in `generate`",
        starts,
        unit="ms/step",
        rounds=bench.rounds(3),
        base="adaptive",
        note=lambda facts: f"{number(facts['before_ms'])} ms before" if facts else "",
        workload={"model": model, "context": case.context, "steps": STEPS, "change": 1} | machine.fields(),
    )
    best = best_fixed(found)
    if best is None or not steps["adaptive"]:
        return
    limit = 1.05 * statistics.median(found[best].values.values()) / 1e3
    late = [steps_until(each[STEPS // 2 :], limit) for each in steps["adaptive"]]
    targets = [
        Target(f"after the change: a step, of {best}'s", ratio(found, "adaptive", best), "<=", 1.05),
        Target("steps until within 5% of it", statistics.median(late), "<=", 50),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "change.json"
        ChangeSession("adaptive", case, loaded, machine, lambda seconds: None, path).measure()
        (rate, share), (slower, less) = before_and_after(read_trace(path))
    targets += [
        Target("in a trace: the link's rate after the change, of before", slower / rate, "<=", 0.55),
        Target("in a trace: the share that is fetched, of before", less / share, "<=", 0.9),
    ]
    report(bench, case, targets, part="change", best=best)
    shown = range(0, STEPS, SHOWN)
    rows = [[str(i) for i in shown]]
    for name in ("adaptive", best):
        by_step = [statistics.median(x) for x in zip(*steps[name], strict=False)]
        rows.append([number(1e3 * statistics.median(by_step[i : i + SHOWN])) for i in shown])
    print(f"planner · median ms/step from a step on (the link changes at step {STEPS // 2})")
    print(table(["step", "adaptive", best], list(zip(*rows, strict=True)), left=()) + "\n", flush=True)


def before_and_after(events: Sequence[Event]) -> tuple[tuple[float, float], tuple[float, float]]:
    """What a trace shows in the third quarter of its first half, and in the last one of its second: bytes per second of
    a fetch, and the share of what is spilled that is planned to be fetched; medians."""
    begin, end = min(x.start for x in events), max(x.end for x in events)

    def within(low: float, high: float) -> tuple[float, float]:
        here = [x for x in events if low <= (x.start - begin) / (end - begin) < high]
        rates = [x.args["bytes"] / x.seconds for x in here if x.lane == "up" and x.seconds]
        shares = [x.args["share_fetched"] for x in here if "share_fetched" in x.args]
        return statistics.median(rates), statistics.median(shares)

    return within(0.25, 0.375), within(0.875, 1.0)


def steps_until(seconds: list[float], limit: float) -> float:
    """Steps until the median of `SHOWN` steps is within a limit; all of them if it never is."""
    windows = (statistics.median(seconds[i : i + SHOWN]) for i in range(len(seconds) - SHOWN + 1))
    return next((float(i) for i, x in enumerate(windows) if x <= limit), float(len(seconds)))
