"""Requests of the engine to parts of answers: the same ones, streamed or not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.serving.http.requests.refusals import refusal_of, shutting_down
from kvtier.serving.request import RequestOutput
from kvtier.serving.text import StopCutter, StopsInAnswer, TextStream


@dataclass(slots=True)
class TokenLog:
    """A token and its log-probability; and those of the likeliest ones at its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Part:
    """A part of an answer, of one kind.

    Attributes:
        text: that the user reads.
        reasoning: that the model thought.
        call: of a tool, with `name` and `arguments`.
        logs: of tokens that this part, or what was held back before it, is of.
        reason: why the answer has ended, in the last part of it: "stop", "length", "tool_calls".
    """

    text: str = ""
    reasoning: str = ""
    call: Any = None
    logs: list[TokenLog] = field(default_factory=list)
    reason: str = ""


class _ThoughtTokens:
    """How many tokens of an answer are thoughts: those with text in them, and so without the marks around.

    Attributes:
        count: of those that the parser has told.
    """

    def __init__(self) -> None:
        self.count = 0
        self._characters = 0
        self._textless = 0  # tokens that have none yet: parts of a character, which is of those that follow too
        self._open = deque[tuple[int, int, int]]()  # from one character to before another, so many tokens

    def put(self, text: str, *, tokens: int = 1) -> None:
        """What text tokens add."""
        self._textless += tokens
        if text:
            begin, self._characters = self._characters, self._characters + len(text)
            self._open.append((begin, self._characters, self._textless))
            self._textless = 0

    def told(self, parser: Any) -> None:
        """Count what a parser has read."""
        for begin, end in parser.thoughts:
            while self._open and self._open[0][0] < end:
                _, behind, tokens = self._open.popleft()
                self.count += tokens if behind > begin else 0
        parser.thoughts.clear()
        while self._open and self._open[0][1] <= parser.read_to:
            self._open.popleft()


class Answer:
    """One sequence as its client sees it.

    Args:
        tokenizer: of the model.
        stop: strings that end it, and are no part of it.
        parser: of what the model writes; None: all of it is text.
        least: tokens of the answer; a string does not end it that ends in them.
        silent: tokens that have no text, though the parser reads special ones.
        behind: tokens that its text goes on from; none: it begins a text.

    Attributes:
        tokens: of the sequence, up to where it ends for the client.
        reason: why it has ended; "": it has not.
        error: what it failed with.
        called: whether it calls a tool.
        thought: tokens of it that are thoughts, as far as that is told.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        parser: Any = None,
        least: int = 0,
        silent: frozenset[int] = frozenset(),
        behind: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._least = least
        # A parser reads special tokens.
        self._of_text: dict[str, Any] = {"skip_special_tokens": parser is None, "silent": silent, "behind": behind}
        self._text = TextStream(tokenizer, **self._of_text)
        self._cutter = StopCutter(stop)
        self._parser = parser
        self._logs: list[TokenLog] = []
        self._thoughts = _ThoughtTokens()
        self.tokens = 0
        self.reason = ""
        self.error: BaseException | None = None
        self.called = False

    def criterion(self, prompt: int) -> StopsInAnswer:
        """What ends a sequence behind a prompt of so many tokens where this answer, which has stop strings, ends."""
        return StopsInAnswer(self._tokenizer, self._stop, prompt, least=self._least, **self._of_text)

    def feed(self, output: RequestOutput) -> list[Part]:
        """What is new in a request's output."""
        finished = output.finish_reason  # read before its tokens, which are all there then
        parts: list[Part] = []
        there = min(len(x) for x in (output.generated_tokens, output.logprobs, output.top_logprobs) if x is not None)
        while self.tokens < there and not self.reason:
            parts += self._put(output)
        if finished and not self.reason:
            self.reason, self.error = finished, output.error
        if self.reason:
            parts += self._end()
        return _joined(parts)

    @property
    def finish(self) -> str:
        """Why it has ended, as clients read it."""
        return "tool_calls" if self.called and self.reason == "stop" else self.reason

    @property
    def thought(self) -> int:
        """See the class."""
        return self._thoughts.count

    def _put(self, output: RequestOutput) -> list[Part]:
        at, self.tokens = self.tokens, self.tokens + 1
        token = output.generated_tokens[at]
        if output.logprobs is not None:
            top = [] if output.top_logprobs is None else output.top_logprobs[at]
            self._logs.append(TokenLog(token, output.logprobs[at], top))
        text = self._text.put(token)
        if self._parser is not None:
            self._thoughts.put(text)
        said = self._cut(text)
        if self._cutter.found is not None:
            self.reason = "stop"
        return self._said(said)

    def _end(self) -> list[Part]:
        """What was held back."""
        parts = []
        if self._cutter.found is None:
            text = self._text.end()
            self._thoughts.put(text, tokens=0)
            parts += self._said(self._cut(text))
            parts += self._said(self._cutter.end())
            self.reason = self.reason if self._cutter.found is None else "stop"
        if self._parser is not None:
            parts += self._parsed(self._parser.finalize()[1])
            self._thoughts.told(self._parser)
            self._parser = None
        parts.append(Part(logs=self._logs, reason=self.finish))
        self._logs = []
        return parts

    def _cut(self, text: str) -> str:
        return self._cutter.put(text, ends=self.tokens > self._least)

    def _said(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._parser is None:
            parts = [Part(text=text)]
        else:
            parts = self._parsed(self._parser.feed(text))
            self._thoughts.told(self._parser)
        if parts:
            parts[-1].logs, self._logs = self._logs, []
        return parts

    def _parsed(self, events: Any) -> list[Part]:
        from transformers.cli.serving import utils

        parts = []
        for item in utils.response_events_to_chunks(events):
            if isinstance(item, utils.ReasoningText):
                parts.append(Part(reasoning=str(item)))
            elif isinstance(item, str):
                parts.append(Part(text=item))
            else:
                parts.append(Part(call=item))
                self.called = True
        return parts


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one kind are one part."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is None or part.call is not None or last.call is not None or _unlike(last, part):
            found.append(part)
        else:
            text, reasoning = last.text + part.text, last.reasoning + part.reasoning
            found[-1] = Part(text, reasoning, None, last.logs + part.logs, part.reason)
    return found


def _unlike(a: Part, b: Part) -> bool:
    return bool((a.text and b.reasoning) or (a.reasoning and b.text))


class Answers:
    """The answers to one request of a client, which may be several sequences of several prompts. On the event loop.

    Args:
        answers: one of each sequence.
        samples: sequences of each prompt.
        prompts: tokens of each prompt.
        cancel: called once, when nobody wants more of them: they have ended, or the client has left.
        ended: called with the number and the output of each that has ended.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        samples: int,
        prompts: Sequence[int],
        cancel: Callable[[Answers], None],
        ended: Callable[[Answers, int, RequestOutput], None],
    ) -> None:
        self.answers = list(answers)
        self.samples = samples
        self.prompts = list(prompts)
        self.outputs: dict[int, RequestOutput] = {}
        self.cancelled = False
        self._cancel = cancel
        self._ended = ended
        self._left = set(range(len(self.answers)))
        self._news: dict[int, None] = {}
        self._woken = asyncio.Event()

    def heard(self, number: int, output: RequestOutput) -> None:
        """The engine has something new of a sequence."""
        self.outputs[number] = output
        self._news[number] = None
        self._woken.set()

    async def parts(self) -> AsyncIterator[tuple[int, Part]]:
        """Parts as they come, each with the number of its sequence, until all have ended.

        Raises:
            Refusal: a sequence has failed.
        """
        try:
            while self._left:
                await self._woken.wait()
                self._woken.clear()
                news, self._news = self._news, {}
                for number in news:
                    for part in self._feed(number):
                        yield number, part
        finally:
            self.cancel()

    def _feed(self, number: int) -> list[Part]:
        if number not in self._left:
            return []
        answer, output = self.answers[number], self.outputs[number]
        parts = answer.feed(output)
        if answer.reason:
            self._left.discard(number)
            self._ended(self, number, output)
        if answer.reason == "error":
            raise refusal_of(answer.error or RuntimeError("the request failed"))
        if answer.reason == "cancelled":
            raise shutting_down()
        return parts

    async def all(self) -> list[list[Part]]:
        """The parts of each sequence when all have ended. Raises `Refusal`."""
        found: list[list[Part]] = [[] for _ in self.answers]
        async for number, part in self.parts():
            found[number].append(part)
        return [_joined(parts) for parts in found]

    @property
    def finished(self) -> bool:
        """Whether the engine is done with all of them."""
        return len(self.outputs) == len(self.answers) and all(x.is_finished() for x in self.outputs.values())

    @property
    def left(self) -> list[int]:
        """The numbers of those that have not ended for the client."""
        return sorted(self._left)

    def cancel(self) -> None:
        """End what has not ended. Idempotent."""
        if not self.cancelled:
            self.cancelled = True
            self._cancel(self)

    @property
    def usage(self) -> dict[str, Any]:
        """What it took so far: each prompt counts once."""
        prompt, tokens = sum(self.prompts), sum(answer.tokens for answer in self.answers)
        firsts = [self.outputs.get(i) for i in range(0, len(self.answers), self.samples)]
        cached = sum(output.cached_tokens for output in firsts if output is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(answer.thought for answer in self.answers)},
        }
