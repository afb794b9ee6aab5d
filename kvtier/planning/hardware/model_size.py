"""The size of a model, from its config: weights, KV and arithmetic of a decoder, by the rules of its shapes.

A config is a mapping as in `config.json`, of any decoder of Transformers whose sizes have the usual names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import ModelSize

#: Bytes of a number by dtype.
_ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: Older names of the same sizes.
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "top_k_experts"),
}
#: Models whose feed-forward part has two matrices and no gate.
_UNGATED = {"gpt2", "gpt_neox", "opt", "bloom", "falcon", "gptj", "codegen", "mpt", "phi", "starcoder2", "gpt_neo"}


def model_size(config: Mapping[str, Any]) -> ModelSize:
    """The sizes of the model that a config describes.

    Only layers with full attention count as layers: windows and recurrent states are bounded and stay on the device.
    Weights are those of all layers. A model of several parts is taken by its text part.

    Raises:
        ConfigError: a size is missing or is no positive number, or the model is an encoder-decoder.
    """
    if config.get("is_encoder_decoder"):
        raise ConfigError("This is an encoder-decoder: a plan is of decoders alone.")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"model_type": config.get("model_type"), "dtype": config.get("dtype")} | dict(text)
    layers, hidden, heads = (_size(config, x) for x in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = _size(config, "num_key_value_heads", heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
        kv_heads = 1
    dim = _size(config, "head_dim", max(hidden // heads, 1))
    nope, rope, v_dim = (_size(config, x, 0) for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = 0
    if nope and rope and v_dim:  # MLA: the cache holds latents, from which each head has keys and values of its own
        kv_heads, dim = heads, -(-(nope + rope + v_dim) // 2)
        rank, q_rank = _size(config, "kv_lora_rank"), _size(config, "q_lora_rank", 0)
        latent = rank + rope
    if not kv_heads or heads % kv_heads:
        raise ConfigError(f"{heads} attention heads are no multiple of {kv_heads} KV heads.")
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    if latent:
        queries = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        attention = queries + hidden * latent + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    dense = matrices * hidden * _size(config, "intermediate_size", 4 * hidden)
    words = _size(config, "vocab_size", 0) * hidden
    embeddings = words if config.get("tie_word_embeddings", matrices == 2) else 2 * words
    experts = _size(config, "num_local_experts", 0)
    held = used = dense
    first = min(_size(config, "first_k_dense_replace", 0), layers) if experts else 0  # layers without experts
    if experts:
        one = matrices * hidden * _size(config, "moe_intermediate_size", _size(config, "intermediate_size", hidden))
        shared = _size(config, "n_shared_experts", 0) * one
        held, used = experts * one + shared, _size(config, "num_experts_per_tok", 1) * one + shared
    kinds = config.get("layer_types")
    full = sum(x == "full_attention" for x in kinds) if isinstance(kinds, list) and kinds else layers
    if not full:
        raise ConfigError(
            "No layer of this model has full attention: its state is bounded, and there is no KV to place."
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return ModelSize(
        layers=full,
        hidden=hidden,
        heads=heads,
        head_dim=dim,
        kv_heads=kv_heads,
        parameters=layers * attention + (layers - first) * held + first * dense + embeddings,
        active=layers * attention + (layers - first) * used + first * dense + words,
        itemsize=_ITEMSIZE.get(dtype, 2),
        embedding=embeddings - words,
        latent=latent,
    )


def divided(model: ModelSize, devices: int) -> ModelSize:
    """One device's part of a model whose heads and weights are divided (tensor parallel). Latents are whole on each.

    Raises:
        ConfigError: the KV heads cannot be divided by that number.
    """
    if devices == 1:
        return model
    if devices < 1 or model.kv_heads % devices:
        raise ConfigError(f"{model.kv_heads} KV heads cannot be divided over {devices} devices.")
    return replace(
        model,
        heads=model.heads // devices,
        kv_heads=model.kv_heads // devices,
        parameters=model.parameters // devices,
        active=model.active // devices,
        embedding=model.embedding // devices,
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    for key in (name, *_OTHER_NAMES.get(name, ())):
        value = config.get(key)
        if isinstance(value, list) and value:
            value = max(value)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default is None):
            raise ConfigError(f"The config's {key} is {value!r}: it is a positive number.")
        return value
    if default is None:
        raise ConfigError(f"The config has no {name}: this is not the config of a decoder.")
    return default
