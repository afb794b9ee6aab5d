"""How much of a step's fetches hides behind its compute, from a trace; and what `cache.explain()` says, by the clock.

On a CPU a device and a link of given speeds are emulated, as in the scenario `planner`. A step is first timed without a
trace, which is what `explain()` is compared with; what hides is read from a trace of the steps after these. In a trace
the device computes whenever it does not wait. What a step takes without fetches is what it takes with everything on the
device. What copies take is their bytes by the link's rate: the one that is emulated, or that which nine in ten large
copies of the trace do not exceed.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

import kvtier
from benchmarks.contenders import Case, contender
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.scenarios import planner
from benchmarks.sessions import DecodeSession
from benchmarks.targets import Target, table_of
from kvtier import TieredKVCache
from kvtier.planning.reports.trace import Event, busy_seconds, hidden_share, read_trace

SUMMARY = "how much of a step's fetches hides behind its compute, from a trace; explain() against the clock"
MODEL, CPU_MODEL = "llama-3.1-8b", planner.MODEL
CONTEXTS, CPU_CONTEXTS = (16384,), (2048,)
CONTENDERS = ("all-fetch@90%", "all-fetch@40%", "adaptive@75%", "adaptive@40%")
#: Steps that a policy learns from, that are timed, and that are traced.
LEARN, STEPS, TRACED = 64, 32, 16
#: Bytes per second of the link that is emulated on a CPU: too slow for a tenth of the KV to hide behind a step.
LINK = 0.08e9
FETCHING = "all-fetch"
#: Bytes of a fetch that shows the link's rate.
LARGE = 2**20
#: What a step takes where nothing has to be fetched.
RESIDENT = "default@100%"


class Steps(Protocol):
    """Decoding, some steps at a time."""

    cache: TieredKVCache

    def run(self, tokens: int) -> list[float]:
        """Decode. Returns the seconds of each step."""

    def close(self) -> None:
        """Drop the cache."""


class Decoding(DecodeSession):
    """Decoding as it is, each step timed until its token is known."""

    def run(self, tokens: int) -> list[float]:
        """See `Steps`. Ends early where that takes long."""
        times = [time.perf_counter()]
        limit = times[0] + 4 * planner.TURN_SECONDS
        while len(times) <= tokens and times[-1] < limit and self.decoded < self.case.new_tokens:
            self.decode(1)
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]


def run(bench: Bench) -> None:
    """Run the scenario."""
    cpu = bench.settings.device.type == "cpu"
    with torch_threads(1 if cpu else torch.get_num_threads()):  # the cores are for the host's attention and for copies
        for model in bench.model_names(CPU_MODEL if cpu else MODEL):
            contexts, steps = CPU_CONTEXTS if cpu else CONTEXTS, LEARN + STEPS + TRACED + 8
            for case in bench.cases("overlap", model, contexts, steps):
                measure(bench, model, case)


def measure(bench: Bench, model: str, case: Case) -> None:
    """Each contender in turn; print and record the figures."""
    rows, targets, copies = [], list[Target](), dict[str, float]()
    resident: float | None = None
    workload = {"model": label(model), "context": case.context, "kv_bytes": case.kv_bytes, "batch": case.batch}
    for name in (RESIDENT, *(bench.settings.contenders or CONTENDERS)):
        bench.progress(f"overlap: {name} at {case.context:,} tokens")
        try:
            with contextlib.closing(start(bench, model, case, name)) as session:
                found = observe(session, learn=4 if bench.settings.quick else LEARN, steps=bench.tokens(STEPS))
        except Exception as error:
            bench.fail("overlap", name, error, unit="ms/step", workload=workload)
            continue
        if name == RESIDENT:
            resident = found["clock_ms"]
        rate = LINK if case.device.type == "cpu" else found["link_rate"]
        link = 1e3 * found["bytes_up_per_step"] / rate if rate else 0.0
        found["of_longer"] = max(link, resident) / found["clock_ms"] if resident and link else None
        policy, _, share = name.partition("@")
        if policy == FETCHING:
            copies[share] = link
        bench.record(
            "overlap",
            contender=name,
            workload=workload,
            unit="ms/step",
            median=found["clock_ms"],
            n=found["steps"],
            ratio=None,
            facts=found,
        )
        hidden, bound, error = (found[x] for x in ("hidden_share", "of_longer", "explain_error"))
        clock, seen, predicted = (_number(found[x]) for x in ("clock_ms", "seen_ms", "predicted_ms"))
        rows.append([name, clock, seen, predicted, str(found["binding"]), _percent(hidden), _percent(bound)])
        if name.startswith(FETCHING):
            targets.append(Target(f"{name}: speed, of the longer of copies and a resident step", bound, ">=", 0.95))
        elif error is not None:
            if resident and copies.get(share):
                # What no policy that only fetches can reach.
                least = max(copies[share], resident)
                what = f"{name}: speed, of the longer of copying all that {FETCHING} copies and a resident step"
                targets.append(Target(what, least / found["clock_ms"], ">=", 1.0))
            targets.append(Target(f"{name}: explain()'s step, off the clock's by", error, "<=", 0.1))
    bench.progress("")
    heads = ["", "ms/step", "explain: seen", "predicted", "bound by", "fetches hidden", "of max(copies, resident)"]
    print(f"overlap · {label(model)} · {case.context:,} tokens")
    print(table(heads, rows, left=(0, 4)) + "\n\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record("overlap", workload={"model": label(model), "context": case.context}, **target.fields())


def start(bench: Bench, model: str, case: Case, name: str) -> Steps:
    """A full cache under a policy."""
    loaded, one = bench.model(model), contender(name)
    if case.device.type != "cpu":
        return Decoding(one, case, loaded, 1)
    policy, _, share = name.partition("@")
    return planner.StepsSession(policy, case, loaded, planner.Machine(LINK), float(share.rstrip("%")) / 100, 1)


def observe(session: Steps, learn: int, steps: int) -> dict[str, float | str | None]:
    """What a step takes and what explains it, and what of its fetches hides."""
    session.run(learn)
    before = session.cache.stats.bytes_up
    times = session.run(steps)
    clock, moved = statistics.median(times), session.cache.stats.bytes_up - before
    said = session.cache.explain()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with kvtier.trace(path):
            traced = session.run(min(steps, TRACED))
        events = read_trace(path)
    seen, predicted = said.seen, said.predicted
    return {
        "steps": len(times),
        "clock_ms": 1e3 * clock,
        "seen_ms": None if seen is None else 1e3 * seen,
        "predicted_ms": None if predicted is None else 1e3 * predicted,
        "explain_error": None if predicted is None else abs(predicted - clock) / clock,
        "binding": said.binding,
        "bytes_up_per_step": moved / len(times),
        "link_rate": link_rate(events),
        "hidden_share": hidden_share(events),
        "link_seconds_per_step": busy_seconds(events, "up") / len(traced),
        "compute_seconds_per_step": busy_seconds(events, "compute") / len(traced),
        "stall_seconds_per_step": busy_seconds(events, "stall") / len(traced),
    }


def link_rate(events: Sequence[Event]) -> float | None:
    """Bytes per second that nine in ten of the large fetches do not exceed; None: there were none."""
    rates = sorted(
        x.args["bytes"] / x.seconds for x in events if x.lane == "up" and x.seconds and x.args.get("bytes", 0) >= LARGE
    )
    return rates[len(rates) * 9 // 10] if rates else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)
