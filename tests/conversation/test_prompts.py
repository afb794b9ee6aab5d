"""What a chat's template is given besides messages: of each turn, and nothing that it does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_store import GREEDY, Tokenizer, store_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier import ConfigError
from kvtier.conversation.given.prompts import Prompts

PYLM = Path(__file__).resolve().parents[2] / "examples" / "pylm"
#: It writes tools first, and what was thought before an answer only where nobody says otherwise, as Qwen 3's does.
TEMPLATE = """{% for x in tools or [] %}def {{ x.function.name }}():
{% endfor %}{% for m in messages %}# {{ m.role }}
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}# assistant
{% if enable_thinking is defined and enable_thinking is false %}pass
{% endif %}{% endif %}"""


def look_up(word: str) -> str:
    """What a word means.

    Args:
        word: of the language.
    """
    return word


@pytest.fixture
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(PYLM)
    made.chat_template = TEMPLATE
    return made


def test_a_turn_is_asked_with_its_tools_and_what_else_its_template_reads(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(PYLM).eval()
    turns: list[dict[str, Any]] = [
        {},
        {"tools": [look_up]},
        {"tools": (look_up,), "chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [], "chat_template_kwargs": {}},
    ]

    def expected(messages: Any, tools: Any = None, chat_template_kwargs: Any = None) -> Any:
        given = {"tools": list(tools) if tools else None, **(chat_template_kwargs or {})}
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", **given)
        ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
        return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist()

    texts = set()
    with store_of(model) as store:
        chat = store.open("alice")
        for n, turn in enumerate(turns):
            chat.send(f"x = {n}", tokenizer=tokenizer, **turn, **GREEDY)
            assert chat.ids == expected(chat.messages[:-1], **turn)
            texts.add(tokenizer.decode(chat.ids))
            chat.regenerate(tokenizer=tokenizer, **turn, **GREEDY)
            assert chat.ids == expected(chat.messages[:-1], **turn)
        assert sum("def look_up" in x for x in texts) == 2
        assert sum("# assistant\npass" in x for x in texts) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": "look_up"}, "give a list of functions"),
        ({"tools": look_up}, "give a list of functions"),
        ({"tools": {"name": "look_up"}}, "give a list of functions"),
        ({"chat_template_kwargs": "enable_thinking"}, "by name"),
        ({"chat_template_kwargs": {1: 2}}, "by name"),
        ({"chat_template_kwargs": {"language": "French"}}, "language: leave it out"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages', which a chat gives itself"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "'add_generation_prompt', which a chat gives"),
    ],
)
def test_what_a_template_does_not_read_is_refused_and_nothing_is_said(
    given: dict[str, Any], said: str, tokenizer: Any
) -> None:
    with store_of(AutoModelForCausalLM.from_pretrained(PYLM)) as store:
        chat = store.open("alice")
        chat.send("x = 1", tokenizer=tokenizer, **GREEDY)
        before = list(chat.messages)
        for does in (lambda **options: chat.send("y = 2", **options), chat.regenerate):
            with pytest.raises(ConfigError, match=said):
                does(tokenizer=tokenizer, **given, **GREEDY)
        assert chat.messages == before


def test_tools_are_refused_by_a_template_that_writes_none_and_by_a_tokenizer_without_one(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="tools: leave it out, for the model's chat template does not read it"):
        Prompts(tokenizer, [look_up], None)
    tokenizer.chat_template = None
    for given in ({"tools": [look_up], "given": None}, {"tools": None, "given": {"enable_thinking": False}}):
        with pytest.raises(ConfigError, match="leave it out, for the model's tokenizer has no chat template"):
            Prompts(tokenizer, **given)  # type: ignore[arg-type]
    tokenizer.chat_template = {"default": "{{ messages }}{{ mood }}", "tool_use": "{{ messages }}{{ tools }}"}
    Prompts(tokenizer, None, {"mood": "calm"})
    with pytest.raises(ConfigError, match="mood: leave it out"):
        Prompts(tokenizer, None, {"mood": "calm"}, any_tools=True)  # it would be ignored where a message has tools
    tokenizer.chat_template = "{{ messages }}{{ mood }}"  # of no tools: these are refused where somebody gives them
    Prompts(tokenizer, None, {"mood": "calm"}, any_tools=True)
    tokenizer.chat_template = {"rag": "{{ documents }}", "tool_use": "{{ tools }}"}
    with pytest.raises(ConfigError, match="which chat template is meant"):
        Prompts(tokenizer, None, {"documents": []})


def test_what_makes_no_prompt_otherwise_needs_nothing_of_a_tokenizer() -> None:
    found = Prompts(Tokenizer(), [], {}).ids_of([{"role": "user", "content": "x"}])
    assert found == Tokenizer().apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
