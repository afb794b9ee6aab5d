"""A model on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def llama() -> Any:
    """Random weights in fp32, with heads that the programs of a device serve; token 2 ends a sequence."""
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
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().cuda()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of several lengths."""
    return [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 300, 900)]
