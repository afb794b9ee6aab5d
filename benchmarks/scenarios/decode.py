"""Decode tokens/s against context, one token at a time, as `generate` does it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.contenders import Case, Contender, fill, held_bytes, tier_facts
from benchmarks.harness import Bench, Start, synchronize
from benchmarks.records import size

SUMMARY = "decode tokens/s at 1k to 32k tokens of context, everything resident"
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
CONTENDERS = ("dynamic", "kvtier", "kvtier@100%", "static", "fp8", "quanto", "hqq", "offloaded")

WARM_UP_TOKENS = 3
#: A turn ends after so many seconds even if not all of its tokens were decoded.
TURN_SECONDS = 4.0


class DecodeSession:
    """A cache full of random KV, and greedy decoding on it.

    Args:
        contender, case, model: what decodes.
        tokens: in one turn.
    """

    def __init__(self, contender: Contender, case: Case, model: PreTrainedModel, tokens: int) -> None:
        self.model = model
        self.device = case.device
        self.tokens = tokens
        self.decoded = 0
        self.limit = case.new_tokens
        self.cache = contender.build(case)
        self.token = torch.zeros((1, 1), dtype=torch.long, device=case.device)
        try:
            fill(self.cache, case)
            for _ in range(WARM_UP_TOKENS):
                self._step()
        except BaseException:
            self.close()
            raise
        self.before = tier_facts(self.cache)
        self.warmed = self.decoded

    def _step(self) -> None:
        assert self.decoded < self.limit, "a static cache would overflow"
        logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
        self.token = logits[:, -1:].argmax(-1)
        self.token.item()  # `generate` looks at each token before it goes on
        self.decoded += 1

    def measure(self) -> float:
        """Tokens/s of one turn."""
        synchronize(self.device)
        before = self.decoded
        began = time.perf_counter()
        seconds = 0.0
        while self.decoded < before + self.tokens and seconds < TURN_SECONDS:
            self._step()
            seconds = time.perf_counter() - began
        return (self.decoded - before) / seconds

    def facts(self) -> dict[str, Any]:
        """Bytes held; of a tiered cache, what its tiers did for each token."""
        now = tier_facts(self.cache)
        steps = max(self.decoded - self.warmed, 1)
        moved = {
            f"{name}_per_token": (now[name] - self.before[name]) / steps
            for name in ("bytes_up", "bytes_down", "copies_up", "copies_down", "stall_seconds")
            if name in now
        }
        return {"held_bytes": held_bytes(self.cache)} | now | moved

    def close(self) -> None:
        """Drop the cache."""
        if hasattr(self.cache, "close"):
            self.cache.close()
        del self.cache


def note(facts: dict[str, Any]) -> str:
    """Where blocks lie and what moves."""
    if not facts.get("device_budget") or not facts.get("bytes_up_per_token"):
        return ""
    return f"budget {size(facts['device_budget'])}, {size(facts['bytes_up_per_token'])} fetched per token"


def compare_decode(
    bench: Bench, scenario: str, contexts: tuple[int, ...], names: tuple[str, ...], *usual_models: str
) -> None:
    """Compare decoding with these contenders at each context."""
    tokens, rounds = bench.tokens(32), bench.rounds(5)
    for model_name in bench.model_names(*usual_models):
        for case in bench.cases(scenario, model_name, contexts, WARM_UP_TOKENS + rounds * tokens):
            model = bench.model(model_name)
            starts: dict[str, tuple[Contender | None, Start]] = {
                c.name: (c, partial(DecodeSession, c, case, model, tokens)) for c in bench.contenders(*names)
            }
            bench.compare(
                scenario, model_name, case, starts, unit="tokens/s", rounds=rounds, note=note, tokens_per_turn=tokens
            )


def run(bench: Bench) -> None:
    """Run the scenario."""
    compare_decode(bench, "decode", CONTEXTS, CONTENDERS, "pylm")
