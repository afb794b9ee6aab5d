"""A policy of your own in one file, next to those that have a name: what each one moves, and that tokens stay the same.

    python examples/policy.py

A policy gets numbers and returns numbers, and whatever it answers is exact. This one is made for a host whose threads
have other work: it keeps the first layers on the device and fetches most of the last ones.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvtier

# Transformers 5.24 calls it `cache`, and takes both names.
warnings.filterwarnings("ignore", ".past_key_values. is deprecated", FutureWarning)

LAYERS, BLOCK_SIZE, PROMPT, NEW_TOKENS = 6, 4, 120, 24
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TOKEN_BYTES = 2 * 2 * 8 * 4  # of one layer: keys and values of 2 heads of 8 numbers of 4 bytes


class FirstLayersStay(kvtier.Policy):
    """Evicts the last layers first, and fetches a share of what they have spilled while the first ones are computed.

    Args:
        share: of a layer's spilled blocks.
    """

    def __init__(self, share: float = 0.75) -> None:
        super().__init__()
        self.share = share

    def plan(self, state: kvtier.StepState) -> kvtier.StepPlan:
        """Once a step: what is fetched of each layer, how many layers ahead, and how many bytes are kept free for it.

        `kvtier.Policy.plan` gives a plan to change; docs/policies.md shows how to try one.
        """
        plan = super().plan(state)
        for layer, its_plan in zip(state.layers, plan.layers, strict=True):
            if layer.host_attention:  # what is not fetched is attended to on the host
                its_plan.fetch, its_plan.keep = int(self.share * layer.spilled), 0
            its_plan.ahead = 4
        largest = max(p.fetch * x.block_bytes for x, p in zip(state.layers, plan.layers, strict=True))
        plan.reserve = min(2 * largest, state.device_bytes // 4)
        return plan

    def victims(self, candidates: Sequence[kvtier.Candidate], blocks: int) -> Iterable[kvtier.Victims]:
        """Room is needed: the last layer gives up all that it takes, then the one before it."""
        return self.in_turn(sorted(candidates, key=lambda x: -x.layer), blocks)


def generate(model: LlamaForCausalLM, cache: DynamicCache) -> list[int]:
    """What a model says, greedily."""
    prompt = torch.arange(PROMPT)[None] * 37 % CONFIG.vocab_size
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0].tolist()  # type: ignore[no-any-return]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    right = generate(model, DynamicCache(config=CONFIG))
    budget = (PROMPT + NEW_TOKENS) * LAYERS * TOKEN_BYTES * 6 // 10
    print(
        f"{LAYERS} layers, {len(right)} tokens, a device budget for six tenths of them. Blocks in all decode steps:\n"
    )
    print(f"  {'policy':<18}{'fetched':>10}{'on the host':>14}{'evicted':>10}   tokens")
    policies: tuple[Any, ...] = (FirstLayersStay(), "default", "all-fetch", "pie", "neo")
    for policy in policies:
        name = policy if isinstance(policy, str) else type(policy).__name__
        with kvtier.TieredKVCache(CONFIG, device_budget=budget, block_size=BLOCK_SIZE, policy=policy) as cache:
            same = "as DynamicCache" if generate(model, cache) == right else "DIFFER"
            stats = cache.stats
        print(f"  {name:<18}{stats.block_fetches:>10}{stats.host_blocks:>14}{stats.evictions:>10}   {same}")


if __name__ == "__main__":
    main()
