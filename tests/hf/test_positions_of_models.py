"""Which models have a table of positions, and where it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, tiny_model

from kvtier.hf.models.positions import count_of_positions, table_of_positions

#: Config class and settings of types with a table, by the model's class: as many positions as behind it.
TABLES: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_positions": 24}, 24),
    "GPTNeoForCausalLM": ("GPTNeoConfig", {"attention_types": [[["global"], 2]]}, 24),
    "GPTBigCodeForCausalLM": ("GPTBigCodeConfig", {"n_positions": 24}, 24),
    "OPTForCausalLM": ("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 32}, 24),
    "BioGptForCausalLM": ("BioGptConfig", {}, 24),
    "GPTJForCausalLM": ("GPTJConfig", {"n_positions": 24, "rotary_dim": 4}, 24),
    "CodeGenForCausalLM": ("CodeGenConfig", {"n_positions": 24, "rotary_dim": 4}, 24),
    "BertLMHeadModel": ("BertConfig", {"is_decoder": True}, 24),
    "RobertaForCausalLM": ("RobertaConfig", {"is_decoder": True}, 22),
}
#: Of every one, by all names that types give them.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    "vocab_size": 64,
    "max_position_embeddings": 24,
}


def takes(model: Any, tokens: int) -> bool:
    try:
        with torch.no_grad():
            model(input_ids=torch.full((1, tokens), 5))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", TABLES)
def test_a_forward_takes_as_many_tokens_as_a_table_has_positions(name: str) -> None:
    config, settings, most = TABLES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**SMALL | settings)).eval()
    assert (count_of_positions(model), table_of_positions(model)) == (24, most)
    assert takes(model, most)
    assert not takes(model, most + 1)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.encoder_decoder])
def test_models_without_a_table_take_more_tokens_than_they_have_positions(name: str) -> None:
    model = tiny_model(name, "eager")
    most = count_of_positions(model)
    assert most is not None
    assert takes(model, most + 1) == (table_of_positions(model) is None)


def test_a_table_for_images_is_none_of_the_texts() -> None:
    """It may have as many rows as the text has rotary positions, beyond which that goes on."""
    model = tiny_model("llama")
    most = model.config.max_position_embeddings
    model.vision_tower = torch.nn.ModuleDict({"position_embedding": torch.nn.Embedding(most, 4)})
    try:
        assert table_of_positions(model) is None
    finally:
        del model.vision_tower
