"""`EncoderReuse`: one call of an encoder-decoder; what its encoder gives is kept, for calls with the same inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from kvtier.conversation.calls.reuse import RowReuse, are_ids, rows_of
from kvtier.conversation.kept.kept import Kept
from kvtier.hf.models import generation as of
from kvtier.hf.models.identity import dependence
from kvtier.memory.tiered import TieredMemory

#: What a call may have besides: it changes nothing of what the encoder gives.
_OF_THE_DECODER = frozenset(("decoder_input_ids", "decoder_attention_mask"))
#: What copying may fail with; where the device has no memory, torch raises a RuntimeError.
_NOT_COPIED = (MemoryError, RuntimeError)


class _Inputs(NamedTuple):
    """Of an encoder: equal ones give equal outputs, to the bit, for batch and padding are the same too."""

    computed_as: Hashable
    salt: Hashable
    shape: tuple[int, ...]
    ids: bytes
    mask: bytes


class _Outputs(NamedTuple):
    """Of an encoder: one tensor, and the class that the model's decoder takes it from, which has names of its own."""

    kind: type
    states: torch.Tensor


class EncoderReuse:
    """Generates with an encoder-decoder. The last outputs of its encoder are kept within a budget; what was used
    longest ago goes first.

    Every entry is set and taken out by one operation, so that an interrupt leaves none that is half there; the bytes
    are counted when they are asked for.

    Args:
        model: of Transformers, an encoder-decoder or not.
        memory, kept: of the store.
        budget: bytes of all outputs.

    Attributes:
        problem: why something was not kept last.
    """

    def __init__(self, model: Any, memory: TieredMemory, kept: Kept, budget: int) -> None:
        self.problem = ""
        self._model = model
        self._memory = memory
        self._kept = kept
        self._budget = budget
        # Changed and copied under the memory's lock: whoever takes an output out may change it.
        self._outputs: OrderedDict[_Inputs, _Outputs] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Of all outputs that are kept. The caller holds the memory's lock."""
        return sum(x.states.nbytes for x in self._outputs.values())

    def clear(self) -> None:
        """Keep nothing. The caller holds the memory's lock, if calls may be under way."""
        self._outputs.clear()

    def erase(self, salt: Hashable) -> None:
        """Keep nothing of calls with a salt: of which conversation a call was is not known."""
        with self._memory.lock, self._memory.change:
            for inputs in [x for x in self._outputs if x.salt == salt]:
                del self._outputs[inputs]

    def generate(
        self, ids: Any, kwargs: dict[str, Any], named: bool, salt: Hashable, depends: dependence.Depends, epoch: int
    ) -> tuple[Any, tuple[RowReuse, ...]]:
        """What `model.generate` gives, and what each row began with.

        Args:
            named: whether the ids were given by name.
            depends: what the model is now.
            epoch: of what is kept, when the call began; see `Kept`.
        """
        inputs, mask, why = self._inputs(ids, kwargs, salt, depends)
        if inputs is None or mask is None:
            rows = _nothing_of(ids, kwargs.get("attention_mask"), why)
            return of.generate(self._model, ids, kwargs, named), rows
        found = self._find(inputs)
        if found is None:
            why = "no call before had the same inputs"
            outputs = self._encode(ids, mask)
            if dependence.depends(self._model) == depends:
                self._keep(inputs, outputs, epoch)
        else:
            outputs = found.kind(last_hidden_state=found.states)
        kwargs |= {"attention_mask": mask, "encoder_outputs": outputs}
        return self._model.generate(ids, **kwargs), _reuse_of(mask, why)

    def _inputs(
        self, ids: Any, kwargs: dict[str, Any], salt: Hashable, depends: dependence.Depends
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
        mask = torch.ones_like(ids) if mask is None else mask  # of these, `generate` infers none
        if mask.shape != ids.shape:
            return None, None, "a mask that is not that of the tokens"
        key = depends.computed_as, salt, tuple(ids.shape)
        return _Inputs(*key, *(x.to("cpu", torch.int64).numpy().tobytes() for x in (ids, mask))), mask, ""

    def _find(self, inputs: _Inputs) -> _Outputs | None:
        """What the encoder gave for these, for one call: a copy, or, where that does not fit, what was kept."""
        with self._memory.lock, self._memory.change:
            found = self._outputs.get(inputs)
            if found is None:
                return None
            try:
                copy = found._replace(states=found.states.clone())
            except _NOT_COPIED as error:
                self.problem = _not_kept(error)
                del self._outputs[inputs]
                return found
            self._outputs.move_to_end(inputs)
            return copy

    def _encode(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        """Let the encoder compute, as `generate` does."""
        with torch.no_grad():
            return self._model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)

    def _keep(self, inputs: _Inputs, outputs: Any, epoch: int) -> None:
        """Keep what the encoder gave, if that is one tensor, there is room, and nothing was dropped meanwhile."""
        if set(outputs.keys()) != {"last_hidden_state"} or outputs[0].nbytes > self._budget:
            return
        with self._memory.lock, self._memory.change:
            if self._kept.epoch != epoch:
                return
            while self._outputs and self.nbytes + outputs[0].nbytes > self._budget:
                self._outputs.popitem(last=False)
            try:
                self._outputs[inputs] = _Outputs(type(outputs), outputs[0].detach().clone())
            except _NOT_COPIED as error:
                self.problem = _not_kept(error)


def _not_kept(error: Exception) -> str:
    return f"what an encoder gave is not kept: {error or repr(error)}"


def _reuse_of(mask: torch.Tensor, why: str) -> tuple[RowReuse, ...]:
    """What each row of a call began with: all of the encoder's tokens, or, where there is a reason, none."""
    return tuple(RowReuse(n, 0 if why else n, n if why else 0, why) for n in mask.ne(0).sum(1).tolist())


def _nothing_of(ids: Any, mask: Any, why: str) -> tuple[RowReuse, ...]:
    """The same of a call that re-uses nothing, of whatever inputs."""
    if not are_ids(ids):
        return (RowReuse(0, 0, 0, why),) * rows_of(ids)
    return _reuse_of(mask if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else torch.ones_like(ids), why)
