"""Microseconds of `cache.update` and attention for one token in one layer, without the rest of a model.

attend  update and attention, all contenders at each context
alone   update without attention; each contender at all contexts in one comparison, to see how it grows
"""

from __future__ import annotations

import statistics

from benchmarks.contenders import Contender
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.sessions import WARM_UP_STEPS as WARM_UP_STEPS
from benchmarks.sessions import UpdateSession as UpdateSession
from benchmarks.turns import Start

SUMMARY = "microseconds of update and attention per layer against context"
CONTEXTS = (256, 1024, 4096, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@100%", "static", "fp8", "offloaded")
CASES = ("attend", "alone")
ALONE_CONTEXTS = (1024, 8192, 32768)
ALONE_CONTENDERS = ("dynamic", "kvtier")

#: What is usual with `--against`.
AGAINST_CONTENDERS = ("dynamic", "kvtier")


def run(bench: Bench) -> None:
    """Run the scenario."""
    steps, rounds = bench.tokens(16), bench.rounds(7)
    names = CONTENDERS if bench.settings.against is None else AGAINST_CONTENDERS
    for model in bench.model_names("pylm", "qwen3-0.6b"):
        if bench.selected("attend"):
            for case in bench.cases("update", model, CONTEXTS, WARM_UP_STEPS + rounds * steps):
                starts = bench.starts("attend", model, case, steps, *names)
                bench.compare(
                    "update",
                    model,
                    case,
                    starts,
                    unit="us/layer",
                    rounds=rounds,
                    base=bench.bases(starts),
                    steps_per_turn=steps,
                )
        if bench.selected("alone"):
            compare_alone(bench, model, steps, rounds)


def compare_alone(bench: Bench, model: str, steps: int, rounds: int) -> None:
    """For each contender: what an update takes at each context, as a multiple of that at the shortest."""
    cases = sorted(
        bench.cases("update", model, ALONE_CONTEXTS, WARM_UP_STEPS + rounds * steps), key=lambda case: case.context
    )
    rows = []
    for one in bench.contenders(*ALONE_CONTENDERS) if cases else ():
        starts: dict[str, tuple[Contender | None, Start]] = {}
        base, each, groups = {}, {}, []
        for tree in reversed(bench.trees(one)):  # this one is compared with the other at the same context
            group = {case.context: f"{bench.name_in(one, tree)} at {case.context:,}" for case in cases}
            for case in cases:
                name = group[case.context]
                # Memory is counted for the longest; what the others take is small against it.
                counted = one if case is cases[-1] else None
                starts[name] = (counted, bench.start(name, "alone", model, one, tree, case, steps))
                base[name] = groups[0][case.context] if groups else group[cases[0].context]
                each[name] = {"context": case.context, "kv_bytes": case.kv_bytes}
            groups.append(group)
        outcomes = bench.compare(
            "update",
            model,
            cases[-1],
            starts,
            unit="us/layer",
            rounds=rounds,
            base=base,
            each=each,
            detail=f"{one.name}, update alone",
            steps_per_turn=steps,
            alone=1,
        )
        for tree, group in zip(bench.trees(one), reversed(groups), strict=True):
            values = [list(outcomes[name].values.values()) for name in group.values()]
            shown = [number(statistics.median(some)) if some else "-" for some in values]
            rows.append([bench.name_in(one, tree), *shown])
    if rows:
        header = ["us/layer", *(f"{case.context:,}" for case in cases)]
        print(f"update · {label(model)} · update alone, by tokens of context")
        print(table(header, rows, left=(0,)) + "\n", flush=True)
