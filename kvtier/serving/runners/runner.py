"""`Runner`: what computes a step."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.conversation.states import States
from kvtier.forward.sub_batch import PackedSequence
from kvtier.planning.rates import Rates
from kvtier.serving.runners.processes import Processes

#: Blocks that may be had where nothing counts them.
NO_LIMIT = 1 << 40


@dataclass(slots=True)
class Work:
    """A part of a step.

    Attributes:
        sequence: of the runner.
        ids: all tokens of the sequence, those to compute at the end of what is cached.
        cached: tokens whose keys and values are there.
        tokens: to compute behind them.
        scored: whether the scores of the token behind them are asked for.
        prompt: tokens that came with the request; the others were generated.
    """

    sequence: Any
    ids: Sequence[int]
    cached: int
    tokens: int
    scored: bool
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where what is preempted may go.

    Attributes:
        host_blocks: of the blocks that may be had, those that are on the host only; 0: there is one tier.
        block_bytes: of one, of all layers.
        overlaps: whether copies between the tiers go on while the device computes.
        rates: what is stored of the machine; None: nothing.
    """

    host_blocks: int = 0
    block_bytes: int = 0
    overlaps: bool = False
    rates: Rates | None = None


class Runner(abc.ABC):
    """Computes steps. One thread at a time.

    Attributes:
        name: "packed", "ragged", "single", "uncached".
        chunked: whether a prompt may be computed in parts.
        processes: that the model is divided over; None: this one has it all.
        half_done: whether a step has failed and could not be undone: nothing but `reset` is of use then.
    """

    name: str
    chunked: bool
    processes: Processes | None = None
    half_done = False

    @abc.abstractmethod
    def add(self) -> Any:
        """A sequence without tokens."""

    @abc.abstractmethod
    def fork(self, sequence: Any) -> Any:
        """A second sequence with the same tokens; None: that cannot be had, its tokens are computed again."""

    def kv(self, sequence: Any) -> PackedSequence:
        """The keys and values of a sequence, where a runner's sequences can be continued by others."""
        raise NotImplementedError

    def states(self, sequence: Any) -> States:
        """A sequence's recurrent states behind the tokens that are cached, which nobody changes; empty: the model has
        none."""
        return {}

    def go_on(self, kv: PackedSequence, states: States) -> Any:
        """A sequence that goes on with keys and values, and with the states behind their last token."""
        raise NotImplementedError

    @abc.abstractmethod
    def remove(self, sequence: Any) -> None:
        """A sequence ends, and gives up what it holds."""

    @abc.abstractmethod
    def forwards(self, work: Sequence[Work]) -> list[list[int]]:
        """Which parts of a step are computed together, by number. One that is not named waits for a later step."""

    def took(self, seconds: float) -> None:  # noqa: B027 - for those that learn from it
        """What the parts took that `forwards` has named last, until their tokens were there."""

    @abc.abstractmethod
    def step(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """Compute what is computed together: of each part the scores `[vocabulary]` of the next token, where they are
        wanted.

        Raises:
            BudgetError: there is no room; nothing was changed. Whatever the model raises: each sequence has the tokens
                that it had, or fewer.
        """

    @abc.abstractmethod
    def blocks(self) -> tuple[int, int, int]:
        """Blocks that may be had, blocks that are held, and tokens of one; a block is of all layers."""

    def tiers(self) -> Tiers:
        """Where what is preempted may go."""
        return Tiers()

    @abc.abstractmethod
    def check_fits(self, length: int) -> None:
        """Raise `BudgetError` where a sequence of so many tokens would not fit, were it alone."""

    @abc.abstractmethod
    def cached(self, sequence: Any) -> int:
        """Tokens of a sequence whose keys and values are there."""

    @abc.abstractmethod
    def held(self, sequence: Any) -> int:
        """Blocks that a sequence holds."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop every sequence. After an interrupt, too."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back."""

    @abc.abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError unless every count agrees. For tests and debugging."""
