"""What `generate` is told, and what is known of a model before it is asked."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.generation import GenerationMixin

from kvtier.errors import ConfigError
from kvtier.hf.models.layers import transformers_layers
from kvtier.hf.models.names import CACHE

#: What `generate` takes that is no input of a model.
_SIGNATURE = frozenset(inspect.signature(GenerationMixin.generate).parameters) - {"self", "inputs", "kwargs"}
_SETTINGS = frozenset(vars(GenerationConfig()))
#: Of each model that was asked: see `shift_of_positions`.
_shifts: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


def model_inputs(arguments: dict[str, Any]) -> list[str]:
    """The names of those arguments of `generate` that are inputs of a model, token ids and their mask aside."""
    known = _SIGNATURE | _SETTINGS | {"input_ids", "attention_mask", "tokenizer", "assistant_tokenizer"}
    return sorted(name for name, value in arguments.items() if name not in known and value is not None)


def check_model(model: object) -> None:
    """Raise `ConfigError` unless this is a model that generates, or what stands for one."""
    if isinstance(model, type) or not hasattr(model, "generate") or not hasattr(model, "config"):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"an object of {type(model).__name__}"
        hint = " Give the model inside it, `.module`." if hasattr(getattr(model, "module", None), "generate") else ""
        raise ConfigError(f"model is {what}, not a loaded Transformers model that generates.{hint}")


def inner(model: Any) -> Any:
    """The model whose forward `generate` calls: of one with adapters, what these are in."""
    model = getattr(model, "_orig_mod", model)  # compiled
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def computed_from_prompt(model: Any) -> str:
    """Which adapter of peft (https://github.com/huggingface/peft) computes from a prompt what no module shows, such as
    virtual tokens before it; "": none does. The model that the adapter is in knows nothing of it."""
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        return "an adapter of virtual tokens"
    return "an adapter that begins within the prompt" if getattr(config, "alora_invocation_tokens", None) else ""


def vocabulary_of(model: Any) -> int | None:
    """Token ids that a model has embeddings for; None: it does not say."""
    try:
        return getattr(inner(model).get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        return None


def special_tokens(model: Any) -> set[int]:
    """Token ids that a model's configs name, such as those that end an answer or stand for a part of an image."""
    config = inner(model).config
    found: set[int] = set()
    for each in (config, config.get_text_config(decoder=True), getattr(model, "generation_config", None)):
        for name, value in vars(each).items() if each is not None else ():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                found.update(x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, int))
    return found


def setting(name: str, model: Any, arguments: dict[str, Any]) -> Any:
    """A setting of `generate`, from its arguments or the configs that it looks at."""
    if arguments.get(name) is not None:
        return arguments[name]
    given = arguments.get("generation_config")
    value = None if given is None else getattr(given, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def assisted(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether `generate` decodes with candidates: it then gives the model the whole prompt, whatever is cached."""
    names = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
    return bool(setting("use_mtp", model, arguments)) or any(setting(x, model, arguments) is not None for x in names)


def reads_text(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether `generate` is to be given the tokenizer: for strings at which it ends, or an assistant that has another
    one."""
    return bool(setting("stop_strings", model, arguments)) or arguments.get("assistant_tokenizer") is not None


def generates_as_usual(model: Any) -> bool:
    """Whether a model's `generate` is that of Transformers, and no other."""
    return type(model).generate is GenerationMixin.generate


#: What the first argument of Transformers' `generate` is called, and of some models' own.
_IDS = ("inputs", "input_ids")


def takes_ids_first(model: Any) -> bool:
    """Whether token ids are the first argument of a model's `generate`, as of Transformers' own. Where another input is
    (Kosmos-2: pixels), the model makes of them what it computes with."""
    generate = getattr(inner(model), "generate", model.generate)
    first = next(iter(inspect.signature(generate).parameters.values()), None)
    return first is None or first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD) or first.name in _IDS


def prefills_as_usual(model: Any) -> bool:
    """Whether `generate` computes prompts of a model as Transformers does, and not in a way of the model's own, which
    may tell an empty cache something first."""
    usual = getattr(GenerationMixin, "_prefill", None)
    return getattr(type(inner(model)), "_prefill", usual) is usual


def generate(model: Any, ids: Any, kwargs: Mapping[str, Any], named: bool) -> Any:
    """`model.generate` with ids, if there are any, as they were given: the first argument of some models is another
    (Whisper: features; BLIP-2: pixels). An adapter finds them by their name only."""
    if ids is None:
        return model.generate(**kwargs)
    by_name = named or computed_from_prompt(model)
    return model.generate(input_ids=ids, **kwargs) if by_name else model.generate(ids, **kwargs)


def reads_positions(model: Any) -> bool:
    """Whether a model can be told the positions of tokens."""
    return "position_ids" in inspect.signature(inner(model).forward).parameters


def shift_of_positions(model: Any) -> int | None:
    """What `generate` adds to the positions of tokens, which come from the mask, before it gives them to a model; None:
    it gives none, so that the model counts the padding. Asked once of each model."""
    model = inner(model)
    if model not in _shifts:
        _shifts[model] = _shift_of_positions(model)
    return _shifts[model]


def _shift_of_positions(model: Any) -> int | None:
    if not reads_positions(model):
        return None
    mask = torch.ones(1, 2, dtype=torch.long, device=device_of(model))
    wanted = mask.cumsum(-1)
    try:
        found = model.prepare_inputs_for_generation(
            mask, attention_mask=mask, position_ids=wanted, use_cache=True, is_first_iteration=True
        ).get("position_ids")
    except Exception:  # of a model whose inputs are others: most are given their positions as they are
        return 0
    return None if found is None else int((found - wanted).max())


def positions(model: Any, mask: torch.Tensor, start: int = 0) -> dict[str, torch.Tensor]:
    """The argument with the positions of the tokens from column `start` on, as `generate` gives it; none, where it
    gives none. Some models count from 0 in every forward that is given none.

    Args:
        mask: of all tokens so far, `[rows, columns]`.
    """
    shift = shift_of_positions(model)
    if shift is None:
        return {}
    return {"position_ids": ((mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0) + shift)[:, start:]}


def keeps_positions(model: Any) -> bool:
    """Whether a model remembers, from one call to the next, how positions go on (multimodal rotary embeddings)."""
    return any("rope_deltas" in vars(module) for module in model.modules())


def goes_on_from_other_calls(model: Any) -> bool:
    """Whether a model that is told no positions goes on from those of its last call, of other rows or of an image, and
    can be told."""
    return keeps_positions(model) and reads_positions(model)


def device_of(model: Any) -> torch.device:
    """Where a model computes. Weights that `accelerate` offloads are on the meta device between forwards."""
    device = torch.device(model.device)
    return executes_on(model) or device if device.type == "meta" else device


def mesh_of(model: Any) -> Any:
    """The mesh of the processes that have a part each of a model's weights; None: this process has them all."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    found = (x for x in model.parameters() if isinstance(x, DTensor) and x.device_mesh.size() > 1)
    divided = next((x for x in found if not all(each.is_replicate() for each in x.placements)), None)
    return None if divided is None else divided.device_mesh


def waits_for_others(model: Any) -> bool:
    """Whether a forward of a model waits for one of each process that has a shard of its weights (FSDP, DeepSpeed's
    third stage). They generate from other prompts, and `synced_gpus` lets them compute equally many forwards."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if torch.distributed.get_world_size() == 1:
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled() or any(
        isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules()
    )


def executes_on(model: Any) -> torch.device | None:
    """Where `accelerate` brings the weights of a module for a forward; None: nowhere."""
    for hook in (hook for module in model.modules() for hook in hooks(module)):
        found = getattr(hook, "execution_device", None)
        if found is not None:
            return torch.device(found)
    return None


def hooks(module: Any) -> Sequence[Any]:
    """Of `accelerate`, on a module."""
    hook = getattr(module, "_hf_hook", None)
    found: Sequence[Any] = getattr(hook, "hooks", (hook,))
    return found


def attends_ahead(model: Any) -> bool:
    """Whether tokens of a prompt attend to those behind them, so that their keys and values depend on these."""
    for part in (model.config, model.config.get_text_config(decoder=True)):
        # "vision": among the tokens of an image.
        if getattr(part, "use_bidirectional_attention", None) not in (None, False, "vision"):
            return True
        if getattr(part, "is_causal", True) is False:
            return True
        # Encoders such as BERT may be decoders, and are not by default. Configs of models without a choice (GPT-NeoX)
        # say the same; their layers do not.
        decoder = getattr(part, "is_decoder", None)
        if decoder is False and any(vars(module).get("is_decoder") is False for module in model.modules()):
            return True
        if decoder is True and _knows_no_causal_mask(model):
            return True
    return False


def _knows_no_causal_mask(model: Any) -> bool:
    """Whether a model's code makes masks, and none of them is causal, whatever its config says: RoFormer, RemBERT and
    others in Transformers 5.17."""
    return _makes_masks(model, "bidirectional") and not _makes_masks(model, "causal")


def forgets_unmasked(model: Any) -> bool:
    """Whether caches of a model let go of tokens that its masks show (Moshi): what a token attends to then depends on
    how the tokens before it were divided into forwards."""
    try:
        layers = transformers_layers(model.config.get_text_config(decoder=True))
    except ConfigError:
        return False
    made = [kind for kind in ("causal", "sliding_window_causal", "chunked_causal") if _makes_masks(model, kind)]
    return made == ["causal"] and any(getattr(layer, "is_sliding", False) for layer in layers)


def adds_to_missing_masks(model: Any) -> bool:
    """Whether attention adds to a mask that the model leaves out where it says nothing but that tokens are causal (Doge
    in Transformers 5.17): tokens of a prompt without padding then attend to those behind them."""
    for kind in {type(module) for module in model.modules()}:
        if hasattr(kind, "prepare_dynamic_mask"):
            try:
                return "allow_is_causal_skip" not in inspect.getsource(sys.modules[kind.__module__])
            except (OSError, KeyError):
                return True  # nobody knows
    return False


def continues_one_by_one(model: Any) -> bool:
    """Whether only one token at a time can follow what a cache holds: models that predict several tokens ahead
    (ProphetNet)."""
    return any("ngram_embeddings" in module._modules for module in model.modules())


def _makes_masks(model: Any, kind: str) -> bool:
    """Whether a model's code has Transformers make masks of a kind."""
    code = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(name), f"create_{kind}_mask") for name in code)


def length_of_constant_positions(config: Any) -> int | None:
    """Tokens up to which keys do not depend on how long a sequence is; None: they never do.

    Of a rotary embedding that is stretched with the length ("dynamic", "longrope"), keys that were computed in a
    shorter sequence are others than those of a longer one.
    """
    limits = []
    for part in (config, config.get_text_config(decoder=True)):
        given = getattr(part, "rope_parameters", None) or getattr(part, "rope_scaling", None) or {}
        for each in [given, *(x for x in given.values() if isinstance(x, dict))]:
            if each.get("rope_type", each.get("type")) in ("dynamic", "longrope"):
                limits.append(
                    each.get("original_max_position_embeddings")
                    or getattr(part, "original_max_position_embeddings", None)
                    or part.max_position_embeddings
                )
    return min(limits) if limits else None


def keeps_recurrent_states(config: Any) -> bool:
    """Whether some layer keeps a state instead of keys and values."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in transformers_layers(config))


def keeps_both(layers: Mapping[int, type]) -> bool:
    """Whether some of these types of layers keep keys and values next to a state."""
    return any(issubclass(layer, CacheLayerMixin) for layer in layers.values())


def knows_length(config: Any) -> bool:
    """Whether some layer of a cache counts tokens: `generate` asks it how much of a prompt is cached."""
    return any(isinstance(layer, CacheLayerMixin) for layer in transformers_layers(config))


def takes_logits_to_keep(model: Any) -> bool:
    """Whether a model computes logits of the last tokens only where it is asked to."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def takes_cache(model: Any) -> bool:
    """Whether `generate` can hand a model a cache: some have none (GPT-1), or one of their own (MiniMax-01)."""
    supports = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    takes = inspect.signature(inner(model).forward).parameters
    # Transformers' models name it; of others nobody knows what they do with arguments by any name.
    others = not type(inner(model)).__module__.startswith("transformers.")
    any_name = others and any(x.kind is inspect.Parameter.VAR_KEYWORD for x in takes.values())
    return bool(supports()) and (any_name or cache_argument(model) in takes)


def cache_argument(model: Any) -> str:
    """The name under which a model's forward takes a cache."""
    takes = inspect.signature(inner(model).forward).parameters
    return "cache_params" if "cache_params" in takes else CACHE


def synchronize(model: Any) -> None:
    """Return when the devices that a model is on have done what they were given."""
    for device in {device_of(model), *(weight.device for weight in model.parameters())}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
