"""Prompts and messages of a body: text, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtier.serving.http.requests.refusals import invalid, shown

#: Prompts of a completion, at most.
MAX_PROMPTS = 256


def prompts_of(body: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts of a completion: a string, token ids, or a list of these.

    Raises:
        Refusal: it is none of these.
    """
    prompt = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts or len(prompts) > MAX_PROMPTS or not all(isinstance(x, str) or _is_ids(x) for x in prompts):
        raise invalid("prompt", f"give a string, token ids, or a list of these, at most {MAX_PROMPTS}")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat.

    Raises:
        Refusal: they are malformed, or hold something other than text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "give a list of messages, at least one")
    for i, message in enumerate(messages):
        check_message(f"messages[{i}]", message)
    return messages


def check_message(where: str, message: Any) -> None:
    """Refuse what is no message, or holds something other than text.

    Args:
        where: it is in the body.

    Raises:
        Refusal: so it is.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid(where, "give an object with a role and its content")
    check_content(where, message.get("content"))
    for name in ("name", "reasoning_content"):
        if not isinstance(message.get(name), str | None):
            raise invalid(where, f"{name} is a string")
    for name in ("function_call", "audio"):  # of assistants, before there were tools, and without a text
        if message.get(name) is not None:
            raise invalid(where, f"{name} is not supported")
    if message.get("content") is None and not message.get("tool_calls"):
        raise invalid(where, "it has no content")
    _check_calls(where, message.get("tool_calls"))


def check_content(where: str, content: Any) -> None:
    """Refuse content that is no text.

    Raises:
        Refusal: so it is.
    """
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(where, "content is a string, or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise invalid(where, f"{shown(kind)}: this server takes parts of text only")
        if not isinstance(part.get("text"), str):
            raise invalid(where, "a part of text has a text")


def _check_calls(where: str, calls: Any) -> None:
    if calls is None:
        return
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(where, "tool_calls is a list of functions with a name and arguments")
        arguments = function.get("arguments")
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid(where, "arguments of a function have half of a surrogate pair, which is no text") from None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise invalid(where, "arguments of a function are a JSON object")
