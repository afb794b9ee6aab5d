"""A model with a `generate` of its own: an engine's tokens are those of that, and not of the model's forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build_model
from transformers import LlamaForCausalLM

from kvtier import Engine

PROMPT, NEW = list(range(5, 25)), 6


class Adapted(torch.nn.Module):
    """A module with an adapter, as adapter libraries have them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters, self.disable_adapters, self.merged = ["speech"], False, False

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) * (1.0 if self.disable_adapters else -2.0)


class OwnWay(LlamaForCausalLM):
    """Its `generate` is its own."""

    flipped = switches = flips = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.switches:  # text is computed without the adapter for speech
            self.model.layers[0].self_attn.v_proj.disable_adapters = True
        self.flipped = self.flips
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.flipped = False


def made(way: str) -> Any:
    model: Any = build_model("llama", "sdpa")
    model.__class__ = OwnWay
    model.flips, model.switches = way == "flips", way == "switches"
    model.lm_head.register_forward_hook(lambda head, args, logits: -logits if model.flipped else logits)
    if model.switches:
        attention = model.model.layers[0].self_attn
        attention.v_proj = Adapted(attention.v_proj).eval()
    return model


@pytest.mark.parametrize(("way", "runner"), [("calls", "packed"), ("flips", "single"), ("switches", "single")])
def test_tokens_are_those_of_its_own_generate(way: str, runner: str) -> None:
    model = made(way)
    expected = made(way).generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :]
    with Engine(model, host_budget="64MiB", block_size=4) as engine:
        assert engine.runner == runner
        for _ in range(2):
            if way == "switches":  # as its `generate` does for speech
                model.model.layers[0].self_attn.v_proj.disable_adapters = False
            name = engine.add_request(PROMPT, max_new_tokens=NEW, do_sample=False)
            assert list(engine.wait(name).generated_tokens) == expected.tolist()


def test_a_model_in_mixed_precision_is_not_taken_for_one_that_cannot_be_run_with_others() -> None:
    """Its weights are in fp32, and it rounds as bf16 does."""
    model = build_model("llama", "sdpa")
    cast: Any = torch.autocast("cpu", torch.bfloat16)
    model.forward = cast(model.forward)
    with Engine(model, host_budget="64MiB", block_size=4) as engine:
        assert engine.runner == "packed"
