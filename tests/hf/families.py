"""Tiny random models, one per model family, that the exactness laws are checked on.

Every model is built from the family's own config class with a fixed seed, and its weights are drawn wide enough that
greedy tokens vary and depend on the KV: with the usual 0.02 a wrong cache could go unnoticed.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB = 128
WINDOW = 8  # smaller than every prompt used here, so that windows matter
PAD = 0

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_ALTERNATING = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
#: The last two layers have the KV of the two before them, which those returned in the same forward.
_SHARED = _ALTERNATING | {
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}


@dataclass(frozen=True)
class Family:
    """How to build one family's tiny model.

    Parameters
    ----------
    config, model:
        Names of the classes in ``transformers``.
    settings:
        Arguments of the config class, over those of a llama-like decoder when ``llama_like``.
    tiered:
        False when no layer of the family keeps its whole past, so that nothing can be tiered.
    """

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    llama_like: bool = True
    encoder_decoder: bool = False
    tiered: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral_sliding": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, tiered=False),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", _MOE),
    "qwen3_moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _MOE | {"head_dim": 16}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", _ALTERNATING | {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", _ALTERNATING | {"head_dim": 16, "query_pre_attn_scalar": 16}
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        _SHARED | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    ),
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", _SHARED | {"global_head_dim": 24}),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM"),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_positions": 512,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": PAD,
        },
        llama_like=False,
    ),
    "opt": Family("OPTConfig", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "falcon": Family("FalconConfig", "FalconForCausalLM", {"multi_query": True}),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        _ALTERNATING | _MOE | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 16,
        },
    ),
    "jamba": Family(
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _MOE
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 64,
            "num_layers": 3,  # as many as in the decoder: DynamicCache(config) counts the encoder's
            "num_heads": 4,
            "tie_word_embeddings": False,
            "decoder_start_token_id": 2,
            "pad_token_id": PAD,
            "eos_token_id": None,
        },
        llama_like=False,
        encoder_decoder=True,
    ),
    "bart": Family(
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 48,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        llama_like=False,
        encoder_decoder=True,
    ),
}


def attentions(name: str) -> tuple[str, ...]:
    """The attention implementations among eager and sdpa that the family's model class offers."""
    model_class = getattr(transformers, FAMILIES[name].model)
    return ("eager", "sdpa") if model_class._supports_sdpa else ("eager",)


def family_attention_pairs() -> Iterator[tuple[str, str]]:
    for name in FAMILIES:
        for attention in attentions(name):
            yield name, attention


def _draw_wide_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw embeddings at std 1 and every matrix at ``1.5 / sqrt(fan in)``, so that activations and attention vary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                draw(module.weight, 1.0)
            elif isinstance(module, nn.Linear):
                draw(module.weight, 1.5 * module.weight.shape[1] ** -0.5)
            elif isinstance(module, nn.LayerNorm):  # equal gains let post-norm models repeat one token
                module.weight.copy_(3 * torch.rand(module.weight.shape, generator=generator))
            elif isinstance(module, Conv1D):
                draw(module.weight, 1.5 * module.weight.shape[0] ** -0.5)
            else:
                for parameter in module.parameters(recurse=False):
                    if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):  # stacked experts
                        draw(parameter, 1.5 * parameter.shape[-1] ** -0.5)


def build_model(name: str, attention: str, *, seed: int = 1, **settings: Any) -> PreTrainedModel:
    """A fresh tiny fp32 model of family `name`, in eval mode, that never stops at an end-of-sequence token."""
    family = FAMILIES[name]
    arguments = (_LLAMA_LIKE if family.llama_like else {}) | family.settings | settings
    config = getattr(transformers, family.config)(**arguments)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, family.model)(config).float().eval()
    _draw_wide_weights(model, seed)
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.bos_token_id = None
    generation.pad_token_id = PAD
    return model


def tiny_model(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """The family's model on the default device, built once a session. Do not change it: use `build_model` for that."""
    return _tiny_model(name, attention, torch.get_default_device())


@functools.cache
def _tiny_model(name: str, attention: str, device: torch.device) -> PreTrainedModel:
    return build_model(name, attention)


def prompt_ids(*, rows: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[rows, length]``, never the padding token."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def dynamic_cache(model: PreTrainedModel, *, with_config: bool = True) -> Cache:
    """The oracle: Transformers' own cache for `model`."""

    def one() -> DynamicCache:
        return DynamicCache(config=model.config) if with_config else DynamicCache()

    return for_architecture(model, one)


def for_architecture(model: PreTrainedModel, one: Callable[[], Cache]) -> Cache:
    """`one()`, or for an encoder-decoder two of them inside ``EncoderDecoderCache``."""
    return EncoderDecoderCache(one(), one()) if model.config.is_encoder_decoder else one()
