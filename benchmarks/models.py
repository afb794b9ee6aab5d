"""The models that are measured: the trained example, shapes of real models with random weights, any other by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

EXAMPLE_MODEL = Path(__file__).resolve().parent.parent / "examples" / "pylm"

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
#: The time of a step of this model is Python and dispatch, not arithmetic.
LLAMA_12X128: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
#: What a CPU computes of this model is little against its KV: for links and devices that are emulated.
LLAMA_6X32: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 131072,
}
#: For many requests at a time on a CPU: its weights are read quickly enough that batching and attention both count.
LLAMA_8X512: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
LLAMA_64X32 = LLAMA_6X32 | {"num_hidden_layers": 64}
#: The same models made small, to run everything on any machine. The layers stay: budgets depend on their number.
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "llama-12x128": LLAMA_12X128,
    "llama-6x32": LLAMA_6X32,
    "llama-64x32": LLAMA_64X32,
    "llama-8x512": LLAMA_8X512,
    "qwen3-tiny": QWEN3_0_6B | TINY,
    "llama-tiny": LLAMA_3_1_8B | TINY,
}


class ModelError(Exception):
    """A model that cannot be measured; the message says why."""


@dataclass(frozen=True)
class Geometry:
    """The keys and values of a model in which every layer has full attention.

    Attributes:
        layers, query_heads, kv_heads, head_dim: as in the model.
        dtype: of keys and values.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype) -> Geometry:
        """Read it from a config.

        Raises:
            ModelError: a model with layers of other kinds, which a benchmark could not fill with random KV.
        """
        config = config.get_text_config(decoder=True)
        others = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
        if others or getattr(config, "kv_lora_rank", None) or getattr(config, "sliding_window", None):
            raise ModelError(
                f"{config.model_type}: benchmarks fill caches with random keys and values, which works for models with "
                f"full attention in every layer; this one has {', '.join(others) or 'another kind of attention'}."
            )
        heads = config.num_attention_heads
        return cls(
            config.num_hidden_layers,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of `tokens` tokens in all layers."""
        return tokens * self.layers * self.token_bytes


def config_of(name: str) -> PretrainedConfig:
    """The config of a shape, of `pylm`, of a folder or of a hub model."""
    if name in SHAPES:
        literal = dict(SHAPES[name])
        return AutoConfig.for_model(literal.pop("model_type"), **literal)
    try:
        return AutoConfig.from_pretrained(_source(name))
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {name} cannot be loaded: {error}") from error


@torch.inference_mode(False)
def load(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model ready to run: trained weights, or random ones for a shape.

    Nobody loads a model in inference mode: with weights that were made there, 64 tokens of a 0.6B shape took torch nine
    times as long on a CPU with AMX.
    """
    if name in SHAPES:
        config = config_of(name)
        torch.manual_seed(0)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    try:
        model = AutoModelForCausalLM.from_pretrained(_source(name), dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {name} cannot be loaded: {error}") from error
    return model.to(device).eval()


def label(name: str) -> str:
    """A model's name for a record: of a folder, only the last part."""
    return Path(name).name if Path(name).is_dir() else name


def _source(name: str) -> str:
    if name != "pylm":
        return name
    if not (EXAMPLE_MODEL / "config.json").is_file():
        raise ModelError("The example model is not there (examples/pylm has no config.json): give --model NAME.")
    return str(EXAMPLE_MODEL)
