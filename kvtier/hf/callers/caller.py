"""Who reads what `update` returns: the model that calls, and in which form it can read a layer's KV."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch.nn import Module
from transformers.configuration_utils import PretrainedConfig

from kvtier.hf.callers.threads import Places
from kvtier.hf.models.layers import encoder_decoder, latent_widths
from kvtier.memory.storage.layout import BlockLayout

#: Callers of `update` that are looked at in search of the module that called it.
_MOST_FRAMES = 32
#: What forwards of layers call the image that they are given.
_IMAGE = "cross_attention_states"
#: The folder of kvtier's own modules.
_OURS = os.path.join(Path(os.path.abspath(__file__)).parents[2], "")


def needs_tensors(implementation: str | None) -> bool:
    """Whether an attention implementation of Transformers reads memory, so that it needs tensors instead of views.

    flex_attention is compiled as a whole. Kernels of flash attention, from the hub ("owner/name") too, and those of
    continuous batching ("paged|...") take addresses. All others, "sdpa" and "eager" among them, call functions of
    torch, which views answer.
    """
    name = implementation or ""
    return "flex_attention" in name or "flash" in name or "/" in name or "|" in name


class Caller:
    """The model that updates a cache, as far as its config tells how it reads KV.

    The Cache API does not say which model calls. A config that the user gave says it, but a model may hold a copy of
    its own (T5), and its attention implementation may be changed at any time. So the config of the module on the call
    stack is asked, once for each forward; where there is none, the given one.

    Args:
        given: the config that the cache was made with.
        check_model: called with the config of a module that is not `given`; raises where the cache does not fit it.

    Attributes:
        check_alone: raises where another thread is using the cache; set by the cache.
        places: where the threads are that use it.
        at: index of the layer that was updated last; a forward begins at one that is not behind it.
        takes_views: whether the model of the last forward takes views of every layer; else see `reads_dense`.
        latents: widths of latents in which the model caches KV (multi-head latent attention). It expands them itself
            between `update` and attention.
        drafts: whether drafts are tried and cropped (the past is recorded): who makes the next ones may read what
            `update` returned before the crop.
    """

    def __init__(
        self,
        given: PretrainedConfig | None,
        check_model: Callable[[PretrainedConfig], None],
    ) -> None:
        self.check_alone: Callable[[], None] = lambda: None
        self.places = Places()
        self._given = given
        self._check_model = check_model
        self._config: PretrainedConfig | None = None
        self._crossed: bool | None = None
        self._implementation: str | None = None
        self._needs_tensors = False
        self.takes_views = self.drafts = False
        self.latents: frozenset[int] = frozenset()
        self.at = self._state_at = sys.maxsize
        self._follow(given)

    def reads_workspace(self) -> bool:
        """Whether its attention may be answered over one layer's KV in a workspace: not where it makes its own."""
        name = None if self._config is None else _implementation(self._config)
        return name != "eager" and not needs_tensors(name) and not self.latents

    @property
    def needs_tensors(self) -> bool:
        """Whether the model's attention cannot read views. Asked of the config, which may have changed."""
        return self._config is not None and needs_tensors(_implementation(self._config))

    def reads_dense(self, layout: BlockLayout) -> bool:
        """Whether the model reads all of a layer's KV itself, so that tensors are made at once."""
        if not self.latents or self._needs_tensors:
            return self._needs_tensors
        return layout.k_heads == 1 and not self.latents.isdisjoint((layout.k_dim, layout.v_dim))

    def follow(self, layer: int) -> None:
        """A layer is about to be updated. Raises what `meet` raises, and is then called again."""
        if layer <= self.at:
            self.meet()
        self.at = layer

    def meet(self) -> None:
        """A forward begins: see whose.

        Raises:
            MismatchError: another model than the one the cache was made for.
            UnsupportedError: both self- and cross-attention of a model update this cache.
            ConcurrentUseError: another thread is generating with it.
        """
        self.check_alone()
        self.places.note()
        config, crossed = _caller(sys._getframe(1))
        if config is None:
            config = self._given
        else:
            self._check_attention(crossed)
        if config is not self._config:
            if config is not None and config is not self._given:
                self._check_model(config)
            self._follow(config)
        name = None if config is None else _implementation(config)
        if name != self._implementation:
            self._implementation, self._needs_tensors = name, needs_tensors(name)
        self.takes_views = not (self._needs_tensors or self.latents)

    def read_state(self, layer: int) -> None:
        """A layer's recurrent state is asked for, perhaps before anything else of a forward. Raises as `meet`."""
        self.check_alone()
        if layer <= self._state_at:
            self.places.note()
        self._state_at = layer

    def forget(self) -> None:
        """The cache was emptied: another model may come."""
        self._crossed = None
        self.at = sys.maxsize

    def _follow(self, config: PretrainedConfig | None) -> None:
        self._config = config
        self.latents = frozenset() if config is None else latent_widths(config)

    def _check_attention(self, crossed: bool) -> None:
        if self._crossed is not None and self._crossed is not crossed:
            raise encoder_decoder(self._given is not None)
        self._crossed = crossed


def _implementation(config: PretrainedConfig) -> str | None:
    try:
        # A config's own lookup of attributes takes microseconds.
        return object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:
        return config._attn_implementation


def _caller(frame: FrameType | None) -> tuple[PretrainedConfig | None, bool]:
    """The config of the nearest module on the call stack that has one, and whether it is at cross-attention."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        # Only of methods: to look at a function's variables keeps them alive until it returns.
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) and code.co_varnames[:1] == ("self",):
            local = frame.f_locals
            module = local.get("self")
            if isinstance(module, Module):
                config = module.__dict__.get("config")
                if isinstance(config, PretrainedConfig):
                    return config, bool(local.get("is_cross_attention"))
        frame = frame.f_back
    return None, False


def given_image() -> bool | None:
    """Whether the forward that updates a layer now is given what layers of cross-attention attend to (Mllama). The
    decoder hands it to each of its layers, and only some of them read it. None where no caller shows it."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if _IMAGE in frame.f_code.co_varnames:
            return frame.f_locals.get(_IMAGE) is not None
        frame = frame.f_back
    return None
