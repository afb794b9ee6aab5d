"""`Request`: one sequence that is generated, and what its user hears of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.hf.sampling import Sampling
from kvtier.scheduling.job import Job


@dataclass(slots=True)
class RequestOutput:
    """What became of a request.

    Attributes:
        request_id: its name.
        prompt_ids, generated_tokens: token ids.
        finish_reason: "stop" (an end-of-sequence token, a stop string or criterion), "length", "cancelled", "error".
        error: what was raised, where it failed.
        logprobs: of each generated token under the model's own scores, where they were asked for.
        cached_tokens: of the prompt, those that were not computed for this request.
        preempted: times that it gave up its blocks.
        arrived, first_token, finished: seconds of the engine's clock; None: it did not come to that.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: BaseException | None = None
    logprobs: list[float] | None = None
    cached_tokens: int = 0
    preempted: int = 0
    arrived: float = 0.0
    first_token: float | None = None
    finished: float | None = None

    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return bool(self.finish_reason)


class Request:
    """A request of an engine. Only its engine changes it.

    Attributes:
        output: what there is of it so far.
        sampling: what it asks of each token.
        job: as the scheduler sees it.
        ids: prompt and generated tokens.
        sequence: of the runner, while it runs.
        salt, key: who may share what it computes, and all else that this depends on.
        conversation: that it is a turn of; None: of none.
        alone: there was no room for it and for what is kept of it: it begins with nothing, and nothing of it is kept.
        lost: times that a failure has cost what was computed.
        cancelled: it is to end at the next step.
        samples: other sequences of its prompt, which begin when that is computed.
        done: set when it has ended.
    """

    def __init__(
        self,
        output: RequestOutput,
        sampling: Sampling,
        job: Job,
        *,
        salt: Hashable = None,
        conversation: str | None = None,
    ) -> None:
        self.output = output
        self.salt = salt
        self.key: Hashable = salt
        self.conversation = conversation
        self.sampling = sampling
        self.job = job
        self.ids = list(output.prompt_ids)
        self.sequence: Any = None
        self.alone = False
        self.lost = 0
        self.cancelled = False
        self.samples: list[Request] = []
        self.done = threading.Event()

    @property
    def name(self) -> str:
        """Its request id."""
        return self.output.request_id

    def give(self, token: int) -> None:
        """A new token."""
        self.ids.append(token)
        self.output.generated_tokens.append(token)

    def again(self) -> None:
        """After an interrupt: it has no sequence, and its output and its job have the tokens that it has."""
        output, job = self.output, self.job
        output.generated_tokens[:] = self.ids[len(output.prompt_ids) :]
        if output.logprobs is not None:
            count = len(output.generated_tokens)
            output.logprobs[:] = (output.logprobs + [math.nan] * count)[:count]
        self.sequence = None
        job.tokens, job.running = len(self.ids), False
        job.cached = job.blocks = job.reusable = 0

    def end(self, reason: str, now: float, error: BaseException | None = None) -> None:
        """It is over. Nothing, if it is over already."""
        if not self.done.is_set():
            self.output.finish_reason, self.output.error, self.output.finished = reason, error, now
            self.done.set()


def prompt_of(ids: Any) -> list[int]:
    """Token ids as a list of integers: of a list, a tensor or an array, `[tokens]` or `[1, tokens]`."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, Sequence) and len(ids) == 1 and isinstance(ids[0], Sequence):
        ids = ids[0]
    return [int(x) for x in ids]
