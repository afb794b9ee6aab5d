"""Decode tokens/s against context, one token at a time.

loop      the model called again and again, its most likely token fed back
generate  `model.generate`, which does more for each token
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.contenders import BASELINE, Case, Contender, fill, held_bytes, host_share, tier_facts
from benchmarks.harness import Bench
from benchmarks.models import label
from benchmarks.records import number, size, table
from benchmarks.turns import Outcome, Start, synchronize
from kvtier.config import DEVICE_BLOCK

SUMMARY = "decode tokens/s at 64 to 32k tokens of context, everything resident"
CONTEXTS = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@100%", "static", "fp8", "quanto", "hqq", "offloaded")

WARM_UP_TOKENS = 3
#: A turn ends after so many seconds even if not all of its tokens were decoded.
TURN_SECONDS = 1.5


class DecodeSession:
    """A cache full of random KV, and greedy decoding on it.

    Args:
        contender, case, model: what decodes.
        tokens: of each sequence in one turn.
    """

    def __init__(self, contender: Contender, case: Case, model: PreTrainedModel, tokens: int) -> None:
        self.case = case
        self.model = model
        self.tokens = tokens
        self.decoded = 0
        self.cache = contender.build(case)
        try:
            fill(self.cache, case)
            self.begin()
            self.decode(WARM_UP_TOKENS)
        except BaseException:
            self.close()
            raise
        self.before = tier_facts(self.cache)
        self.warmed = self.decoded
        self.written: dict[str, float | None] = dict.fromkeys(("bytes_down_per_token", "backlog_bytes_per_token"))

    def begin(self) -> None:
        """Make what decoding starts from."""
        self.token = torch.zeros((self.case.batch, 1), dtype=torch.long, device=self.case.device)

    def decode(self, tokens: int) -> None:
        """Decode so many tokens, fewer if they take longer than a turn."""
        began = time.perf_counter()
        for _ in range(tokens):
            assert self.decoded < self.case.new_tokens, "a static cache would overflow"
            logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
            self.token = logits[:, -1:].argmax(-1)
            self.token.tolist()  # `generate` looks at each token before it goes on
            self.decoded += 1
            if time.perf_counter() - began > TURN_SECONDS:
                break

    def measure(self) -> float:
        """Tokens/s of one turn, of all sequences together."""
        synchronize(self.case.device)
        before = self.decoded
        began = time.perf_counter()
        self.decode(self.tokens)
        return (self.decoded - before) * self.case.batch / (time.perf_counter() - began)

    def facts(self) -> dict[str, Any]:
        """Bytes held; of a tiered cache, what its tiers did for each token."""
        now = tier_facts(self.cache)
        steps = max(self.decoded - self.warmed, 1)
        found: dict[str, Any] = {"held_bytes": held_bytes(self.cache)} | now
        if now:
            for name in ("bytes_up", "copies_up", "copies_down", "stall_seconds"):
                found[f"{name}_per_token"] = (now[name] - self.before[name]) / steps
            # Blocks are written back whole: what is written back for a token shows over as many tokens as they have.
            block = self.case.block_size or DEVICE_BLOCK
            if steps % block == 0:
                down, copied = (now[name] - self.before[name] for name in ("bytes_down", "host_blocks"))
                # What was full before and not yet written back follows little by little.
                late = copied * block - steps * self.case.batch * self.case.geometry.layers
                late_bytes = max(late, 0) * self.case.geometry.token_bytes
                self.written = {"bytes_down_per_token": down / steps, "backlog_bytes_per_token": late_bytes / steps}
            found |= self.written
        if now.get("device_budget"):
            held = self.case.batch * self.case.geometry.kv_bytes(self.case.context + self.decoded)
            found["host_bytes"] = host_share(self.cache, self.case) * held
        return found

    def close(self) -> None:
        """Drop the cache."""
        if hasattr(self.cache, "close"):
            self.cache.close()
        del self.cache


class GenerateSession(DecodeSession):
    """The same through `model.generate`."""

    def begin(self) -> None:
        """The text so far: `generate` looks only at what the cache does not cover, one token."""
        shape = (self.case.batch, self.case.context + 1)
        self.ids = torch.zeros(shape, dtype=torch.long, device=self.case.device)
        # Random weights end a text at any moment, and the measurement with it.
        self.config = GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, max_time=TURN_SECONDS, disable_compile=True
        )

    def decode(self, tokens: int) -> None:
        """Decode so many tokens, fewer if they take longer than a turn."""
        assert self.decoded + tokens <= self.case.new_tokens, "a static cache would overflow"
        before = self.ids.shape[1]
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            generation_config=self.config,
            max_new_tokens=tokens,
        )
        self.decoded += self.ids.shape[1] - before


SESSIONS: dict[str, type[DecodeSession]] = {"loop": DecodeSession, "generate": GenerateSession}
CASES = tuple(SESSIONS)


def note(facts: dict[str, Any]) -> str:
    """Where blocks lie and what moves."""
    if not facts.get("device_budget") or not facts.get("bytes_up_per_token"):
        return ""
    return f"budget {size(facts['device_budget'])}, {size(facts['bytes_up_per_token'])} fetched per token"


def compare_decode(
    bench: Bench, scenario: str, contexts: tuple[int, ...], names: tuple[str, ...], through: str, *usual_models: str
) -> None:
    """Compare decoding with these contenders at each context, then say how it depends on the context."""
    tokens, rounds = bench.tokens(32), bench.rounds(5)
    session = SESSIONS[through]
    for model_name in bench.model_names(*usual_models):
        found: dict[int, dict[str, Outcome]] = {}
        for case in bench.cases(scenario, model_name, contexts, WARM_UP_TOKENS + rounds * tokens):
            model = bench.model(model_name)
            starts: dict[str, tuple[Contender | None, Start]] = {
                c.name: (c, partial(session, c, case, model, tokens)) for c in bench.contenders(*names)
            }
            found[case.context] = bench.compare(
                scenario,
                model_name,
                case,
                starts,
                unit="tokens/s",
                rounds=rounds,
                note=note,
                detail=f"{through}, {torch.get_num_threads()} threads" if case.device.type == "cpu" else through,
                tokens_per_turn=tokens,
                through=through,
            )
        if len(found) > 2:  # through two points there is always a line
            summarize(bench, scenario, model_name, found, through)


def summarize(
    bench: Bench, scenario: str, model: str, found: Mapping[int, Mapping[str, Outcome]], through: str
) -> None:
    """Of each contender: its worst ratio at any context, and how near to a line in the context a step's time is."""
    batch = bench.settings.batch
    rows = []
    for name in next(iter(found.values())):
        medians = {
            context: statistics.median(outcomes[name].values.values())
            for context, outcomes in found.items()
            if outcomes[name].values
        }
        if len(medians) < 3:
            continue
        ratios = {
            context: ratio.median
            for context in medians
            if BASELINE in found[context] and (ratio := found[context][name].ratio(found[context][BASELINE]))
        }
        least = min(ratios, key=lambda context: ratios[context], default=None)
        line = fit({context: 1e3 * batch / median for context, median in medians.items()})
        facts = {"contexts": list(medians), "off_line": line.off, "base_ms": line.base}
        if least is not None:
            facts |= {"least_ratio": ratios[least], "least_ratio_context": least}
        rows.append(
            [
                name,
                "-" if least is None else f"{ratios[least]:.2f} at {least:,}",
                number(line.base),
                number(line.slope * 1024),
                f"{line.off:.0%}",
            ]
        )
        bench.record(
            scenario,
            contender=name,
            unit="ms/step per 1k tokens",
            n=len(medians),
            median=line.slope * 1024,
            ratio=None,
            workload={
                "model": label(model),
                "dtype": str(bench.settings.dtype).removeprefix("torch."),
                "context": max(medians),
                "batch": batch,
                "through": through,
                "summary": 1,
            },
            facts=facts,
        )
    if rows:
        together = f" · batch of {batch}" if batch > 1 else ""
        print(f"{scenario} · {label(model)}{together} · {through} · over all contexts: the time of a step, as a line")
        header = ["", f"least x {BASELINE}", "ms/step", "+ ms per 1k tokens", "farthest from the line"]
        print(table(header, rows, left=(0,)) + "\n", flush=True)


@dataclass(frozen=True)
class Line:
    """`base + slope x context`; `off` is the largest relative distance of a point from it."""

    base: float
    slope: float
    off: float


def fit(points: Mapping[int, float]) -> Line:
    """The line with the least relative squares through at least two points, all positive."""
    # Relative errors: each point counts with 1 / y^2.
    weights = {x: 1 / y**2 for x, y in points.items()}
    total = sum(weights.values())
    mean_x = sum(weights[x] * x for x in points) / total
    mean_y = sum(weights[x] * y for x, y in points.items()) / total
    spread = sum(weights[x] * (x - mean_x) ** 2 for x in points)
    slope = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in points.items()) / spread
    base = mean_y - slope * mean_x
    return Line(base, slope, max(abs(y - base - slope * x) / y for x, y in points.items()))


def run(bench: Bench) -> None:
    """Run the scenario."""
    for through in CASES:
        if bench.selected(through):
            compare_decode(bench, "decode", CONTEXTS, CONTENDERS, through, "pylm")
