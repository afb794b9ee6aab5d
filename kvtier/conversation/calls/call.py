"""`Calls`: what a call of `generate` asks for, and whether what is kept may be any part of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.conversation.calls.reuse import RowReuse, are_ids, rows_of
from kvtier.conversation.index import WIDTH, packed
from kvtier.conversation.saved.tail import Tail
from kvtier.errors import ConfigError
from kvtier.hf.models import generation as of
from kvtier.hf.models.identity import dependence
from kvtier.hf.models.names import ARGUMENTS


@dataclass
class Call:
    """A call of `generate` that may re-use.

    Attributes:
        ids, mask: of the prompt, `[rows, columns]`.
        pads: columns of padding of each row.
        rows: token ids of each row, packed.
        expand: rows of the cache for each row.
        longest: tokens that a row may come to, its padding included.
        key: see `PrefixIndex`.
        depends: what keys and values depend on besides tokens, when the call began.
        loaded: tokens of each row that were read from the disk for this call.
        tail: that is being loaded, or was, while what precedes it was computed; None: there is none.
        filled: columns of gaps that were computed before what is kept behind them.
        why: where nothing is re-used, the reason.
        name: of the conversation that it is a turn of; None: of none.
        epoch: of what is kept, when the call began; see `Kept`.
        refused: there was no room for the rest of the prompt behind what was there, or was computed first.
        told: `generate` was called with it: a streamer has the prompt.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    pads: list[int]
    rows: list[bytes]
    expand: int
    longest: int
    key: Hashable
    depends: dependence.Depends
    loaded: list[int] = field(default_factory=list)
    tail: Tail | None = None
    filled: int = 0
    why: str = ""
    name: str | None = None
    epoch: int = 0
    refused: bool = False
    told: bool = False

    def reuse(self, columns: int) -> tuple[RowReuse, ...]:
        """What each row begins with, of so many columns that are there."""
        found = []
        for row, pad, loaded in zip(self.rows, self.pads, self.loaded, strict=True):
            prompt, cached = len(row) // WIDTH, max(columns - pad - self.filled, 0)
            found.append(RowReuse(prompt, cached, prompt - cached, self.why, min(loaded, cached)))
        return tuple(found)


class Calls:
    """Reads the arguments of `generate` as one model takes them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._keeps_positions = of.keeps_positions(model)
        self._forgets_unmasked = of.forgets_unmasked(model)
        self._adds_to_missing_masks = of.adds_to_missing_masks(model)
        self._continues_one_by_one = of.continues_one_by_one(model)
        #: Whether the model can be handed a cache.
        self.takes_cache = of.takes_cache(model)
        # Tokens up to which positions do not depend on the length; None: they never do.
        self.constant = of.length_of_constant_positions(model.config)

    @property
    def varies(self) -> bool:
        """Whether keys and values depend on more than a model's weights and tokens."""
        return self._keeps_positions or self.constant is not None

    def check(self, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that bring a cache, as `ConfigError`."""
        model = self._model
        given = of.setting("cache_implementation", model, kwargs) if hasattr(model, "generation_config") else None
        for name in ARGUMENTS:
            if kwargs.get(name) is not None:
                raise ConfigError(f"{name}: the store brings its own cache. Leave it out, or call model.generate.")
        if given not in (None, "hybrid"):  # which models of the Hub ask for, and `generate` leaves out
            raise ConfigError(
                f"cache_implementation={given!r}: the store brings its own cache. Leave it out, and set it to None in "
                "model.generation_config if it is there, or call model.generate."
            )

    def read(
        self, ids: Any, kwargs: dict[str, Any], salt: Hashable, depends: dependence.Depends
    ) -> tuple[Call | None, str]:
        """The call, whose mask is taken out of the arguments; or None, and why it re-uses nothing and is of no use to
        others. `depends` is what the model is now."""
        model = self._model
        others = of.model_inputs(kwargs)
        if model.config.is_encoder_decoder:
            return None, "an encoder-decoder"
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():
            return None, "no token ids"
        if others:
            return None, f"keys and values depend on {', '.join(others)} too"
        adapter = of.computed_from_prompt(model)
        if adapter:
            return None, f"keys and values depend on {adapter} too"
        if not of.takes_ids_first(model):
            return None, "the model has a way of its own to generate"
        if of.setting("use_cache", model, kwargs) is False:
            return None, "use_cache=False"
        if not self.takes_cache:
            return None, "the model takes no cache"
        if self._keeps_positions:
            return None, "the model keeps positions from one call to the next"
        if depends.training:
            return None, f"{depends.training} is in training mode"
        if any(of.setting(name, model, kwargs) for name in ("output_attentions", "output_hidden_states")):
            return None, "what layers give for tokens of the prompt is asked for"
        masks_may_miss = self._adds_to_missing_masks and model.config._attn_implementation != "eager"
        if masks_may_miss or of.attends_ahead(model):
            return None, "tokens of a prompt attend to those behind them"
        if self._continues_one_by_one:
            return None, "the model computes one token at a time behind those that are cached"
        if self._forgets_unmasked:
            return None, "what the cache lets go of is not masked"
        if not of.prefills_as_usual(model):
            return None, "the model computes prompts in a way of its own"
        if of.setting("prefill_chunk_size", model, kwargs):
            return None, "prefill_chunk_size"
        if of.setting("token_healing", model, kwargs):
            return None, "token_healing changes the prompt"
        if not of.knows_length(model.config):
            return None, "no layer of the model counts tokens"
        mask = kwargs.pop("attention_mask", None)
        if mask is None:
            mask = self._default_mask(ids, kwargs)
        here = mask.to("cpu", torch.bool) if mask.dim() == 2 else torch.zeros(1, 0)
        if here.shape != ids.shape or not bool((here[:, 1:] >= here[:, :-1]).all()) or not bool(here[:, -1].all()):
            kwargs["attention_mask"] = mask
            return None, "a mask that is not that of left padding"
        expand = max(of.setting(name, model, kwargs) or 1 for name in ("num_beams", "num_return_sequences"))
        pads = (~here).sum(1).tolist()
        if any(pads) and of.shift_of_positions(model) is None:
            kwargs["attention_mask"] = mask
            return None, "positions of the model count the padding"
        rows = [packed(row[pad:]) for row, pad in zip(ids.tolist(), pads, strict=True)]
        key, longest = (depends.computed_as, salt), self._longest(ids, kwargs)
        return Call(ids, mask, pads, rows, expand, longest, key, depends, [0] * len(rows)), ""

    def prompts(self, ids: Any, kwargs: dict[str, Any]) -> list[int]:
        """Tokens of each row of a prompt, without padding on the left; none, where these are no token ids."""
        if not are_ids(ids):
            return [0] * rows_of(ids)
        mask = kwargs.get("attention_mask")
        if mask is None and hasattr(self._model, "generation_config"):
            mask = self._default_mask(ids, kwargs)
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
            return [ids.shape[1]] * len(ids)
        found: list[int] = (mask.ne(0).cumsum(1) > 0).sum(1).tolist()
        return found

    def _default_mask(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The mask that `generate` infers: what is a padding token, and no token that ends a sequence."""
        pad, ends = (of.setting(name, self._model, kwargs) for name in ("pad_token_id", "eos_token_id"))
        ends = ends if isinstance(ends, (list, tuple)) else [ends]
        if isinstance(pad, int) and pad not in ends and bool((ids == pad).any()):
            return (ids != pad).long()
        return torch.ones_like(ids)

    def _longest(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
        most = of.setting("max_new_tokens", self._model, kwargs)
        if most is not None:
            return int(ids.shape[1] + most)
        return max(of.setting("max_length", self._model, kwargs) or 0, ids.shape[1] + 1)
