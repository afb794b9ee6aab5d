"""Calls of tools on the wire, streamed or not, whatever the model writes; and where prompts are decoded for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from servers import NAME, Running
from transformers.cli.serving import utils

from kvtier.serving.http import answers
from kvtier.serving.http.answers import Part
from kvtier.serving.http.handlers.handler import streamed
from kvtier.serving.http.handlers.responses import ResponsesHandler, _Reply
from kvtier.serving.text import TextStream

PROMPT = "def first(items):\n"
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
QWEN = next(x for types, x in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types)


@pytest.fixture
def parsed(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model writes is read as Qwen 3 writes."""
    monkeypatch.setattr(trained[1], "response_template", QWEN, raising=False)


@pytest.fixture
def written(parsed: None, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Lets the model write a text, and end there: gives the fields that ask for it."""
    ids = trained[1](PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        tokens = trained[0].generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    last = max(i for i, token in enumerate(tokens) if token not in tokens[:i])

    def write(text: str) -> dict[str, Any]:
        size = -(-len(text) // (last + 1))

        class Scripted(TextStream):
            tokens = 0

            def put(self, token: int) -> str:
                self.tokens += 1
                return text[(self.tokens - 1) * size : self.tokens * size]

        monkeypatch.setattr(answers, "TextStream", Scripted)
        return {"model": NAME, "extra_body": {"generation_config": json.dumps({"eos_token_id": tokens[last]})}}

    return write


@pytest.mark.parametrize("call", ["{bad", '[{"name": "f"}]', '{"arguments": {}}', "5"])
def test_a_call_that_cannot_be_read_is_content(
    running: Running, written: Callable[[str], dict[str, Any]], call: str
) -> None:
    text = f"I look: <tool_call>{call}</tool_call> now."
    asked = written(text) | {"messages": [{"role": "user", "content": PROMPT}]}
    client = running.client()
    (whole,) = client.chat.completions.create(**asked).choices
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (text, None, "stop")
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason == "stop"


def test_a_call_without_arguments_is_a_call(running: Running, written: Callable[[str], dict[str, Any]]) -> None:
    asked = written('<tool_call>{"name": "now"}</tool_call>') | {"messages": [{"role": "user", "content": PROMPT}]}
    (whole,) = running.client().chat.completions.create(**asked).choices
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments, whole.finish_reason) == ("now", "{}", "tool_calls")


def test_a_response_that_calls_is_read_by_openais_client(
    running: Running, written: Callable[[str], dict[str, Any]]
) -> None:
    asked = written(f"<think>Hm.</think>I look.{CALL}") | {"input": PROMPT}
    with running.client().responses.stream(**asked) as stream:
        kinds = [event.item.type for event in stream if event.type == "response.output_item.added"]
        final = stream.get_final_response()
    assert kinds == [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (final.output_text, final.output[2].arguments) == ("I look.", '{"x": 1}')
    assert kinds == [item.type for item in running.client().responses.create(**asked).output]


SAID = {
    "t": ("message", Part(text="I look.")),
    "s": ("message", Part(text="So it is.")),
    "r": ("reasoning", Part(reasoning="Hm.")),
    "c": ("function_call", Part(call=SimpleNamespace(name="f", arguments='{"x": 1}'))),
}


def replied(parts: Sequence[Part], reason: str = "stop") -> _Reply:
    """To a request whose answer has these parts."""

    async def each() -> Any:
        for part in parts:
            yield 0, part

    async def whole() -> Any:
        return [list(parts)]

    usage = {"prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    given: Any = SimpleNamespace(answers=[SimpleNamespace(reason=reason)], usage=usage, parts=each, all=whole)
    head = {"created_at": 1.0, "model": NAME, "object": "response", "parallel_tool_calls": True, "tool_choice": "auto"}
    return _Reply(given, head | {"tools": []})


@pytest.mark.parametrize("said", ["c", "tc", "ct", "rc", "tcs", "cc", "rtcrs", "t", "r", ""])
def test_items_of_a_response_are_told_in_their_order(
    running: Running, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Each has an index, an id and a text of its own, and OpenAI's client takes them."""
    expected = [SAID[x][0] for x in said] + ([] if set(said) & set("tc") else ["message"])

    async def reply(*_: Any) -> Any:
        return streamed(replied([SAID[x][1] for x in said]).events())

    monkeypatch.setattr(ResponsesHandler, "handle_request", reply)
    with running.client().responses.stream(model=NAME, input="x") as stream:
        seen = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    for what in ("added", "done"):
        items = [event for event in seen if event.type == f"response.output_item.{what}"]
        assert [event.output_index for event in items] == list(range(len(expected)))
        assert [event.item.type for event in items] == expected
        assert [event.item.id for event in items] == [item.id for item in final.output]
    assert [item.type for item in final.output] == expected
    assert len({item.id for item in final.output}) == len(expected)
    texts = [SAID[x][1].text for x in said if x in "ts"]
    assert [item.content[0].text for item in final.output if item.type == "message"] == (
        texts or [""] * expected.count("message")
    )
    assert [event.text for event in seen if event.type == "response.output_text.done"] == (
        texts or [""] * expected.count("message")
    )
    whole = asyncio.run(replied([SAID[x][1] for x in said]).whole())
    assert [item["type"] for item in whole["output"]] == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("t", ["incomplete"]),
        ("r", ["incomplete", "incomplete"]),
        ("rt", ["completed", "incomplete"]),
        ("tc", ["completed", "completed"]),
        ("", ["incomplete"]),
    ],
)
def test_of_a_response_that_is_cut_off_what_was_cut_is_incomplete(said: str, expected: list[str]) -> None:
    """A call is whole: what could be a part of one is text."""
    parts = [SAID[x][1] for x in said]
    whole = asyncio.run(replied(parts, "length").whole())
    assert [item["status"] for item in whole["output"]] == expected

    async def events() -> list[dict[str, Any]]:
        text = "".join([event async for event in replied(parts, "length").events()])
        return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]

    told = asyncio.run(events())
    assert [x["item"]["status"] for x in told if x["type"] == "response.output_item.done"] == expected
    assert told[-1]["type"] == "response.incomplete"
    assert [item["status"] for item in told[-1]["response"]["output"]] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_token_that_the_parser_does_not_know_is_no_content(running: Running, parsed: None, stream: bool) -> None:
    pad = {"forced_eos_token_id": 1, "eos_token_id": 1}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 3, "extra_body": {"generation_config": pad}}
    done: Any = running.client().chat.completions.create(
        **asked, messages=[{"role": "user", "content": PROMPT}], stream=stream
    )
    content = "".join(x.choices[0].delta.content or "" for x in done) if stream else done.choices[0].message.content
    assert content
    assert "<|" not in content


@pytest.mark.parametrize("path", ["chat", "echo"])
def test_prompts_are_decoded_once_and_next_to_the_event_loop(
    running: Running, parsed: None, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    ids, threads, decode = trained[1](PROMPT)["input_ids"], list[str](), trained[1].decode

    def seen(tokens: Any, **options: Any) -> Any:
        if list(tokens) == ids:
            threads.append(threading.current_thread().name)
        return decode(tokens, **options)

    monkeypatch.setattr(trained[1], "decode", seen)
    client, asked = running.client(), {"model": NAME, "max_tokens": 2, "n": 3, "temperature": 1.0}
    if path == "chat":
        done: Any = client.chat.completions.create(**asked, messages=[{"role": "user", "content": PROMPT}])
    else:
        done = client.completions.create(**asked, prompt=ids, echo=True)
    assert len(done.choices) == 3
    assert [name.startswith("kvtier-read") for name in threads] == [True]
