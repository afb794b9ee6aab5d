"""`/v1/responses`: with the reading of items that Transformers has."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openai.types.responses import Response
from openai.types.responses.response_usage import ResponseUsage
from transformers.cli.serving.response import ResponseHandler, compute_usage

from kvtier.serving.http.answers import Answers
from kvtier.serving.http.handlers.handler import Handler, streamed
from kvtier.serving.http.handlers.items import Items
from kvtier.serving.http.requests.asked import Asked, asked_of
from kvtier.serving.http.requests.messages import check_message
from kvtier.serving.http.requests.refusals import Refusal, invalid

#: What the types of parts of a message begin with: a list of these is one message.
_PARTS = ("input_", "output_text", "text")
#: What items of each type have, besides what Transformers can do without.
_NEEDED = {
    "message": ("role",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


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
        asked.grammar = await self.grammar(asked, parsers[0])
        answers = await self.manager.generate([ids], asked, self.visit, parsers=parsers)
        reply = _Reply(answers, self._head(body, asked))
        if asked.stream:
            return streamed(reply.events())
        return JSONResponse(await reply.whole())

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
        _response(head | {"id": "resp_"}, "queued", output=[])
    except ValueError as error:
        lines = str(error).splitlines()
        raise invalid("tools", f"one is malformed: {' '.join(x.strip() for x in lines[1:3])}") from error


def messages_from(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Items as messages of a chat. Raises `Refusal`."""
    items = body.get("input")
    if not isinstance(items, (str, list)) or not items:
        raise invalid("input", "give a string, or a list of items")
    if isinstance(items, list) and not all(isinstance(item, dict) for item in items):
        raise invalid("input", "items are objects")
    if not isinstance(items, str) and not _is_parts(items):
        for i, item in enumerate(items):
            _check_item(f"input[{i}]", item)
    try:
        found = _messages(items)
    except HTTPException as error:
        raise Refusal(400, str(error.detail), code="invalid_value", param="input") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise invalid("input", f"an item is malformed: {error!r}") from error
    if not found:
        raise invalid("input", "give an item that says something")
    for message in found:  # whose numbers are not those of items
        check_message("input", message)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise invalid("instructions", "give a string")
    if instructions:  # before a system message of the input, and not in its place
        found.insert(0, {"role": "system", "content": instructions})
    return found


def _is_parts(items: list[dict[str, Any]]) -> bool:
    """Whether they are parts of one message."""
    return "role" not in items[0] and str(items[0].get("type")).startswith(_PARTS)


def _check_item(where: str, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    missing = [] if "role" in item else [name for name in _NEEDED.get(str(kind), ()) if item.get(name) is None]
    text = (
        f"an item of type {kind} has {' and '.join(_NEEDED[kind])}, and this one has no {missing[0]}" if missing else ""
    )
    thoughts = item.get("content") or [] if kind == "reasoning" else []
    if not isinstance(thoughts, list) or not all(
        isinstance(x, dict) and isinstance(x.get("text"), str) for x in thoughts
    ):
        text = "the content of a thought is a list of parts, each with a text"
    if text:
        raise Refusal(400, f"{where}: {text}.", code="invalid_value", param="input")


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a user says, or the items of a history, which begins with whichever of them its client has left."""
    if isinstance(items, str) or _is_parts(items):
        return [{"role": "user", "content": items}]
    found: list[dict[str, Any]] = ResponseHandler._normalize_response_items(_with_thoughts(items))
    return found


def _with_thoughts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of which each thought is before a message of the assistant. Transformers gives a thought to the next one,
    wherever that is, and of several thoughts keeps the last: where a call is behind it, or nothing, that message is
    empty."""
    found: list[dict[str, Any]] = []
    thought: list[Any] = []
    for item in [*items, {}]:
        if item.get("type") == "reasoning":
            thought += item.get("content") or []
            continue
        if thought:
            found.append({"type": "reasoning", "content": thought})
            found += [] if item.get("role") == "assistant" else [{"role": "assistant", "content": ""}]
            thought = []
        found.append(item)
    return found[:-1]


def _response(head: dict[str, Any], status: str, **fields: Any) -> dict[str, Any]:
    """Raises ValueError: a field is malformed."""
    found: dict[str, Any] = Response(**head, status=status, **fields).model_dump(mode="json", exclude_none=True)
    return found | {"created_at": int(found["created_at"])}  # as OpenAI's: there are clients that read no other number


class _Reply:
    """An answer as this endpoint has it."""

    def __init__(self, answers: Answers, head: dict[str, Any]) -> None:
        self._answers = answers
        name = uuid.uuid4().hex
        self._head = head | {"id": f"resp_{name}"}
        self._items = Items(name)

    async def events(self) -> AsyncIterator[str]:
        """As it comes."""
        items = self._items
        yield items.event("response.created", response=_response(self._head, "queued", output=[]))
        yield items.event("response.in_progress", response=_response(self._head, "in_progress", output=[]))
        try:
            async for _, part in self._answers.parts():
                if said := items.put(part):
                    yield "".join(said)
        except Refusal as error:
            failed = {"code": "server_error", "message": str(error)}
            yield items.event("error", code=error.code, message=str(error), param=error.param)
            yield items.event("response.failed", response=_response(self._head, "failed", output=[], error=failed))
            return
        yield "".join(items.end(self._status))
        last = self._last()
        yield items.event(f"response.{last['status']}", response=last)

    async def whole(self) -> dict[str, Any]:
        """All of it. Raises `Refusal`."""
        (parts,) = await self._answers.all()
        for part in parts:
            self._items.put(part)
        self._items.end(self._status)
        return self._last()

    @property
    def _status(self) -> str:
        """Of the response when all of it is there."""
        return "incomplete" if self._answers.answers[0].reason == "length" else "completed"

    def _last(self) -> dict[str, Any]:
        """The response when all of it is there."""
        fields: dict[str, Any] = {"output": self._items.done, "usage": self._usage()}
        if self._status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return _response(self._head, self._status, **fields)

    def _usage(self) -> ResponseUsage:
        usage = self._answers.usage
        found = compute_usage(usage["prompt_tokens"], usage["completion_tokens"])
        found.input_tokens_details.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        found.output_tokens_details.reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
        return found
