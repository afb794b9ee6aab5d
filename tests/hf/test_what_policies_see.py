"""What a policy is told of a step is what the step does: whether the host can attend depends on who reads the views."""

from __future__ import annotations

import pytest
import torch
from families import prompt_ids, tiny_model

from kvtier import Policy, TieredKVCache
from kvtier.planning.step import StepPlan, StepState


class Watching(Policy):
    """The default, which keeps what it is told of decode steps."""

    def __init__(self) -> None:
        super().__init__()
        self.hosted: list[bool] = []

    def plan(self, state: StepState) -> StepPlan:
        if state.tokens == 1:
            self.hosted += [x.host_attention for x in state.layers]
        return super().plan(state)


@pytest.mark.parametrize(
    ("family", "implementation", "hosted"),
    [("llama", "sdpa", True), ("llama", "eager", False), ("deepseek_v3", "sdpa", False), ("llama", "kvtier", True)],
)
@torch.no_grad()
def test_a_policy_is_told_that_the_host_attends_where_it_does(family: str, implementation: str, hosted: bool) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    policy = Watching()
    cache = TieredKVCache(model.config, device_budget=16_000, block_size=4, policy=policy)
    try:
        if implementation == "kvtier":
            import kvtier

            kvtier.register_attention()
        model.set_attn_implementation(implementation)
        model(input_ids=prompt_ids(rows=1, length=120), past_key_values=cache)
        for _ in range(4):
            model(input_ids=prompt_ids(rows=1, length=1), past_key_values=cache)
    finally:
        model.set_attn_implementation(before)
    assert policy.hosted, "nothing was spilled"
    assert set(policy.hosted) == {hosted}
    assert bool(cache.stats.host_attended) == hosted
