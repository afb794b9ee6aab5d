"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from kvtier.serving.http.answers import Answers, Part
from kvtier.serving.http.handlers.handler import DONE, Handler, Named, sse, streamed, usage_so_far
from kvtier.serving.http.requests.asked import Asked, asked_of
from kvtier.serving.http.requests.messages import messages_of
from kvtier.serving.http.requests.refusals import Refusal


class ChatHandler(Handler):
    """Messages in, a message out."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. Raises `Refusal`."""
        asked = asked_of("chat", body)
        self.served.check(body.get("model"))
        ids = await self.manager.read(self.prompt_of, messages_of(body), asked)
        parsers = await self.manager.read(self.parsers, ids, asked)
        asked.grammar = await self.grammar(asked, parsers[0])
        answers = await self.manager.generate(
            [ids], asked, self.visit, parsers=parsers, goes_on=asked.begun is not None
        )
        reply = _Reply(self, answers)
        if asked.stream:
            return streamed(reply.events(asked))
        return JSONResponse(reply.whole(await answers.all(), logprobs=asked.logprobs))


class _Reply:
    """Answers as this endpoint has them."""

    def __init__(self, handler: Handler, answers: Answers) -> None:
        self._handler = handler
        self._answers = answers
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": handler.served.name,
        }
        self._calls = [0] * len(answers.answers)

    def whole(self, parts: Sequence[Sequence[Part]], *, logprobs: bool) -> dict[str, Any]:
        """All of it."""
        choices = []
        for number, each in enumerate(parts):
            calls = [self._call(number, part) for part in each if part.call is not None]
            message: dict[str, Any] = {"role": "assistant", "content": "".join(x.text for x in each)}
            if reasoning := "".join(x.reasoning for x in each):
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
                message["content"] = message["content"] or None
            choice = {"index": number, "message": message, "finish_reason": each[-1].reason}
            logs = [log for part in each for log in self._logs(part)]
            choices.append(choice | {"logprobs": {"content": logs} if logprobs else None})
        return self._head | {"object": "chat.completion", "choices": choices, "usage": self._answers.usage}

    async def events(self, asked: Asked) -> AsyncIterator[str]:
        """As it comes."""
        begun = set[int]()
        try:
            async for number, part in self._answers.parts():
                if number not in begun:  # with its first tokens: load generators take it for these
                    begun.add(number)
                    role = {"role": "assistant", "content": ""}
                    yield self._chunk(number, role, more=usage_so_far(asked, self._answers))
                if part.call is not None:
                    delta: dict[str, Any] = {"tool_calls": [self._call(number, part)]}
                else:
                    shown = {"content": part.text, "reasoning_content": part.reasoning}
                    delta = {name: text for name, text in shown.items() if text}
                logs = self._logs(part) if asked.logprobs else []
                if delta or logs:
                    yield self._chunk(number, delta, logs=logs, more=usage_so_far(asked, self._answers))
                if part.reason:
                    yield self._chunk(number, {}, reason=part.reason, more=usage_so_far(asked, self._answers))
        except Refusal as error:
            yield sse(error.body)
        else:
            if asked.usage:
                head = self._head | {"object": "chat.completion.chunk"}
                yield sse(head | {"choices": [], "usage": self._answers.usage})
        yield DONE

    def _chunk(
        self, number: int, delta: Any, *, more: dict[str, Any], logs: Sequence[Any] = (), reason: str | None = None
    ) -> str:
        choice = {"index": number, "delta": delta, "finish_reason": reason}
        choice["logprobs"] = {"content": list(logs)} if logs else None
        return sse(self._head | {"object": "chat.completion.chunk", "choices": [choice]} | more)

    def _call(self, number: int, part: Part) -> dict[str, Any]:
        index, self._calls[number] = self._calls[number], self._calls[number] + 1
        function = {"name": part.call.name, "arguments": part.call.arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _logs(self, part: Part) -> list[dict[str, Any]]:
        found = []
        for log in part.logs:
            named = self._handler.named(log.token, log.logprob, log.top)
            found.append(_entry(named) | {"top_logprobs": [_entry(each) for each in named.top]})
        return found


def _entry(named: Named) -> dict[str, Any]:
    return {
        "token": named.text,
        "logprob": named.logprob,
        "bytes": None if named.bytes is None else list(named.bytes),
    }
