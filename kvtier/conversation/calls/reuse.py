"""What calls began with, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


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
