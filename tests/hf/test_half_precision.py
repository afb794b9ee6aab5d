"""What holds in half precision, measured against float64: with a tiered cache, logits are about as far from the exact
ones as with ``DynamicCache``, and bit for bit those of ``DynamicCache`` where no host thread attends."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from families import FAMILIES, attentions, build_model, dynamic_cache, prompt_ids
from placements import ON_HOST, alike, check_invariants, smallest_budget, tiered_cache, tiered_parts
from torch import nn
from transformers import Cache, PreTrainedModel

import kvtier
from kvtier.cpu import native

HALF = (torch.bfloat16, torch.float16)
#: Tokens of each forward: a prompt, a second one that is too long for the decode kernel, and 20 decoded tokens.
FORWARDS = (23, 17, *[1] * 20)
TOKENS = sum(FORWARDS)
#: Every token goes to all experts. Where a router chooses some of them, the model is not continuous: two experts with
#: nearly the same score change places by rounding, and the logits then have nothing to do with the exact ones.
ALL_EXPERTS = {
    name: {"num_experts_per_tok": 4} for name in ("mixtral", "qwen3_moe", "gpt_oss", "jamba", "qwen3_next")
} | {"deepseek_v3": {"num_experts_per_tok": 4, "topk_group": 2}}
#: Families that refuse sdpa are also attended by kvtier's own implementation.
OWN = ("gpt_oss", "gemma2")
#: It works on its keys between update and attention: the views become tensors.
DENSE = ("deepseek_v3",)

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not compiled")


def cases() -> Iterator[tuple[str, str]]:
    for name, family in FAMILIES.items():
        if family.tiered:
            yield name, attentions(name)[-1]
    for name in OWN:
        yield name, "kvtier"


@functools.cache
def model_of(name: str, attention: str, dtype: torch.dtype, *, all_experts: bool = True) -> PreTrainedModel:
    """The family's model with weights that every one of the dtypes holds exactly, so that all have one reference."""
    settings = ALL_EXPERTS.get(name, {}) if all_experts else {}
    model = build_model(name, attention, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().half())
    if dtype is torch.float64:
        model.config._experts_implementation = "eager"  # the others have no float64
    return model.to(dtype)


def logits(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """Of all tokens, `[rows, tokens, vocab]`, given in several forwards, whatever the model would choose."""
    ids = prompt_ids(length=TOKENS, seed=8)
    fixed, name = {}, "input_ids"
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            fixed["encoder_outputs"] = model.get_encoder()(input_ids=prompt_ids(length=12, seed=10))
            name = "decoder_input_ids"
        parts = [
            model(**{name: part}, past_key_values=cache, use_cache=True, **fixed).logits
            for part in ids.split(FORWARDS, 1)
        ]
    return torch.cat(parts, 1)


@functools.cache
def exact(name: str) -> torch.Tensor:
    model = model_of(name, "eager", torch.float64)
    return logits(model, dynamic_cache(model))


@functools.cache
def with_dynamic_cache(name: str, attention: str, dtype: torch.dtype) -> torch.Tensor:
    model = model_of(name, "eager" if attention == "kvtier" else attention, dtype)
    return logits(model, dynamic_cache(model))


def error(name: str, found: torch.Tensor) -> float:
    """The largest distance of a logit from the exact one."""
    return (found.double() - exact(name)).abs().max().item()


def bound(name: str, attention: str, dtype: torch.dtype) -> float:
    """Twice the error with torch's own attention, and one unit in the last place of the largest logit."""
    last_place = torch.finfo(dtype).eps * exact(name).abs().max().item()
    return 2 * error(name, with_dynamic_cache(name, attention, dtype)) + last_place


def attended_by(model: PreTrainedModel, attention: str) -> tuple[PreTrainedModel, Callable[[], object]]:
    """A model, and the context in which it has that attention."""
    if attention != "kvtier":
        return model, nullcontext
    model = copy.deepcopy(model)
    return model, partial(kvtier.enable, model)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("name", "attention"), [x for x in cases() if x[1] != "kvtier"])
def test_without_host_attention_the_logits_are_those_of_dynamic_cache(
    name: str, attention: str, dtype: torch.dtype
) -> None:
    model = model_of(name, attention, dtype)
    cache = tiered_cache(model, block_size=4)
    assert alike(with_dynamic_cache(name, attention, dtype), logits(model, cache))
    check_invariants(cache)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("placement", ["host", "split"])
@pytest.mark.parametrize(("name", "attention"), [x for x in cases() if x[1] != "eager"])
def test_with_host_attention_the_error_is_at_most_twice_that_of_dynamic_cache(
    name: str, attention: str, placement: str, dtype: torch.dtype
) -> None:
    model, enabled = attended_by(model_of(name, "eager" if attention == "kvtier" else attention, dtype), attention)
    with enabled():

        def make(budget: int | None) -> Cache:
            return tiered_cache(model, budget, block_size=4, host_attention=True)

        # With the smallest budget that works, most blocks are on the host and some on the device.
        budget = smallest_budget(make, partial(logits, model)) if placement == "split" else None
        cache = make(budget)
        found = logits(model, cache)
    assert error(name, found) <= bound(name, attention, dtype)
    check_invariants(cache)
    if ON_HOST and name not in DENSE:
        assert sum(part.stats.host_attended for part in tiered_parts(cache)) > 0


# Experts


class Routing:
    """Records which experts the routers of a model choose, or gives them the recorded ones.

    Attributes:
        chosen: `[tokens, experts per token]` for each call of a router, in order.
    """

    def __init__(self, model: PreTrainedModel, given: list[torch.Tensor] | None = None) -> None:
        self.chosen: list[torch.Tensor] = []
        self._given = iter(given) if given is not None else None
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self._hooks = [router.register_forward_hook(self._hook) for router in routers]

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(
        self, router: nn.Module, args: object, result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, weights, experts = result
        if self._given is not None:
            experts = next(self._given)
            shares = scores.softmax(-1, dtype=torch.float32).gather(-1, experts)
            weights = (shares / shares.sum(-1, keepdim=True)).to(weights.dtype)
        self.chosen.append(experts)
        return scores, weights, experts


def test_a_large_error_of_qwen3_next_in_fp16_is_another_expert_chosen_by_the_model() -> None:
    """Transformers' own cache shows it too. Given the experts of the float64 run, both caches are near that run."""
    name, dtype = "qwen3_next", torch.float16
    wide = model_of(name, "eager", torch.float64, all_experts=False)
    model = model_of(name, "sdpa", dtype, all_experts=False)
    with Routing(wide) as right:
        expected = logits(wide, dynamic_cache(wide))
    nearest = []
    for make in (dynamic_cache, partial(tiered_cache, block_size=4, host_attention=True)):
        with Routing(model) as routing:
            found = logits(model, make(model))
        changed = sum(
            int((a.sort(-1).values != b.sort(-1).values).any(-1).sum())
            for a, b in zip(right.chosen, routing.chosen, strict=True)
        )
        with Routing(model, right.chosen):
            given = logits(model, make(model))
        far, near = ((x.double() - expected).abs().max().item() for x in (found, given))
        assert changed > 0
        assert far > 10 * near
        nearest.append(near)
    dynamic, tiered = nearest
    assert tiered <= 2 * dynamic + torch.finfo(dtype).eps * expected.abs().max().item()
