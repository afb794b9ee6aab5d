"""Tokens to parts of an answer: text, reasoning, calls of tools, whatever portions they come in."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.serving.http.answers import Answer, Part, parser_of
from kvtier.serving.request import RequestOutput

CALL = '{"name": "look_up", "arguments": {"word": "naïve"}}'
THOUGHT = "<think>It is a word.</think>"
SAID = "Let me see."


def parts_of(tokenizer: Any, text: str, seed: int, *, stop: tuple[str, ...] = (), reason: str = "stop") -> list[Part]:
    """The parts of an answer whose tokens come in portions."""
    prompt = tokenizer("<|im_start|>assistant\n")["input_ids"]
    parser = parser_of(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), prompt, None)
    answer, output, rng = Answer(tokenizer, stop, parser), RequestOutput("a", prompt), random.Random(seed)
    output.logprobs = []
    found: list[Part] = []
    for token in tokenizer(text)["input_ids"]:
        output.generated_tokens.append(token)
        output.logprobs.append(-1.0)
        if rng.random() < 0.4:
            found += answer.feed(output)
    output.finish_reason = reason
    if not answer.reason:
        found += answer.feed(output)
    assert answer.reason
    assert sum(len(part.logs) for part in found) == answer.tokens, "each token has one log"
    return found


@pytest.mark.parametrize("seed", range(5))
def test_reasoning_text_and_calls_are_told_apart(trained: tuple[Any, Any], seed: int) -> None:
    text = f"{THOUGHT}{SAID}<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call><|im_end|>"
    found = parts_of(trained[1], text, seed)
    assert "".join(part.reasoning for part in found) == "It is a word."
    assert "".join(part.text for part in found) == SAID
    calls = [part.call for part in found if part.call is not None]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look_up", {"word": "naïve"})] * 2
    assert found[-1].reason == "tool_calls"


def test_an_answer_that_ends_within_a_call_has_what_came_before(trained: tuple[Any, Any]) -> None:
    found = parts_of(trained[1], f"{SAID}<tool_call>{CALL[:20]}", 1, reason="length")
    assert "".join(part.text for part in found) == SAID
    assert found[-1].reason == "length"
    assert all(part.call is None for part in found)


def test_a_stop_string_ends_what_the_parser_sees(trained: tuple[Any, Any]) -> None:
    found = parts_of(trained[1], f"{THOUGHT}{SAID} And more.", 2, stop=("me",), reason="length")
    assert "".join(part.text for part in found) == "Let "
    assert found[-1].reason == "stop"
