"""What a contender does in a turn: decode with a model, or update and attend for one token in each layer.

Child processes that measure another commit run these classes as well (see `worker`): of kvtier, this module and what it
imports name public names only.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.contenders import Case, Contender, fill, held_bytes, host_share, tier_facts
from benchmarks.turns import synchronize

WARM_UP_TOKENS = 3
WARM_UP_STEPS = 3
#: A turn ends after this time even if not all of its tokens were decoded.
TURN_SECONDS = 1.5


class DecodeSession:
    """A cache full of random KV, and greedy decoding on it.

    Args:
        contender, case, model: what decodes.
        tokens: of each sequence in one turn.
    """

    def __init__(self, contender: Contender, case: Case, model: PreTrainedModel, tokens: int) -> None:
        self.contender = contender
        self.case = case
        self.model = model
        self.tokens = tokens
        self.decoded = 0
        self.cache = contender.build(case)
        try:
            fill(self.cache, case)
            self.begin()
            with contender.attention(model):
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
        """Decode `tokens` tokens, fewer if they take longer than a turn."""
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
        with self.contender.attention(self.model):
            synchronize(self.case.device)
            before = self.decoded
            began = time.perf_counter()
            self.decode(self.tokens)
            seconds = time.perf_counter() - began
        return (self.decoded - before) * self.case.batch / seconds

    def facts(self) -> dict[str, Any]:
        """Bytes held; of a tiered cache, what its tiers did for each token."""
        now = tier_facts(self.cache)
        steps = max(self.decoded - self.warmed, 1)
        found: dict[str, Any] = {"held_bytes": held_bytes(self.cache)} | now
        if now:
            for name in ("bytes_up", "copies_up", "copies_down", "stall_seconds"):
                if name in self.before:
                    found[f"{name}_per_token"] = (now[name] - self.before[name]) / steps
            # Whole blocks are written back: the bytes per token are exact only over whole blocks.
            block = self.case.block_tokens
            if steps % block == 0 and self.before.keys() >= {"bytes_down", "host_blocks"}:
                down, copied = (now[name] - self.before[name] for name in ("bytes_down", "host_blocks"))
                # Blocks that were sealed earlier and not yet written back follow step by step.
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
        """The tokens so far: the cache covers all but one, and `generate` runs the model on that one."""
        shape = (self.case.batch, self.case.context + 1)
        self.ids = torch.zeros(shape, dtype=torch.long, device=self.case.device)
        # Random weights may give the end token at any step, which would end the measurement.
        self.config = GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, max_time=TURN_SECONDS, disable_compile=True
        )

    def decode(self, tokens: int) -> None:
        """Decode `tokens` tokens, fewer if they take longer than a turn."""
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
        issued = self.issued / self.steps / self.case.geometry.layers * 1e6 if self.issued else None
        found = {"held_bytes": held_bytes(self.cache), "issue_us_per_layer": issued} | tier_facts(self.cache)
        if found.get("device_budget"):
            found["host_share"] = host_share(self.cache, self.case)
        return found

    def close(self) -> None:
        """Drop the cache."""
        if hasattr(self.cache, "close"):
            self.cache.close()
        del self.cache


class UpdateAlone(UpdateSession):
    """An update session without attention: only that one token's keys and values are stored."""

    def step(self) -> None:
        """One token, all layers."""
        for layer in range(self.case.geometry.layers):
            self.cache.update(self.keys, self.values, layer)
        self.done += 1


class UpdateSteps(UpdateSession):
    """An update session whose value is the median of its steps: microseconds per layer, for steps of that length."""

    def measure(self) -> float:
        """Microseconds per layer of the median step."""
        return statistics.median(self._timed() for _ in range(self.steps)) / self.case.geometry.layers * 1e6

    def _timed(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


class ModelSteps(DecodeSession):
    """A decode session whose value is the median of its forwards, in microseconds per layer."""

    def measure(self) -> float:
        """Microseconds per layer of the median forward."""
        with self.contender.attention(self.model):
            seconds = statistics.median(self._timed() for _ in range(self.tokens))
        return seconds / self.case.geometry.layers * 1e6

    def _timed(self) -> float:
        token = self.token
        began = time.perf_counter()
        logits = self.model(input_ids=token, past_key_values=self.cache, use_cache=True).logits
        seconds = time.perf_counter() - began
        self.token = logits[:, -1:].argmax(-1)
        self.decoded += 1
        return seconds


#: The sessions by name; those that need a model are in `WITH_MODEL`.
WITH_MODEL: dict[str, type[DecodeSession]] = {
    "loop": DecodeSession,
    "generate": GenerateSession,
    "steps": ModelSteps,
}
WITHOUT_MODEL: dict[str, type[UpdateSession]] = {
    "attend": UpdateSession,
    "alone": UpdateAlone,
    "layers": UpdateSteps,
}


def session(
    kind: str, contender: Contender, case: Case, tokens: int, model: PreTrainedModel | None = None
) -> DecodeSession | UpdateSession:
    """The session of that name: `tokens` are decoded, or added to each layer, in one turn."""
    if kind in WITHOUT_MODEL:
        return WITHOUT_MODEL[kind](contender, case, tokens)
    assert model is not None
    return WITH_MODEL[kind](contender, case, model, tokens)
