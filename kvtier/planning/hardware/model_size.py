"""The size of a model, from its config: weights, KV and arithmetic of a decoder, by the rules of its shapes.

A config is a mapping as in `config.json`, of any decoder of Transformers whose sizes have the usual names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.planning.hardware.machines import ModelSize, Weights

#: Bytes of a number by dtype.
_ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: Older names of the same sizes.
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "head_dim": ("attention_head_dim",),
    "mamba_n_heads": ("n_mamba_heads", "mamba_num_heads"),
    "mamba_d_head": ("mamba_headdim", "mamba_head_dim"),
    "mamba_n_groups": ("mamba_ngroups", "n_groups"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "linear_key_head_dim": ("linear_head_dim",),
    "linear_value_head_dim": ("linear_head_dim",),
    "linear_num_key_heads": ("linear_num_heads",),
    "linear_num_value_heads": ("linear_num_heads",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "top_k_experts"),
}
#: Models whose feed-forward part has two matrices and no gate.
_UNGATED = {"gpt2", "gpt_neox", "opt", "bloom", "falcon", "gptj", "codegen", "mpt", "phi", "starcoder2", "gpt_neo"}
#: Kinds of layers, as `layer_types` names them: tiered; with a window; without anything of the past; with a state.
_TIERED, _WINDOWS = {"full_attention", "attention"}, {"sliding_attention", "chunked_attention", "hybrid_sliding"}
_EMPTY, _STATES = {"dummy", "moe", "mlp"}, {"linear_attention", "lightning_attention"}


def _grows(kind: str) -> bool:
    """Whether such a layer keeps KV of every token and is not tiered, as other attention than the above does."""
    return kind == "hybrid" or (kind.endswith("attention") and kind not in _TIERED | _WINDOWS | _STATES)


def _recurs(kind: str) -> bool:
    """Whether such a layer keeps a state."""
    return kind.startswith("hybrid") or not (kind in _TIERED | _WINDOWS | _EMPTY or _grows(kind))


def model_size(config: Mapping[str, Any], counted: Weights | None = None) -> ModelSize:
    """The sizes of the model that a config describes.

    Only layers with full attention count as layers: all others stay on the device. Weights are those of all layers. A
    model of several parts is taken by its text part.

    Args:
        config: as `config.json` has it. Without `layer_types`, every layer is taken for full attention.
        counted: the weights, where the model could be built; else they are estimated from the sizes.

    Raises:
        ConfigError: a size is missing or is no positive number, or the model is an encoder-decoder.
    """
    if config.get("is_encoder_decoder"):
        raise ConfigError("This is an encoder-decoder: a plan is of decoders alone.")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = ("model_type", "dtype", "quantization_config")
        config = {name: config.get(name) for name in outer} | dict(text)
    layers, hidden = (_size(config, x) for x in ("num_hidden_layers", "hidden_size"))
    kinds = config.get("layer_types")
    kinds = [str(x) for x in kinds] if isinstance(kinds, list) and kinds else ["full_attention"] * layers
    full, windowed = (sum(x in some for x in kinds) for some in (_TIERED, _WINDOWS))
    growing, recurrent = sum(map(_grows, kinds)), sum(map(_recurs, kinds))
    if not full + windowed + growing + recurrent:
        raise ConfigError("No layer of this model keeps anything of the past: there is nothing to plan.")
    attends = full + windowed + growing > 0
    window = _attention(_of_layer(config, kinds, lambda kind: kind in _WINDOWS), attends)
    found = _attention(_of_layer(config, kinds, lambda kind: kind in _TIERED or _grows(kind)), attends)
    if counted is None:
        mixing = (full + growing) * found.weights + windowed * window.weights
        mixing += recurrent * (_state_weights(config) or found.weights)
        counted = _estimated(config, layers, hidden, mixing)
    bits = weight_bits(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    itemsize = _ITEMSIZE.get(dtype, 2)
    return ModelSize(
        layers=full,
        hidden=hidden,
        heads=found.heads,
        head_dim=found.dim,
        kv_heads=found.kv_heads,
        parameters=counted.parameters,
        active=counted.active,
        itemsize=itemsize,
        embedding=counted.embedding,
        latent=found.latent,
        # Embeddings, and the head, are not quantised.
        weight_itemsize=itemsize + (bits / 8 - itemsize) * (1 - counted.words / counted.parameters) if bits else 0,
        windowed=windowed,
        window=_size(config, "sliding_window", 0) if windowed else 0,
        window_numbers=window.numbers if windowed and window.numbers != found.numbers else 0,
        recurrent=recurrent,
        state_bytes=recurrent * _state_size(config, itemsize) if recurrent else 0,
        growing=growing,
        expanded=found.expanded,
        expand_flops=found.expand_flops,
    )


def _of_layer(config: Mapping[str, Any], kinds: Sequence[str], wanted: Callable[[str], bool]) -> Mapping[str, Any]:
    """The config of the first layer of some kinds, where layers have sizes of their own (Gemma 4's heads are larger in
    layers with full attention); the config itself where there is no such layer."""
    own = config.get("per_layer_config")
    place = next((i for i, kind in enumerate(kinds) if wanted(kind)), None)
    if place is None or not isinstance(own, Mapping):
        return config
    found = next((x for name, x in own.items() if str(name).isdecimal() and int(name) == place), None)
    return {**config, **found} if isinstance(found, Mapping) else config


class _Attention(NamedTuple):
    """The attention of a layer: see `ModelSize`; `weights` of its projections."""

    heads: int
    kv_heads: int
    dim: int
    weights: int
    latent: int = 0
    expanded: int = 0
    expand_flops: int = 0

    @property
    def numbers(self) -> int:
        """Of a token, that the cache holds."""
        return self.latent or 2 * self.kv_heads * self.dim


def _attention(config: Mapping[str, Any], attends: bool) -> _Attention:
    """The attention of a layer.

    Args:
        config: of the layer.
        attends: whether any layer of the model does; else it needs no heads.

    Raises:
        ConfigError: a size is missing, or the heads are no multiple of the KV heads.
    """
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads", None if attends else 1)
    kv_heads = _size(config, "num_key_value_heads", heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
        kv_heads = 1
    dim = _size(config, "head_dim", max(hidden // heads, 1))
    nope, rope, v_dim = (_size(config, x, 0) for x in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    # MLA: the cache holds latents, from which each head has keys and values of its own.
    latent = bool(nope and v_dim and (rope or _size(config, "kv_lora_rank", 0)))
    if latent:
        kv_heads, dim = heads, nope + rope
    if not kv_heads or heads % kv_heads:
        raise ConfigError(f"{heads} attention heads are no multiple of {kv_heads} KV heads.")
    dim = -(-(dim + (v_dim or dim)) // 2)  # values may be of another size than keys
    if not latent:
        return _Attention(heads, kv_heads, dim, hidden * dim * (2 * heads + 2 * kv_heads))
    rank, q_rank = _size(config, "kv_lora_rank"), _size(config, "q_lora_rank", 0)
    queries = q_rank * (hidden + heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
    weights = queries + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden
    return _Attention(
        *(heads, kv_heads, dim, weights, rank + rope),
        expanded=heads * (2 * nope + rope + v_dim),
        expand_flops=2 * rank * heads * (nope + v_dim),
    )


def _estimated(config: Mapping[str, Any], layers: int, hidden: int, mixing: int) -> Weights:
    """Weights by the rules of a decoder's shapes, without norms, biases and positions.

    Args:
        mixing: weights of attention and recurrence in all layers.
    """
    matrices = 2 if str(config.get("model_type")) in _UNGATED else 3
    dense = matrices * hidden * _size(config, "intermediate_size", 4 * hidden)
    words = _size(config, "vocab_size", 0) * hidden
    embeddings = words if config.get("tie_word_embeddings", matrices == 2) else 2 * words
    experts, sparse = _size(config, "num_local_experts", 0), 0
    held = used = 0
    if experts:
        one = matrices * hidden * _size(config, "moe_intermediate_size", _size(config, "intermediate_size", hidden))
        shared = _size(config, "n_shared_experts", 0) * one
        held, used = experts * one + shared, _size(config, "num_experts_per_tok", 1) * one + shared
        sparse = sum(_sparse(config, i) for i in range(layers))
    rest = mixing + (layers - sparse) * dense
    return Weights(rest + sparse * held + embeddings, rest + sparse * used + words, embeddings - words, embeddings)


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture has experts, by the names that configs have for it."""
    of_layer = config.get("mlp_layer_types")
    if isinstance(of_layer, list) and layer < len(of_layer):
        return bool(of_layer[layer] == "sparse")
    listed = config.get("moe_layer_freq")
    if isinstance(listed, list):
        return bool(layer < len(listed) and listed[layer])
    dense = config.get("mlp_only_layers")
    if layer < _size(config, "first_k_dense_replace", 0) or (isinstance(dense, list) and layer in dense):
        return False
    period = max(_size(config, "expert_layer_period", 1), 1)
    step = max(_size(config, "decoder_sparse_step", 1), 1)
    every = max(_size(config, "moe_layer_freq", 1), 1)
    offset = _size(config, "expert_layer_offset", 0)
    return layer % period == offset % period and (layer + 1) % step == 0 and layer % every == 0


def _state_weights(config: Mapping[str, Any]) -> int:
    """Weights of a recurrent layer's projections, where the config has the usual names; else 0."""
    hidden = _size(config, "hidden_size")
    key, value = _size(config, "linear_key_head_dim", 0), _size(config, "linear_value_head_dim", 0)
    if key and value:  # queries, keys, values and gates in; values out
        keys, values = _size(config, "linear_num_key_heads", 1), _size(config, "linear_num_value_heads", 1)
        return hidden * (2 * keys * key + 3 * values * value)
    # Values and gates in; values out.
    return 3 * hidden * _inner(config) if _state(config) else 0


def weight_bits(config: Mapping[str, Any]) -> float:
    """Bits of a quantised weight, as a config says, scales of groups left out; 0: of none.

    Raises:
        ConfigError: it says that weights are quantised, and not how far.
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or not found:
        return 0
    method = str(found.get("quant_method", "")).lower()
    for name in ("bits", "w_bit", "num_bits", "nbits"):
        if isinstance(found.get(name), (int, float)) and 0 < found[name] <= 16:
            return float(found[name])
    named = re.search(r"\d+", str(found.get("weights", "")))  # quanto: "int4"
    if named is not None and 0 < int(named[0]) <= 16:
        return float(named[0])
    if found.get("load_in_4bit") or "fp4" in method:
        return 4
    if found.get("load_in_8bit") or "fp8" in method or "int8" in method:
        return 8
    groups = found.get("config_groups")  # compressed-tensors
    of_weights = (
        [x.get("weights") for x in groups.values() if isinstance(x, Mapping)] if isinstance(groups, Mapping) else []
    )
    bits = [x["num_bits"] for x in of_weights if isinstance(x, Mapping) and isinstance(x.get("num_bits"), int)]
    if bits:
        return float(max(bits))
    raise ConfigError(
        f"The weights are quantised ({method or 'quantization_config'}), and the config does not say to how many bits: "
        'add "bits" to its quantization_config.'
    )


def _state_size(config: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of a recurrent layer's state of one sequence, where the config has the usual names; else 0. Most keep
    the state itself in float32 whatever their dtype, and what a convolution reads in theirs, of `itemsize` bytes."""
    key, value = _size(config, "linear_key_head_dim", 0), _size(config, "linear_value_head_dim", 0)
    if key and value:  # gated delta rule: a matrix per head
        keys, values = _size(config, "linear_num_key_heads", 1), _size(config, "linear_num_value_heads", 1)
        taken = 2 * keys * key + values * value
        return 4 * values * key * value + itemsize * taken * _size(config, "linear_conv_kernel_dim", 4)
    if config.get("model_type") == "minimax":  # lightning attention: a matrix per head, in the model's dtype
        heads = _size(config, "num_attention_heads")
        return itemsize * heads * _size(config, "head_dim", _size(config, "hidden_size") // heads) ** 2
    state = _state(config)
    if state:  # Mamba
        inner, kernel = _inner(config), _size(config, "mamba_d_conv", _size(config, "conv_kernel", 4))
        of_groups = 2 * _size(config, "mamba_n_groups", 1) * state if _size(config, "mamba_n_heads", 0) else 0
        return 4 * inner * state + itemsize * (inner + of_groups) * kernel
    return itemsize * _size(config, "hidden_size") * _size(config, "conv_L_cache", 0)  # a convolution alone: LFM2


def _state(config: Mapping[str, Any]) -> int:
    """Numbers of a state per channel of a Mamba layer, where the config has one."""
    return _size(config, "mamba_d_state", _size(config, "ssm_state_size", _size(config, "state_size", 0)))


def _inner(config: Mapping[str, Any]) -> int:
    """Channels of a Mamba layer."""
    heads, dim = _size(config, "mamba_n_heads", 0), _size(config, "mamba_d_head", 0)
    return heads * dim or _size(config, "mamba_expand", _size(config, "expand", 2)) * _size(config, "hidden_size")


def divided(model: ModelSize, devices: int) -> ModelSize:
    """One device's part of a model whose heads and weights are divided (tensor parallel). Latents are whole on each.

    Raises:
        ConfigError: the KV heads cannot be divided by that number.
    """
    if devices == 1:
        return model
    if devices < 1 or model.kv_heads % devices:
        heads = f"{model.kv_heads} KV heads" if model.attends else "A model that has no KV heads"
        raise ConfigError(f"{heads} cannot be divided over {devices} devices.")
    return replace(
        model,
        heads=model.heads // devices,
        kv_heads=model.kv_heads // devices,
        parameters=model.parameters // devices,
        active=model.active // devices,
        embedding=model.embedding // devices,
        state_bytes=model.state_bytes // devices,
        expanded=model.expanded // devices,
        expand_flops=model.expand_flops // devices,
        window_numbers=model.window_numbers if model.latent else model.window_numbers // devices,
    )


def divisors(model: ModelSize, most: int = 16) -> list[int]:
    """Numbers of devices that the heads of a model can be divided over, 1 left out."""
    return [n for n in range(2, most + 1) if model.kv_heads % n == 0]


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
