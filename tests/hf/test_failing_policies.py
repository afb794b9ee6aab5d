"""A policy that raises an error in the middle of a step: the step is not taken for a finished one."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from families import tiny_model
from transformers import DynamicCache

from kvtier import BudgetError, InterruptedStepError, Policy, TieredKVCache
from kvtier.forward import forward
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.step import StepPlan, StepState


class NotTodayError(Exception):
    """Of a policy."""


class FailsOnce(Policy):
    """Raises where it is asked for the so-manieth time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def _ask(self) -> None:
        self.left -= 1
        if self.left == -1:
            raise NotTodayError

    def plan(self, state: StepState) -> StepPlan:
        self._ask()
        return super().plan(state)

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        self._ask()
        return super().victims(candidates, blocks)

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        self._ask()
        return super().write_back(used_bytes, device_bytes, sealed)


@pytest.mark.parametrize(("name", "budget"), [("llama", 18_000), ("deepseek_v3", 8_000)])
@pytest.mark.parametrize("host_attention", [True, False])
def test_a_step_in_which_a_policy_fails_is_not_taken_for_a_finished_one(
    host_attention: bool, name: str, budget: int
) -> None:
    """In whichever layer, as tokens are added or read: what is repeated after `crop(0)` is what was to come."""
    model = tiny_model(name)  # the second one is given tensors, not views
    ids = torch.randint(64, (1, 61), generator=torch.Generator().manual_seed(0))
    right = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :45], past_key_values=right)
        expected = torch.stack([model(x[None, None], past_key_values=right).logits for x in ids[0, 45:]])
    failed, where = 0, set[str]()
    step = 1 if name == "llama" else 3  # the calls of the second one take long, and there are many
    for at in itertools.count(step=step):
        policy = FailsOnce(at)
        options: dict[str, Any] = {"block_size": 4, "host_attention": host_attention, "policy": policy}
        with TieredKVCache(model.config, device_budget=budget, **options) as cache, torch.no_grad():
            had, found = 0, list[torch.Tensor]()
            while had < ids.shape[1]:
                more = 1 if had else 45
                try:
                    logits = model(ids[:, had : had + more], past_key_values=cache).logits[:, -1:]
                except NotTodayError as error:
                    where |= {x.name for x in traceback.extract_tb(error.__traceback__)}
                    failed += 1
                    cache.check_integrity()
                    if {layer.get_seq_length() for layer in cache.layers} != {had}:
                        with pytest.raises(InterruptedStepError):
                            model(ids[:, had : had + more], past_key_values=cache)
                    cache.crop(0)
                    assert {layer.get_seq_length() for layer in cache.layers} == {had}
                    continue
                if had:
                    found.append(logits)
                had += more
            torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)
        if policy.left >= 0:
            break
    assert failed * step == at > 20
    assert {"append_token", "write_back", *([] if host_attention else ["victims"])} <= where
    assert host_attention or name != "llama" or "attend" in where


@pytest.mark.parametrize("layer", [0, -1])
def test_a_step_whose_tensors_cannot_be_made_is_not_taken_for_a_finished_one(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("deepseek_v3"), torch.arange(1, 22)[None]
    layers, made, own_kv = model.config.num_hidden_layers, list[int](), forward.own_kv
    fails_at = layers + layer % layers

    def failing(*args: Any) -> Any:
        made.append(1)
        if len(made) == fails_at + 1:
            raise BudgetError("no room for tensors", tier="device", needed=2, budget=1)
        return own_kv(*args)

    monkeypatch.setattr(forward, "own_kv", failing)
    right = DynamicCache(config=model.config)
    with TieredKVCache(model.config, block_size=4) as cache, torch.no_grad():
        for begin, end in ((0, 19), (19, 20)):
            for each in (cache, right):
                model(ids[:, begin:end], past_key_values=each)
        with pytest.raises(BudgetError, match="no room"):
            model(ids[:, 20:], past_key_values=cache)
        cache.crop(0)
        assert {layer.get_seq_length() for layer in cache.layers} == {20}
        found, expected = (model(ids[:, 20:], past_key_values=each).logits for each in (cache, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
