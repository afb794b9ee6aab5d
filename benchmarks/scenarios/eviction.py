"""Eviction policies on traces: the default against each fixed policy and the offline bound, and tiers in virtual time.

Nothing here is timed: seconds are virtual, and the figures are the same on every machine. A *hit* is a block of a
prompt that is kept when its request comes, as are all blocks before it; the rate is hits of all blocks of all prompts,
those that are new to the trace included. `--trace` names Mooncake's trace of conversations; without it, only the
generated trace of agents is replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Bench
from benchmarks.records import RESULTS, number, table
from benchmarks.targets import Target, table_of
from kvtier.eviction.policies.names import FIXED, POLICIES
from kvtier.eviction.replay.offline import best_possible
from kvtier.eviction.replay.one_tier import replay
from kvtier.eviction.replay.tiers import Machine, Replayed, Tier, replay_tiers
from kvtier.eviction.replay.traces import Request, agents, mooncake

SUMMARY = "eviction policies on traces, against the offline bound, and several tiers in virtual time (--trace PATH)"
CASES = ("rates", "tiers")
BLOCKS = (1000, 3000, 10_000, 30_000, 50_000)
#: Sizes between them, at which the default is compared too, without a target.
BETWEEN = (700, 2000, 15_000)
#: Keys and values of Llama-3.1-8B in half precision: bytes of a token, and of a block of 512.
BLOCK_BYTES = 512 * 131_072
#: Blocks of device and disk. An hour of Mooncake's trace is for many such machines: its arrivals are spread over so
#: many hours. So many agents begin in a second that a machine with all tiers keeps up; their think times stay.
DEVICE, DISK, HOURS, AGENTS = 640, 16_000, 10.0, 0.01
#: The live set, against the host's budget.
LIVE = 1.8
#: Tiers below the device, share that is copied ahead, whether what has no copy is waited for, and the policy.
NO_SAVING = "no saving: the device alone"
WAYS: dict[str, tuple[int, float, bool, str]] = {
    NO_SAVING: (0, 0.0, False, "lru"),
    "host, copies ahead": (1, 0.5, True, "lru"),
    "host, copies when blocks leave": (1, 0.0, True, "lru"),
    "host, disk, copies ahead": (2, 0.5, True, "lru"),
    "host, disk, copies ahead, what has none is lost": (2, 0.5, False, "lru"),
    "host, disk, copies when blocks leave": (2, 0.0, True, "lru"),
    "host, disk, copies ahead, arc": (2, 0.5, True, "arc"),
    "host, disk, copies ahead, pensieve": (2, 0.5, True, "pensieve"),
    "host, disk, copies ahead, default": (2, 0.5, True, "adaptive"),
}
#: Each is compared with the second one.
AGAINST = (
    ("host, copies ahead", NO_SAVING),
    ("host, disk, copies ahead", NO_SAVING),
    ("host, copies ahead", "host, copies when blocks leave"),
    ("host, disk, copies ahead", "host, disk, copies when blocks leave"),
)


def prefill(new: int, past: int) -> float:
    """Seconds of a prefill of Llama-3.1-8B at 150 TFLOPS: 16 GFLOP a token, 4 x 4096 x 32 for each pair of tokens."""
    return 0.005 + new * 1.07e-4 + new * (past + new / 2) * 3.5e-9


def run(bench: Bench) -> None:
    """Run the scenario."""
    quick, path = bench.settings.quick, bench.settings.trace
    traces: dict[str, list[Request]] = {"agents": agents(count=12 if quick else 300, per_second=0.5)}
    if path is not None:
        traces["mooncake"] = mooncake(path)[: 300 if quick else None]
    else:
        print("without --trace PATH, only the generated trace is replayed")
    if bench.selected("rates"):
        _draw(bench, {name: _rates(bench, name, trace) for name, trace in traces.items()})
    if bench.selected("tiers"):
        for name, trace in traces.items():
            _tiers(bench, name, trace)


def _rates(bench: Bench, name: str, trace: Sequence[Request]) -> dict[str, list[tuple[int, float]]]:
    """Hit rates of every policy and of the bound, by blocks."""
    curves: dict[str, list[tuple[int, float]]] = {x: [] for x in (*POLICIES, "offline bound")}
    rows, targets = [], []
    total = sum(len(request.keys) for request in trace)
    common = {"trace": name, "requests": len(trace), "blocks_of_prompts": total}
    for blocks in (300, 1000) if bench.settings.quick else sorted((*BLOCKS, *BETWEEN)):
        rates = {}
        for policy, make in POLICIES.items():
            bench.progress(f"eviction: {name}, {blocks:,} blocks, {policy}")
            rates[policy] = replay(trace, make(), blocks).rate
        rates["offline bound"] = best_possible(trace, blocks).rate
        best = max(FIXED, key=rates.__getitem__)
        ratio = rates["adaptive"] / rates[best] if rates[best] else 1.0
        workload = {**common, "blocks": blocks}
        for policy, rate in rates.items():
            curves[policy].append((blocks, rate))
            bench.record("eviction", contender=policy, workload=workload, hit_rate=round(rate, 4))
        target = Target(f"{name}, {blocks:,} blocks: default, x the best fixed policy", ratio, ">=", 0.98)
        if blocks in BETWEEN:
            bench.record("eviction", workload=workload, best=best, default_x_best=round(ratio, 4))
        else:
            targets.append(target)
            bench.record("eviction", workload=workload, best=best, **target.fields())
        rows.append((f"{blocks:,}", *(f"{rate:.4f}" for rate in rates.values()), best, f"{ratio:.3f}"))
    bench.progress("")
    print(f"{name}: {len(trace):,} requests, {total:,} blocks of prompts; hits of all blocks\n")
    heads = ("blocks", *curves, "best fixed", "default x best")
    print(table(heads, rows) + "\n\n" + table_of(targets) + "\n", flush=True)
    return curves


def _tiers(bench: Bench, name: str, trace: Sequence[Request]) -> None:
    """Tiers under a trace: without any below the device, with copies made ahead, and with copies when blocks leave."""
    if name == "mooncake":
        trace = [dataclasses.replace(request, time=request.time * HOURS) for request in trace]
    else:
        trace = agents(count=12 if bench.settings.quick else 100, per_second=AGENTS)
    live = _live(trace)
    host = max(int(live / LIVE), 1)
    found: dict[str, Replayed] = {}
    rows = []
    for way, (count, ahead, waits, policy) in WAYS.items():
        bench.progress(f"eviction: {name}, {way}")
        tiers = (Tier("device", DEVICE, 22e9, 22e9), Tier("host", host, 6e9, 3e9), Tier("disk", DISK))
        machine = Machine(tiers[: count + 1], BLOCK_BYTES, prefill, 0.03, ahead=ahead, waits=waits)
        done = found[way] = replay_tiers(trace, machine, POLICIES[policy])
        mean = sum(done.first) / len(done.first)
        figures: dict[str, Any] = {
            "first_token_mean": round(mean, 3),
            "first_token_median": round(done.median, 3),
            "first_token_p99": round(done.percentile(0.99), 3),
            "seconds_saved": round(done.saved),
            "hits": {tier: round(hits / done.blocks, 4) for tier, hits in done.hits.items()},
            "bytes_copied": done.copied,
            "bytes_fetched": done.fetched,
            "blocks_dropped": done.dropped,
            "stalled": round(done.stalled, 1),
            "queued_for_room": round(done.queued, 1),
            "lasted": round(trace[-1].time, 1),
        }
        workload = {"trace": name, "requests": len(trace), "host_blocks": host, "live_blocks": live}
        bench.record("eviction", contender=way, workload=workload, **figures)
        hits = (f"{done.hits.get(tier, 0) / done.blocks:.3f}" for tier in ("device", "host", "disk"))
        seconds = map(number, (mean, done.median, done.percentile(0.99), done.saved, done.stalled))
        rows.append((way, *seconds, *hits, number(sum(done.copied.values()) / 1e9)))
    bench.progress("")
    spread = f"spread over {HOURS:g} times as long" if name == "mooncake" else f"{AGENTS:g} agents begin in a second"
    print(f"{name}, {spread}: device {DEVICE} blocks, host {host:,}, disk {DISK:,}; live {live:,}\n")
    heads = ("tiers", "TTFT mean s", "median", "p99", "saved s", "stalled s", "device", "host", "disk", "copied GB")
    print(table(heads, rows, left=(0,)) + "\n", flush=True)
    targets = []
    for way, other in AGAINST:
        ratio = sum(found[other].first) / sum(found[way].first)
        target = Target(f"{name}: {way}: time to first token, speed x {other}", ratio, ">=", 0.98)
        targets.append(target)
        bench.record("eviction", workload={"trace": name, "host_blocks": host}, **target.fields())
    print(table_of(targets) + "\n", flush=True)


def _live(trace: Sequence[Request]) -> int:
    """The most blocks at one time that are used again later."""
    first: dict[object, int] = {}
    last: dict[object, int] = {}
    for i, request in enumerate(trace):
        for key in request.keys:
            first.setdefault(key, i)
            last[key] = i
    change = [0] * (len(trace) + 1)
    for key, begin in first.items():
        if last[key] > begin:
            change[begin] += 1
            change[last[key]] -= 1
    most = live = 0
    for step in change:
        live += step
        most = max(most, live)
    return most


def _draw(bench: Bench, curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> None:
    """The picture, where matplotlib is installed: hit rates, and how far they are from the bound."""
    with contextlib.suppress(ImportError):
        from matplotlib.figure import Figure

        out = bench.settings.out
        folder = out.parent if out.suffix else out
        folder.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(6.5 * len(curves), 8), layout="constrained")
        for i, (name, lines) in enumerate(curves.items(), 1):
            rates, distances = (figure.add_subplot(2, len(curves), i + row * len(curves)) for row in (0, 1))
            bound = dict(lines["offline bound"])
            for policy, points in lines.items():
                style = {"adaptive": {"color": "k", "linewidth": 2.2}, "offline bound": {"color": "0.5", "ls": "--"}}
                more = style.get(policy, {"linewidth": 1.0, "marker": "o", "markersize": 3})
                at = [x for x, _ in points]
                rates.plot(at, [100 * y for _, y in points], label=policy, **more)
                distances.plot(at, [100 * (1 - y / bound[x]) if bound[x] else 0.0 for x, y in points], **more)
            rates.set(title=name, ylabel="hits, % of all blocks of prompts")
            distances.set(xlabel="blocks kept", ylabel="short of the offline bound, % of its hits")
            for axes in (rates, distances):
                axes.set_xscale("log")
                axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
            rates.legend(fontsize=8)
        figure.savefig(folder / "eviction.png", dpi=110)
        print(f"picture: {'benchmarks/results/' if folder == RESULTS else ''}eviction.png\n")
