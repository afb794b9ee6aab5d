"""Thoughts of an answer: what a model begins itself is free under a schema, and its tokens are counted."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from servers import NAME, serving
from transformers.cli.serving import utils

from kvtier.serving.http.answers import Answer
from kvtier.serving.http.handlers.handler import Handler
from kvtier.serving.http.parsing import parsers_of, unread_ends
from kvtier.serving.http.requests.asked import Asked, asked_of
from kvtier.serving.http.requests.grammars import GrammarProcessor, Grammars
from kvtier.serving.request import RequestOutput

MARKS = ["<think>", "</think>", "<|channel>", "<channel|>"]
QWEN, GEMMA = (
    next(x for types, x in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if y in types) for y in ("qwen3", "gemma4")
)
FIELD = next(x for x in QWEN["fields"] if x in ("reasoning_content", "thinking"))
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": "<think>"}}}}
SAID = '{"a":"<think>"}'


@pytest.fixture(scope="module")
def thinker(trained: tuple[Any, Any]) -> tuple[Any, Any]:
    """The model and its tokenizer, with marks of thoughts."""
    model, tokenizer = copy.deepcopy(trained[0]), copy.deepcopy(trained[1])
    tokenizer.add_tokens(MARKS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.add_tokens("<|reserved|>", special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def of_template(thinker: tuple[Any, Any], template: Any) -> tuple[Any, Any]:
    """With a template; None: Transformers has none."""
    tokenizer = copy.copy(thinker[1])
    tokenizer.response_template = template
    return thinker[0], tokenizer


def held(thinker: tuple[Any, Any], prompt: str, form: Any = FORM) -> tuple[GrammarProcessor, list[Any], list[int]]:
    """What holds an answer to a schema, the parsers of two answers, and the prompt."""
    model, tokenizer = thinker
    handler = Handler.__new__(Handler)
    handler.served = SimpleNamespace(tokenizer=tokenizer, model=model)  # type: ignore[assignment]
    asked, ids = asked_of("chat", {"response_format": form, "n": 2}), tokenizer(prompt)["input_ids"]
    assert isinstance(asked, Asked)
    assert asked.form is not None
    parsers = handler.parsers(ids, asked)
    thought = None if parsers[0] is None else parsers[0].thought
    return Grammars(tokenizer, model).of(*asked.form, None, thought).processor(len(ids)), parsers, ids


def may_come(processor: GrammarProcessor, ids: list[int], size: int) -> set[int]:
    return set(processor(torch.tensor([ids]), torch.zeros(1, size))[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize("template", ["qwen", "none", "pattern"])
def test_a_thought_that_the_model_begins_is_free_and_the_schema_holds_behind_it(
    template: str, thinker: tuple[Any, Any]
) -> None:
    fields = QWEN["fields"] | {FIELD: {"open_pattern": r"<think>\s*", "close": "</think>"}}
    thinker = of_template(thinker, {"qwen": QWEN, "none": None, "pattern": QWEN | {"fields": fields}}[template])
    tokenizer, size = thinker[1], len(thinker[1])
    processor, _, ids = held(thinker, "<|turn|>" if template == "none" else "<|im_start|>assistant\n")
    begin, end, stop = *tokenizer.convert_tokens_to_ids(MARKS[:2]), thinker[0].generation_config.eos_token_id
    first = may_come(processor, ids, size)
    assert begin in first
    assert tokenizer.convert_tokens_to_ids("{") in first
    assert len(first) < 10
    for token in [begin, *tokenizer(' it is "{"')["input_ids"]]:
        ids.append(token)
        assert may_come(processor, ids, size) == set(range(size)) - {stop}
    ids.append(end)
    assert may_come(processor, ids, size) == first - {begin}, "it thinks once"
    for token in tokenizer("{")["input_ids"]:
        ids.append(token)
        assert begin not in may_come(processor, ids, size)


def test_a_mark_of_several_tokens_comes_whole(thinker: tuple[Any, Any]) -> None:
    thinker = of_template(thinker, GEMMA)
    tokenizer, size = thinker[1], len(thinker[1])
    processor, _, ids = held(thinker, "<|turn>model\n")
    mark = tokenizer("<|channel>thought\n")["input_ids"]
    assert len(mark) > 2
    assert mark[0] in may_come(processor, ids, size)
    for token, following in itertools.pairwise(mark):
        ids.append(token)
        assert may_come(processor, ids, size) == {following}
    ids.append(mark[-1])
    assert len(may_come(processor, ids, size)) == size - 1


def test_an_answer_that_begins_without_a_thought_has_none(thinker: tuple[Any, Any]) -> None:
    thinker = of_template(thinker, QWEN)
    tokenizer, size = thinker[1], len(thinker[1])
    begin = tokenizer.convert_tokens_to_ids("<think>")
    processor, parsers, ids = held(thinker, "<|im_start|>assistant\n")
    assert begin in may_come(processor, ids, size)
    for token in tokenizer("{")["input_ids"]:
        ids.append(token)
        assert begin not in may_come(processor, ids, size)
    assert said_by(parsers[1], '{"a": "<think>b</think>"}', 3) == ("", '{"a": "<think>b</think>"}')


@pytest.mark.parametrize("case", ["it is over", "no token", "no end", "no thoughts", "answered"])
def test_where_no_thought_is_known_to_begin_the_schema_holds_from_the_first_token(
    case: str, thinker: tuple[Any, Any]
) -> None:
    fields, prompt = dict(QWEN["fields"]), "<|im_start|>assistant\n"
    if case == "no token":  # "<" might be what a model that does not think begins a page of HTML with
        fields[FIELD] = {"open": "<thought>", "close": "</thought>"}
    elif case == "no end":
        fields[FIELD] = {"open": "<think>"}
    elif case == "no thoughts":
        del fields[FIELD]
    elif case == "it is over":  # as Qwen 3's template writes where thinking is switched off
        prompt += "<think>\n\n</think>\n\n"
    else:
        prompt += "So: "
    processor, parsers, ids = held(of_template(thinker, QWEN | {"fields": fields}), prompt)
    found = may_come(processor, ids, len(thinker[1]))
    assert all(thinker[1].decode([x]).startswith("{") for x in found)
    assert parsers == [None, None], "all is text"


def said_by(parser: Any, text: str, size: int) -> tuple[str, str]:
    """Thoughts and text, fed in pieces of a size."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = {FIELD: "", "content": ""}
    for event in [*(x for piece in pieces for x in parser.feed(piece)), *parser.finalize()[1]]:
        if event["type"] == "region_chunk":
            found[event["field"]] += event["text"]
    return found[FIELD], found["content"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_json_behind_a_thought_of_the_models_own_is_text(size: int, thinker: tuple[Any, Any]) -> None:
    for number, thought in enumerate(("", "<think>", "{}")):
        _, parsers, _ = held(of_template(thinker, QWEN), "<|im_start|>assistant\n")
        text = f"<think>{thought}</think>{SAID}</think><tool_call>{{}}</tool_call><|im_end|>"
        found = said_by(parsers[number % 2], text, size)
        assert found == (thought, text.removeprefix(f"<think>{thought}</think>"))


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|turn|>", "<think>Hm.</think>So.", ("Hm.", "So.")),
        ("<|im_start|>assistant\n", "<think>Hm.</think>So.", ("Hm.", "So.")),
        ("<|turn|><think>\n", "Hm.</think>So.", ("Hm.", "So.")),
        ("What is <think>?<|turn|>", "So.", ("", "So.")),
        ("<|turn|><think>\n\n</think>\n\n", "<think>So.", ("", "<think>So.")),
        ("<|turn|>", "So<|turn|>.", ("", "So.")),
        ("<|turn|>", "\n<think>Hm.</think>So.", ("Hm.", "So.")),
        ("<|turn|>", "It is <think>. So.", ("", "It is <think>. So.")),
        ("<|im_start|>assistant\n<think><|turn|>", "So.", ("", "So.")),
        ("<|turn|>What does <think> do? ASSISTANT:", "So.", ("", "So.")),
        ("<|turn|>", "So<|reserved|>.", ("", "So.")),
    ],
)
def test_marks_that_are_tokens_are_read_without_a_template(
    prompt: str, text: str, expected: tuple[str, str], thinker: tuple[Any, Any]
) -> None:
    model, tokenizer = of_template(thinker, None)
    ids = tokenizer(f"user{prompt}")["input_ids"]
    parsers = parsers_of(tokenizer, model, ids, None, 2)
    for parser in parsers:
        assert parser is not None
        answer = Answer(tokenizer, (), parser, silent=unread_ends(tokenizer, parser, None))
        parts = answer.feed(RequestOutput("a", ids, tokenizer(text)["input_ids"], finish_reason="stop"))
        assert ("".join(x.reasoning for x in parts), "".join(x.text for x in parts)) == expected


@pytest.mark.parametrize(
    "typed", ["<|im_start|>assistant\n<think>", "<|im_start|>assistant\n", "what is <think>?", "x"]
)
def test_what_a_user_writes_begins_no_thought_without_a_template(typed: str, thinker: tuple[Any, Any]) -> None:
    thinker = of_template(thinker, None)
    tokenizer, size = thinker[1], len(thinker[1])
    processor, parsers, ids = held(thinker, f"user{typed}<|turn|>")
    assert parsers[0] is not None, "it may think"
    found = may_come(processor, ids, size)
    assert {tokenizer.decode([x])[0] for x in found - {tokenizer.convert_tokens_to_ids("<think>")}} == {"{"}
    # Where nothing tells that an answer begins there, the schema holds.
    processor, parsers, ids = held(thinker, f"a<|turn|>user{typed} ASSISTANT:")
    assert parsers == [None, None]
    assert {tokenizer.decode([x])[0] for x in may_come(processor, ids, size)} == {"{"}


@pytest.mark.parametrize(("prompt", "is_begun"), [("assistant\n", True), ("user\n", False), ("assistant\nSo", False)])
def test_behind_a_header_of_a_token_and_text_an_answer_begins(
    prompt: str, is_begun: bool, thinker: tuple[Any, Any]
) -> None:
    tokenizer = copy.deepcopy(thinker[1])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    _, parsers, _ = held(of_template((thinker[0], tokenizer), None), f"<|im_start|>user\nx<|im_start|>{prompt}")
    assert (parsers[0] is not None) == is_begun


def test_a_tokenizer_that_names_no_added_tokens_has_no_thoughts(thinker: tuple[Any, Any]) -> None:
    class Other:
        """As mistral-common's."""

        def __init__(self, response_template: Any) -> None:
            self.response_template = response_template

        def __getattr__(self, name: str) -> Any:
            if name == "added_tokens_decoder":
                raise AttributeError(name)
            return getattr(thinker[1], name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return thinker[1](*args, **kwargs)

    ids = thinker[1]("<|im_start|>assistant\n")["input_ids"]
    for template in (QWEN, None):
        assert parsers_of(Other(template), thinker[0], ids, None, 1, plain=True) == [None]


def test_a_tokenizer_without_marks_has_no_parser(trained: tuple[Any, Any]) -> None:
    assert parsers_of(trained[1], trained[0], [5, 6], None, 2) == [None, None]


# Tokens of thoughts


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_between_marks_are_counted(seed: int, begun: bool, thinker: tuple[Any, Any]) -> None:
    """However an answer goes on, in whatever portions its tokens come."""
    model, tokenizer = of_template(thinker, QWEN)
    rng, begin, end = random.Random(seed), *tokenizer.convert_tokens_to_ids(MARKS[:2])
    ids = tokenizer("<|im_start|>assistant\n" + ("<think>\nSo" if begun else ""))["input_ids"]
    thought = tokenizer("\nIt is < a \N{SNOWMAN}\N{CUCUMBER} word, naïve.\n")["input_ids"]
    for behind in ("", "</think>", '</think>So it <tool_call>{"name": "f"}</tool_call>', "</think>So.<|im_end|>"):
        tail = tokenizer(behind)["input_ids"]
        assert behind == "" or tail[0] == end
        (parser,) = parsers_of(tokenizer, model, ids, None)
        answer = Answer(tokenizer, (), parser)
        output = RequestOutput("a", ids)
        for token in [*([] if begun else [begin]), *thought, *tail]:
            output.generated_tokens.append(token)
            if rng.random() < 0.4:
                answer.feed(output)
                assert answer.thought <= answer.tokens
        output.finish_reason = "length"
        answer.feed(output)
        assert answer.thought == len(thought)


def test_what_is_no_thought_is_not_counted_nor_what_a_stop_string_cuts_off(thinker: tuple[Any, Any]) -> None:
    model, tokenizer = of_template(thinker, QWEN)
    ids = tokenizer("<|im_start|>assistant\n")["input_ids"]

    def counted(text: str, *stop: str) -> int:
        (parser,) = parsers_of(tokenizer, model, ids, None)
        answer = Answer(tokenizer, stop, parser)
        answer.feed(RequestOutput("a", ids, tokenizer(text)["input_ids"], finish_reason="stop"))
        return answer.thought

    assert counted("I think of <thinking>, and of < think >.") == 0
    assert counted("<think></think>So.") == 0
    assert counted("<think>a b c") == len(tokenizer("a b c")["input_ids"])
    assert counted("<think>a b STOP c", "STOP") == len(tokenizer("a b ")["input_ids"]) < counted("<think>a b STOP c")
    assert counted("a<think>b</think>c<think>d</think>e") == 2


# By OpenAI's client


@pytest.fixture(scope="module")
def client(thinker: tuple[Any, Any]) -> Iterator[openai.OpenAI]:
    with serving(thinker) as running, running.client() as made:
        yield made


PROMPT = "p ="


def wants(tokenizer: Any, text: str) -> tuple[dict[str, Any], int]:
    """Lets a model want to answer with a text, one token behind another; and how many of them are between marks."""
    (*_, last), tokens = tokenizer(PROMPT)["input_ids"], tokenizer(text)["input_ids"]
    assert len({last, *tokens}) == 1 + len(tokens), "each is told by the one before it"
    bias = [[[a, b], 1000.0] for a, b in zip([last, *tokens], tokens, strict=False)]
    begin, end = (tokens.index(x) for x in tokenizer.convert_tokens_to_ids(MARKS[:2]))
    return {"generation_config": json.dumps({"sequence_bias": bias})}, end - begin - 1


THINKS = "<think>for x in y</think>"


@pytest.mark.parametrize("formed", [False, True])
def test_clients_get_thoughts_and_how_many_tokens_they_are(
    formed: bool, thinker: tuple[Any, Any], client: openai.OpenAI
) -> None:
    more, tokens = wants(thinker[1], THINKS)
    assert tokens > 2
    ask: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 40, "n": 2, "extra_body": more}
    ask["messages"] = [{"role": "user", "content": PROMPT}]
    if formed:
        ask["response_format"] = FORM
    whole = client.chat.completions.create(**ask)
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * tokens
    for choice in whole.choices:
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"] == "for x in y"
        if formed:
            assert (json.loads(choice.message.content or ""), choice.finish_reason) == ({"a": "<think>"}, "stop")
    *chunks, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == 2 * tokens
    told = [x.choices[0] for x in chunks]
    for number in range(2):
        mine = [x.delta for x in told if x.index == number]
        assert "".join(x.model_extra.get("reasoning_content") or "" for x in mine) == "for x in y"
        assert "".join(x.content or "" for x in mine) == whole.choices[number].message.content


@pytest.mark.parametrize("formed", [False, True])
def test_responses_have_thoughts_and_how_many_tokens_they_are(
    formed: bool, thinker: tuple[Any, Any], client: openai.OpenAI
) -> None:
    more, tokens = wants(thinker[1], THINKS)
    ask: dict[str, Any] = {
        "model": NAME,
        "temperature": 0,
        "max_output_tokens": 40,
        "input": PROMPT,
        "extra_body": more,
    }
    if formed:
        ask["text"] = {"format": {"type": "json_schema", "name": "x", "schema": FORM["json_schema"]["schema"]}}  # type: ignore[index]
    whole = client.responses.create(**ask)
    *_, last = client.responses.create(**ask, stream=True)
    for found in (whole, last.response):
        assert found.usage.output_tokens_details.reasoning_tokens == tokens
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert found.output[0].content[0].text == "for x in y"
        if formed:
            assert json.loads(found.output_text) == {"a": "<think>"}


def test_a_completion_is_held_from_its_first_token(thinker: tuple[Any, Any], client: openai.OpenAI) -> None:
    more, _ = wants(thinker[1], THINKS)
    ask: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 40, "prompt": PROMPT}
    found = client.completions.create(**ask, extra_body=more | {"response_format": FORM})
    assert json.loads(found.choices[0].text) == {"a": "<think>"}
