"""`NextToken`: one more token for one layer, in the middle of a step that decodes, in as little Python as there can be.

What `attention/repeat.py` is for an attention call, this is for `Forward.append`: between two layers a model reads all
of its weights, so what counts is how many functions and objects an update touches.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvtier.attention.reader import LayerReader
from kvtier.attention.tangents import level


class NextToken:
    """Appends a token to each row of a layer where that takes no new slot, seals nothing, and begins no step.

    Whoever makes it has seen the layer take a token in the ordinary way. It does what that does, under the same guard
    and the same lock, and says so if anything has changed since.

    Args:
        forward: of the cache; whoever keeps this holds it too.
        index: of the layer in the model.
        reader: of the layer.
    """

    __slots__ = ("_block_size", "_blocks", "_forward", "_index", "_layer", "_memory", "_steps", "reader")

    def __init__(self, forward: Any, index: int, reader: LayerReader) -> None:
        self._forward, self._steps, self._memory = forward, forward.steps, forward.memory
        self._index, self.reader, self._layer = index, reader, reader.layer
        self._blocks, self._block_size = reader.layer.blocks, reader.layer.layout.block_size

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Append keys `[batch, heads, 1, k_dim]` and values `[batch, heads, 1, v_dim]`.

        Returns:
            False, and nothing done, where `Forward.append` has to look at them.
        """
        steps, layer, index, forward = self._steps, self._layer, self._index, self._forward
        began, length = steps.began, layer.length
        offset, tails = length % self._block_size, layer._tails
        if (
            tails is None
            or tails.version != self._blocks.version
            or tails.last is None
            or not 0 < offset < self._block_size - 1  # neither into a new block, nor the last of one
            or not began  # a step begins
            or index in began
            or not forward._decoding
            or forward._step != steps.count
            or steps.pending is not None
            or steps._torn
            or forward.readers.get(index) is not self.reader
            or keys.requires_grad
            or values.requires_grad
            or level._current_level >= 0
        ):
            return False
        # `with guard` and refusals written out: what is refused here is refused in the ordinary way, which says why.
        guard, me = steps.guard, [threading.get_ident()]
        holder = guard.holder
        if steps.owner != me[0] or holder.setdefault(0, me) is not me:
            return False
        if guard.broken:
            holder.clear()
            return False
        guard.broken = True
        memory = self._memory
        try:
            with memory.lock:
                # What was found without the lock holds with it, but for what other caches of the memory may do.
                done = (
                    tails is layer._tails
                    and tails.version == self._blocks.version
                    and not memory.recovery.has_garbage
                    and tails.last.repeat(keys, values, offset)
                )
                if done:
                    layer.length = length + 1
                    for table in layer.tables:
                        table.length += 1
                    began[index] = length
                    forward._record.layers += 1
        except BaseException as error:
            guard.__exit__(type(error), error, None)
            raise
        guard.broken = False
        holder.clear()
        return done
