"""The engine under Mooncake's load for real, under each scheduler, and what the simulator says of the same load.

`--trace` names Mooncake's trace of conversations; lengths are divided by 32, and so are its blocks. Requests share what
their prompts have in common. The machine's own speed sets the pace: all requests are first served at once, and then
arrive within that time divided by PRESSURE, so that a queue builds up. Schedulers take turns, each with a new engine.

The simulator gets two numbers of this machine, measured before: the seconds of a step that decodes one token, which are
taken for what any step takes besides arithmetic, for a model this small hardly waits for memory; and of one that
computes a prompt of 512 tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from benchmarks.cores import limited_to, torch_threads
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of
from kvtier import Engine
from kvtier.planning.hardware.machines import OF_FLOPS, Machine, ModelSize
from kvtier.planning.hardware.model_size import model_size
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.simulation.loads import mooncake
from kvtier.scheduling.simulation.outcome import Outcome, Request
from kvtier.scheduling.simulation.profile import Profile
from kvtier.scheduling.simulation.simulate import simulate
from kvtier.serving.replay import replay

SUMMARY = "the engine under a trace's load for real, by scheduler, and as it is simulated (CPU only; --trace PATH)"
NAME = "serving_measured"
MODEL = "llama-8x512"
COUNT, ROUNDS = 200, 3
#: Of the trace: its blocks of 512 tokens come to 16.
LENGTHS, BLOCK = 1 / 32, 16
#: Arrivals of the load, as a multiple of what the engine serves: the queue is long, and orders of it differ.
PRESSURE = 4.0
BUDGET = "1GiB"
STEP = 512
#: Bytes per second of memory that nothing waits for, and the part of a prompt's step that is arithmetic, at the least.
MEMORY, LEAST = 1e15, 0.1
WAYS = ("fcfs", "fair")
SHOWN = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "tokens_per_second", "turnaround", "reused", "rows")
#: What fair scheduling is to give, as a multiple of first come, first served: of mean and p99 times to the first token.
LIMITS = {"ttft_mean": 0.4, "ttft_p99": 1.0}


def run(bench: Bench) -> None:
    """Run the scenario."""
    if bench.settings.device.type != "cpu":
        return
    if bench.settings.trace is None:
        print("without --trace PATH, no load is served\n")
        return
    name = (bench.model_names(MODEL) or [MODEL])[0]
    count = 12 if bench.settings.quick else COUNT
    load = mooncake(bench.settings.trace, block_size=BLOCK, lengths=LENGTHS, count=count)
    with limited_to(1), torch_threads(1):
        model = bench.model(name)
        bench.progress(f"{NAME}: what a step takes")
        one, prompt = _step_seconds(model)
        bench.progress(f"{NAME}: all at once")
        whole = _serve(model, "fcfs", [dataclasses.replace(x, arrived=0.0) for x in load]).seconds
        pace = whole / PRESSURE / max(x.arrived for x in load)
        load = [dataclasses.replace(x, arrived=x.arrived * pace) for x in load]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for n in range(bench.rounds(ROUNDS)):
            for way in WAYS:
                bench.progress(f"{NAME}: round {n + 1}, {way}")
                found[way].append(_serve(model, way, load).figures())
        blocks = _blocks(model)
    bench.progress("")
    size = model_size(model.config.to_dict() | {"torch_dtype": "float32"})
    profile = _profile(size, one, prompt, blocks)
    expected = {
        way: simulate(load, profile, scheduler_of(way), stateful=True, max_tokens=STEP).figures() for way in WAYS
    }
    workload = {"model": label(name), "trace": "mooncake", "requests": count, "pressure": PRESSURE, "threads": 1}
    _report(bench, workload, found, expected)


def _engine(model: PreTrainedModel, scheduler: Any) -> Engine:
    return Engine(model, host_budget=BUDGET, block_size=BLOCK, max_batch_tokens=STEP, scheduler=scheduler)


def _serve(model: PreTrainedModel, scheduler: str, load: Sequence[Request]) -> Outcome:
    with _engine(model, scheduler) as engine:
        return replay(engine, load, block_size=BLOCK)


def _blocks(model: PreTrainedModel) -> int:
    with _engine(model, "fcfs") as engine:
        return engine.load.total_blocks


def _step_seconds(model: PreTrainedModel) -> tuple[float, float]:
    """Of a step that decodes one token, and of one that computes a prompt of `STEP` tokens; medians of five."""
    alone = [_serve(model, "fcfs", [Request(0.0, 8, 32), Request(0.0, STEP, 1)][i % 2 :][:1]) for i in range(10)]
    decodes = [(x.finished - x.first) / (x.output - 1) for each in alone[::2] for x in each.requests]
    prompts = [x.first - x.scheduled for each in alone[1::2] for x in each.requests]
    return statistics.median(decodes), statistics.median(prompts)


def _profile(size: ModelSize, one: float, prompt: float, blocks: int) -> Profile:
    """A machine on which these steps take that long."""
    pairs = STEP * (STEP + 1) / 2
    work = 2 * size.active * STEP + 4 * size.layers * size.heads * size.head_dim * pairs
    flops = work / max(prompt - one, LEAST * prompt)
    return Profile(Machine(flops / OF_FLOPS, MEMORY, 1 << 40, 1e9, 1e9), size, blocks, 0, BLOCK, overhead=one)


def _report(
    bench: Bench,
    workload: dict[str, Any],
    found: dict[str, list[dict[str, float]]],
    expected: dict[str, dict[str, float]],
) -> None:
    """Print and record what was measured, next to what was simulated."""
    medians = {way: {x: statistics.median(each[x] for each in those) for x in SHOWN} for way, those in found.items()}
    rows = []
    for way, those in found.items():
        spread: dict[str, Any] = {}
        for x in SHOWN:
            spread[f"{x}_low"], spread[f"{x}_high"] = min(each[x] for each in those), max(each[x] for each in those)
        bench.record(NAME, contender=way, workload=workload, n=len(those), **_rounded(medians[way] | spread))
        simulated = {x: expected[way][x] for x in SHOWN}
        bench.record(NAME, contender=f"{way}, simulated", workload=workload, **_rounded(simulated))
        rows.append([way, *(number(medians[way][x]) for x in SHOWN)])
        rows.append([f"{way}, simulated", *(number(simulated[x]) for x in SHOWN)])
    print(f"{NAME} · {workload['model']} · {workload['requests']} requests, medians of {len(found[WAYS[0]])} rounds\n")
    print(table(["", *SHOWN], rows, left=(0,)) + "\n")
    targets = []
    for x, limit in LIMITS.items():
        ratios = [a[x] / b[x] for a, b in zip(found["fair"], found["fcfs"], strict=True)]
        targets.append(Target(f"fair, {x}, x first come", statistics.median(ratios), "<=", limit))
    print(table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(x, 5) for name, x in figures.items()}
