"""Two forwards that take turns on a real device: greedy tokens are those of one forward."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier import Engine

pytestmark = pytest.mark.cuda


def test_two_forwards_that_take_turns_give_the_tokens_of_one() -> None:
    pytest.importorskip("greenlet")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval().cuda()
    prompts = [torch.randint(1, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 300, 900)]
    found = []
    for apart in (False, True):
        engine = Engine(model, device_budget="2MB", host_budget="64MiB", block_size=16, sub_batches=apart)
        try:
            if apart:  # whatever is predicted
                decider = engine._runner.sub_batches  # type: ignore[attr-defined]
                decider.second = lambda batch: {0} if len(batch) > 1 else ()
            outputs = engine.generate_batch(prompts, max_new_tokens=32, do_sample=False)
            found.append([output.generated_tokens for output in outputs.values()])
            assert engine._runner.forward.counters.host_blocks  # type: ignore[attr-defined]
        finally:
            engine.close()
    assert found[0] == found[1]
