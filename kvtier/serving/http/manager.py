"""What Transformers' app asks for generation: requests to the engine, tokens back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.cli.serving.utils import BaseGenerateManager, _StreamError

from kvtier.conversation.calls.reuse import StoreStats
from kvtier.conversation.store import ConversationStore
from kvtier.errors import BudgetError
from kvtier.hf.models import generation as of
from kvtier.serving.engine import Engine
from kvtier.serving.http.answers import Answer, Answers
from kvtier.serving.http.metrics import Metrics
from kvtier.serving.http.parsing import Parser, unread_ends
from kvtier.serving.http.requests.asked import Asked
from kvtier.serving.http.requests.keys import Caller, Keys, Visit
from kvtier.serving.http.requests.refusals import Refusal, invalid, refusal_of_asked, shutting_down, too_long
from kvtier.serving.http.requests.settings import Penalties, asked_of, check_settings, with_own
from kvtier.serving.http.sessions import Sessions
from kvtier.serving.request import RequestOutput
from kvtier.stats import CacheStats

_LOG = logging.getLogger("kvtier.serving")
T = TypeVar("T")

#: Seconds that a client with a full queue is asked to wait, at the most.
_LONGEST_RETRY = 30
#: Seconds that metrics wait for the memory.
_LONGEST_LOOK = 0.5
#: Seconds between two looks at what a store could not save.
_LOOKS = 10.0


@dataclass(frozen=True)
class Limits:
    """What a request may take.

    Attributes:
        context: tokens of a prompt and its answer; None: the memory alone says.
        default_tokens: of an answer that names no limit.
        ttl: seconds after which a session that was not used is forgotten.
        sessions: that are known; beyond them, that which was not used for longest is forgotten.
    """

    context: int | None
    default_tokens: int
    ttl: float = math.inf
    sessions: int = 10_000


@dataclass(frozen=True, slots=True)
class _Terms:
    """What the requests of a client have in common.

    Attributes:
        salt, tenant: as of `Engine.add_request`.
        session: that they are a turn of; None: of none.
        samples: whether tokens are drawn.
    """

    salt: str | None
    session: str | None
    tenant: str
    samples: bool


class EngineManager(BaseGenerateManager):
    """Hands requests to an engine, whose thread runs them, and its tokens to the event loop.

    Args:
        engine: that runs.
        tokenizer: of its model.
        store: of sessions; None: there are none.
        keys: whose salts separate what is kept.
        metrics: that count.
        limits: of a request.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        store: ConversationStore | None,
        keys: Keys,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.limits = limits
        self.draining = False
        self._store = store
        self._keys = keys
        self._numbers = itertools.count()
        # Templates and tokens; and what waits for the engine's lock. One thread: what is cancelled was added before.
        self._readers = concurrent.futures.ThreadPoolExecutor(2, "kvtier-read")
        self._adder = concurrent.futures.ThreadPoolExecutor(1, "kvtier-add")
        # Grammars of schemas, which may take seconds: prompts wait for none of them.
        self._formers = concurrent.futures.ThreadPoolExecutor(1, "kvtier-form")
        # What shows how the server is: it waits for no prompt.
        self._lookers = concurrent.futures.ThreadPoolExecutor(1, "kvtier-look")
        self._lock = threading.Lock()
        self._news: dict[tuple[Answers, int], RequestOutput] = {}
        self._names: dict[Answers, list[str]] = {}
        # Used by the thread that adds.
        self._sessions = None if store is None else Sessions(store, limits.ttl, limits.sessions)
        self._now = time.monotonic
        self._problem = ""
        self._stats = engine.memory.stats, None if store is None else store.stats

    # Requests

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Do what takes long for a long prompt, in a thread next to the event loop, which knows the visit, too."""
        return await _within(self._readers, work, *args)

    async def form(self, work: Callable[..., T], *args: Any) -> T:
        """Make what holds answers to a schema, in a thread next to those that read prompts; it knows the visit, too."""
        return await _within(self._formers, work, *args)

    async def look(self, work: Callable[..., T], *args: Any) -> T:
        """Look how the server is, in a thread next to the event loop and to those that read prompts."""
        return await asyncio.get_running_loop().run_in_executor(self._lookers, work, *args)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        asked: Asked,
        visit: Visit,
        *,
        parsers: Sequence[Any] = (),
        default_tokens: int | None = None,
        goes_on: bool = False,
    ) -> Answers:
        """Add requests.

        Args:
            prompts: token ids of each.
            visit: that they are of, whose end is theirs.
            parsers: of what each sequence says; none: all is text.
            default_tokens: of an answer, where neither the request nor the server says.
            goes_on: whether the text of an answer goes on from that of its prompt; else it begins one.

        Raises:
            Refusal: they are not taken, and none of them runs.
        """
        if self.draining:
            raise shutting_down()
        sequences, most = len(prompts) * asked.count, self.engine.max_waiting
        if sequences > most:
            text = f"{sequences} answers are asked for, and no more than {most} requests may wait here: ask for less."
            raise Refusal(400, text, code="too_many_answers", param="n" if asked.count > 1 else "prompt")
        lengths = [self._length(len(ids), asked, default_tokens) for ids in prompts]
        parsers, own = parsers or [None] * sequences, self.engine.model.generation_config
        asked = with_own(asked, own)
        ends = asked.settings.get("eos_token_id", own.eos_token_id)
        silent = unread_ends(self.tokenizer, parsers[0], ends) | (asked.grammar.ends if asked.grammar else frozenset())
        answers = Answers(
            [
                Answer(self.tokenizer, asked.stop, parser, _least(asked), silent, behind=ids if goes_on else ())
                for parser, ids in zip(parsers, (x for x in prompts for _ in range(asked.count)), strict=True)
            ],
            asked.count,
            [len(ids) for ids in prompts],
            self._cancel,
            self._ended,
        )
        loop = asyncio.get_running_loop()
        visit.opened.append(answers)
        self._names[answers] = []
        try:
            terms = await loop.run_in_executor(self._adder, self._begin, prompts, asked, visit.caller)
            # One by one: others are let in between, and nothing more is added for a client that has left.
            for number in range(0, len(answers.answers), asked.count if terms.samples else 1):
                ids, length = prompts[number // asked.count], lengths[number // asked.count]
                await loop.run_in_executor(self._adder, self._add, loop, answers, number, ids, length, asked, terms)
        except asyncio.CancelledError:
            answers.cancel()
            raise
        except BudgetError as error:
            refusal = refusal_of_asked(error, self.retry_after)
            if asked.max_tokens is None:
                limit = f"{max(lengths)} tokens of an answer were reserved, for max_tokens does not say how many."
                refusal = Refusal(refusal.status, f"{refusal} {limit}", code=refusal.code, param="max_tokens")
            raise self._not_taken(answers, refusal) from error
        except Exception as error:
            raise self._not_taken(answers, refusal_of_asked(error, self.retry_after)) from error
        return answers

    def _not_taken(self, answers: Answers, refusal: Refusal) -> Refusal:
        """Some of these were refused: none of them runs."""
        answers.cancelled = True
        self._adder.submit(self._cancel_all, answers)
        return refusal

    def _length(self, prompt: int, asked: Asked, default_tokens: int | None) -> int:
        """Tokens of an answer, at the most."""
        context = self.limits.context
        if prompt == 0:
            raise Refusal(400, "The prompt has no tokens.", code="empty_prompt")
        if context is not None and prompt + (asked.max_tokens or 1) > context:
            asks = "" if asked.max_tokens is None else f" and {asked.max_tokens} are asked for"
            raise too_long(context, f"{prompt}{asks}")
        usual = self.limits.default_tokens if default_tokens is None else default_tokens
        most = asked.max_tokens or (usual if context is None else min(usual, context - prompt))
        least = _least(asked)
        if least > most:
            text = f"the answer may have {most} tokens, and {least} are to be there: give a larger max_tokens"
            raise invalid("min_tokens", text)
        return most

    def _begin(self, prompts: Sequence[Sequence[int]], asked: Asked, caller: Caller) -> _Terms:
        """What the requests of a client have in common."""
        if not self.alive:
            raise Refusal(503, "The server's engine has ended: start it again.", code="engine_ended")
        salt = self._keys.salt(caller, asked.cache_salt)
        session = asked.session or caller.session if len(prompts) == 1 else None
        # Without sampling all answers are the same, and Transformers refuses several of them.
        own = self.engine.model.generation_config
        samples = asked.settings.get("do_sample", bool(own.do_sample))
        check_settings(asked.settings, samples, of.vocabulary_of(self.engine.model), own)
        return _Terms(salt, session, caller.tenant, bool(samples))

    def _add(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        number: int,
        ids: Sequence[int],
        length: int,
        asked: Asked,
        terms: _Terms,
    ) -> None:
        """Add the request of an answer; where it samples, those to the same prompt are sequences of it.

        Args:
            number: of the answer.
            ids, length: of its prompt, and tokens of it at the most.
        """
        options: dict[str, Any] = dict(asked.settings, max_new_tokens=length)
        if asked.stop:
            options["stopping_criteria"] = [answers.answers[number].criterion(len(ids))]
        processors: list[Any] = []
        if asked.presence or asked.frequency:
            processors.append(Penalties(len(ids), asked.presence, asked.frequency))
        if asked.grammar is not None:
            processors.append(asked.grammar.processor(len(ids)))
        if processors:
            options["logits_processor"] = processors
        name, count = f"http-{next(self._numbers)}", asked.count if terms.samples else 1
        numbers = {name if not k else f"{name}#{k}": number + k for k in range(count)}
        options["num_return_sequences"] = count  # also 1: the model's own config may ask for more
        names = self._names.get(answers)
        if names is None:  # everything has been cancelled since the first ones of them were added
            raise shutting_down()
        names += numbers
        sessions = None if number % asked.count or terms.session is None else self._sessions
        # Held until the request is added, which then reads nothing from the disk.
        chat = None if sessions is None else sessions.open(terms.tenant, terms.session or "", terms.salt)
        session = None if chat is None else chat.name
        try:
            self.engine.add_request(
                ids,
                request_id=name,
                seed=asked.seed,
                logprobs=asked.logprobs,
                top_logprobs=asked.top_logprobs,
                salt=terms.salt,
                tenant=terms.tenant,
                conversation=session,
                listener=functools.partial(self._listen, loop, answers, numbers, session),
                **options,
            )
        except Exception:
            if sessions is not None and session is not None:
                sessions.refused(session)
            raise
        del chat
        if sessions is not None and session is not None:
            sessions.use(session)

    def _listen(
        self,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        numbers: dict[str, int],
        session: str | None,
        output: RequestOutput,
    ) -> None:
        """The engine's thread has something new. All of a step wake the event loop once.

        Args:
            numbers: of the answers, by the name of the sequence; the first one is a turn of the session.
        """
        ended = output.is_finished() and output.request_id == next(iter(numbers))
        if ended and session is not None and self._sessions is not None:
            with contextlib.suppress(RuntimeError):  # all threads have ended
                self._adder.submit(self._sessions.ended, session)
        with self._lock:
            first = not self._news
            self._news[answers, numbers[output.request_id]] = output
        if first:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        for (answers, number), output in news.items():
            answers.heard(number, output)

    def _cancel(self, answers: Answers) -> None:
        """Nobody wants more of these answers: let requests end, behind the one that is being added."""
        for number in answers.left:
            self._count(answers, number, "cancelled", answers.outputs.get(number))
        if answers.finished:
            self._names.pop(answers, None)
            return
        with contextlib.suppress(RuntimeError):  # all threads have ended
            self._adder.submit(self._cancel_all, answers)

    def cancel_everything(self) -> None:
        """Let all requests end at the next step; their clients hear that the server ends."""
        for answers in list(self._names):
            with contextlib.suppress(RuntimeError):  # all threads have ended
                self._adder.submit(self._cancel_all, answers)

    def _cancel_all(self, answers: Answers) -> None:
        for name in self._names.pop(answers, ()):
            self.engine.cancel(name)

    def _ended(self, answers: Answers, number: int, output: RequestOutput) -> None:
        """A sequence has ended for its client."""
        self._count(answers, number, answers.answers[number].reason, output)

    def _count(self, answers: Answers, number: int, reason: str, output: RequestOutput | None) -> None:
        if output is None:  # it was not begun
            self.metrics.ended(reason, prompt=0, cached=0, tokens=0, preempted=0, queued=None, first=None, seconds=0.0)
            return
        first = number % answers.samples == 0
        finished = output.finished if output.finished is not None else self._now()
        self.metrics.ended(
            reason,
            prompt=len(output.prompt_ids) if first else 0,
            cached=output.cached_tokens if first else 0,
            tokens=answers.answers[number].tokens,
            preempted=output.preempted,
            queued=None if output.scheduled is None else output.scheduled - output.arrived,
            first=None if output.first_token is None else output.first_token - output.arrived,
            seconds=finished - output.arrived,
        )

    @property
    def retry_after(self) -> int:
        """Seconds after which a full queue may have room."""
        return max(1, min(_LONGEST_RETRY, math.ceil(self.metrics.usual_seconds)))

    async def forget_sessions_forever(self) -> None:
        """Forget those that were not used for as long as they live, from time to time."""
        if self._sessions is None or self.limits.ttl == math.inf:
            return
        while True:
            await asyncio.sleep(min(60.0, max(0.1, self.limits.ttl / 4)))
            await asyncio.get_running_loop().run_in_executor(self._adder, self._sessions.forget_unused)

    async def tell_problems_forever(self) -> None:
        """Say what the store could not save or read, from time to time: no answer shows it."""
        while self._store is not None:
            await asyncio.sleep(_LOOKS)
            await self.look(self.tell_problem)

    def tell_problem(self) -> None:
        """Write into the log what the store could not save or read last, once."""
        _, kept = self._seen()
        if kept is not None and kept.problem != self._problem:
            self._problem = kept.problem
            if kept.problem:
                _LOG.warning("The store: %s", kept.problem)

    def text_of_metrics(self) -> str:
        """In Prometheus' format."""
        load, (memory, kept) = self.engine.load, self._seen()
        gauges = {
            "num_requests_running": ("requests that are computed", load.running),
            "num_requests_waiting": ("requests that wait", load.waiting),
            "kv_cache_usage_perc": (
                "share of the blocks that running requests hold",
                load.blocks / max(load.total_blocks, 1),
            ),
            "prompt_tokens_per_second": ("tokens of prompts that are computed in a second", load.rate),
            "engine_alive": ("whether the engine's thread runs", float(load.alive)),
        }
        for name, tier in (("device", memory.device), ("host", memory.host)):
            gauges[f"{name}_bytes"] = (f"of keys and values on the {name}", tier.bytes)
            gauges[f"{name}_budget_bytes"] = (f"that they may take on the {name}", tier.budget)
        if self._sessions is not None and kept is not None:
            gauges["sessions"] = ("sessions that are known", len(self._sessions))
            gauges["kept_sequences"] = ("sequences that are kept in memory", kept.sequences)
            gauges["disk_bytes"] = ("that are saved", kept.saved_bytes)
            gauges["damaged"] = ("pieces on the disk that were damaged", kept.damaged)
        return self.metrics.text(gauges)

    def _seen(self) -> tuple[CacheStats, StoreStats | None]:
        """What the memory and the store hold. Where a step does not let go of the memory in time, what they held when
        this was asked before."""
        lock = self.engine.memory.lock
        if lock.acquire(timeout=_LONGEST_LOOK):
            try:
                self._stats = self.engine.memory.stats, None if self._store is None else self._store.stats
            finally:
                lock.release()
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.engine.alive

    def stop(self) -> None:
        """No more requests. Idempotent."""
        self.draining = True
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._formers.shutdown(wait=True, cancel_futures=True)
        self._lookers.shutdown(wait=True, cancel_futures=True)
        self._adder.shutdown(wait=True)

    # What Transformers' own handlers ask

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """See `BaseGenerateManager`."""
        asked = asked_of(gen_config)
        streamer, queue = _Streamer(), asyncio.Queue[Any]()
        parsers = [] if response_parser is None else [Parser.instead_of(response_parser)]

        async def follow() -> None:
            try:
                answers = await self.generate([inputs["input_ids"]], asked, Visit(), parsers=parsers)
                async for _, part in answers.parts():
                    streamer.total_tokens = answers.answers[0].tokens
                    for item in (part.reasoning and _reasoning(part.reasoning), part.call, part.text):
                        if item:
                            queue.put_nowait(item)
                streamer.total_tokens = answers.answers[0].tokens
                queue.put_nowait(None)
            except Refusal as error:
                queue.put_nowait(_StreamError(str(error)))

        streamer.task = asyncio.get_running_loop().create_task(follow())
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """See `BaseGenerateManager`."""
        ids = inputs["input_ids"]
        answers = await self.generate([ids], asked_of(gen_config), Visit())
        await answers.all()
        tokens = answers.outputs[0].generated_tokens[: answers.answers[0].tokens]
        return processor.decode(tokens, skip_special_tokens=True), len(ids), list(tokens)


async def _within(threads: concurrent.futures.Executor, work: Callable[..., T], *args: Any) -> T:
    """Do something in another thread, which knows the visit."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(threads, run, work, *args)


def _least(asked: Asked) -> int:
    """Tokens of an answer, at the least."""
    least = asked.settings.get("min_new_tokens")
    return least if isinstance(least, int) else 0


class _Streamer:
    """What a handler of Transformers asks of a stream."""

    def __init__(self) -> None:
        self.total_tokens = 0
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """The client has left."""
        if self.task is not None:
            self.task.cancel()


def _reasoning(text: str) -> Any:
    from transformers.cli.serving.utils import ReasoningText

    return ReasoningText(text)
