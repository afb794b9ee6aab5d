"""An answer that the caller begins: the model goes on from there, and what is kept is all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from test_store import GREEDY, Tokenizer, store_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from kvtier import ConfigError
from kvtier.conversation.given.prompts import Prompts

PYLM = Path(__file__).resolve().parents[2] / "examples" / "pylm"
TEMPLATE = """{% for m in messages %}# {{ m.role }}
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}# assistant
{% endif %}"""
BEGIN = "def add(a, b):\n    return"


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(PYLM).eval()


@pytest.fixture
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(PYLM)
    made.chat_template = TEMPLATE
    return made


def expected(model: Any, tokenizer: Any, messages: list[dict[str, str]], begin: str) -> tuple[list[int], str]:
    """All ids and the text of the whole answer, as Transformers has them."""
    whole = [*messages, {"role": "assistant", "content": begin}]
    text = tokenizer.apply_chat_template(whole, tokenize=False, continue_final_message=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0]
    return out.tolist(), begin + tokenizer.decode(out[ids.shape[1] :], skip_special_tokens=True)


def test_the_model_goes_on_from_the_beginning_and_the_whole_answer_is_kept(model: Any, tokenizer: Any) -> None:
    with store_of(model) as store:
        chat = store.open("alice")
        user = [{"role": "user", "content": "Add."}]
        ids, text = expected(model, tokenizer, user, BEGIN)
        assert chat.send("Add.", tokenizer=tokenizer, begin=BEGIN, **GREEDY) == text
        assert chat.ids == ids
        assert chat.messages == [*user, {"role": "assistant", "content": text}]
        assert text.startswith(BEGIN)
        assert text != BEGIN
        # Another answer begins as it is told to, or as the model begins it.
        for begin in ("class", BEGIN):
            ids, text = expected(model, tokenizer, user, begin)
            assert chat.regenerate(tokenizer=tokenizer, begin=begin, **GREEDY) == text
            assert (chat.ids, chat.messages[-1]["content"]) == (ids, text)
        chat.send("And?", tokenizer=tokenizer, **GREEDY)
        assert chat.reuse is not None
        assert chat.reuse.cached >= len(tokenizer(TEMPLATE[:10] + BEGIN)["input_ids"])
        plain = chat.messages[-1]["content"]
        assert chat.regenerate(tokenizer=tokenizer, begin="", **GREEDY) == plain
        chat.rewind(turns=1)
        assert chat.messages == [*user, {"role": "assistant", "content": text}]
        assert chat.ids == ids


def test_a_streamer_is_given_the_beginning_with_the_prompt(model: Any, tokenizer: Any) -> None:
    with store_of(model) as store:
        for skip in (True, False):
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip, skip_special_tokens=True)
            text = store.open(f"{skip}").send("Add.", tokenizer=tokenizer, begin=BEGIN, streamer=streamer, **GREEDY)
            told = "".join(streamer)
            assert BEGIN + told == text if skip else told.endswith(text)


def test_spaces_that_a_template_leaves_out_are_not_kept(model: Any, tokenizer: Any) -> None:
    """The model has not read them, and writes its own."""
    tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content | trim")
    with store_of(model) as store:
        chat = store.open("alice")
        text = chat.send("Add.", tokenizer=tokenizer, begin=f"  {BEGIN}  ", **GREEDY)
        assert text == expected(model, tokenizer, [{"role": "user", "content": "Add."}], BEGIN)[1]
    tokenizer.chat_template = TEMPLATE
    with store_of(model) as store:
        text = store.open("alice").send("Add.", tokenizer=tokenizer, begin=f"  {BEGIN}  ", **GREEDY)
        assert text.startswith(f"  {BEGIN}  ")


def test_without_a_template_the_beginning_follows_the_contents(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with store_of(model) as store:
        chat = store.open("alice")
        text = chat.send("# Add.\n", tokenizer=tokenizer, begin=BEGIN, **GREEDY)
        prompt = tokenizer("# Add.\n" + BEGIN)["input_ids"]
        assert chat.ids[: len(prompt)] == prompt
        assert text == BEGIN + tokenizer.decode(chat.ids[len(prompt) :], skip_special_tokens=True)


class Words:
    """As of SentencePiece: the first word of what is decoded has no space before it."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(map(len, text.split()))}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join("x" * n for n in ids)


def test_the_space_between_the_beginning_and_what_follows_is_kept() -> None:
    prompts = Prompts(Words(), None, None)
    assert prompts.end_of([1, 2], [3, 4]) == " xxx xxxx"
    assert prompts.end_of([2] * 100, [3]) == " xxx"


def test_what_cannot_begin_an_answer_is_refused_and_nothing_is_said(model: Any, tokenizer: Any) -> None:
    with store_of(model) as store:
        chat = store.open("alice")

        def refused(said: str, begin: Any, of: Any = tokenizer) -> None:
            with pytest.raises(ConfigError, match=said):
                chat.send("Add.", tokenizer=of, begin=begin, **GREEDY)
            assert (chat.messages, chat.ids) == ([], [])

        refused("give the text", 3)
        refused("give the text", ["x"])
        refused("does not end a prompt with it", "x", Tokenizer())  # gives ids, whatever it is asked for
        tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content | upper")
        refused("continues no message", BEGIN)
        raises = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        tokenizer.chat_template = TEMPLATE + raises
        refused("continues no message: no", BEGIN)
        tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content + '!'")
        assert chat.send("Add.", tokenizer=tokenizer, begin=BEGIN, **GREEDY).startswith(BEGIN)
    with store_of(tiny_model("t5")) as store, pytest.raises(ConfigError, match="encoder-decoder"):
        store.open("alice").send("Add.", tokenizer=Tokenizer(), begin="x", **GREEDY)
