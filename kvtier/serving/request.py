"""`Request`: one sequence that is generated, and what its user hears of it."""

from __future__ import annotations

import logging
import math
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from kvtier.conversation.conversation import Conversation
from kvtier.conversation.given.arguments import check_count, check_salt
from kvtier.errors import ConfigError
from kvtier.hf.engine.sampling import Sampling, log_probabilities
from kvtier.scheduling.job import Job

_LOG = logging.getLogger("kvtier.serving")

#: Characters of a wrong prompt in an error.
_SHOWN = 60


@dataclass(slots=True)
class RequestOutput:
    """What became of a request.

    Attributes:
        request_id: its name.
        prompt_ids, generated_tokens: token ids.
        finish_reason: "stop" (an end-of-sequence token, a stop string or criterion), "length", "cancelled", "error".
        error: what was raised, where it failed.
        logprobs: of each generated token under the model's own scores, where they were asked for.
        top_logprobs: of each generated token, the likeliest tokens at its place and their log-probabilities.
        cached_tokens: of the prompt, those that were not computed for this request: all of them where it is a further
            sequence of the prompt, and goes on from the first one.
        preempted: times that it gave up its blocks.
        swapped: of these, times that they were to stay on the host until it goes on.
        arrived, scheduled, first_token, finished: seconds of the engine's clock when it came, first had a part in a
            step, had its first token, and ended; None: it did not come to that.
        conversation_error: why the conversation that it is a turn of did not go on with it, or is not saved or ranked
            as it is now; None: it is, or will be saved. The tokens are right in any case.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: BaseException | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    preempted: int = 0
    swapped: int = 0
    arrived: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    conversation_error: BaseException | None = None

    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return bool(self.finish_reason)


class Chosen(NamedTuple):
    """The next token of a sequence.

    Attributes:
        token: its id.
        log: its log-probability, where it was asked for.
        top: the likeliest tokens at its place, and their log-probabilities, as many as were asked for.
    """

    token: int
    log: float = math.nan
    top: Sequence[tuple[int, float]] = ()


#: Is told of each new token of a sequence, and of its end.
Listener = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do.

    Attributes:
        running, waiting: requests.
        blocks, total_blocks: that running requests hold, and that there are; a block is of all layers.
        rate: tokens of prompts that it computes in a second, by what steps took.
        steps: that were computed.
        computed, rows: tokens that they computed, and sequences that had a part, summed over all steps.
        alive: whether its thread runs.
    """

    running: int
    waiting: int
    blocks: int
    total_blocks: int
    rate: float
    steps: int
    computed: int
    rows: int
    alive: bool


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks of an engine, besides its tokens; see `Engine.add_request`."""

    request_id: str | None = None
    priority: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    salt: Hashable = None
    conversation: str | None = None
    tenant: str = ""
    listener: Listener | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` of what no step could honour: it would fail the others, too."""
        try:
            object.__setattr__(self, "priority", operator.index(self.priority))
        except TypeError:
            raise ConfigError(f"priority={self.priority!r:.80}: give a whole number.") from None
        check_count("top_logprobs", self.top_logprobs, 0)
        check_salt(self.salt)
        if not isinstance(self.tenant, str):
            raise ConfigError(f"tenant={self.tenant!r:.80}: give a string.")
        if self.listener is not None and not callable(self.listener):
            raise ConfigError(f"listener={self.listener!r:.80}: give a function of one output.")

    @classmethod
    def names(cls) -> set[str]:
        """Of all of them."""
        return {each.name for each in fields(cls)}

    def check_prompts(self, count: int) -> None:
        """Raise `ConfigError` where so many prompts would have one name, or be the same turn of a conversation."""
        for name in ("request_id", "conversation"):
            value = getattr(self, name)
            if value is not None and count > 1:
                raise ConfigError(f"{name}={value!r:.80} is of one request, not of {count}: leave it out.")


class Prepared(NamedTuple):
    """What is asked for a prompt, checked, and not in the queue yet.

    Attributes:
        prompt: token ids.
        samplings: what each of its sequences asks.
        terms: what all of them ask besides.
    """

    prompt: list[int]
    samplings: list[Sampling]
    terms: RequestOptions


class Request:
    """A request of an engine. Only its engine changes it.

    Attributes:
        output: what there is of it so far.
        sampling: what it asks of each token.
        job: as the scheduler sees it.
        ids: prompt and generated tokens.
        sequence: of the runner, while it runs.
        salt, key: who may share what it computes, and all else that this depends on.
        chat: the conversation that it is a turn of; None: of none.
        begun: it had a sequence, now or before.
        alone: there was no room for it and for what is kept of it: it begins with nothing, and nothing of it is kept.
        epoch, changes: of what is kept, see `Kept`, and of the model, see `Prefixes`, when it got its sequence.
        lost: times that a failure has cost what was computed.
        cancelled: it is to end at the next step.
        samples: other sequences of its prompt, which begin when that is computed.
        listener: is told of its tokens and its end.
        top_logprobs: how many of the likeliest tokens are kept at each place.
        done: set when it has ended.
    """

    def __init__(self, output: RequestOutput, sampling: Sampling, job: Job, terms: RequestOptions) -> None:
        self.output = output
        self.salt = terms.salt
        self.key: Hashable = terms.salt
        self.chat: Conversation | None = None
        self.listener = terms.listener
        self.top_logprobs = terms.top_logprobs
        self.sampling = sampling
        self.job = job
        self.ids = list(output.prompt_ids)
        self.sequence: Any = None
        self.begun = self.alone = False
        self.epoch = self.changes = 0
        self.lost = 0
        self.cancelled = False
        self.samples: list[Request] = []
        self.done = threading.Event()

    @property
    def name(self) -> str:
        """Its request id."""
        return self.output.request_id

    def goes_beyond(self, count: int) -> bool:
        """Whether it has more than so many new tokens, or has ended."""
        return len(self.output.generated_tokens) > count or self.done.is_set()

    def chosen(self, token: int, scores: torch.Tensor) -> Chosen:
        """A token that was chosen by the model's own scores `[vocabulary]`, with what else was asked for. Changes
        nothing."""
        if self.output.logprobs is None:
            return Chosen(token)
        logs = log_probabilities(scores)
        if self.output.top_logprobs is None:
            return Chosen(token, float(logs[token]))
        top = logs.topk(min(self.top_logprobs, len(logs)))
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Chosen(token, float(logs[token]), pairs)

    def give(self, chosen: Chosen) -> None:
        """A new token."""
        output = self.output
        self.ids.append(chosen.token)
        output.generated_tokens.append(chosen.token)
        self.job.tokens += 1
        if output.logprobs is not None:
            output.logprobs.append(chosen.log)
        if output.top_logprobs is not None:
            output.top_logprobs.append(list(chosen.top))

    def tell(self) -> None:
        """Its listener hears how far it is."""
        if self.listener is not None:
            try:
                self.listener(self.output)
            except Exception:
                _LOG.exception("A listener of request %r raised.", self.name)

    def again(self) -> None:
        """After an interrupt: it has no sequence, and its output and its job have the tokens that it has."""
        output, job = self.output, self.job
        output.generated_tokens[:] = self.ids[len(output.prompt_ids) :]
        if output.logprobs is not None:
            count = len(output.generated_tokens)
            output.logprobs[:] = (output.logprobs + [math.nan] * count)[:count]
        if output.top_logprobs is not None:
            count = len(output.generated_tokens)
            output.top_logprobs[:] = (output.top_logprobs + [[]] * count)[:count]
        self.sequence = None
        job.tokens, job.running = len(self.ids), False
        job.cached = job.blocks = job.reusable = job.swapped = 0

    def end(self, reason: str, now: float, error: BaseException | None = None) -> None:
        """It is over. Nothing, if it is over already."""
        if not self.done.is_set():
            self.output.error, self.output.finished = error, now
            self.output.finish_reason = reason  # last: whoever reads that it has ended, in another thread, reads how
            self.done.set()


def prompt_of(ids: Any) -> list[int]:
    """Token ids as a list of integers: of a list, a tensor or an array, `[tokens]` or `[1, tokens]`.

    Raises:
        ConfigError: something else.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, Sequence) and len(ids) == 1 and isinstance(ids[0], Sequence):
        ids = ids[0]
    try:
        return [operator.index(x) for x in ids]
    except TypeError:
        raise ConfigError(
            f"A prompt is token ids, as in `tokenizer(text).input_ids`: whole numbers in a list or tensor, [tokens] or "
            f"[1, tokens], and not {_shown(ids)}."
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
