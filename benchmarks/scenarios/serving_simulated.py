"""The engine's schedulers in simulation, in ratio with what papers report; preemption by price on random loads.

Nothing here is timed: seconds are virtual, machines are those of `planning/hardware/machines.py` by their datasheets,
and the figures are the same everywhere. Profiles state the papers' machines, models, memory and lengths; none of their
numbers is fitted to a result. `--trace` names Mooncake's trace of conversations; without it, `fair` is left out.

trials       random loads: ways back by price, against always swap and always recompute
fair         Mooncake's trace: fair against first come, first served, by rate of arrivals
adaptivellm  128 blocks on the device and 64 on the host, all requests at once (AdaptiveLLM, section 4.2)
pensieve     conversations: a stateful against a stateless engine, by rate (Pensieve, section 6)
neo          rows that decode on the host, and forwards that take turns, against the device alone (Neo, section 5.4)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench
from benchmarks.records import RESULTS, number, table
from benchmarks.targets import Target, table_of
from kvtier.planning.hardware.machines import MACHINES, Machine, ModelSize
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.fcfs import FirstComeFirstServed
from kvtier.scheduling.scheduler import Scheduler
from kvtier.scheduling.simulation.hosted import Hosted
from kvtier.scheduling.simulation.loads import conversations, lognormal, mooncake, poisson, uniform
from kvtier.scheduling.simulation.outcome import percentile
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import Simulation, simulate
from kvtier.scheduling.simulation.trials import MODELS, against_the_better

SUMMARY = "the engine's schedulers in simulation, in ratio with papers; preemption by price (--trace PATH)"
CASES = ("trials", "fair", "adaptivellm", "pensieve", "neo")
NAME = "serving_simulated"
TRIALS = 300
#: Of the trace's arrivals, 1,000 requests; the target is read at the second one but last, with this bound in seconds.
FAIR_RATES, FAIR_BOUND, FAIR_COUNT = (0.28, 0.3, 0.32, 0.34, 0.36), 120.0, 1000
#: Seconds of a step besides the device's work.
OVERHEAD = 2e-3
OPT_13B = ModelSize(40, 5120, 40, 128, 40, 12_850_000_000, 12_590_000_000, embedding=260_000_000)
#: Mean tokens of prompts of AdaptiveLLM's data sets (table 2). Lengths of outputs are bounded by 64 there.
PROMPTS = {"chatbot": 17.02, "alpaca": 19.66, "summary": 340.48}
GPT_6_7B = ModelSize(32, 4096, 32, 128, 32, 6_700_000_000, 6_494_000_000, embedding=206_000_000)
#: Mean tokens of a turn, in and out, of Pensieve's data sets (table 2), and turns of a conversation.
TURNS = {"ShareGPT": (31.26, 180.44, 7.58), "LMSYS": (22.49, 100.67, 7.73)}
#: Conversations that begin in a second; seconds of arrivals, and those from which on what ends is counted.
BEGIN, LASTS, SETTLED = (1.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0), 150.0, 60.0
#: Seconds per token up to which a service is usable, at the 90th percentile.
USABLE = 0.1
#: Neo's machines (table 1), by datasheets. NVIDIA T4: 65 TFLOPS fp16, 320 GB/s, 16 GB, PCIe 3.0; its host has six
#: channels of DDR4-2933. A10G: 125 TFLOPS and 600 GB/s as Neo says, 24 GB, PCIe 4.0; eight of DDR4-3200. Two H100, and
#: one of the four NUMA nodes of their host: four of DDR5-4800.
NEO_MACHINES = {
    "t4": Machine(65e12, 320e9, 16 * 10**9, 15.75e9, 140.8e9),
    "a10g": Machine(125e12, 600e9, 24 * 10**9, 31.5e9, 204.8e9),
    "2 x h100": Machine(2 * 989e12, 2 * 3.35e12, 160 * 10**9, 2 * 63e9, 153.6e9),
}
LLAMA_2_7B = ModelSize(32, 4096, 32, 128, 32, 6_740_000_000, 6_600_000_000, embedding=131_000_000)
LLAMA_3_8B = ModelSize(32, 4096, 32, 128, 8, 8_030_000_000, 7_500_000_000, embedding=525_000_000)
LLAMA_3_70B = ModelSize(80, 8192, 64, 128, 8, 70_550_000_000, 69_400_000_000, embedding=1_050_000_000)
#: Model, bytes of KV on the host, tokens of a prompt, requests, and the gain that Neo reports at the most (figure 9).
NEO = {
    "t4": (LLAMA_2_7B, 40e9, 200, 200, 7.5),
    "a10g": (LLAMA_3_8B, 40e9, 1000, 300, 1.26),
    "2 x h100": (LLAMA_3_70B, 300e9, 2000, 150, 1.14),
}
#: Tokens of an answer; of the device's memory, what weights and KV take.
NEO_OUTPUTS, NEO_MEMORY = (25, 50, 75, 100, 200, 400), 0.92
#: Of the paper's claims: the gain on an H100, and "several times" on a T4.
NEO_LEAST = {"2 x h100": 1.14, "t4": 3.0}


def run(bench: Bench) -> None:
    """Run the scenario; `--rounds` is the number of random loads."""
    if bench.selected("trials"):
        axes = "loads, sorted", "seconds until all have ended, x the better way"
        _draw(bench, "trials", *axes, _trials(bench), {"target": 1.02})
    if bench.selected("fair"):
        if bench.settings.trace is None:
            print("without --trace PATH, fair scheduling is not replayed\n")
        else:
            axes = "arrivals, x the trace's", "seconds to the first token: mean, and p99 (dashed)"
            _draw(bench, "fair", *axes, _fair(bench, bench.settings.trace))
    if bench.selected("adaptivellm"):
        _adaptivellm(bench)
    if bench.selected("pensieve"):
        _draw(bench, "pensieve", "turns per second", "p90 of seconds per token", _pensieve(bench), {"limit": 0.1})
    if bench.selected("neo"):
        most = {f"{name}: most in the paper": machine[-1] for name, machine in NEO.items()}
        _draw(bench, "neo", "tokens of an answer", "tokens per second, x the device alone", _neo(bench), most)


def _trials(bench: Bench) -> dict[str, list[tuple[float, float]]]:
    count = bench.settings.rounds or (10 if bench.settings.quick else TRIALS)
    ratios, to_swap, to_again = [], [], []
    for seed in range(count):
        bench.progress(f"{NAME}: load {seed} of {count}")
        price, swap, again = against_the_better(seed)
        ratios.append(price / min(swap, again))
        to_swap.append(price / swap)
        to_again.append(price / again)
    bench.progress("")
    workload = {"case": "trials", "loads": count}
    found = {
        "median": percentile(ratios, 0.5),
        "p95": percentile(ratios, 0.95),
        "worst": max(ratios),
        "best": min(ratios),
        "over_1.02": sum(x > 1.02 for x in ratios),
        "best_against_swap": min(to_swap),
        "best_against_recompute": min(to_again),
    }
    bench.record(NAME, contender="price", workload=workload, **{name: round(x, 4) for name, x in found.items()})
    print(f"{count} random loads; seconds until all have ended, by price, x the better way\n")
    print(table(list(found), [[number(x) for x in found.values()]]) + "\n")
    _targets(bench, workload, [Target("by price, x the better of always swap and recompute", max(ratios), "<=", 1.02)])
    return {"loads, sorted": [(float(i), x) for i, x in enumerate(sorted(ratios))]}


def _fair(bench: Bench, path: Path) -> dict[str, list[tuple[float, float]]]:
    model, size = MODELS["llama-3.1-8b"], 512
    block = size * model.layers * model.kv_bytes
    profile = Profile(MACHINES["h100"], model, 40 * 10**9 // block, 2000, size, OVERHEAD, write_through=True)
    count = 100 if bench.settings.quick else FAIR_COUNT
    ways: dict[str, Callable[[], Scheduler]] = {
        "first come": FirstComeFirstServed,
        "fair": Fair,
        f"fair, bound {FAIR_BOUND:g} s": lambda: Fair(FAIR_BOUND),
    }
    curves: dict[str, list[tuple[float, float]]] = {}
    rows, targets = [], []
    for rate in FAIR_RATES:
        requests = mooncake(path, block_size=size, scale=rate, count=count)
        workload = {"case": "fair", "trace": "mooncake", "requests": count, "rate_scale": rate, "machine": "h100"}
        found = {}
        for name, make in ways.items():
            bench.progress(f"{NAME}: mooncake at {rate:g}, {name}")
            figures = simulate(requests, profile, make(), stateful=True, max_tokens=8192).figures()
            found[name] = figures
            bench.record(NAME, contender=name, workload=workload, **_rounded(figures))
            curves.setdefault(name, []).append((rate, figures["ttft_mean"]))
            curves.setdefault(f"{name}, p99", []).append((rate, figures["ttft_p99"]))
            shown = (figures[x] for x in ("ttft_mean", "ttft_p50", "ttft_p99", "turnaround"))
            rows.append([f"{rate:g}", name, *map(number, shown)])
        if rate == FAIR_RATES[-2]:
            base, other = found["first come"], found[f"fair, bound {FAIR_BOUND:g} s"]
            for part, limit in (("mean", 0.4), ("p99", 1.0)):
                ratio = other[f"ttft_{part}"] / base[f"ttft_{part}"]
                name = f"mooncake at {rate:g}: fair, {part} TTFT, x first come"
                targets.append(Target(name, ratio, "<=", limit))
    bench.progress("")
    print(f"Mooncake's first {count} requests, llama-3.1-8b on an h100, 40 GB of KV\n")
    print(table(["rate x", "scheduler", "TTFT mean s", "p50", "p99", "turnaround"], rows, left=(1,)) + "\n")
    _targets(bench, {"case": "fair", "rate_scale": FAIR_RATES[-2]}, targets)
    return curves


def _adaptivellm(bench: Bench) -> None:
    # An A800 is an A100 with a slower NVLink. Copies and compute take turns there (section 6).
    profile = Profile(replace(MACHINES["a100"], overlaps=False), OPT_13B, 128, 64, 16, OVERHEAD)
    count = 60 if bench.settings.quick else 1000
    ways: dict[str, tuple[str | None, Callable[[], Scheduler]]] = {
        "price, fair": (None, lambda: Fair(math.inf)),
        "price, first come": (None, FirstComeFirstServed),
        "swap, first come": ("swap", FirstComeFirstServed),
        "recompute, first come": ("recompute", FirstComeFirstServed),
    }
    rows, targets = [], []
    for name, prompt in PROMPTS.items():
        requests = poisson(count, math.inf, lognormal(prompt, 0.6, 1000), lognormal(58, 0.2, 64), seed=1)
        workload = {"case": "adaptivellm", "lengths": name, "requests": count, "machine": "a100, no overlap"}
        found = {}
        for way, (preempt, make) in ways.items():
            bench.progress(f"{NAME}: adaptivellm, {name}, {way}")
            figures = simulate(requests, profile, make(), ways=preempt, max_running=128, max_tokens=2560).figures()
            found[way] = figures
            bench.record(NAME, contender=way, workload=workload, **_rounded(figures))
            shown = (figures[x] for x in ("tokens_per_second", "turnaround", "swapped", "recomputed", "rows"))
            rows.append([name, way, *map(number, shown)])
        ours = found["price, fair"]
        for other in ("swap, first come", "recompute, first come"):
            gain = ours["tokens_per_second"] / found[other]["tokens_per_second"]
            targets.append(Target(f"adaptivellm, {name}: tokens/s, x {other}", gain, ">=", 1.1))
            share = ours["turnaround"] / found[other]["turnaround"]
            targets.append(Target(f"adaptivellm, {name}: weighted turnaround, x {other}", share, "<=", 0.8))
    bench.progress("")
    print(f"AdaptiveLLM's setting: {count} requests at once, OPT-13B, 128 blocks on the device, 64 on the host\n")
    heads = ["lengths", "ways back, scheduler", "tokens/s", "turnaround", "swapped", "recomputed", "rows"]
    print(table(heads, rows, left=(0, 1)) + "\n")
    _targets(bench, {"case": "adaptivellm"}, targets)


def _pensieve(bench: Bench) -> dict[str, list[tuple[float, float]]]:
    size = 32
    block = size * GPT_6_7B.layers * GPT_6_7B.kv_bytes
    whole = Profile(MACHINES["a100"], GPT_6_7B, 40 * 2**30 // block, 170 * 2**30 // block, size, OVERHEAD, True)
    profiles = {"stateless": replace(whole, host_blocks=0, write_through=False), "stateful": whole}
    curves: dict[str, list[tuple[float, float]]] = {}
    rows, targets = [], []
    for name, (prompt, output, turns) in TURNS.items():
        best = dict.fromkeys(profiles, 0.0)
        for begin in BEGIN[:2] if bench.settings.quick else BEGIN:
            requests = conversations(
                int(begin * LASTS),
                begin,
                turns=turns,
                prompt=lognormal(prompt, 1.0),
                output=lognormal(output, 0.8),
                think=20.0,
                least_think=5.0,
                most=2048,
                block_size=size,
                seed=2,
            )
            for kind, profile in profiles.items():
                bench.progress(f"{NAME}: pensieve, {name}, {begin:g} begin in a second, {kind}")
                simulation = Simulation(requests, profile, FirstComeFirstServed(), stateful=kind == "stateful")
                done = [x for x in simulation.run(LASTS).requests if SETTLED < x.finished <= LASTS]
                rate = len(done) / (LASTS - SETTLED)
                latency = percentile([(x.finished - x.arrived) / x.output for x in done], 0.9)
                figures = {"requests_per_second": round(rate, 3), "normalised_p90": round(latency, 5)}
                workload = {"case": "pensieve", "lengths": name, "begin_per_second": begin, "machine": "a100"}
                bench.record(NAME, contender=kind, workload=workload, **figures)
                curves.setdefault(f"{name}, {kind}", []).append((rate, latency))
                rows.append([name, f"{begin:g}", kind, number(rate), f"{1000 * latency:.1f}"])
                if latency <= USABLE:
                    best[kind] = max(best[kind], rate)
        gain = best["stateful"] / best["stateless"] if best["stateless"] else None
        targets.append(Target(f"pensieve, {name}: turns/s at {USABLE:g} s per token, x stateless", gain, ">=", 1.5))
    bench.progress("")
    print("Pensieve's setting: GPT-3 6.7B on an a100, 40 GiB of KV there and 170 GiB on the host; 20 s between turns\n")
    print(table(["lengths", "begin/s", "engine", "turns/s", "p90 ms per token"], rows, left=(0, 2)) + "\n")
    _targets(bench, {"case": "pensieve"}, targets)
    return curves


def _neo(bench: Bench) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {}
    rows, targets = [], []
    for name, (model, host, prompt, count, theirs) in NEO.items():
        machine, block = NEO_MACHINES[name], 16 * model.layers * model.kv_bytes
        device = machine.device_bytes * NEO_MEMORY - model.parameters * model.itemsize
        profile = Profile(machine, model, int(device // block), int(host // block), 16, OVERHEAD)
        for tokens in NEO_OUTPUTS[:2] if bench.settings.quick else NEO_OUTPUTS:
            bench.progress(f"{NAME}: neo, {name}, {tokens} tokens")
            requests = poisson(count, math.inf, uniform(prompt), uniform(tokens), seed=1)
            alone = replace(profile, host_blocks=0)
            base = simulate(requests, alone, FirstComeFirstServed(), ways="recompute")
            simulation = Hosted(requests, profile, FirstComeFirstServed())
            found = simulation.run()
            workload = {"case": "neo", "machine": name, "prompt": prompt, "output": tokens, "requests": count}
            gain = base.seconds / found.seconds
            steps = {way: count / found.steps for way, count in sorted(simulation.steps_by_way.items())}
            bench.record(NAME, contender="device only", workload=workload, **_rounded(base.figures()))
            more = {"gain": gain, "hosted_rows": simulation.hosted / found.steps}
            bench.record(NAME, contender="host too", workload=workload, **_rounded(found.figures() | more), ways=steps)
            curves.setdefault(name, []).append((float(tokens), gain))
            shown = (base.figures()["rows"], found.figures()["rows"], more["hosted_rows"], gain)
            rows.append([name, str(tokens), *map(number, shown), f"{steps.get('sub-batches', 0.0):.0%}"])
        if name in NEO_LEAST:
            best = max(gain for _, gain in curves[name])
            title = f"neo, {name}: tokens/s at the best length, x the device alone (there {theirs:g})"
            targets.append(Target(title, best, ">=", NEO_LEAST[name]))
    bench.progress("")
    print("Neo's setting: all requests at once, lengths within 10%; figure 9\n")
    heads = ["machine", "output", "rows, device only", "rows", "on the host", "tokens/s x", "two forwards"]
    print(table(heads, rows, left=(0,)) + "\n")
    _targets(bench, {"case": "neo"}, targets)
    return curves


def _targets(bench: Bench, workload: Mapping[str, Any], found: Sequence[Target]) -> None:
    print(table_of(found) + "\n", flush=True)
    for target in found:
        bench.record(NAME, workload=dict(workload), **target.fields())


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(x, 5) for name, x in figures.items()}


def _draw(
    bench: Bench,
    case: str,
    x: str,
    y: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    levels: Mapping[str, float] | None = None,
) -> None:
    """The picture of a case, where matplotlib is installed.

    Args:
        x, y: what the axes show.
        lines: by name; a p99 is dashed, in the colour of its mean.
        levels: by name, shown dotted: in the colour of the line that the name begins with.
    """
    with contextlib.suppress(ImportError):
        from matplotlib.figure import Figure

        out = bench.settings.out
        folder = out.parent if out.suffix else out
        folder.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(6.5, 4.5), layout="constrained")
        axes = figure.add_subplot()
        colors: dict[str, str] = {}
        for name, points in lines.items():
            kind = name.removesuffix(", p99")
            color = colors.setdefault(kind, f"C{len(colors)}")
            label = name if kind == name else None
            axes.plot(*zip(*points, strict=True), color=color, ls="-" if label else "--", marker=".", label=label)
        for name, level in (levels or {}).items():
            axes.axhline(level, color=colors.get(name.partition(":")[0], "0.5"), linestyle=":", label=name)
        if len(lines) > 1:
            axes.set_yscale("log")
            for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                axis("{x:g}")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        name = f"{NAME}-{case}.png"
        figure.savefig(folder / name, dpi=110)
        print(f"picture: {'benchmarks/results/' if folder == RESULTS else ''}{name}\n")
