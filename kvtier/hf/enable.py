"""`enable` and `disable`: a loaded model's attention goes through kvtier, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.hf.attention import NAME, bypasses, register_attention, uses_interface

# On the model, so that a copy of an enabled model can be disabled: [(config, what it said before)].
_BEFORE = "_kvtier_attention_before"


class Enabled:
    """What `enable` did. Leaving it as a context manager undoes that, and only that.

    Attributes:
        model: the model.
        left: class names of submodels that compute attention by themselves and were left as they were.
    """

    def __init__(self, model: nn.Module, changed: list[tuple[PretrainedConfig, str | None]], left: tuple[str, ...]):
        self.model = model
        self.left = left
        self._changed = changed

    def disable(self) -> None:
        """Restore what was there before. Nothing, where the model was enabled already."""
        _restore(self.model, self._changed)
        self._changed = []

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *exc: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        left = f", left={self.left}" if self.left else ""
        return f"Enabled({type(self.model).__name__}{left})"


def enable(model: nn.Module) -> Enabled:
    """Let `model` and its submodels attend with the implementation "kvtier".

        kvtier.enable(model)             # until kvtier.disable(model)

        with kvtier.enable(model):       # or for a while
            model.generate(**inputs, past_key_values=TieredKVCache(model.config))

    A `TieredKVCache` works without it: models read its views under `sdpa` and `eager`. With it, models that run under
    `eager` only (attention sinks, softcap) attend to blocks in place too, and a chunk of a prefill needs no mask.
    Other caches, and none, give what they gave.

    Args:
        model: a Transformers model, or a module with some inside. Weights and modules are not touched, only which
            implementation their configs name.

    Returns:
        A handle and context manager. Enabling twice is harmless: the second handle has nothing to undo.

    Raises:
        ConfigError: not a module.
        UnsupportedError: the model, or the decoder inside it, computes attention by itself; or its config asks for
            attention weights. Nothing was changed.
    """
    _check_module("enable", model)
    switchable, fixed = _configs(model)
    decoder = _decoder(model)
    for owner in fixed:
        if not switchable or owner is decoder:
            raise bypasses(type(owner))
    if not switchable:
        raise UnsupportedError(f"{type(model).__name__} holds no Transformers model.")
    for config in switchable:
        if getattr(config, "output_attentions", False):
            raise UnsupportedError(
                f"{type(config).__name__}.output_attentions is set, and attention weights are never made as a whole. "
                "Set it to False first."
            )
    register_attention()
    changed = []
    for config in switchable:
        if config._attn_implementation != NAME:
            changed.append((config, config._attn_implementation))
            # As `set_attn_implementation` does: the property's setter would change nested configs, too.
            config._attn_implementation_internal = NAME
    before: list[Any] = vars(model).get(_BEFORE, [])
    kept = [entry for entry in before if not any(entry[0] is config for config, _ in changed)]
    if kept or changed:
        vars(model)[_BEFORE] = kept + changed
    return Enabled(model, changed, tuple(sorted({type(owner).__name__ for owner in fixed})))


def disable(model: nn.Module) -> None:
    """Restore the attention implementations that `model` and its submodels had before `enable`.

    Nothing, for a model that is not enabled. A config whose implementation was changed since keeps it.

    Raises:
        ConfigError: not a module.
        UnsupportedError: the model was loaded with attn_implementation="kvtier": there is nothing to go back to.
    """
    _check_module("disable", model)
    before = vars(model).get(_BEFORE, [])
    if not before and any(config._attn_implementation == NAME for config in _configs(model)[0]):
        raise UnsupportedError(
            f'{type(model).__name__} has attn_implementation="kvtier", but not from `kvtier.enable(model)`: there is '
            'nothing to go back to. Choose with `model.set_attn_implementation("sdpa")`.'
        )
    _restore(model, list(before))


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{function} takes a loaded model, not an object of {type(model).__name__}.")


def _restore(model: nn.Module, changed: list[tuple[PretrainedConfig, str | None]]) -> None:
    for config, implementation in changed:
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = implementation
    before = vars(model).get(_BEFORE, [])
    kept = [entry for entry in before if not any(entry[0] is config for config, _ in changed)]
    if kept:
        vars(model)[_BEFORE] = kept
    else:
        vars(model).pop(_BEFORE, None)


def _configs(model: nn.Module) -> tuple[list[PretrainedConfig], list[PreTrainedModel]]:
    """Configs that attention inside `model` reads, and submodels that read none: they compute attention by themselves.

    Transformers' own `set_attn_implementation` misses configs that are copies of the model's (T5 on 5.17).
    """
    configs: dict[int, PretrainedConfig] = {}
    fixed: dict[int, PreTrainedModel] = {}
    for owner, module in _owned(model, None):
        config = vars(module).get("config")
        if owner is None or not isinstance(config, PretrainedConfig):
            continue
        if uses_interface(owner):
            configs[id(config)] = config
        else:
            fixed[id(owner)] = owner
    # One config may serve a wrapper that could be switched and a submodel that cannot.
    for owner in fixed.values():
        configs.pop(id(owner.config), None)
    return list(configs.values()), list(fixed.values())


def _owned(module: nn.Module, owner: PreTrainedModel | None) -> Iterator[tuple[PreTrainedModel | None, nn.Module]]:
    """Every module with the Transformers model that it is part of, outermost first."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield owner, module
    for child in module.children():
        yield from _owned(child, owner)


def _decoder(model: nn.Module) -> Any:
    """The submodel that generates: what a model without it is not worth switching."""
    return model.get_decoder() if isinstance(model, PreTrainedModel) else None
