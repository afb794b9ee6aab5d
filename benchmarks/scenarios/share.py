"""Time per layer and step against the share of the KV on the host, attended there or fetched.

A cache decodes, layer after layer and without a model, under budgets that leave 0 to 100% of its KV on the host: that
share is attended by host threads (kvtier) or comes to the device at each step (fetch). At 100%, the device has the
smallest budget with which a cache works. On a CPU the device is emulated in RAM, and a fetch is a copy.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.contenders import BASELINE, Case, Contender, contender, host_share
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.scenarios.update import WARM_UP_STEPS, UpdateSession
from benchmarks.turns import Outcome, Start
from kvtier import BudgetError, TieredKVCache

SUMMARY = "time per layer and step with 0 to 100% of the KV on the host, attended there or fetched"
CONTEXTS = (4096, 16384)
SHARES = (0, 10, 25, 50, 75, 100)
WAYS = ("kvtier", "fetch")


class ShareSession(UpdateSession):
    """An update session whose facts say how much of the KV really is on the host."""

    def facts(self) -> dict[str, Any]:
        """With the share of the blocks that have no place on the device, in percent."""
        return super().facts() | {"host_percent": 100 * host_share(self.cache, self.case)}


def with_least_budget(way: str, case: Case, steps: int) -> ShareSession:
    """A session with the smallest device budget that serves it, found by following the errors."""
    # A layer's workspace, the longest thing that must fit, grows with the tokens that are added.
    spare = case.batch * (-(-case.new_tokens // case.block_tokens) + 1)
    spare *= case.block_tokens * case.geometry.token_bytes
    budget = 1
    while True:

        def make(case: Case, budget: int = budget) -> TieredKVCache:
            host = way == "kvtier"
            return TieredKVCache(case.config, device_budget=budget, block_size=case.blocks, host_attention=host)

        try:
            return ShareSession(Contender(f"{way}@0%", make, 0.1, 1.1), case, steps)
        except BudgetError as error:
            if error.tier != "device" or error.needed + spare <= budget:
                raise
            budget = error.needed + spare


def note(facts: dict[str, Any]) -> str:
    """Where the KV is."""
    return f"{facts['host_percent']:.0f}% on the host" if "host_percent" in facts else ""


def run(bench: Bench) -> None:
    """Run the scenario."""
    steps, rounds = bench.tokens(8), bench.rounds(5)
    for model in bench.model_names("pylm", "qwen3-0.6b"):
        for case in bench.cases("share", model, CONTEXTS, WARM_UP_STEPS + rounds * steps):
            base = contender(BASELINE)
            starts: dict[str, tuple[Contender | None, Start]] = {}
            starts[BASELINE] = (base, partial(UpdateSession, base, case, steps))
            each = {}
            for share in SHARES:
                for way in WAYS:
                    name = _name(way, share)
                    each[name] = {"host_share": share}
                    if share == 100:
                        memory = Contender(name, contender("kvtier@1%").make, 0.1, 1.1)
                        starts[name] = (memory, partial(with_least_budget, way, case, steps))
                    else:
                        one = replace(contender(f"{way}@{100 - share}%"), name=name)
                        starts[name] = (one, partial(ShareSession, one, case, steps))
            outcomes = bench.compare(
                "share",
                model,
                case,
                starts,
                unit="us/layer",
                rounds=rounds,
                note=note,
                each=each,
                steps_per_turn=steps,
            )
            _print_curve(model, case, outcomes)


def _name(way: str, share: int) -> str:
    return f"{way}, {share}% on the host"


def _print_curve(model: str, case: Case, outcomes: dict[str, Outcome]) -> None:
    def shown(name: str) -> str:
        values = outcomes[name].values.values()
        return number(statistics.median(values)) if values else "-"

    rows = [[f"{share}%", *(shown(_name(way, share)) for way in WAYS)] for share in SHARES]
    title = f"share · {label(model)} · {case.context:,} tokens · us/layer by the share on the host"
    print(f"{title} (dynamic: {shown(BASELINE)})")
    print(table(["on the host", "attended there", "fetched"], rows, left=()) + "\n", flush=True)
