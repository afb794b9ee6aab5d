"""What of Transformers is wrapped while a model is tiered, and which models are; see docs/design/wrapper.md."""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin

from kvtier.hf.models.names import ARGUMENTS
from kvtier.hf.wrapper.call import Call, Server

_GENERATE, _PREPARE = "generate", "_prepare_cache_for_generation"

#: Guards what follows, and what a `Tiered` counts. Re-entrant: a model may be collected while it is held.
lock = threading.RLock()
#: Which models are tiered, by what; the last one serves. The models' own attributes stay as they are.
_serving: weakref.WeakKeyDictionary[nn.Module, list[Server]] = weakref.WeakKeyDictionary()
#: Methods that are wrapped: by class and name, the method of before and the one that took its place.
_wrapped: dict[tuple[type, str], tuple[Any, Any]] = {}
#: The call of `generate` under way.
_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("kvtier_call", default=None)


def begin(models: Sequence[nn.Module], server: Server) -> None:
    """Let calls of these models' `generate` come by a server. The caller holds the lock."""
    _wrap(GenerationMixin, _GENERATE, _around_generate)
    for model in models:
        _wrap(_definer(type(model), _PREPARE), _PREPARE, _around_prepare)
        _serving.setdefault(model, []).append(server)


def end(models: Sequence[nn.Module], server: Server, times: int) -> None:
    """Undo so many beginnings. Nothing stays wrapped that nobody needs. The caller holds the lock."""
    for _ in range(times):
        for model in models:
            stack = _serving[model]
            # The last one: those of before belong to blocks around this one.
            del stack[len(stack) - 1 - stack[::-1].index(server)]
            if not stack:
                del _serving[model]
    if not _serving:
        _unwrap()


def servers(model: nn.Module) -> Sequence[Server]:
    """What a model is tiered by; the last one serves. The caller holds the lock."""
    return _serving.get(model, [])


def _serves(model: Any) -> Server | None:
    with lock:
        stack = _serving.get(model)
        return stack[-1] if stack else None


def _around_generate(before: Any) -> Any:
    @functools.wraps(before)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        tiered = _serves(self)
        if tiered is None:
            return before(self, *args, **kwargs)
        call = Call(tiered, self)
        token, failed = _current.set(call), True
        try:
            result = before(self, *args, **kwargs)
            failed = False
            return result
        finally:
            _current.reset(token)
            call.end(failed=failed)

    return generate


def _around_prepare(before: Any) -> Any:
    @functools.wraps(before)
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        call, tiered = _current.get(), None
        if call is None or call.model is not self:
            tiered = _serves(self)
            if tiered is None:
                return before(self, generation_config, model_kwargs, *args, **kwargs)
            call = None
        given = any(model_kwargs.get(name) is not None for name in ARGUMENTS)
        result = before(self, generation_config, model_kwargs, *args, **kwargs)
        if call is None and tiered is not None:
            # A `generate` that was looked up before it was wrapped, or the model's own. It ends when its config does,
            # which every call makes for itself.
            call = Call(tiered, self)
            weakref.finalize(generation_config, call.let_go).atexit = False
        if call is not None:
            call.serve(generation_config, model_kwargs, given)
        return result

    return prepare


def _definer(cls: type, name: str) -> type:
    """The class whose method an object of `cls` has."""
    return next(each for each in cls.__mro__ if name in vars(each))


def _wrap(cls: type, name: str, around: Callable[[Any], Any]) -> None:
    """Wrap a method, unless it is. The caller holds the lock."""
    if (cls, name) not in _wrapped:
        before = vars(cls)[name]
        after = around(before)
        setattr(cls, name, after)
        _wrapped[cls, name] = before, after


def _unwrap() -> None:
    """Restore every method but those that somebody else has wrapped since: ours does nothing there."""
    for (cls, name), (before, after) in list(_wrapped.items()):
        if vars(cls).get(name) is after:
            setattr(cls, name, before)
            del _wrapped[cls, name]
