"""Microseconds of `cache.update` and attention for one token in one layer, without the rest of a model.

attend  update and attention, all contenders at each context
alone   update without attention; each contender at all contexts in one comparison, to see how it grows
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.contenders import Case, Contender, fill, held_bytes, tier_facts
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, table
from benchmarks.turns import Start, synchronize

SUMMARY = "microseconds of update and attention per layer against context"
CONTEXTS = (256, 1024, 4096, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@100%", "static", "fp8", "offloaded")
CASES = ("attend", "alone")
ALONE_CONTEXTS = (1024, 8192, 32768)
ALONE_CONTENDERS = ("dynamic", "kvtier")

WARM_UP_STEPS = 3


class UpdateSession:
    """A cache full of random KV, and its part of a decode step, layer after layer.

    Args:
        contender, case: what is measured.
        steps: of all layers, in one turn.
        kv: fill with these, `[batch, kv_heads, context, head_dim]`, instead of random ones.
    """

    def __init__(
        self,
        contender: Contender,
        case: Case,
        steps: int,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.case = case
        self.steps = steps
        self.done = 0
        self.issued = 0.0
        g = case.geometry
        random = torch.Generator(case.device).manual_seed(1)
        shape = (case.batch, g.query_heads + 2 * g.kv_heads, 1, g.head_dim)
        token = torch.randn(shape, generator=random, dtype=g.dtype, device=case.device)
        self.query, self.keys, self.values = token.split([g.query_heads, g.kv_heads, g.kv_heads], dim=1)
        # What Transformers' attention function asks of a module.
        self.module = torch.nn.Module()
        self.module.num_key_value_groups = g.query_heads // g.kv_heads  # type: ignore[assignment]
        self.module.is_causal = True  # type: ignore[assignment]
        self.cache = contender.build(case)
        try:
            fill(self.cache, case, kv)
            for _ in range(WARM_UP_STEPS):
                self.step()
        except BaseException:
            self.close()
            raise
        synchronize(case.device)

    def step(self) -> None:
        """One token, all layers."""
        length = self.case.context + self.done + 1
        mask = None
        for layer in range(self.case.geometry.layers):
            keys, values = self.cache.update(self.keys, self.values, layer)
            if keys.shape[2] != length:  # a static cache returns all of its room
                if mask is None:
                    mask = torch.arange(keys.shape[2], device=self.case.device)[None, None, None] < length
                sdpa_attention_forward(self.module, self.query, keys, values, mask)
            else:
                sdpa_attention_forward(self.module, self.query, keys, values, None)
        self.done += 1

    def run_turn(self) -> float:
        """The seconds of one turn."""
        synchronize(self.case.device)
        began = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        self.issued = time.perf_counter() - began
        synchronize(self.case.device)
        return time.perf_counter() - began

    def measure(self) -> float:
        """Microseconds per layer and token."""
        return self.run_turn() / self.steps / self.case.geometry.layers * 1e6

    def facts(self) -> dict[str, Any]:
        """Bytes held, what Python takes, and what a tiered cache says."""
        # Until everything is launched: unless the CPU waits for the device, that is Python's own time.
        issued = self.issued / self.steps / self.case.geometry.layers * 1e6
        return {"held_bytes": held_bytes(self.cache), "issue_us_per_layer": issued} | tier_facts(self.cache)

    def close(self) -> None:
        """Drop the cache."""
        if hasattr(self.cache, "close"):
            self.cache.close()
        del self.cache


class UpdateAlone(UpdateSession):
    """Without attention: what is measured is that one token's keys and values find their place."""

    def step(self) -> None:
        """One token, all layers."""
        for layer in range(self.case.geometry.layers):
            self.cache.update(self.keys, self.values, layer)
        self.done += 1


def run(bench: Bench) -> None:
    """Run the scenario."""
    steps, rounds = bench.tokens(16), bench.rounds(7)
    for model in bench.model_names("pylm", "qwen3-0.6b"):
        if bench.selected("attend"):
            for case in bench.cases("update", model, CONTEXTS, WARM_UP_STEPS + rounds * steps):
                starts: dict[str, tuple[Contender | None, Start]] = {
                    c.name: (c, partial(UpdateSession, c, case, steps)) for c in bench.contenders(*CONTENDERS)
                }
                bench.compare("update", model, case, starts, unit="us/layer", rounds=rounds, steps_per_turn=steps)
        if bench.selected("alone"):
            compare_alone(bench, model, steps, rounds)


def compare_alone(bench: Bench, model: str, steps: int, rounds: int) -> None:
    """For each contender: what an update takes at each context, as a multiple of that at the shortest."""
    cases = sorted(
        bench.cases("update", model, ALONE_CONTEXTS, WARM_UP_STEPS + rounds * steps), key=lambda case: case.context
    )
    rows = []
    for one in bench.contenders(*ALONE_CONTENDERS) if cases else ():
        names = {f"{one.name} at {case.context:,}": case for case in cases}
        outcomes = bench.compare(
            "update",
            model,
            cases[-1],
            # Memory is counted for the longest; the others are small beside it.
            {
                name: (one if case is cases[-1] else None, partial(UpdateAlone, one, case, steps))
                for name, case in names.items()
            },
            unit="us/layer",
            rounds=rounds,
            base=next(iter(names)),
            each={name: {"context": case.context, "kv_bytes": case.kv_bytes} for name, case in names.items()},
            detail=f"{one.name}, update alone",
            steps_per_turn=steps,
            alone=1,
        )
        values = [list(outcome.values.values()) for outcome in outcomes.values()]
        rows.append([one.name, *(number(statistics.median(some)) if some else "-" for some in values)])
    if rows:
        header = ["us/layer", *(f"{case.context:,}" for case in cases)]
        print(f"update · {label(model)} · update alone, by tokens of context")
        print(table(header, rows, left=(0,)) + "\n", flush=True)
