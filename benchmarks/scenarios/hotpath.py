"""Python and dispatch of one decode step of a CPU model: microseconds per layer at 256 tokens, one thread.

layers  update and attention together, without the rest of a model: DynamicCache under sdpa, a tiered cache on the
        host, and one with a device budget that leaves about half of each layer's blocks on the host (a split layer)
step    one forward of one token of a llama with 12 layers of width 128 and random weights, under sdpa with DynamicCache
        and a tiered cache, and under the implementation "kvtier" with a tiered cache (enabled)

Each turn fills a cache of its own, so that all turns have the same number of tokens. Its value is the median of its
steps. The targets are those of a reference machine; the first two depend on it least, for they are ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from benchmarks.contenders import BASELINE, Case
from benchmarks.cores import torch_threads
from benchmarks.harness import Bench
from benchmarks.sessions import WARM_UP_STEPS
from benchmarks.targets import Target, table_of
from benchmarks.turns import Outcome

SUMMARY = "microseconds per layer of a decode step's Python and dispatch, on a CPU"
MODEL = "llama-12x128"
CONTEXTS = (256,)
CONTENDERS = ("dynamic", "kvtier", "kvtier@60%")
STEP_CONTENDERS = ("dynamic", "kvtier", "enabled")
AGAINST_CONTENDERS = ("dynamic", "kvtier", "kvtier@60%", "enabled")
CASES = ("layers", "step")
HOST, SPLIT = CONTENDERS[1:]
ENABLED = STEP_CONTENDERS[2]
#: A split layer has such a share of its blocks on the host; a device budget beyond its share holds workspaces.
SPLIT_SHARES = (0.35, 0.65)
#: Microseconds per layer of DynamicCache, of the host tier and of a split layer on the reference machine.
REFERENCE, HOST_TARGET, SPLIT_TARGET = 36, 45, 60
#: Microseconds per layer of a whole step with DynamicCache on the reference machine, and what it may take more.
STEP_REFERENCE, STEP_TARGET = 228, 9


def run(bench: Bench) -> None:
    """Run the scenario, on one thread whatever `--threads` says."""
    if bench.settings.device.type != "cpu":
        print("hotpath: not measured, for it is about a model on the CPU\n", flush=True)
        return
    with torch_threads(1):
        for kind, part in (("layers", "update and attention"), ("steps", "whole step")):
            if not bench.selected(kind if kind == "layers" else "step"):
                continue
            # Most of a whole step is the model's: short turns in turn, so that what else the machine does meets both.
            tokens, rounds = (32, 15) if kind == "layers" else (8, 120)
            tokens, rounds = bench.tokens(tokens), bench.rounds(rounds)
            for model in bench.model_names(MODEL):
                for case in bench.cases("hotpath", model, CONTEXTS, WARM_UP_STEPS + tokens):
                    compare_part(bench, model, case, kind, part, tokens, rounds)


def compare_part(bench: Bench, model: str, case: Case, kind: str, part: str, tokens: int, rounds: int) -> None:
    """Compare the caches; print and record the targets."""
    names = CONTENDERS if kind == "layers" else STEP_CONTENDERS
    starts = bench.starts(kind, model, case, tokens, *names)
    outcomes = bench.compare(
        "hotpath",
        model,
        case,
        starts,
        unit="us/layer",
        rounds=rounds,
        note=lambda facts: f"{facts['host_share']:.0%} of the blocks on the host only" if "host_share" in facts else "",
        detail=f"{part}, one thread",
        together=False,
        part=part,
        threads=torch.get_num_threads(),
        steps_per_turn=tokens,
    )
    found = layer_targets(outcomes) if kind == "layers" else step_targets(outcomes)
    print(table_of(found) + "\n", flush=True)
    for target in found:
        bench.record("hotpath", workload={"model": model, "context": case.context, "part": part}, **target.fields())


def layer_targets(outcomes: Mapping[str, Outcome]) -> list[Target]:
    """Of update and attention."""
    found = []
    for name, word, limit in ((HOST, "host", HOST_TARGET), (SPLIT, "split layer", SPLIT_TARGET)):
        figures = _figures(outcomes, name)
        share = outcomes[name].facts.get("host_share") if name in outcomes else None
        if name == SPLIT and not (share and SPLIT_SHARES[0] <= share <= SPLIT_SHARES[1]):
            figures = None, None  # another placement was measured
        found.append(Target(f"{word}: update and attention, of {BASELINE}'s", figures[0], "<=", limit / REFERENCE))
        found.append(Target(f"{word}: update and attention, us per layer", figures[1], "<=", limit))
    return found


def step_targets(outcomes: Mapping[str, Outcome]) -> list[Target]:
    """Of a whole step: what a layer takes more than with DynamicCache, the median of the differences within rounds."""
    found = []
    for name, how in ((HOST, "sdpa"), (ENABLED, "kvtier")):
        more = None
        if name in outcomes and BASELINE in outcomes:
            mine, base = outcomes[name].values, outcomes[BASELINE].values
            both = [mine[i] - base[i] for i in mine if i in base]
            more = statistics.median(both) if both else None
        ratio, _ = _figures(outcomes, name)
        limit = (STEP_REFERENCE + STEP_TARGET) / STEP_REFERENCE
        found.append(Target(f"whole step under {how}, of {BASELINE}'s", ratio, "<=", limit))
        found.append(Target(f"whole step under {how}, us per layer more than {BASELINE}", more, "<=", STEP_TARGET))
    return found


def _figures(outcomes: Mapping[str, Outcome], name: str) -> tuple[float | None, float | None]:
    if name not in outcomes or not outcomes[name].values:
        return None, None
    ratio = outcomes[name].ratio(outcomes[BASELINE]) if BASELINE in outcomes else None
    return (ratio.median if ratio else None), statistics.median(outcomes[name].values.values())
