"""Tokens to parts of an answer: text, reasoning, calls of tools, whatever portions they come in."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.cli.serving import utils

from kvtier.serving.http.answers import Answer, Part
from kvtier.serving.http.handlers.chat import _Reply
from kvtier.serving.http.parsing import Parser, parsers_of, unread_ends
from kvtier.serving.http.requests.asked import Asked
from kvtier.serving.request import RequestOutput

CALL = '{"name": "look_up", "arguments": {"word": "naïve"}}'
THOUGHT = "<think>It is a word.</think>"
SAID = "Let me see."


def parts_of(
    tokenizer: Any,
    text: str,
    seed: int,
    *,
    stop: tuple[str, ...] = (),
    reason: str = "stop",
    begun: str = "",
    model_type: str = "qwen3",
    silent: frozenset[int] = frozenset(),
) -> list[Part]:
    """The parts of an answer whose tokens come in portions, and whose beginning is in the prompt."""
    prompt = tokenizer(f"<|im_start|>assistant\n{begun}")["input_ids"]
    (parser,) = parsers_of(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type)), prompt, None)
    answer, output, rng = Answer(tokenizer, stop, parser, 0, silent), RequestOutput("a", prompt), random.Random(seed)
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
    assert text_and_calls(found) == (SAID, [("look_up", {"word": "naïve"})] * 2)
    assert found[-1].reason == "tool_calls"


def test_a_prompt_is_read_once_for_all_its_answers(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which goes on by itself."""
    read, consume = list[str](), Parser._consume_prefix
    monkeypatch.setattr(Parser, "_consume_prefix", lambda self, text: read.append(text) or consume(self, text))
    prompt = trained[1]("<|im_start|>assistant\n<think>It")["input_ids"]
    qwen3 = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    parsers = parsers_of(trained[1], qwen3, prompt, None, 3)
    assert len(read) == 1
    answers = [Answer(trained[1], (), parser) for parser in parsers]
    for text, answer in zip((" is.</think>A", " was.</think>B", " will be."), answers, strict=True):
        output = RequestOutput("a", prompt, trained[1](text)["input_ids"], finish_reason="stop")
        parts = answer.feed(output)
        assert "".join(part.reasoning for part in parts) + "".join(part.text for part in parts) == text.replace(
            "</think>", ""
        )


def text_and_calls(parts: list[Part]) -> tuple[str, list[tuple[str, Any]]]:
    calls = [part.call for part in parts if part.call is not None]
    return "".join(part.text for part in parts), [(call.name, json.loads(call.arguments)) for call in calls]


#: What is no call: broken, of another shape, without a name, with arguments that are no object or no JSON.
NO_CALLS = (
    *("{bad", "", "5", "[" * 5000, '[{"name": "f"}]', "{}", '{"name": 5}', '{"name": "\\ud800"}'),
    *(f'{{"name": "f", "arguments": {x}}}' for x in ("[1]", '"x"', '{"x": NaN}')),
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("call", NO_CALLS, ids=range(len(NO_CALLS)))
def test_a_call_that_cannot_be_read_is_text_and_what_follows_is_read(
    trained: tuple[Any, Any], call: str, seed: int
) -> None:
    wrong, right = f"<tool_call>{call}</tool_call>", f"<tool_call>{CALL}</tool_call>"
    found = parts_of(trained[1], f"{THOUGHT}{SAID}{wrong}{SAID}{right}<|im_end|>", seed)
    assert text_and_calls(found) == (f"{SAID}{wrong}{SAID}", [("look_up", {"word": "naïve"})])
    assert "".join(part.reasoning for part in found) == "It is a word."
    found = parts_of(trained[1], f"{THOUGHT}{wrong}<|im_end|>", seed)
    assert text_and_calls(found) == (wrong, [])
    assert found[-1].reason == "stop"


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}', ', "arguments": "{}"'])
def test_a_call_without_arguments_has_none(trained: tuple[Any, Any], arguments: str) -> None:
    found = parts_of(trained[1], f'<tool_call>{{"name": "now"{arguments}}}</tool_call><|im_end|>', 0)
    assert text_and_calls(found) == ("", [("now", {})])
    assert found[-1].reason == "tool_calls"


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_ends_within_a_call_says_what_was_written_of_it(
    trained: tuple[Any, Any], seed: int, end: str
) -> None:
    reason = "stop" if end else "length"
    found = parts_of(trained[1], f"{SAID}<tool_call>{CALL[:19]}{end}", seed, reason=reason)
    assert text_and_calls(found) == (f"{SAID}<tool_call>{CALL[:19]}", [])
    assert found[-1].reason == reason
    found = parts_of(trained[1], f"{SAID}<tool_call>{CALL}{end}", seed, reason=reason)
    assert text_and_calls(found) == (SAID, [("look_up", {"word": "naïve"})]), "only the last word of it is missing"


def test_an_answer_that_ends_within_a_thought_has_no_end_token_in_it(trained: tuple[Any, Any]) -> None:
    found = parts_of(trained[1], "<think>It is<|im_end|>", 0)
    assert ("".join(part.reasoning for part in found), text_and_calls(found)) == ("It is", ("", []))


@pytest.mark.parametrize("seed", range(3))
def test_what_the_prompt_has_begun_is_no_part_of_the_answer(trained: tuple[Any, Any], seed: int) -> None:
    def said(begun: str, text: str) -> tuple[str, str]:
        found = parts_of(trained[1], f"{text}<|im_end|>", seed, begun=begun)
        return "".join(part.reasoning for part in found), "".join(part.text for part in found)

    assert said("<think>\n\n</think>\n\n", SAID) == ("", SAID)
    assert said("<think>\n\n</think>\n\n", f"\n{SAID}") == ("", f"\n{SAID}")
    assert said("<think>\n", f"It is.</think>{SAID}") == ("It is.", SAID)
    assert said("It is said: <", SAID) == ("", SAID)
    assert said("It is said. <tool_call>{bad</tool_call>", SAID) == ("", SAID)
    assert said("<tool_call>{bad", f" too</tool_call>{SAID}") == ("", f" too</tool_call>{SAID}")
    found = parts_of(trained[1], f"{CALL[9:]}</tool_call><|im_end|>", seed, begun=f"<tool_call>{CALL[:9]}")
    assert text_and_calls(found) == ("", [("look_up", {"word": "naïve"})])


def test_a_parser_takes_the_place_of_transformers_own(trained: tuple[Any, Any]) -> None:
    prompt = trained[1](f"<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>{CALL[:9]}")["input_ids"]
    own = utils.build_response_parser(trained[1], SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), prompt)
    parser = Parser.instead_of(own)
    items = utils.response_events_to_chunks(parser.feed(f"{CALL[9:]}</tool_call>{SAID}<tool_call>{{bad"))
    items += utils.response_events_to_chunks(parser.finalize()[1])
    assert [getattr(item, "name", item) for item in items] == ["look_up", SAID, "<tool_call>{bad"]


def test_a_call_whose_arguments_are_no_json_is_read_as_its_model_writes_it(trained: tuple[Any, Any]) -> None:
    text = '<|tool_call>call:now{}<tool_call|><|tool_call>call:look_up{word:<|"|>x<|"|>}<tool_call|>'
    found = parts_of(trained[1], f"{text}<|tool_call>call:f{{<tool_call|><turn|>", 0, model_type="gemma4")
    assert text_and_calls(found) == ("<|tool_call>call:f{<tool_call|>", [("now", {}), ("look_up", {"word": "x"})])


def test_a_stop_string_ends_what_the_parser_sees(trained: tuple[Any, Any]) -> None:
    found = parts_of(trained[1], f"{THOUGHT}{SAID} And more.", 2, stop=("me",), reason="length")
    assert "".join(part.text for part in found) == "Let "
    assert found[-1].reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_an_end_token_that_the_parser_does_not_know_is_no_text(trained: tuple[Any, Any], seed: int) -> None:
    """A model of a family that Transformers has a template for may end with a token of its own."""
    tokenizer = copy.deepcopy(trained[1])
    tokenizer.add_tokens(["<own_end>"], special_tokens=True)
    own, known = tokenizer.convert_tokens_to_ids("<own_end>"), tokenizer.eos_token_id
    (parser,) = parsers_of(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), [], None)
    silent = unread_ends(tokenizer, parser, [own, known, -1, 1 << 40])
    assert silent == {own}, "what is known the parser reads: it takes the spaces before it away"
    assert unread_ends(tokenizer, None, own) == unread_ends(tokenizer, parser, None) == frozenset()
    for odd in ([[own], "x", None], 2.5, "x"):  # they are refused elsewhere
        assert unread_ends(tokenizer, parser, odd) == frozenset()
    found = parts_of(tokenizer, f"{THOUGHT}{SAID}<own_end>", seed, silent=silent)
    assert text_and_calls(found) == (SAID, [])
    found = parts_of(tokenizer, f"{THOUGHT}{SAID}<tool_call>{CALL}<own_end>", seed, silent=silent)
    assert text_and_calls(found) == (SAID, [("look_up", {"word": "naïve"})])


@pytest.mark.parametrize("wrote", ["What is <think>?", "What is <tool_call>?"])
def test_what_a_user_writes_begins_no_region_of_the_answer(trained: tuple[Any, Any], wrote: str) -> None:
    """Also where the chat is marked up in another way than Transformers' template of the family knows."""
    tokenizer = copy.deepcopy(trained[1])
    tokenizer.add_tokens(["<own_turn>", "<think>", "<tool_call>"])

    def said(prompt: str, text: str) -> tuple[str, str]:
        ids = [tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]
        (parser,) = parsers_of(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type="qwen3")), ids, None)
        answer = Answer(tokenizer, (), parser)
        parts = answer.feed(RequestOutput("a", ids, tokenizer(text)["input_ids"]))
        return "".join(part.reasoning for part in parts), "".join(part.text for part in parts)

    assert said(wrote, SAID) == ("", SAID)
    assert said(f"<own_turn>{wrote}<own_turn>", SAID) == ("", SAID)
    for marked in (f"<own_turn>{wrote}<own_turn><think>\n", f"### User: {wrote}\n### Model:<think>\n"):
        assert said(marked, f"It is.</think>{SAID}") == ("It is.", SAID)


def test_a_stream_of_a_chat_begins_with_its_first_tokens() -> None:
    said = list[tuple[int, dict[str, Any]]]()

    async def parts() -> AsyncIterator[tuple[int, Part]]:
        assert not said, "a load generator takes the first chunk for the first token"
        for number, part in ((1, Part("b")), (0, Part("a")), (1, Part(reason="stop")), (0, Part(reason="length"))):
            yield number, part

    async def read() -> None:
        answers: Any = SimpleNamespace(answers=[None, None], parts=parts, usage={})
        handler: Any = SimpleNamespace(served=SimpleNamespace(name="m"))
        async for event in _Reply(handler, answers).events(Asked(stream=True)):
            if "[DONE]" not in event:
                (choice,) = json.loads(event.removeprefix("data: "))["choices"]
                said.append((choice["index"], choice["delta"]))

    asyncio.run(read())
    role = {"role": "assistant", "content": ""}
    assert said == [(1, role), (1, {"content": "b"}), (0, role), (0, {"content": "a"}), (1, {}), (0, {})]
