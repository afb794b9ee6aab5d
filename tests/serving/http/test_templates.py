"""What a chat template reads is honoured; what it only mentions, or sets itself, is refused and not ignored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.hf.models.checkpoint.templates import names_read
from kvtier.serving.http.handlers import responses
from kvtier.serving.http.handlers.handler import Handler
from kvtier.serving.http.requests.asked import Asked
from kvtier.serving.http.requests.messages import messages_of
from kvtier.serving.http.requests.refusals import Refusal

#: As Llama 3.1 and Qwen 3 have them.
SETS_DEFAULTS = """
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{%- macro shown(x) %}{{ x }}{{ language }}{%- endmacro %}
{%- for m in messages %}{% generation %}{{ shown(m.content) }}{% if enable_thinking %}?{% endif %}{% endgeneration %}
{%- if loop.index > 9 %}{% break %}{% endif %}{%- endfor %}{{ tools }}"""
MENTIONS = """{# tools go here #}{% set temperature = 1 %}{% for m in messages %}style: {{ m.tools }}{{ 'effort' }}
{{- temperature }}{% endfor %}"""


@pytest.fixture
def handler(trained: tuple[Any, Any]) -> Iterator[Any]:
    """Of a tokenizer whose template a test may set."""
    tokenizer = copy.copy(trained[1])
    made = Handler.__new__(Handler)
    made.served = SimpleNamespace(tokenizer=tokenizer, model=trained[0], context=None, template={})  # type: ignore[assignment]
    return made


SAID = """{% for m in messages %}
{{ m.role }} {{ m.name }}: {{ m.content }} ({{ m.reasoning_content }}) {{ m.tool_calls }}{{ '\\n' }}
{%- endfor %}"""


def test_all_that_a_message_says_is_there_for_the_template(handler: Any) -> None:
    handler.served.tokenizer.chat_template = SAID
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "assistant", "content": "As OpenAI's client sends it back.", "tool_calls": None},
    ]
    text = handler.served.tokenizer.decode(handler.prompt_of(messages_of({"messages": messages}), Asked()))
    lines = text.splitlines()
    assert lines[0].startswith("user Ada: hi (")
    assert lines[1].startswith("assistant : I look. (Hm.) [")
    assert "'arguments': {'a': 1}" in lines[1]
    assert lines[2].startswith("assistant :  () [")
    assert lines[3].startswith("assistant : As OpenAI's client sends it back. ()")


def test_a_tokenizer_that_writes_chats_by_code_of_its_own_does_and_takes_what_that_has_parameters_for(
    handler: Any,
) -> None:
    """As that of mistral-common, which has no template."""
    tokenizer = handler.served.tokenizer

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(
            self, conversation: Any, tools: Any = None, effort: str = "", truncation: bool = False, **options: Any
        ) -> Any:
            return {"input_ids": self(f"{conversation[0]['content']} {tools} {effort}")["input_ids"]}

    tokenizer.__class__, tokenizer.chat_template = Own, None
    messages = messages_of({"messages": [{"role": "user", "content": "hi"}]})
    asked = Asked(template={"effort": "high"})
    assert tokenizer.decode(handler.prompt_of(messages, asked)) == "hi None high"
    for name in ("enable_thinking", "truncation", "options"):
        with pytest.raises(Refusal, match="does not read"):
            handler.prompt_of(messages, Asked(template={name: True}))


def test_instructions_come_before_a_system_message_and_not_in_its_place() -> None:
    items = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    found = responses.messages_from({"input": items, "instructions": "Be kind."})
    assert [x["content"] for x in found] == ["Be kind.", "Be brief.", "hi"]
    assert [x["content"] for x in responses.messages_from({"input": "hi", "instructions": None})] == ["hi"]


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ITEMS: dict[str, dict[str, Any]] = {
    "u": {"role": "user", "content": "hi"},
    "t": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    "r": THOUGHT,
    "e": THOUGHT | {"content": None, "encrypted_content": "x"},
    "c": {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    "o": {"type": "function_call_output", "call_id": "1", "output": "5"},
}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("urt", "u a(Hm.)"),
        ("urrt", "u a(Hm.Hm.)"),
        ("urco", "u a(Hm.)c tool"),
        ("urcort", "u a(Hm.)c tool a(Hm.)"),
        ("urcot", "u a(Hm.)c tool a"),
        ("urtcot", "u a(Hm.)c tool a"),
        ("utrc", "u a a(Hm.)c"),
        ("urut", "u a(Hm.) u a"),
        ("ur", "u a(Hm.)"),
        ("uec", "u ac"),
        ("ueut", "u u a"),
        ("rtu", "a(Hm.) u"),
        ("rcou", "a(Hm.)c tool u"),
        ("ecou", "ac tool u"),
        ("cou", "ac tool u"),
        ("ou", "tool u"),
        ("r", "a(Hm.)"),
    ],
)
def test_a_thought_of_a_response_stays_with_what_was_said_behind_it(items: str, expected: str) -> None:
    found = responses.messages_from({"input": [ITEMS[x] for x in items]})
    shown = {"user": "u", "assistant": "a", "tool": "tool"}
    thought = [f"({x['reasoning_content']})" if x.get("reasoning_content") else "" for x in found]
    calls = ["c" * len(x.get("tool_calls", ())) for x in found]
    assert " ".join(shown[x["role"]] + t + c for x, t, c in zip(found, thought, calls, strict=True)) == expected


@pytest.mark.parametrize("items", ["cou", "rcou", "ou", "rtu", "r"])
def test_a_history_that_is_cut_at_its_front_is_rendered(handler: Any, items: str) -> None:
    handler.served.tokenizer.chat_template = SAID
    found = handler.prompt_of(responses.messages_from({"input": [ITEMS[x] for x in items]}), Asked())
    roles = [line.split()[0] for line in handler.served.tokenizer.decode(found).splitlines()]
    assert roles == [
        {"u": "user", "t": "assistant", "c": "assistant", "o": "tool"}[x] for x in items.lstrip("r") or "t"
    ]


def test_parts_of_a_text_are_one_message_of_the_user() -> None:
    parts = [{"type": "input_text", "text": x} for x in ("a", "b")]
    assert responses.messages_from({"input": parts}) == [{"role": "user", "content": parts}]


def test_items_that_cannot_be_rendered_are_named() -> None:
    for item in ({"type": "item_reference", "id": "x"}, {"type": "input_image", "image_url": "x"}, {"type": None}, {}):
        for items in ([item], [ITEMS["c"], item], [ITEMS["u"], item]):
            with pytest.raises(Refusal, match=str(item.get("type", "message"))) as error:
                responses.messages_from({"input": items})
            assert (error.value.status, error.value.param) == (400, "input")


def test_a_generation_prompt_may_be_left_out(handler: Any) -> None:
    reads = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert text_of(handler, reads).endswith(">")
    assert not text_of(handler, reads, add_generation_prompt=False).endswith(">")


def text_of(handler: Any, template: Any, tools: Any = None, **kwargs: Any) -> str:
    handler.served.tokenizer.chat_template = template
    asked = Asked(tools=tools, template=kwargs)
    return handler.served.tokenizer.decode(handler.prompt_of([{"role": "user", "content": "hi"}], asked))


def refused(handler: Any, template: Any, tools: Any = None, **kwargs: Any) -> Refusal:
    with pytest.raises(Refusal) as error:
        text_of(handler, template, tools, **kwargs)
    assert error.value.status == 400
    return error.value


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def test_variables_that_a_template_reads_are_given_to_it(handler: Any) -> None:
    assert "hi?" in text_of(handler, SETS_DEFAULTS)
    assert "hi?" not in text_of(handler, SETS_DEFAULTS, enable_thinking=False)
    assert "hiEnglish" in text_of(handler, SETS_DEFAULTS, language="English")
    assert "look_up" in text_of(handler, SETS_DEFAULTS, TOOLS)
    assert names_read(SETS_DEFAULTS) == {"tools", "enable_thinking", "language", "messages"}


def test_what_a_request_says_takes_the_place_of_what_the_server_gives_its_template(handler: Any) -> None:
    handler.served.template = {"enable_thinking": False, "language": "English"}
    assert "hiEnglish" in text_of(handler, SETS_DEFAULTS)
    assert "hiEnglish?" not in text_of(handler, SETS_DEFAULTS)
    assert "hiEnglish?" in text_of(handler, SETS_DEFAULTS, enable_thinking=True)


@pytest.mark.parametrize("name", ["temperature", "style", "effort", "m", "e"])
def test_what_a_template_only_mentions_is_refused(handler: Any, name: str) -> None:
    assert refused(handler, MENTIONS, **{name: "x"}).param == name


def test_tools_are_read_by_the_template_that_is_rendered(handler: Any) -> None:
    assert refused(handler, MENTIONS, TOOLS).param == "tools"
    reads = "{{ tools }}{{ messages[0].content }}"
    assert refused(handler, {"default": MENTIONS, "rag": reads}, TOOLS).param == "tools"
    both = {"default": MENTIONS, "tool_use": reads}
    assert "look_up" in text_of(handler, both, TOOLS)
    assert refused(handler, both, effort=1).param == "effort"


def test_a_template_that_cannot_be_used_says_so(handler: Any) -> None:
    broken = "{{ tools }}{% if x"
    assert "chat template refuses" in str(refused(handler, broken, TOOLS))
    assert refused(handler, broken, effort=1).param == "effort"
    assert "no default" in str(refused(handler, {"a": MENTIONS, "b": MENTIONS}))


@pytest.mark.parametrize(("kind", "field"), [(Handler, "messages"), (responses.ResponsesHandler, "input")])
def test_a_template_that_refuses_names_the_field_of_the_request(handler: Any, kind: Any, field: str) -> None:
    made = kind.__new__(kind)
    made.served = handler.served
    assert refused(made, "{{ raise_exception('no') }}").param == field
