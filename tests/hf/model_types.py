"""A tiny random model of every decoder-only type that Transformers knows, as far as its config lets itself be shrunk.

The size of a config is cut down by the names of its attributes, so a type that comes with a later Transformers is built
without being mentioned here. Some types need a word more (`OVER`), and some cannot be built like that at all.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, LAYERS, WINDOW = 96, 4, 8
MOST_PARAMETERS = 3 * 10**7

_SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    (32, "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size lru_width attention_hidden_size"),
    (48, "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim ffn_hidden_size shared_intermediate_size"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads linear_num_value_heads rotary_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts laurel_rank adapter_rank"),
    (4, "mamba_d_conv conv_kernel linear_conv_kernel_dim mamba_dt_rank time_step_rank"),
    (2, "num_key_value_heads multi_query_group_num linear_num_key_heads index_n_heads encoder_layers"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk zero_expert_num altup_num_inputs"),
    (2, "expert_layer_period attn_layer_period global_attn_every_n_layers mamba_expand expand"),
    (8, "head_dim d_kv kv_channels attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_topk"),
    (8, "mamba_d_state mamba_d_head mamba_n_heads mamba_head_dim mamba_num_heads state_size ssm_state_size"),
    (8, "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input"),
    (16, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank"),
    (16, "index_head_dim qk_head_dim mamba_chunk_size chunk_size expert_ffn_hidden_size"),
    (24, "q_lora_rank"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_target_positions"),
    (1, "n_group topk_group n_shared_experts first_k_dense_replace attn_layer_offset num_mem_blocks"),
    (1, "mamba_n_groups n_groups"),
    (0, "expert_layer_offset num_kv_shared_layers"),
    (WINDOW, "sliding_window attention_window_size window_size"),
)
SMALL: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()} | {
    "hybrid_layer_ids": [1, 3],
    "mamba_d_ssm": None,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SETTABLE = {"num_key_value_heads", "head_dim"}  # although a config may leave them to others

_ZAMBA = {
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
}
OVER: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"mamba_ngroups": 1, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}
#: Types whose config says by other attributes which layers are which.
UNTYPED = {"bamba", "falcon_h1", "recurrent_gemma"}


def types() -> list[str]:
    """Every type with a causal model, by name."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(
        name
        for name, model in names.items()
        if name in CONFIG_MAPPING and isinstance(model, str) and hasattr(transformers, model)
    )


def tiny_config(name: str) -> Any:
    """The config of a tiny model of a type. Raises whatever the config class raises."""
    config_class = CONFIG_MAPPING[name]
    default = config_class()
    known = set(vars(default)) | set(config_class.attribute_map) | set(inspect.signature(config_class).parameters)
    given = {
        key: value
        for key, value in SMALL.items()
        if key in known and (key in _SETTABLE or getattr(default, key, None) is not None)
    }
    given |= {key: value for key, value in TOKENS.items() if key in known}
    layers = getattr(default, "num_hidden_layers", None)
    for key, value in vars(default).items():  # lists with an entry for each layer
        if isinstance(value, list) and len(value) == layers and not key.startswith("_"):
            kinds = list(dict.fromkeys(map(str, value)))
            given[key] = [next(x for x in value if str(x) == kinds[i % len(kinds)]) for i in range(LAYERS)]
    if getattr(default, "layer_types", None) and "layer_types" in known:
        given["layer_types"] = (list(dict.fromkeys(default.layer_types)) * LAYERS)[:LAYERS]
    if name in UNTYPED:
        given = {key: value for key, value in given.items() if key not in ("layer_types", "layers_block_type")}
    if "kv_lora_rank" in known:
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    return config_class(**(given | OVER.get(name, {})))


@functools.lru_cache(maxsize=64)
def tiny_model_of_type(name: str) -> PreTrainedModel:
    """A tiny fp32 model of a type, in eval mode. Raises what its classes raise, and RuntimeError if it is not tiny."""
    config = tiny_config(name)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise RuntimeError(f"{size} parameters are not tiny")
    return model_class(config).float().eval()
