"""`EncoderOutputs`: what an encoder gave for its inputs, for calls with the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kvtier.conversation.calls.call import Calls
from kvtier.conversation.calls.reuse import RowReuse
from kvtier.hf.models import generation as of

#: What a call may have besides: it changes nothing of what the encoder gives.
_OF_THE_DECODER = frozenset(("decoder_input_ids", "decoder_attention_mask"))


class _Inputs(NamedTuple):
    """Of an encoder: equal ones give equal outputs, to the bit, for batch and padding are the same too."""

    computed_as: Hashable
    salt: Hashable
    shape: tuple[int, ...]
    ids: bytes
    mask: bytes


class EncoderOutputs:
    """Keeps the last outputs of an encoder within a budget; what was used longest ago goes first. The caller holds the
    memory's lock for all but `encode`.

    Every entry is set and taken out by one operation, so that an interrupt leaves none that is half there; the bytes
    are counted when they are asked for.

    Args:
        model: of Transformers, an encoder-decoder or not.
        calls: reads its calls.
        budget: bytes of all outputs.
    """

    def __init__(self, model: Any, calls: Calls, budget: int) -> None:
        self._model = model
        self._calls = calls
        self._budget = budget
        self._kept: OrderedDict[_Inputs, torch.Tensor] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Of all outputs that are kept."""
        return sum(x.nbytes for x in self._kept.values())

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()

    def inputs(
        self, ids: Any, kwargs: dict[str, Any], salt: Hashable, depends: of.Depends
    ) -> tuple[_Inputs | None, torch.Tensor | None, str]:
        """What a call gives to the encoder, and its mask; None, and why that is of no use to others."""
        model = self._model
        others = sorted({*of.model_inputs(kwargs)} - _OF_THE_DECODER)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return None, None, "an encoder-decoder without token ids"
        if others:
            return None, None, f"what the encoder gives depends on {', '.join(others)} too"
        if depends.training:
            return None, None, f"{depends.training} is in training mode"
        if any(of.setting(name, model, kwargs) for name in ("output_attentions", "output_hidden_states")):
            return None, None, "more than the last output of the encoder is asked for"
        if not of.generates_as_usual(model):
            return None, None, "the model has a way of its own to generate"
        mask = kwargs.get("attention_mask")
        mask = self._calls.default_mask(ids, kwargs) if mask is None else mask
        if mask.shape != ids.shape:
            return None, None, "a mask that is not that of the tokens"
        key = depends.computed_as, salt, tuple(ids.shape)
        return _Inputs(*key, *(x.to("cpu", torch.int64).numpy().tobytes() for x in (ids, mask))), mask, ""

    def find(self, inputs: _Inputs) -> torch.Tensor | None:
        """What the encoder gave for these; its user gets a copy."""
        found = self._kept.get(inputs)
        if found is not None:
            self._kept.move_to_end(inputs)
        return found

    def encode(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Let the encoder compute, as `generate` does."""
        with torch.no_grad():
            return self._model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)

    def keep(self, inputs: _Inputs, outputs: Any) -> None:
        """Keep what the encoder gave, if that is one tensor and there is room."""
        if set(outputs.keys()) != {"last_hidden_state"} or outputs[0].nbytes > self._budget:
            return
        while self._kept and self.nbytes + outputs[0].nbytes > self._budget:
            self._kept.popitem(last=False)
        self._kept[inputs] = outputs[0].detach().clone()


def reuse_of(mask: torch.Tensor, why: str) -> tuple[RowReuse, ...]:
    """What each row of a call began with: all of the encoder's tokens, or, where there is a reason, none."""
    return tuple(RowReuse(n, 0 if why else n, n if why else 0, why) for n in mask.ne(0).sum(1).tolist())
