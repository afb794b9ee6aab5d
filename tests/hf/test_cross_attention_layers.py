"""Models with cross-attention, whose keys and values have a length and a batch of their own, as on ``DynamicCache``."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import _draw_wide_weights, prompt_ids, tiny_model
from placements import assert_same_as_dynamic_cache
from transformers import Cache, PreTrainedModel

VOCAB, IMAGE = 128, 5


@functools.cache
def mllama() -> PreTrainedModel:
    text = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1, 2], "eos_token_id": None,
        "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 8,
        "attention_heads": 2, "patch_size": 4, "max_num_tiles": 1, "intermediate_layers_indices": [0],
        "vision_output_dim": 32, "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config).float().eval()
    _draw_wide_weights(model, 1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def an_image() -> dict[str, Any]:
    ids = torch.randint(20, 120, (1, 13), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = IMAGE
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, generator=torch.Generator().manual_seed(2)),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 13, 1, 1, dtype=torch.long),
    }


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("placement", ["host", "smallest"])
def test_an_image_is_described_in_any_way(options: dict[str, Any], placement: Any) -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        torch.manual_seed(0)
        return model.generate(**an_image(), past_key_values=cache, max_new_tokens=8, **({"do_sample": False} | options))

    assert_same_as_dynamic_cache(mllama(), run, placement, block_size=4)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_image_goes_on(way: Callable[[Any], Any]) -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        with torch.no_grad():
            found = [model(**an_image(), past_key_values=cache).logits]
            made = way(cache)
            found += [model(input_ids=torch.tensor([[30 + i]]), past_key_values=made).logits for i in range(3)]
        return found

    assert_same_as_dynamic_cache(mllama(), run, "host", block_size=4)


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("placement", ["host", "device"])
def test_many_rows_are_decoded_from_one_encoding(name: str, attention: str, placement: Any) -> None:
    """Torch lets one row of keys stand for all rows of queries."""

    def run(model: PreTrainedModel, cache: Cache) -> Any:
        ids = prompt_ids(rows=1, length=9)
        with torch.no_grad():
            given = {"encoder_outputs": model.get_encoder()(ids), "attention_mask": torch.ones_like(ids)}
            decoded = [prompt_ids(rows=3, length=n, seed=n) for n in (4, 1, 1)]
            return [model(**given, decoder_input_ids=x, past_key_values=cache).logits for x in decoded]

    model = tiny_model(name, attention)
    assert_same_as_dynamic_cache(model, run, placement, block_size=4, host_attention=True)
