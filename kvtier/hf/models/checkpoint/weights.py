"""The weights of a model, counted in the model itself, built on torch's device "meta", which holds shapes alone.

Needs neither a file of weights nor a network, and takes no memory for weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvtier.errors import ConfigError
from kvtier.hf.models.checkpoint.config import text_config
from kvtier.planning.hardware.machines import Weights

#: Layers of a model that is built: more take many seconds.
MOST_LAYERS = 512
#: Names under which configs, and the modules that route, have the number of experts that a token is sent to.
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "moe_top_k", "top_k")


def count_weights(config: Mapping[str, Any]) -> Weights:
    """Build the decoder that a config describes, without numbers, and count its weights.

    Args:
        config: as a file has it. Of a model of several parts, the text part is counted.

    Raises:
        ConfigError: the model cannot be built; says why.
    """
    made = text_config(config)
    if getattr(made, "num_hidden_layers", 0) > MOST_LAYERS:
        raise ConfigError(f"it has more than {MOST_LAYERS} layers")
    for name in ("quantization_config", "auto_map"):  # neither changes how many weights there are
        vars(made).pop(name, None)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # such as of kernels that are not installed: nothing is computed here
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"Transformers cannot build the model: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    return _counted(model, made)


def _counted(model: nn.Module, config: Any) -> Weights:
    """The weights of a model. What several layers share is counted once."""
    total = sum(x.numel() for x in model.parameters())
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head = getattr(output, "weight", None)
    tables = {id(x.weight): x.weight for x in model.modules() if isinstance(x, nn.Embedding)}
    read_by_rows = sum(x.numel() for key, x in tables.items() if key != id(head))
    words = tables if head is None else tables | {id(head): head}
    used = _experts_used(config, model)
    idle = sum(x.numel() * max(n - used, 0) // n for x, n in _experts(model)) if used else 0
    return Weights(total, total - read_by_rows - idle, read_by_rows, sum(x.numel() for x in words.values()))


def _experts(model: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """The weights of experts that tokens are routed to, each with the number of experts that it is of, or is one of."""
    found: dict[int, tuple[nn.Parameter, int]] = {}
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if own != "experts" and not (type(module).__name__.endswith("Experts") and "shared" not in own):
            continue
        listed = len(module) if isinstance(module, nn.ModuleList) else None
        for x in module.parameters():
            if x.numel() and (listed or x.dim() == 3):  # a module for each expert, or one tensor for all
                found[id(x)] = x, listed or x.shape[0]
    return list(found.values())


def _experts_used(config: Any, model: nn.Module) -> int:
    """How many experts a token is sent to; 0: nobody says."""
    for holder in (config, *model.modules()):
        for name in _USED:
            number = getattr(holder, name, None)
            if isinstance(number, list) and number:  # by layer
                number = max(number)
            if type(number) is int and number > 0:
                return number
    return 0
