"""Whether the time to the first token tells a tenant what another one has asked.

A tenant of a store has asked something. Another, whose salt is another one, probes: prompts that begin as that did, and
prompts that nobody ever gave, in turn. If what is kept were shared, the first kind would be faster. The figure is the
AUC: how often a probe of the first kind is faster than one of the second, of all pairs; 0.5 is a guess.
"""

from __future__ import annotations

import random
import time

import torch

import kvtier
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.targets import Target, table_of

SUMMARY = "whether the time to the first token tells a tenant of a store what another one has asked"
MODEL, NAME = "examples/pylm", "store_tenants"
#: Probes of each kind, and tokens of a prompt; of these, new ones at the end.
PROBES, TOKENS, NEW = 500, 256, 16


def auc(faster: list[float], slower: list[float]) -> float:
    """How often one of the first is below one of the second; equal ones count half."""
    wins = sum((a < b) + (a == b) / 2 for a in faster for b in slower)
    return wins / (len(faster) * len(slower))


def run(bench: Bench) -> None:
    """Run the scenario."""
    model, device = bench.model(bench.settings.model or MODEL), bench.settings.device
    probes = 20 if bench.settings.quick else PROBES
    draw, rng = torch.Generator("cpu").manual_seed(0), random.Random(0)

    def some(tokens: int) -> torch.Tensor:
        return torch.randint(5, model.config.vocab_size, (1, tokens), generator=draw).to(device)

    found: dict[str, list[float]] = {"of another tenant": [], "of nobody": [], "its own": []}
    with torch_threads(1), kvtier.ConversationStore(model, host_budget="1GiB") as store:

        def ask(ids: torch.Tensor, salt: str) -> float:
            began = time.perf_counter()
            out = store.generate(ids, attention_mask=torch.ones_like(ids), salt=salt, max_new_tokens=1, do_sample=False)
            out[0, -1].item()
            return time.perf_counter() - began

        for _ in range(3):
            ask(some(TOKENS), "warm")
        for n in range(probes):
            bench.progress(f"{NAME}: probe {n + 1} of {probes}")
            asked = some(TOKENS - NEW)
            ask(torch.cat([asked, some(NEW)], 1), "tenant")
            kinds = list(found)
            rng.shuffle(kinds)
            for kind in kinds:
                prompt = some(TOKENS - NEW) if kind == "of nobody" else asked
                salt = "tenant" if kind == "its own" else f"probe {n}"
                found[kind].append(ask(torch.cat([prompt, some(NEW)], 1), salt))
                assert (store.reuse[0].cached > 0) == (kind == "its own")
    bench.progress("")
    cold, rows = found["of nobody"], []
    workload = {"model": label(bench.settings.model or MODEL), "tokens": TOKENS, "new_tokens": NEW}
    figures = {kind: auc(times, cold) for kind, times in found.items() if kind != "of nobody"}
    for kind, times in found.items():
        median = sorted(times)[len(times) // 2]
        rows.append([kind, number(median * 1e3), number(figures.get(kind, 0.5))])
        facts = {"auc": figures.get(kind)}
        bench.record(NAME, contender=kind, workload=workload, unit="s", median=median, n=len(times), facts=facts)
    print(f"{NAME} · {label(bench.settings.model or MODEL)} · prompts of {TOKENS} tokens")
    print(table(["a prompt that begins as one", "ms to the first token", "AUC against nobody's"], rows))
    other = figures["of another tenant"]
    targets = [
        Target("AUC of what another tenant asked", max(other, 1 - other), "<=", 0.55),
        # What is kept is seen by whoever may see it: the probe can tell.
        Target("AUC of what the tenant asked itself", figures["its own"], ">=", 0.9),
    ]
    print("\n" + table_of(targets) + "\n", flush=True)
    for target in targets:
        bench.record(NAME, workload=workload, **target.fields())
