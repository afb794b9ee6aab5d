"""`SubBatches`: for each step, which of its rows are computed, and by one forward or by two that take turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from kvtier.attention import split
from kvtier.forward.packed import PackedForward
from kvtier.forward.sub_batch import MAX_SHORT, PackedSequence
from kvtier.memory.blocks.block import State
from kvtier.memory.tiered import TieredMemory
from kvtier.planning.sub_batches import Choice, Learned, Row, choose
from kvtier.serving.runners import turns

#: Layers of which it is looked at where their blocks are; the others are taken to be like these.
_LOOKED_AT = 4


def why_not(model: torch.nn.Module, memory: TieredMemory, host_attention: bool) -> str:
    """Why two forwards of a model could not take turns, or would gain nothing by it; "": they can."""
    reason = turns.why_not()
    if reason:
        return reason
    if not host_attention:
        return "host_attention is off"
    if hasattr(model, "_orig_mod"):
        return "the model is compiled"
    if any(getattr(hook, "offload", False) for hook in _hooks(model)):
        return "Accelerate offloads weights of the model, which one forward would take from the other"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "other processes compute with this one, and each would choose for itself"
    if not any(device.slabs is not None and device.engine.asynchronous for device in memory.devices):
        return "no device computes behind the CPU's back"
    return ""


def _hooks(model: torch.nn.Module) -> list[Any]:
    """Accelerate's hooks."""
    found = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    return [each for hook in found for each in (hook, *getattr(hook, "hooks", ()))]


class SubBatches:
    """Decides for the steps of an engine, and learns from them.

    Args:
        forward: whose sequences they are.
        layers: of the model.
    """

    def __init__(self, forward: PackedForward, layers: int) -> None:
        self._forward = forward
        self.times = Learned(layers)
        self.choice: Choice | None = None
        self._rows: list[Row] = []
        self._second: list[PackedSequence] = []
        self._left: dict[PackedSequence, int] = {}
        self._before = (0, 0.0)

    def plan(self, batch: Sequence[tuple[PackedSequence, int]]) -> list[int]:
        """Choose for a step. Returns the parts that are computed in it, by number."""
        rows = self._look(batch)
        self.choice = choose(rows, self.times, may_leave=True, factor=self.times.factor) if self.times.known else None
        chosen = list(range(len(rows))) if self.choice is None else list(self.choice.rows)
        second = () if self.choice is None else self.choice.second
        self._second = [batch[i][0] for i in second]
        there = set(chosen)
        self._left = {batch[i][0]: rows[i].left + 1 for i in range(len(rows)) if i not in there}
        self._rows = [rows[i] for i in chosen]
        counters = self._forward.counters
        self._before = counters.host_bytes, counters.host_seconds
        return chosen

    def second(self, batch: Sequence[PackedSequence]) -> Collection[int]:
        """Which of some parts of the step that was planned are the second forward's, by number."""
        found = {i for i, sequence in enumerate(batch) if any(sequence is each for each in self._second)}
        return found if len(found) < len(batch) else ()

    def took(self, seconds: float) -> None:
        """What the step that was planned took."""
        counters = self._forward.counters
        nbytes, hosted = counters.host_bytes - self._before[0], counters.host_seconds - self._before[1]
        if self._rows:
            self.times.observe(self._rows, self.choice, seconds, (nbytes, hosted))
        self._rows = []

    def _look(self, batch: Sequence[tuple[PackedSequence, int]]) -> list[Row]:
        """Where the blocks are of each part of a step."""
        forward = self._forward
        found: list[Row] = []
        with forward.memory.lock:
            every = sorted(forward.readers)
            some = every[:: max(len(every) // _LOOKED_AT, 1)][:_LOOKED_AT]
            layers = [forward.readers[index].layer for index in some]
            in_place = [split.can_attend(layer) for layer in layers]
            for sequence, tokens in batch:
                here = there = 0
                for index, layer, short in zip(some, layers, in_place, strict=True):
                    nbytes = layer.layout.nbytes
                    for run in sequence.tables[index].resolve():
                        if run.state is State.HOST and short and tokens <= MAX_SHORT:
                            there += run.count * nbytes
                        else:
                            here += run.count * nbytes
                count = max(len(some), 1)
                found.append(Row(tokens, here / count, there / count, self._left.get(sequence, 0)))
        return found
