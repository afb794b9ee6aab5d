"""Attention parameters: what attention does besides softmax(q k) v. Every kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Scale, masks and biases of one call. Scores are scaled, capped, biased and masked, in this order.

    Attributes:
        scale: of the scores.
        softcap: scores become cap * tanh(score / cap); 0: none.
        window: a query at position p sees positions > p - window; 0: all.
        causal: query i of n sees the positions up to length - n + i.
        mask: bool (True: seen) or floating (added to the scores), `[batch or 1, heads or 1, queries or 1, tokens]`;
            tokens behind the sequence's length are ignored.
        first_valid: `[batch]` int64, the first valid token of each sequence (left padding).
        sinks: `[heads]` fp32, logits that only add to the sum.
        slopes: `[heads]` fp32, ALiBi: slope * (position of the key - position of the query).
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    causal: bool = False
    mask: torch.Tensor | None = None
    first_valid: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing besides the scale, a causal limit and a window."""
        extras = (self.mask, self.first_valid, self.sinks, self.slopes)
        return not self.softcap and all(x is None for x in extras)
