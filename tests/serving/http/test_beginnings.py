"""Answers that go on from a beginning of the client's: the tokens are those of `generate`, and no more comes back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from servers import NAME, Running, serving
from tokenizers import decoders, normalizers
from transformers.cli.serving import utils

from kvtier.serving.http.answers import Answer
from kvtier.serving.http.parsing import parsers_of
from kvtier.serving.request import RequestOutput

MARKS = ["<think>", "</think>", "<|im_start|>", "<|im_end|>"]
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRIMS = CHATML.replace("m.content", "m.content | trim")
OTHER = CHATML.replace("m.content", "m.content | upper")
QWEN = next(x for types, x in utils._RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types)
BEGINS = ("def first(items):\n    for x in", "    return ", "class")


def of(trained: tuple[Any, Any], template: str | None) -> tuple[Any, Any]:
    """The model and its tokenizer with the tokens of a template, and that."""
    model, tokenizer = copy.deepcopy(trained[0]), copy.deepcopy(trained[1])
    tokenizer.add_tokens(MARKS)
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = template
    return model, tokenizer


@pytest.fixture(scope="module", params=[None, CHATML, TRIMS], ids=["joined", "chatml", "trims"])
def server(trained: tuple[Any, Any], request: pytest.FixtureRequest) -> Iterator[tuple[Running, Any, Any]]:
    made = of(trained, request.param)
    with serving(made) as running:
        yield running, *made


def messages_of(begin: str, *before: dict[str, str]) -> list[dict[str, str]]:
    """A chat that ends with a beginning."""
    return [*before, {"role": "user", "content": "import os\n"}, {"role": "assistant", "content": begin}]


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The prompt, as Transformers writes it."""
    if tokenizer.chat_template is None:
        return list(tokenizer("".join(x["content"] for x in messages))["input_ids"])
    return list(tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=True)["input_ids"])


def generated(model: Any, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return [int(x) for x in found[0, len(ids) :]]


def text_behind(tokenizer: Any, ids: list[int], answer: list[int]) -> str:
    """The new text, with the space that it begins with."""
    head, whole = (tokenizer.decode(x, skip_special_tokens=True) for x in (ids, ids + answer))
    assert whole.startswith(head)
    return str(whole[len(head) :])


def ask(running: Running, messages: Any, **more: Any) -> Any:
    body = {"continue_final_message": True, **more.pop("body", {})}
    return running.client().chat.completions.create(
        model=NAME, messages=messages, temperature=0, extra_body=body, **{"max_tokens": 12} | more
    )


@pytest.mark.parametrize("begin", BEGINS)
def test_an_answer_goes_on_as_generate_does_streamed_or_not(server: tuple[Running, Any, Any], begin: str) -> None:
    running, model, tokenizer = server
    messages = messages_of(begin)
    ids = rendered(tokenizer, messages)
    answer = generated(model, ids, 12)
    whole = ask(running, messages, n=2, body={"add_generation_prompt": False})
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == 2 * len(answer)
    wanted = text_behind(tokenizer, ids, answer)
    assert [x.message.content for x in whole.choices] == [wanted] * 2
    chunks = ask(running, messages, stream=True)
    assert "".join(x.choices[0].delta.content or "" for x in chunks) == wanted


def test_a_session_keeps_the_whole_answer_and_the_next_turn_re_uses_it(server: tuple[Running, Any, Any]) -> None:
    running, model, tokenizer = server
    name, kept, before, begins = f"s{id(tokenizer)}", list[int](), list[dict[str, str]](), 0
    for turn in range(3):
        begin = f"def turn_{turn}(items):\n    return"
        messages = messages_of(begin, *before)
        ids = rendered(tokenizer, messages)
        answer = generated(model, ids, 10)
        done = ask(running, messages, max_tokens=10, body={"session_id": name})
        assert done.choices[0].message.content == text_behind(tokenizer, ids, answer)
        shared = next((i for i, (a, b) in enumerate(zip(ids, kept, strict=False)) if a != b), min(len(ids), len(kept)))
        if turn:
            assert shared > begins, "the next turn re-uses what was generated behind the beginning"
            assert done.usage.prompt_tokens_details.cached_tokens == shared
        store: Any = running.server.manager._store
        assert store.open(f"serve//{name}").ids[: len(ids)] == ids
        kept, begins = (ids + answer)[:-1], len(ids)
        before = [*messages[:-1], {"role": "assistant", "content": begin + done.choices[0].message.content}]


def test_a_stop_string_and_penalties_are_of_what_is_new(server: tuple[Running, Any, Any]) -> None:
    running, _, _ = server
    messages = messages_of("def first(items):\n    for x in")
    plain = ask(running, messages).choices[0].message.content
    assert ask(running, messages, stop=["first(items)"]).choices[0].message.content == plain.split("first(items)")[0]
    stop = plain[3:6]
    stopped = ask(running, messages, stop=[stop]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (plain.split(stop)[0], "stop")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}
FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("template", "messages", "body", "field"),
    [
        (CHATML, [USER, ASSISTANT], {"add_generation_prompt": True}, "continue_final_message"),
        (
            CHATML,
            [USER, ASSISTANT],
            {"chat_template_kwargs": {"add_generation_prompt": True}},
            "continue_final_message",
        ),
        (
            CHATML,
            [USER, ASSISTANT],
            {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}},
            "add_generation_prompt",
        ),
        (CHATML, [USER], {}, "continue_final_message"),
        (None, [USER], {}, "continue_final_message"),
        (CHATML, [USER, ASSISTANT | {"tool_calls": [CALL]}], {}, "continue_final_message"),
        (CHATML, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], {}, "continue_final_message"),
        (CHATML, [USER, ASSISTANT | {"content": ""}], {}, "continue_final_message"),
        (None, [USER, ASSISTANT | {"content": []}], {}, "continue_final_message"),
        # Of it nothing is left, and the prompt would end within what begins an answer.
        (TRIMS, [USER, ASSISTANT | {"content": " \n"}], {}, "continue_final_message"),
        (CHATML, [USER, ASSISTANT], {"response_format": FORM}, "continue_final_message"),
        (OTHER, [USER, ASSISTANT | {"content": "It is"}], {}, "continue_final_message"),
        ("{{ messages[0].content }}", [USER, ASSISTANT], {}, "continue_final_message"),
        ("{{ raise_exception('no') }}{{ messages[0].content }}", [USER, ASSISTANT], {}, "messages"),
        (CHATML, [USER, ASSISTANT], {"continue_final_message": 1}, "continue_final_message"),
        (
            CHATML,
            [USER, ASSISTANT],
            {"continue_final_message": False, "add_generation_prompt": "x"},
            "add_generation_prompt",
        ),
        (None, [USER], {"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(
    template: str | None, messages: Any, body: dict[str, Any], field: str, shared: Running
) -> None:
    shared.server.manager.tokenizer.chat_template = template
    with pytest.raises(openai.BadRequestError) as refused:
        ask(shared, messages, body=body)
    assert refused.value.param == field
    assert str(field) in str(refused.value)


def test_a_refusal_does_not_say_what_the_template_renders(shared: Running) -> None:
    shared.server.manager.tokenizer.chat_template = "A secret of the template's.\n" + OTHER
    with pytest.raises(openai.BadRequestError) as refused:
        ask(shared, [USER | {"content": "x" * 5000}, ASSISTANT | {"content": "It is"}])
    assert refused.value.param == "continue_final_message"
    assert "secret" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.fixture(scope="module")
def shared(trained: tuple[Any, Any]) -> Iterator[Running]:
    """Of a tokenizer whose template a test sets."""
    with serving(of(trained, CHATML)) as running:
        yield running


def test_other_endpoints_have_no_such_fields(shared: Running) -> None:
    client, body = shared.client(), {"continue_final_message": True}
    for asked in (
        lambda: client.completions.create(model=NAME, prompt="x", extra_body=body),
        lambda: client.responses.create(model=NAME, input="x", extra_body=body),
    ):
        with pytest.raises(openai.BadRequestError, match="continue_final_message"):
            asked()


def test_what_begins_an_answer_may_be_left_out(shared: Running) -> None:
    tokenizer = shared.server.manager.tokenizer
    tokenizer.chat_template = CHATML
    for header in (True, False):
        ids = tokenizer.apply_chat_template([USER], add_generation_prompt=header, return_dict=True)["input_ids"]
        body = {"continue_final_message": False, "add_generation_prompt": header}
        assert ask(shared, [USER], max_tokens=1, body=body).usage.prompt_tokens == len(ids)


HEADERS = (
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
THOUGHTS = (
    "<think>",
    "<think>So",
    "<think>So</think>",
    "<think>So</think>It",
    "It",
    "So</think>It",
    "caf\u00e9",
    "cafe\u0301",
)
#: Behind an open thought no other one begins; a mark that ends none is text, which is read alike by nobody.
BEGUN = [
    (header, begin)
    for header in HEADERS
    for begin in THOUGHTS
    if not (header.endswith("<think>\n") and begin.startswith("<think>"))
    and not (header.endswith("</think>\n\n") and begin.startswith("So</think>"))
]


@pytest.mark.parametrize("response_template", [None, QWEN], ids=["marks", "qwen"])
@pytest.mark.parametrize(("header", "begin"), BEGUN)
def test_a_thought_that_the_client_begins_goes_on(
    trained: tuple[Any, Any], response_template: Any, header: str, begin: str
) -> None:
    """What comes behind it is what it would be, had the model begun so itself; of it only what is new is said."""
    model, tokenizer = of(trained, CHATML)
    tokenizer.response_template = response_template
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # so that decoding does not give each beginning back
    written = header + begin
    thinks = written.count("<think>") > written.count("</think>")
    before = f"<|im_start|>user\n</think> <think><|im_end|>\n{header}"
    ids = tokenizer(before + begin)["input_ids"]
    news = (((" it is</think> so", " it is", " so"),) if thinks else ()) + ((" and on", " and on", ""),)
    for new, thought, said in news:
        (parser,) = parsers_of(tokenizer, model, ids, None, begun=(before, begin))
        answer = Answer(tokenizer, (), parser, behind=ids)
        parts = answer.feed(RequestOutput("a", ids, tokenizer(new)["input_ids"], finish_reason="stop"))
        found = "".join(x.reasoning for x in parts), "".join(x.text for x in parts)
        wanted = (thought, said) if thinks else ("", new)
        assert tuple(x.strip() for x in found) == tuple(x.strip() for x in wanted)


def test_a_client_gets_the_rest_of_a_thought_that_it_has_begun(shared: Running) -> None:
    manager = shared.server.manager
    manager.tokenizer.chat_template = CHATML
    messages = messages_of("<think>def first(items):\n    for x in")
    ids = rendered(manager.tokenizer, messages)
    text = text_behind(manager.tokenizer, ids, generated(manager.engine.model, ids, 8))
    done = ask(shared, messages, max_tokens=8).choices[0].message
    assert (done.model_extra.get("reasoning_content"), done.content) == (text, "")


def test_a_text_goes_on_with_the_space_that_a_tokenizer_leaves_out_where_one_begins(trained: tuple[Any, Any]) -> None:
    model, tokenizer = of(trained, None)
    messages = messages_of("def first(items):\n    for x in")
    ids = rendered(tokenizer, messages)
    text = text_behind(tokenizer, ids, generated(model, ids, 8))
    assert text.startswith(" ")
    strips = [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(strips)
    with serving((model, tokenizer)) as running:
        assert ask(running, messages, max_tokens=8).choices[0].message.content == text


def test_a_call_that_the_client_begins_comes_whole(trained: tuple[Any, Any]) -> None:
    model, tokenizer = of(trained, CHATML)
    tokenizer.response_template = QWEN
    begin = '<tool_call>\n{"name": "f", '
    before, tools = "<|im_start|>assistant\n", [{"type": "function", "function": {"name": "f"}}]
    ids = tokenizer(before + begin)["input_ids"]
    (parser,) = parsers_of(tokenizer, model, ids, tools, begun=(before, begin))
    answer = Answer(tokenizer, (), parser, behind=ids)
    new = tokenizer('"arguments": {"a": 1}}\n</tool_call>')["input_ids"]
    parts = answer.feed(RequestOutput("a", ids, new, finish_reason="stop"))
    assert [(x.call.name, x.call.arguments) for x in parts if x.call is not None] == [("f", '{"a": 1}')]
    assert "".join(x.text for x in parts).strip() == ""
