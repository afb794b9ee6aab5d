"""Time to the first token of a turn after a long history: kept by a `ConversationStore`, and computed again.

Every turn has the same number of new tokens, other ones each time. What a store costs where it re-uses nothing is
measured with prompts that nothing begins like, against plain `generate`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

import kvtier
from benchmarks.contenders import Case
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of

SUMMARY = "time to the first token of a turn after a long history: kept by a store, and computed again"
MODEL, CPU_MODEL = "llama-3.1-8b", "examples/pylm"
CONTEXTS, CPU_CONTEXTS = (65536, 131072), (2048, 8192)
#: New tokens of a turn, and turns of each way.
NEW, TURNS = 64, 5
#: Prompts of so many tokens for what a store costs that re-uses nothing, and how many of each way.
SHORT, PAIRS = 2048, 8
NAME = "conversation"


def run(bench: Bench) -> None:
    """Run the scenario."""
    cpu = bench.settings.device.type == "cpu"
    with torch_threads(torch.get_num_threads()):
        for model in bench.model_names(CPU_MODEL if cpu else MODEL):
            for case in bench.cases(NAME, model, CPU_CONTEXTS if cpu else CONTEXTS, NEW * (TURNS + 2)):
                measure(bench, model, case)


def seconds(generate: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> float:
    """Until the first token is known."""
    began = time.perf_counter()
    generate(ids)[0, -1].item()
    return time.perf_counter() - began


def measure(bench: Bench, name: str, case: Case) -> None:
    """Both ways in turn; print and record the figures."""
    model, device = bench.model(name), bench.settings.device
    draw = torch.Generator("cpu").manual_seed(0)

    def some(tokens: int) -> torch.Tensor:
        return torch.randint(5, model.config.vocab_size, (1, tokens), generator=draw).to(device)

    def again(ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        out: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1, do_sample=False
        )
        return out

    turns = 2 if bench.settings.quick else TURNS
    with kvtier.ConversationStore(model) as store:

        def kept(ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = store.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
            )
            return out

        history = some(case.context)
        bench.progress(f"{NAME}: a history of {case.context:,} tokens")
        kept(history)
        found: dict[str, list[float]] = {"kept": [], "computed again": []}
        for _ in range(turns):
            ids = torch.cat([history, some(NEW)], 1)
            found["kept"].append(seconds(kept, ids))
            assert store.reuse[0].cached >= case.context - 1
            found["computed again"].append(seconds(again, ids))
        ratios = [a / b for a, b in zip(*found.values(), strict=True)]
        costs = []
        for _ in range(3 if bench.settings.quick else PAIRS):
            ids = some(SHORT)
            costs.append(seconds(kept, ids) / seconds(again, ids))
    rows = []
    workload = {"model": label(name), "context": case.context, "new_tokens": NEW, "batch": 1}
    for way, times in found.items():
        median, low, high = statistics.median(times), min(times), max(times)
        rows.append([way, number(median), f"{number(low)} .. {number(high)}"])
        ratio = statistics.median(ratios) if way == "kept" else None
        facts = {"low": low, "high": high}
        bench.record(
            NAME, contender=way, workload=workload, unit="s", median=median, n=len(times), ratio=ratio, facts=facts
        )
    cost = statistics.median(costs)
    bench.progress("")
    print(f"{NAME} · {label(name)} · a turn of {NEW} tokens after {case.context:,}")
    print(table(["", "seconds to the first token", "low .. high"], rows))
    share = statistics.median(ratios)
    limit = 1 / 40 if case.context >= 32768 else 1 / 20
    targets = [
        Target(f"kept / computed again, {case.context:,} tokens", share, "<=", limit),
        Target(f"a store that re-uses nothing / plain, {SHORT} tokens", cost, "<=", 1.02),
    ]
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
