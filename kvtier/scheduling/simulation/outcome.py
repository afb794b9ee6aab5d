"""What a simulated engine is asked for, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for.

    Attributes:
        arrived: seconds; where `after` is set, seconds behind the end of that request.
        prompt, output: tokens.
        keys: of the blocks of the prompt, and perhaps of what is generated; equal keys are equal blocks and all before
            them. None: nothing of it is used again.
        after: index of the request whose answer this one follows.
        tenant, priority: as of `Job`.
    """

    arrived: float
    prompt: int
    output: int
    keys: tuple[Hashable, ...] = ()
    after: int | None = None
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True)
class Served:
    """What became of a request. Times in seconds of the virtual clock.

    Attributes:
        arrived, scheduled, first, finished: when it came, first had a part in a step, had its first token and its last.
        prompt, output: tokens.
        reused: tokens of the prompt that were there.
        swapped, recomputed: how often it gave up its blocks, by the way back.
        tenant: whose.
    """

    arrived: float
    prompt: int
    output: int
    tenant: str = ""
    scheduled: float = math.nan
    first: float = math.nan
    finished: float = math.nan
    reused: int = 0
    swapped: int = 0
    recomputed: int = 0


def percentile(values: Sequence[float], part: float) -> float:
    """Of sorted values or not: the smallest that so large a part does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)] if ordered else math.nan


@dataclass(slots=True)
class Outcome:
    """What a simulation found.

    Attributes:
        requests: in the order in which they were given.
        seconds: until the last one ended.
        steps: computed.
        computed: tokens, of prompts and others, those that were computed again included.
        device, link: seconds in which the device computed, and in which it waited for copies.
        rows: sum over all steps of the sequences that had a part.
    """

    requests: list[Served]
    seconds: float = 0.0
    steps: int = 0
    computed: int = 0
    device: float = 0.0
    link: float = 0.0
    rows: int = 0

    def figures(self) -> dict[str, float]:
        """By name.

        `ttft_*`: seconds to the first token; `tpot_mean`: seconds per token behind the first; `normalised_*`: seconds
        from arrival to end per generated token (Orca; Pensieve, section 6); `turnaround`: mean of (end - arrival) /
        (end - first scheduled) (AdaptiveLLM, formula 5); `fairness`: Jain's index of tenants' tokens per second, 1
        where all are equal; `reused`: share of the tokens of prompts.
        """
        done = self.requests
        ttft = [x.first - x.arrived for x in done]
        tpot = [(x.finished - x.first) / (x.output - 1) for x in done if x.output > 1]
        normalised = [(x.finished - x.arrived) / x.output for x in done]
        rates: dict[str, list[float]] = {}
        for x in done:
            rates.setdefault(x.tenant, []).append((x.prompt + x.output) / max(x.finished - x.arrived, 1e-9))
        means = [_mean(some) for some in rates.values()]
        span = self.seconds or math.nan
        return {
            "seconds": self.seconds,
            "requests_per_second": len(done) / span,
            "tokens_per_second": sum(x.output for x in done) / span,
            "ttft_mean": _mean(ttft),
            "ttft_p50": percentile(ttft, 0.5),
            "ttft_p99": percentile(ttft, 0.99),
            "tpot_mean": _mean(tpot),
            "normalised_mean": _mean(normalised),
            "normalised_p90": percentile(normalised, 0.9),
            "turnaround": _mean([(x.finished - x.arrived) / max(x.finished - x.scheduled, 1e-9) for x in done]),
            "fairness": sum(means) ** 2 / (len(means) * sum(x * x for x in means)) if means else math.nan,
            "reused": sum(x.reused for x in done) / max(sum(x.prompt for x in done), 1),
            "swapped": float(sum(x.swapped for x in done)),
            "recomputed": float(sum(x.recomputed for x in done)),
            "rows": self.rows / max(self.steps, 1),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
