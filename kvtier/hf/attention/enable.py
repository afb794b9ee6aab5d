"""`enable` and `disable`: a loaded model's attention goes through kvtier, and back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from kvtier.errors import ConfigError, UnsupportedError
from kvtier.forks import heed, inherited
from kvtier.hf.attention.interface import NAME, bypasses, register_attention, uses_interface
from kvtier.memory.access.lock import Lock, new_lock

# On the model, so that a copy of an enabled model can be disabled: a list of `_Switched`.
_SWITCHED = "_kvtier_attention"


class _Changes:
    """Changes of what configs say, one at a time. Engines are made and closed in threads of their own; and a signal
    handler may close one in the midst of this."""

    def __init__(self) -> None:
        self.lock = new_lock()

    def forked(self) -> None:
        """See `Inherited`."""
        self.lock = inherited(self.lock, new_lock)


_CHANGES = _Changes()
#: Claims whose owners are garbage, and the models that they are of.
_ABANDONED: deque[tuple[weakref.ref[nn.Module], _Claim]] = deque()


class _Settled:
    """Goes around a change of what configs say, and around its lock: at the end of it claims are taken back that were
    abandoned meanwhile.

    The lock is not taken by this, nor by a generator: an interrupt in Python's code of a context manager ends a `with`
    that has not begun, or that believes to have ended. The lock would be held for as long as somebody has the
    traceback. A `with` statement takes and gives back a lock of C whatever comes.
    """

    def __enter__(self) -> None:
        heed(_CHANGES)

    def __exit__(self, *error: object) -> None:
        _take_back_abandoned()


#: `with settled, unchanged():`
settled = _Settled()


def _changing() -> Lock:
    """The lock of changes of what configs say, for a `with` statement, within `settled`."""
    return _CHANGES.lock


def unchanged() -> Lock:
    """While a `with` statement holds this, within `settled`, no other thread changes which attention a model has: a
    forward that one cuts through has a mask of one implementation, and attends with another."""
    return _changing()


def _abandon(model: weakref.ref[nn.Module], claim: _Claim) -> None:
    """Take a claim back in a finalizer, which comes between any two lines of any thread, and waits for no lock."""
    _ABANDONED.append((model, claim))
    _take_back_abandoned()


def _take_back_abandoned() -> None:
    """Where somebody is at a change, in this thread or another one, it is done at the end of that."""
    lock = _CHANGES.lock
    while _ABANDONED and not lock._is_owned():
        try:
            if not lock.acquire(blocking=False):
                return
            if _ABANDONED:
                found, claim = _ABANDONED[0]  # until it is done: an interrupt may cut it short
                model = found()
                if model is not None:
                    _restore(model, [claim])
                _ABANDONED.popleft()
        finally:
            try:  # noqa: SIM105
                lock.release()  # the first call here: an interrupt may come behind it, and not before
            except RuntimeError:  # another thread has it, or an interrupt came before it was taken
                pass


class _Claim:
    """Wants a model's attention to go through kvtier: one for each `enable`.

    Args:
        user: what cannot work without, for an error; "": nothing.
    """

    def __init__(self, user: str = "") -> None:
        self.user = user

    def __reduce__(self) -> tuple[Callable[[], _Claim], tuple[()]]:
        return _copied_claim, ()


def _copied_claim() -> _Claim:
    """Of a copy of a model. A pickle may come to a process that does not know the name yet, which the copy's config
    says. The engine of a model does not run its copy."""
    register_attention()
    return _Claim()


@dataclass(eq=False)
class _Switched:
    """A config that names kvtier for a while: what it said before, and who wants that."""

    config: PretrainedConfig
    before: str | None
    claims: list[_Claim]


class Enabled:
    """What `enable` did. Leaving it as a context manager undoes that, once nobody else wants the same.

    Attributes:
        model: the model.
        left: class names of submodels that compute attention by themselves and were left as they were.
    """

    def __init__(self, model: nn.Module, claim: _Claim, left: tuple[str, ...]):
        self.model = model
        self.left = left
        self._claim = claim
        self._end: weakref.finalize[..., Any] | None = None

    def disable(self) -> None:
        """Restore what was there before, unless another handle or an `Engine` wants it as it is. Idempotent."""
        with settled, _changing():
            _restore(self.model, [self._claim])
        if self._end is not None:
            self._end.detach()

    def end_with(self, user: object) -> None:
        """As `disable`, when an object is garbage that may be so without having called it."""
        before, self._end = self._end, weakref.finalize(user, _abandon, weakref.ref(self.model), self._claim)
        self._end.atexit = False
        if before is not None:
            before.detach()

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
        A handle and context manager. A model that is enabled twice stays so until both handles have left, in any order,
        or until `kvtier.disable(model)`.

    Raises:
        ConfigError: not a module.
        UnsupportedError: the model, or the decoder inside it, computes attention by itself; or its config asks for
            attention weights. Nothing was changed.
    """
    return enable_for(model, "")


def enable_for(model: nn.Module, user: str) -> Enabled:
    """As `enable`, for what cannot work without: `disable(model)` is refused until the handle has left.

    Args:
        user: it, for the error; "": nothing.
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
    claim = _Claim(user)
    try:
        with settled, _changing():
            _switch(model, switchable, claim)
        made = Enabled(model, claim, tuple(sorted({type(owner).__name__ for owner in fixed})))
        if user:  # an interrupt may come before the caller has the handle, and would leave a claim that nobody can end
            made.end_with(made)
    except BaseException:  # an interrupt, before anybody has the handle
        with settled, _changing():
            _restore(model, [claim])
        raise
    return made


def _switch(model: nn.Module, configs: list[PretrainedConfig], claim: _Claim) -> None:
    entries = _entries(model)
    for config in configs:
        entry = next((entry for entry in entries if entry.config is config), None)
        if config._attn_implementation != NAME:
            users = [claim for claim in entry.claims if claim.user] if entry is not None else []
            if entry is not None:  # somebody changed it since
                entries.remove(entry)
            entries.append(_Switched(config, config._attn_implementation, [*users, claim]))
            _keep(model, entries)  # first: an interrupt may come before the config says so, and not be known of behind
            # As `set_attn_implementation` does: the property's setter would change nested configs, too.
            config._attn_implementation_internal = NAME
        elif entry is not None:  # else the model was loaded so
            entry.claims.append(claim)


def disable(model: nn.Module) -> None:
    """Restore the attention implementations that `model` and its submodels had before `enable`, however often that was.

    Nothing, for a model that is not enabled. A config whose implementation was changed since keeps it.

    Raises:
        ConfigError: not a module.
        UnsupportedError: the model was loaded with attn_implementation="kvtier": there is nothing to go back to. Or an
            `Engine` runs it. Nothing was changed.
    """
    _check_module("disable", model)
    if not _entries(model) and any(config._attn_implementation == NAME for config in _configs(model)[0]):
        raise UnsupportedError(
            f'{type(model).__name__} has attn_implementation="kvtier", but not from `kvtier.enable(model)`: there is '
            'nothing to go back to. Choose with `model.set_attn_implementation("sdpa")`.'
        )
    with settled, _changing():
        claims = [claim for entry in _entries(model) for claim in entry.claims]
        users = sorted({claim.user for claim in claims if claim.user})
        if users:
            raise UnsupportedError(
                f"{' and '.join(users)} runs this {type(model).__name__} and needs its attention as it is: close that "
                "first. Nothing was changed."
            )
        _restore(model, claims)


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{function} takes a loaded model, not an object of {type(model).__name__}.")


def _entries(model: nn.Module) -> list[_Switched]:
    return list(vars(model).get(_SWITCHED, []))


def _keep(model: nn.Module, entries: list[_Switched]) -> None:
    if entries:
        vars(model)[_SWITCHED] = entries
    else:
        vars(model).pop(_SWITCHED, None)


def _restore(model: nn.Module, claims: list[_Claim]) -> None:
    """Take claims back. A config that nobody wants changed says again what it said, unless somebody chose since."""
    kept = list[_Switched]()
    for entry in _entries(model):
        entry.claims = [claim for claim in entry.claims if claim not in claims]
        if entry.claims:
            kept.append(entry)
        elif entry.config._attn_implementation == NAME:
            entry.config._attn_implementation_internal = entry.before
    _keep(model, kept)


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
