"""OpenAI's own client against the server: the tokens are those of `generate`, and what is re-used is what is said."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from conftest import NAME, Running

PROMPTS = ("def first(items):\n", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n\n\ndef main(")


def by_generate(trained: tuple[Any, Any], prompt: str, count: int, **options: Any) -> str:
    """What `generate` writes behind a prompt, greedily."""
    model, tokenizer = trained
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_generate_writes(running: Running, trained: tuple[Any, Any], prompt: str) -> None:
    done = running.client().completions.create(model=NAME, prompt=prompt, max_tokens=24, temperature=0)
    assert done.choices[0].text == by_generate(trained, prompt, 24)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 24


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_chat_streamed_or_not_is_what_generate_writes(
    running: Running, trained: tuple[Any, Any], prompt: str
) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    client = running.client()
    whole = client.chat.completions.create(**asked, temperature=0)
    assert whole.choices[0].message.content == by_generate(trained, prompt, 24)
    chunks = list(
        client.chat.completions.create(**asked, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_cached_tokens_are_right_in_every_turn(running: Running, trained: tuple[Any, Any]) -> None:
    """Each turn begins with what the turns before have left: all of their tokens that its prompt shares, but one that
    has to be computed for the next one."""
    tokenizer, text, kept = trained[1], "def turns(count):\n    total = 0\n", list[int]()
    for turn in range(4):
        ids = tokenizer(text)["input_ids"]
        done = running.client().completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0)
        shared = next((i for i, (a, b) in enumerate(zip(ids, kept, strict=False)) if a != b), min(len(ids), len(kept)))
        if turn:
            assert done.usage.prompt_tokens_details.cached_tokens == min(shared, len(ids) - 1)
            assert shared > 10
        answer = by_generate(trained, text, 12)
        assert done.choices[0].text == answer
        # Of an answer the last token is never attended to, and not cached.
        kept = (ids + _generated(trained, ids, 12))[:-1]
        text += answer + f"\n    # turn {turn}\n"


def _generated(trained: tuple[Any, Any], ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = trained[0].generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_a_model_that_is_not_served_is_not_found(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        running.client().completions.create(model="other", prompt="x")
    assert [model.id for model in running.client().models.list()] == [NAME]
    assert running.client().models.retrieve(NAME).id == NAME
