"""Calls of tools on the wire, streamed or not, whatever the model writes; and where prompts are decoded for them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from servers import NAME, Running
from transformers.cli.serving import utils

from kvtier.serving.http import answers
from kvtier.serving.text import TextStream

PROMPT = "def first(items):\n"
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
