"""Answers that are JSON of a schema, whatever the model would rather say; and no answer besides them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import importlib.util
import json
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import openai
import pydantic
import pytest
import torch
from servers import Running, Start, by_generate

from kvtier.serving.http.handlers.handler import Handler
from kvtier.serving.http.parsing import Thought, parsers_of
from kvtier.serving.http.requests.asked import asked_of
from kvtier.serving.http.requests.grammars import GrammarProcessor, Grammars
from kvtier.serving.http.requests.refusals import Refusal

NAME = "pylm"
#: Each with what says whether a value is of it.
SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "object"}, lambda x: isinstance(x, dict)),
    ({"enum": ["red", "green", 5, None]}, lambda x: x in ("red", "green", 5, None)),
    ({"type": "integer", "minimum": -3, "maximum": 12}, lambda x: isinstance(x, int) and -3 <= x <= 12),
    ({"type": "string", "pattern": "^[a-c]{2,4}$"}, lambda x: re.fullmatch("[a-c]{2,4}", x) is not None),
    (
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 6}, "at": {"$ref": "#/$defs/at"}},
            "required": ["name", "at"],
            "additionalProperties": False,
            "$defs": {"at": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
        },
        lambda x: (
            x.keys() == {"name", "at"}
            and len(x["name"]) <= 6
            and 1 <= len(x["at"]) <= 3
            and all(isinstance(y, bool) for y in x["at"])
        ),
    ),
]


@pytest.fixture(scope="module")
def made(trained: tuple[Any, Any]) -> Grammars:
    model, tokenizer = trained
    return Grammars(tokenizer, model)


def answer(processor: GrammarProcessor, trained: tuple[Any, Any], rng: random.Random, prompt: int) -> list[int]:
    """Tokens of a model that says anything, up to its end."""
    model, tokenizer = trained
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ends = [model.generation_config.eos_token_id, *tokenizer.convert_tokens_to_ids(['"', "}", "]"])]
    ids = [rng.randrange(5, 100) for _ in range(prompt)]
    while len(ids) < prompt + 1000:
        scores = torch.randn(1, model.config.vocab_size, generator=generator)
        scores[:, ends] += 6  # else strings and objects have none
        probabilities = processor(torch.tensor([ids]), scores).softmax(-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == model.generation_config.eos_token_id:
            return ids[prompt:-1]
    raise AssertionError("it has no end")


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_whatever_a_model_says_is_json_of_the_schema(number: int, made: Grammars, trained: tuple[Any, Any]) -> None:
    rng = random.Random(number)
    schema, fits = SCHEMAS[number]
    grammar = made.of("response_format", schema, None, None)
    for _ in range(6):
        prompt = rng.randrange(1, 9)
        processor = grammar.processor(prompt)
        others = [copy.deepcopy(processor) for _ in range(2)]  # of other answers, that one knows nothing of
        for each in (processor, *others):
            text = trained[1].decode(answer(each, trained, rng, prompt))
            assert fits(json.loads(text)), text
            assert re.search(r"\s{33}", text) is None


@pytest.mark.parametrize("text", ["a <|endoftext|> b", "<mark>", "x<mark>"])
def test_a_text_that_is_a_token_of_the_tokenizer_is_written_in_others(text: str, trained: tuple[Any, Any]) -> None:
    """Also where nothing else may come."""
    model, tokenizer = trained[0], copy.deepcopy(trained[1])
    tokenizer.add_tokens(["<mark>"])
    grammar = Grammars(tokenizer, model).of("text", {"const": text}, None, None)
    for seed in range(4):
        found = answer(grammar.processor(3), trained, random.Random(seed), 3)
        assert json.loads(tokenizer.decode(found)) == text


def test_an_end_token_that_is_text_ends_no_answer_in_its_midst(
    trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = trained
    lines = tokenizer("\n")["input_ids"]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [0, *lines])
    processor = Grammars(tokenizer, model).of("text", {"type": "object"}, None, None).processor(1)
    ids = [5]
    for token in tokenizer('{"a": 1}')["input_ids"]:
        assert processor(torch.tensor([ids]), torch.zeros(1, model.config.vocab_size))[0, lines].isinf().all()
        ids.append(token)
    assert not processor(torch.tensor([ids]), torch.zeros(1, model.config.vocab_size))[0, [0, *lines]].isinf().any()


def test_a_thought_that_the_prompt_has_begun_is_free_but_is_not_the_whole_answer(
    made: Grammars, trained: tuple[Any, Any]
) -> None:
    tokenizer, size = trained[1], trained[0].config.vocab_size
    processor = made.of("text", {"type": "object"}, None, Thought(re.compile(r"\s*# end|\Z"))).processor(2)
    ids = [5, 6]

    def barred() -> list[int]:
        return processor(torch.tensor([ids]), torch.zeros(1, size))[0].isinf().nonzero().flatten().tolist()

    end = trained[0].generation_config.eos_token_id
    assert barred() == [end]
    for token in tokenizer("def first(items):\n# end")["input_ids"]:
        assert barred() == [end]
        ids.append(token)
    assert len(barred()) > size // 2
    ids.append(tokenizer.convert_tokens_to_ids("{"))
    ids.append(tokenizer.convert_tokens_to_ids("}"))
    assert end not in barred()


def test_json_goes_on_from_the_token_that_ends_a_thought(made: Grammars, trained: tuple[Any, Any]) -> None:
    tokenizer, size = trained[1], trained[0].config.vocab_size
    schema = {"type": "string", "pattern": "^a+$"}

    def after(token: str, thought: str, *behind: int) -> list[int]:
        """Which tokens may come then."""
        ids = [5, *tokenizer("end")["input_ids"]]
        processor = made.of("text", schema, None, Thought(re.compile(thought))).processor(1)
        for each in (tokenizer.convert_tokens_to_ids(token), *behind):
            processor(torch.tensor([ids]), torch.zeros(1, size))
            ids.append(each)
        return processor(torch.tensor([ids]), torch.zeros(1, size))[0].isfinite().nonzero().flatten().tolist()

    letter, quote = tokenizer('a"')["input_ids"]
    assert letter in after('="', "end=")
    assert after('="', "end=", letter, quote) == [trained[0].generation_config.eos_token_id]
    with pytest.raises(Refusal, match="cannot be followed"):  # no JSON of the schema begins so
        after("([", r"end\(")


THINKS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "# assistant",
    "fields": {
        "thinking": {"open": "# think", "close": "# end", "content": "text"},
        "tool_calls": {"open": "{", "close": "}", "content": "json"},
        "content": {"content": "text"},
    },
}


@pytest.mark.parametrize("begun", [False, True])
def test_json_that_looks_like_a_call_is_text(begun: bool, trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    tokenizer = copy.copy(tokenizer)
    tokenizer.response_template = THINKS
    ids = tokenizer("# user\nhi\n# assistant\n" + ("# think" if begun else ""))["input_ids"]
    for parser in parsers_of(tokenizer, model, ids, None, 2, plain=True):
        if not begun:
            assert parser is None
            continue
        assert parser is not None
        assert parser.begun.search("so # end")
        events = [*parser.feed(" so # end"), *parser.feed('{"name": "f"}'), *parser.finalize()[1]]
        said = {x["field"]: "" for x in events}
        for event in events:
            said[event["field"]] += event["text"] if event["type"] == "region_chunk" else ""
        assert said == {"thinking": " so ", "content": '{"name": "f"}'}


@pytest.mark.parametrize("text", ["# think so # end", "{}", "<end>", "so <end> more"])
@pytest.mark.parametrize("marked", [False, True])
def test_json_behind_a_thought_keeps_what_looks_like_a_mark(text: str, marked: bool, trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    tokenizer = copy.copy(tokenizer)
    content = {"content": "text", "close_pattern": r"\s*<end>"} | ({"open": "# say"} if marked else {})
    tokenizer.response_template = THINKS | {"fields": THINKS["fields"] | {"content": content}}
    ids, written = tokenizer("# assistant\n# think")["input_ids"], json.dumps({"a": text})
    (parser,) = parsers_of(tokenizer, model, ids, None, plain=True)
    assert parser is not None
    events = [event for x in f" so # end{written}" for event in parser.feed(x)] + parser.finalize()[1]
    said = [x["text"] for x in events if x["type"] == "region_chunk" and x["field"] == "content" and not x["dirty"]]
    assert "".join(said) == written


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_for_json_is_read_as_text_behind_its_thought(begun: bool, trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    tokenizer = copy.copy(tokenizer)
    tokenizer.response_template = THINKS
    handler = Handler.__new__(Handler)
    handler.manager = SimpleNamespace(form=asyncio.to_thread)  # type: ignore[assignment]
    handler.served = SimpleNamespace(tokenizer=tokenizer, model=model, grammars=Grammars(tokenizer, model))  # type: ignore[assignment]
    asked = asked_of("chat", {"response_format": {"type": "json_object"}})
    parsers = handler.parsers(tokenizer("# assistant\n" + ("# think" if begun else ""))["input_ids"], asked)
    assert [x is not None for x in parsers] == [begun]
    grammar = asyncio.run(handler.grammar(asked, parsers[0]))
    assert grammar is not None
    assert (grammar.thought is not None) == begun
    assert asyncio.run(handler.grammar(asked_of("chat", {}), parsers[0])) is None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nonsense"}, "Invalid type"),
        ({"$ref": "http://127.0.0.1:9/x"}, "not supported"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
        ({"enum": [str(i) for i in range(100_000)]}, "too big"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_before_anything_runs(
    schema: dict[str, Any], said: str, made: Grammars
) -> None:
    with pytest.raises(Refusal, match=said) as error:
        made.of("response_format", schema, None, None)
    assert error.value.status == 400
    assert len(str(error.value)) < 400
    assert "%" not in str(error.value), "that is not of the client's schema"


def test_a_tokenizer_may_have_tokens_that_the_model_lacks(trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    larger = copy.deepcopy(tokenizer)
    more = model.config.vocab_size + 9 - len(larger)
    assert larger.add_tokens([f"<more{i}>" for i in range(more)]) == more
    schema, good = SCHEMAS[-1]
    grammar = Grammars(larger, model).of("response_format", schema, None, None)
    found = answer(grammar.processor(3), trained, random.Random(0), 3)
    assert good(json.loads(tokenizer.decode(found)))


def test_what_does_not_go_with_a_schema_is_refused(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(Refusal, match="held to response_format calls nothing"):
        asked_of("chat", {"response_format": {"type": "json_object"}, "tools": tools})
    with pytest.raises(Refusal, match="by the model's own end tokens"):
        made.of("text", {}, -1, None)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Refusal, match="pip install llguidance"):
            made.of("text", {}, None, None)
    with pytest.raises(Refusal, match="cannot read this model's tokenizer"):
        Grammars(object(), made._model).of("text", {}, None, None)


# By OpenAI's client


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=99)
    name: str = pydantic.Field(max_length=8)


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.client() as made:
        yield made


def test_the_openai_client_parses_what_it_asks_for(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "p ="}], "max_tokens": 400}
    one = client.chat.completions.parse(**ask, response_format=Point, temperature=0)
    assert isinstance(one.choices[0].message.parsed, Point)
    several = client.chat.completions.parse(**ask, response_format=Point, temperature=1.0, n=4, seed=1)
    assert len({x.message.content for x in several.choices}) > 1
    assert all(isinstance(x.message.parsed, Point) for x in several.choices)
    with client.chat.completions.stream(**ask, response_format=Point, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == one.choices[0].message.parsed
    response = client.responses.parse(model=NAME, input="p =", text_format=Point, max_output_tokens=400)
    assert isinstance(response.output_parsed, Point)
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": Point.model_json_schema()}}
    asked: dict[str, Any] = {"model": NAME, "prompt": ["p =", "q ="], "max_tokens": 400}
    found = client.completions.create(**asked, n=2, temperature=1.0, seed=2, extra_body={"response_format": form})
    assert len({Point.model_validate_json(x.text).name for x in found.choices}) > 1


def test_nobody_else_in_the_batch_is_held_to_it(
    running: Running, trained: tuple[Any, Any], client: openai.OpenAI
) -> None:
    ask: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0}
    texts = [f"def f{i}(items):" for i in range(6)]
    forms: Mapping[str, Any] = {"response_format": {"type": "json_object"}}
    streams = [
        client.completions.create(**ask, prompt=x, stream=True, extra_body=forms if i % 2 else None)
        for i, x in enumerate(texts)
    ]
    for i, stream in enumerate(streams):
        text = "".join(each.choices[0].text for each in stream if each.choices)
        if i % 2:
            assert text.lstrip().startswith("{")
        else:
            assert text.strip() == by_generate(trained, texts[i], 24).strip()


def test_a_schema_that_cannot_be_followed_is_a_400(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "p ="}], "max_tokens": 8}
    for schema in ({"type": "nonsense"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="response_format: the schema"):
            client.chat.completions.create(**ask, response_format=form)  # type: ignore[call-overload]
    for more in ({"ignore_eos": True}, {"generation_config": {"eos_token_id": 7}}):
        with pytest.raises(openai.BadRequestError, match="own end tokens"):
            client.chat.completions.create(**ask, response_format={"type": "json_object"}, extra_body=more)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("bars", ["its end", "what it says"])
def test_an_answer_that_has_no_token_left_does_not_end_as_if_it_were_whole(
    bars: str, temperature: int, trained: tuple[Any, Any], client: openai.OpenAI
) -> None:
    tokens = [x for x in range(2, 2048) if "7" in trained[1].decode([x])]
    barred = {"min_tokens": 64} if bars == "its end" else {"generation_config": {"suppress_tokens": tokens}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    ask: dict[str, Any] = {"model": NAME, "prompt": "p =", "max_tokens": 100, "temperature": temperature}
    with pytest.raises(openai.BadRequestError, match="bars each token that the schema allows"):
        client.completions.create(**ask, extra_body={"response_format": form, **barred})


def test_nobody_without_a_schema_waits_for_one(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, asked, of = threading.Event(), threading.Semaphore(0), Grammars.of

    def slow(*args: Any) -> Any:
        asked.release()
        assert waits.wait(60)
        return of(*args)

    monkeypatch.setattr(Grammars, "of", slow)
    ask: dict[str, Any] = {"model": NAME, "max_tokens": 2, "temperature": 0}
    forms = {"response_format": {"type": "json_object"}}
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        try:
            begun = [clients.submit(client.completions.create, **ask, prompt="p =", extra_body=forms) for _ in range(4)]
            assert asked.acquire(timeout=20)  # the others come meanwhile
            time.sleep(0.2)
            assert client.completions.create(**ask, prompt="q =", timeout=20).choices[0].text
            assert not any(x.done() for x in begun)
        finally:
            waits.set()
        assert all(x.result().choices[0].text for x in begun)


def test_an_end_token_that_is_text_is_no_part_of_the_json(
    start: Start, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (end,) = trained[1]("x")["input_ids"]
    monkeypatch.setattr(trained[0].generation_config, "eos_token_id", [0, end])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    ask: dict[str, Any] = {"model": NAME, "prompt": "p =", "temperature": 0, "logit_bias": {str(end): 100}}
    with start() as running, running.client() as client:
        found = client.completions.create(**ask, extra_body={"response_format": form}).choices[0]
        assert (found.text, found.finish_reason) == ("7", "stop")
        stream = client.completions.create(**ask, stream=True, extra_body={"response_format": form})
        assert "".join(x.choices[0].text for x in stream if x.choices) == "7"
