"""A tiny Mllama: layers of cross-attention, which attend to an image, among those of self-attention."""

import functools
from typing import Any

import torch
import transformers
from families import _draw_wide_weights
from transformers import PreTrainedModel

VOCAB, IMAGE = 128, 5


@functools.cache
def mllama(cross_attention: tuple[int, ...] = (1, 2)) -> PreTrainedModel:
    """Of four layers. Do not change it."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None,
        "cross_attention_layers": list(cross_attention), "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
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
    for name, gate in model.named_parameters():
        if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
            torch.nn.init.ones_(gate)  # at 0, which they begin with, no image has any effect
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def an_image() -> dict[str, Any]:
    """A prompt of an image and text."""
    ids = torch.randint(20, 120, (1, 13), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = IMAGE
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, generator=torch.Generator().manual_seed(2)),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 13, 1, 1, dtype=torch.long),
    }
