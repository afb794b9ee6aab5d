"""OpenAI's own client against the server: the tokens are those of `generate`, and what is re-used is what is said."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from servers import NAME, Running, by_generate

PROMPTS = ("def first(items):\n", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n\n\ndef main(")


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


def _generated(trained: tuple[Any, Any], ids: list[int], count: int, stop: list[str] | None = None) -> list[int]:
    options = {} if stop is None else {"stop_strings": stop, "tokenizer": trained[1]}
    with torch.no_grad():
        out = trained[0].generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, **options)
    return out[0, len(ids) :].tolist()


def test_a_model_that_is_not_served_is_not_found(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        running.client().completions.create(model="other", prompt="x")
    assert [model.id for model in running.client().models.list()] == [NAME]
    assert running.client().models.retrieve(NAME).id == NAME


def test_several_answers_to_several_prompts(running: Running, trained: tuple[Any, Any]) -> None:
    client = running.client()
    done = client.completions.create(model=NAME, prompt=list(PROMPTS[:2]), n=2, max_tokens=8, temperature=0)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert [c.text for c in done.choices] == [by_generate(trained, p, 8) for p in PROMPTS[:2] for _ in range(2)]
    ids = trained[1](PROMPTS[0])["input_ids"]
    assert client.completions.create(model=NAME, prompt=ids, max_tokens=8, temperature=0).choices[0].text == (
        done.choices[0].text
    )
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPTS[1]}], "model": NAME, "max_tokens": 8}
    sampled = client.chat.completions.create(**asked, n=3, temperature=1.5, seed=7)
    texts = [choice.message.content for choice in sampled.choices]
    assert len(set(texts)) > 1
    assert sampled.usage.prompt_tokens == len(trained[1](PROMPTS[1])["input_ids"]), "a prompt counts once"
    assert sampled.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, temperature=1.5, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_seed_gives_the_same_tokens_whatever_else_is_computed(running: Running) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 1.2, "seed": 11}
    alone = running.client().completions.create(**asked).choices[0].text
    streams = [
        running.client().completions.create(model=NAME, prompt=p, max_tokens=40, temperature=1.0, stream=True)
        for p in PROMPTS
    ]
    assert running.client().completions.create(**asked).choices[0].text == alone
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("stop", ["\n", ["return", "self"], " item"])
def test_text_ends_before_a_stop_string_streamed_or_not(
    running: Running, trained: tuple[Any, Any], stop: str | list[str]
) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    whole = by_generate(trained, PROMPTS[1], 40)
    ends = min((whole.find(s) for s in strings if s in whole), default=None)
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, "stop": stop}
    done = running.client().completions.create(**asked)
    assert done.choices[0].text == whole[:ends]
    assert done.choices[0].finish_reason == ("stop" if ends is not None else "length")
    parts = list(running.client().completions.create(**asked, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole[:ends]
    assert parts[-1].choices[0].finish_reason == done.choices[0].finish_reason
    by_stop = by_generate(trained, PROMPTS[1], 40, stop_strings=strings, tokenizer=trained[1])
    assert by_stop.startswith(done.choices[0].text)
    assert done.usage.completion_tokens == len(_generated(trained, trained[1](PROMPTS[1])["input_ids"], 40, strings))


def test_log_probabilities_are_the_models_own(running: Running, trained: tuple[Any, Any]) -> None:
    model, tokenizer = trained
    ids = tokenizer(PROMPTS[0])["input_ids"]
    tokens = _generated(trained, ids, 8)
    with torch.no_grad():
        scores = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    asked: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8}
    asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    done = running.client().chat.completions.create(**asked)
    chunks = [chunk.choices[0] for chunk in running.client().chat.completions.create(**asked, stream=True)]
    streamed = [entry for c in chunks if c.logprobs is not None for entry in c.logprobs.content]
    for found in (done.choices[0].logprobs.content, streamed):
        assert [entry.token for entry in found] == [tokenizer.decode([t]) for t in tokens]
        for entry, row, token in zip(found, scores, tokens, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [x.token for x in entry.top_logprobs] == [tokenizer.decode([t]) for t in row.topk(3).indices]
    legacy = running.client().completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=8, temperature=0, logprobs=2)
    logs = legacy.choices[0].logprobs
    assert logs.token_logprobs == pytest.approx([float(r[t]) for r, t in zip(scores, tokens, strict=True)], abs=1e-4)
    assert logs.text_offset[0] == 0
    assert len(logs.top_logprobs) == 8


def penalised(trained: tuple[Any, Any], ids: list[int], begins: int) -> list[int]:
    """What a penalty of 1.5 for presence and .5 for frequency gives by definition, token by token.

    Args:
        begins: where in the sequence tokens begin to count.
    """
    said = list[int]()
    for _ in range(16):
        with torch.no_grad():
            row = trained[0](torch.tensor([ids + said])).logits[0, -1]
        counted = (ids + said)[begins:]
        for token in set(counted):
            row[token] -= 1.5 + 0.5 * counted.count(token)
        said.append(int(row.argmax()))
    return said


def test_penalties_lower_the_scores_of_what_was_said_and_not_of_the_prompt(
    running: Running, trained: tuple[Any, Any]
) -> None:
    prompt = "    if value:\n        return value\n" * 4
    ids = trained[1](prompt)["input_ids"]
    expected = penalised(trained, ids, len(ids))
    assert expected != penalised(trained, ids, 0), "the prompt makes no difference here"
    asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    done = running.client().completions.create(**asked, presence_penalty=1.5, frequency_penalty=0.5)
    assert done.choices[0].text == trained[1].decode(expected)
    assert done.choices[0].text != running.client().completions.create(**asked).choices[0].text


def test_a_bias_forces_and_forbids(running: Running, trained: tuple[Any, Any]) -> None:
    token = trained[1](" lambda")["input_ids"][0]
    done = running.client().completions.create(
        model=NAME, prompt=PROMPTS[0], max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert done.choices[0].text == trained[1].decode([token] * 3)


def test_settings_beyond_openais(running: Running, trained: tuple[Any, Any]) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 20}
    done = running.client().completions.create(**asked, extra_body={"repetition_penalty": 1.3, "temperature": 0})
    assert done.choices[0].text == by_generate(trained, PROMPTS[0], 20, repetition_penalty=1.3)
    end = trained[1].eos_token_id
    forced = running.client().completions.create(
        **asked, temperature=0, logit_bias={str(end): 100}, extra_body={"ignore_eos": True}
    )
    assert forced.usage.completion_tokens == 20
    ended = running.client().completions.create(**asked, temperature=0, logit_bias={str(end): 100})
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    least = running.client().completions.create(
        **asked, temperature=0, logit_bias={str(end): 100}, extra_body={"min_tokens": 5}
    )
    assert least.usage.completion_tokens == 6


def test_responses_streamed_or_not(running: Running, trained: tuple[Any, Any]) -> None:
    client, expected = running.client(), by_generate(trained, PROMPTS[0], 12)
    asked: dict[str, Any] = {"model": NAME, "input": PROMPTS[0], "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == expected
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_echo_is_the_prompt(running: Running, trained: tuple[Any, Any]) -> None:
    done = running.client().completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=4, temperature=0, echo=True)
    assert done.choices[0].text == PROMPTS[0] + by_generate(trained, PROMPTS[0], 4)
