"""`/v1/responses`: with the events and the reading of items that Transformers has."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openai.types.responses import Response, ResponseIncompleteEvent
from openai.types.responses.response_usage import ResponseUsage
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage

from kvtier.serving.http.answers import Answers, Part
from kvtier.serving.http.asked import Asked, asked_of, check_message
from kvtier.serving.http.handlers.handler import Handler, streamed
from kvtier.serving.http.refusals import Refusal


class ResponsesHandler(Handler):
    """Items in, items out."""

    field = "input"

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. Raises `Refusal`."""
        asked = asked_of("responses", body)
        self.served.check(body.get("model"))
        messages = messages_from(body)
        asked.tools = ResponseHandler._normalize_tools(asked.tools)
        ids = await self.manager.read(self.prompt_of, messages, asked)
        check_head(self._head(body, asked))
        parsers = await self.manager.read(self.parsers, ids, asked)
        answers = await self.manager.generate([ids], asked, self.visit, parsers=parsers)
        reply = _Reply(answers, self._head(body, asked))
        if asked.stream:
            return streamed(reply.events())
        events = [event async for event in reply.parts()]
        return JSONResponse(reply.last(events))

    def _head(self, body: dict[str, Any], asked: Asked) -> dict[str, Any]:
        return {
            "created_at": time.time(),
            "model": self.served.name,
            "object": "response",
            "tools": body.get("tools") or [],
            "parallel_tool_calls": True,
            "tool_choice": body.get("tool_choice") or "auto",
            "instructions": body.get("instructions"),
            "max_output_tokens": asked.max_tokens,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
        }


def check_head(head: dict[str, Any]) -> None:
    """Refuse what a response cannot repeat, such as a tool without a name. Raises `Refusal`."""
    try:
        _ResponseStreamBuilder(request_id="", response_defaults=head | {"id": "resp_"}).start_response()
    except ValueError as error:
        lines = str(error).splitlines()
        text = f"tools: one is malformed: {' '.join(x.strip() for x in lines[1:3])}."
        raise Refusal(400, text, code="invalid_value", param="tools") from error


def messages_from(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Items as messages of a chat. Raises `Refusal`."""
    items = body.get("input")
    if not isinstance(items, (str, list)) or not items:
        raise Refusal(400, "input: give a string, or a list of items.", code="invalid_value", param="input")
    if isinstance(items, list) and not all(isinstance(item, dict) for item in items):
        raise Refusal(400, "input: items are objects.", code="invalid_value", param="input")
    try:
        found = ResponseHandler._normalize_input({"input": items})
    except HTTPException as error:
        raise Refusal(400, str(error.detail), code="invalid_value", param="input") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal(400, f"input: an item is malformed: {error!r}.", code="invalid_value", param="input") from error
    if not found:
        raise Refusal(400, "input: give an item that says something.", code="invalid_value", param="input")
    for message in found:  # whose numbers are not those of items
        check_message("input", message)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise Refusal(400, "instructions: give a string.", code="invalid_value", param="instructions")
    if instructions:  # before a system message of the input, and not in its place
        found.insert(0, {"role": "system", "content": instructions})
    return found


class _Reply:
    """Answers as this endpoint has them."""

    def __init__(self, answers: Answers, head: dict[str, Any]) -> None:
        self._answers = answers
        name = uuid.uuid4().hex
        self._builder = _ResponseStreamBuilder(request_id=name, response_defaults=head | {"id": f"resp_{name}"})
        self._head = head | {"id": f"resp_{name}"}
        self._calls = 0
        self.response: Response | None = None

    async def events(self) -> AsyncIterator[str]:
        """As it comes."""
        yield "".join(self._builder.start_response())
        try:
            async for part in self.parts():
                yield part
        except Refusal as error:
            yield "".join(self._builder.error(str(error)))

    async def parts(self) -> AsyncIterator[str]:
        """Events of the answer itself. Raises `Refusal`."""
        builder = self._builder
        reason = ""
        async for _, part in self._answers.parts():
            reason = part.reason
            if said := self._said(part):
                yield "".join(said)
        if builder.reasoning_open:
            yield "".join(builder.finish_reasoning())
        if not builder.message_open and builder.message_item is None:
            yield "".join(builder.start_message())
        if builder.message_open:
            yield "".join(builder.finish_message())
        yield "".join(self._ended(reason))

    def _said(self, part: Part) -> list[str]:
        builder, said = self._builder, list[str]()
        if builder.reasoning_open and (part.call is not None or part.text):
            said += builder.finish_reasoning()
        if part.call is not None:
            if builder.message_open:
                said += builder.finish_message()
            said += builder.tool_call(f"call_{builder.resp_id}_{self._calls}", part.call.name, part.call.arguments)
            self._calls += 1
        if part.reasoning:
            if not builder.reasoning_open:
                said += builder.start_reasoning()
            said += builder.reasoning_delta(part.reasoning)
        if part.text:
            if not builder.message_open:
                said += builder.start_message()
            said += builder.text_delta(part.text)
        return said

    def _ended(self, reason: str) -> Sequence[str]:
        builder, usage = self._builder, self._usage()
        items = [x for x in (builder.reasoning_item, builder.message_item, *builder.tool_calls) if x is not None]
        if reason != "length":
            self.response = builder._response("completed", output=items, usage=usage)
            found: list[str] = builder.completed(usage)
            return found
        self.response = builder._response(
            "incomplete", output=items, usage=usage, incomplete_details={"reason": "max_output_tokens"}
        )
        event = ResponseIncompleteEvent(type="response.incomplete", sequence_number=builder.seq, response=self.response)
        return [builder._emit(event)]

    def last(self, events: Sequence[str]) -> dict[str, Any]:
        """The whole response, when all its events are there."""
        assert events
        assert self.response is not None
        found: dict[str, Any] = self.response.model_dump(mode="json", exclude_none=True)
        return found

    def _usage(self) -> ResponseUsage:
        usage = self._answers.usage
        found = compute_usage(usage["prompt_tokens"], usage["completion_tokens"])
        found.input_tokens_details.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return found
