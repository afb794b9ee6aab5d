"""What calls began with, in numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.hf.models.names import CACHE
from kvtier.memory.tiered import TieredMemory


@dataclass(frozen=True)
class RowReuse:
    """What one row of a call began with.

    Attributes:
        prompt: tokens of the prompt.
        cached: of these, tokens whose keys and values were there.
        loaded: of the cached ones, those that were read from the disk.
        computed: the others.
        why: where none was re-used, the reason; else "".
    """

    prompt: int
    cached: int
    computed: int
    why: str = ""
    loaded: int = 0


def are_ids(inputs: Any) -> bool:
    """Whether the inputs of a call are token ids, `[rows, tokens]`."""
    return isinstance(inputs, torch.Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()


def rows_of(inputs: Any) -> int:
    """The rows of whatever inputs a call has."""
    return int(inputs.shape[0]) if isinstance(inputs, torch.Tensor) and inputs.dim() else 1


@dataclass(frozen=True)
class StoreStats:
    """What a store holds and has saved.

    Attributes:
        calls: of `generate`.
        prompt_tokens, cached_tokens: of all calls; what was not cached was computed.
        sequences, tokens: that are kept; tokens that sequences share are counted once for each.
        state_bytes: of copied states, which are outside of the budgets.
        dropped: sequences that gave up their end, or all, for want of room.
        saved_bytes: on the disk, conversations included.
        damaged: files, or rows of the manifest, that were not what was written. They were not used.
        problem: why something was not saved or loaded last; "": nothing was.
    """

    calls: int
    prompt_tokens: int
    cached_tokens: int
    sequences: int
    tokens: int
    state_bytes: int
    dropped: int
    saved_bytes: int = 0
    damaged: int = 0
    problem: str = ""


class ReuseCounts:
    """What the calls of a store began with: of each thread the last one, and all of them counted.

    Args:
        memory: of the store.

    Attributes:
        calls, prompt_tokens, cached_tokens: see `StoreStats`.
    """

    def __init__(self, memory: TieredMemory) -> None:
        self.calls = self.prompt_tokens = self.cached_tokens = 0
        self._memory = memory
        self._here = threading.local()

    @property
    def last(self) -> tuple[RowReuse, ...]:
        """What each row of this thread's last call began with."""
        return getattr(self._here, "rows", ())

    def add(self, out: Any, rows: tuple[RowReuse, ...]) -> Any:
        """A call of this thread has ended. What it gives: what `generate` gave, and, if that is a dict, what its rows
        began with."""
        self._here.rows = rows
        with self._memory.lock, self._memory.change:
            self.calls += 1
            self.prompt_tokens += sum(row.prompt for row in rows)
            self.cached_tokens += sum(row.cached for row in rows)
        if not isinstance(out, torch.Tensor):
            out.reuse = rows
            if CACHE in out:
                setattr(out, CACHE, None)  # it is closed: what it held is kept by the store
        return out
