"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from kvtier.serving.http.answers import Answers, Part, TokenLog
from kvtier.serving.http.handlers.handler import DONE, Handler, Named, sse, streamed, usage_so_far
from kvtier.serving.http.requests.asked import Asked, asked_of
from kvtier.serving.http.requests.messages import prompts_of
from kvtier.serving.http.requests.refusals import Refusal

#: Tokens of an answer that names no limit: OpenAI's.
_DEFAULT_TOKENS = 16


class CompletionHandler(Handler):
    """Prompts in, what follows them out."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. Raises `Refusal`."""
        asked = asked_of("completions", body)
        self.served.check(body.get("model"))
        given = prompts_of(body)
        prompts = [await self.manager.read(self.ids_of, prompt) for prompt in given]
        echoed = [await self.manager.read(self._text, prompt) if body.get("echo") else "" for prompt in given]
        asked.grammar = await self.grammar(asked)
        answers = await self.manager.generate(prompts, asked, self.visit, default_tokens=_DEFAULT_TOKENS, goes_on=True)
        reply = _Reply(self, answers, [echo for echo in echoed for _ in range(asked.count)])
        if asked.stream:
            return streamed(reply.events(asked))
        return JSONResponse(reply.whole(await answers.all(), logprobs=asked.logprobs))

    def _text(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else str(self.served.tokenizer.decode(prompt))


class _Reply:
    """Answers as this endpoint has them.

    Args:
        echoes: what each answer begins with.
    """

    def __init__(self, handler: Handler, answers: Answers, echoes: Sequence[str]) -> None:
        self._handler = handler
        self._answers = answers
        self._echoes = echoes
        self._offsets = [0] * len(echoes)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": handler.served.name,
        }

    def whole(self, parts: Sequence[Sequence[Part]], *, logprobs: bool) -> dict[str, Any]:
        """All of it."""
        choices = []
        for number, each in enumerate(parts):
            logs = [log for part in each for log in part.logs]
            text = self._echoes[number] + "".join(part.text for part in each)
            choices.append(self._choice(number, text, each[-1].reason, self._logs(number, logs) if logprobs else None))
        return self._head | {"choices": choices, "usage": self._answers.usage}

    async def events(self, asked: Asked) -> AsyncIterator[str]:
        """As it comes."""
        for number, echo in enumerate(self._echoes):
            if echo:
                yield sse(
                    self._head
                    | {"choices": [self._choice(number, echo, None, None)]}
                    | usage_so_far(asked, self._answers)
                )
        try:
            async for number, part in self._answers.parts():
                logs = self._logs(number, part.logs) if asked.logprobs and part.logs else None
                choice = self._choice(number, part.text, part.reason or None, logs)
                yield sse(self._head | {"choices": [choice]} | usage_so_far(asked, self._answers))
        except Refusal as error:
            yield sse(error.body)
        else:
            if asked.usage:
                yield sse(self._head | {"choices": [], "usage": self._answers.usage})
        yield DONE

    def _choice(self, number: int, text: str, reason: str | None, logs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": number, "text": text, "finish_reason": reason, "logprobs": logs}

    def _logs(self, number: int, logs: Sequence[TokenLog]) -> dict[str, Any]:
        named = [self._handler.named(log.token, log.logprob, log.top) for log in logs]
        offsets = []
        for each in named:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(each.text)
        return {
            "tokens": [each.name for each in named],
            "token_logprobs": [each.logprob for each in named],
            "top_logprobs": [_top(each) for each in named] if any(each.top for each in named) else None,
            "text_offset": offsets,
        }


def _top(named: Named) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens by name, and of the one that was chosen, which may be none of them. Of
    two that look the same, the second one is named by its id, as vLLM names tokens."""
    found = {named.name: named.logprob}
    for each in named.top:
        if each.token != named.token:
            found[f"token_id:{each.token}" if each.name in found else each.name] = each.logprob
    return dict(sorted(found.items(), key=lambda item: -item[1]))
