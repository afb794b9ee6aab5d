"""Log-probabilities as clients read them: of each token that was asked for, with its bytes, in numbers JSON has."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from servers import NAME, Running

from kvtier.serving.http.answers import TokenLog
from kvtier.serving.http.handlers.chat import _Reply as ChatReply
from kvtier.serving.http.handlers.completions import _Reply
from kvtier.serving.http.handlers.handler import Handler

SMILE = "🙂"


class Words:
    """A tokenizer whose words decode to the same text with and without a space before them, and has bytes."""

    names = ("▁the", "the", "<0xF0>", "<0x9F>", "�", "x")

    def decode(self, ids: list[int]) -> str:
        text = {"▁the": "the", "<0xF0>": "�", "<0x9F>": "�"}
        return "".join(text.get(self.names[i], self.names[i]) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.names[token]


def handler_of(tokenizer: Any) -> Any:
    made = Handler.__new__(Handler)
    made.served = SimpleNamespace(tokenizer=tokenizer, name=NAME)  # type: ignore[assignment]
    return made


def test_no_token_hides_another_one_of_the_same_text() -> None:
    logs = [TokenLog(0, -1.0, [(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0), (4, -5.0)])]
    found = _Reply(handler_of(Words()), None, [""])._logs(0, logs)  # type: ignore[arg-type]
    assert found["tokens"] == ["the"]
    assert found["top_logprobs"] == [
        {"the": -1.0, "token_id:1": -2.0, "bytes:\\xf0": -3.0, "bytes:\\x9f": -4.0, "�": -5.0}
    ]


class Begins(Words):
    """The same, which leaves out only the space that a text begins with."""

    def decode(self, ids: list[int]) -> str:
        return "".join(self.names[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_a_token_has_the_space_that_its_text_has_behind_others() -> None:
    logs = [TokenLog(1, -1.0, [(1, -1.0), (0, -2.0)]), TokenLog(0, -3.0, [(0, -3.0)])]
    handler = handler_of(Begins())
    found = _Reply(handler, None, [""])._logs(0, logs)  # type: ignore[arg-type]
    assert (found["tokens"], found["text_offset"]) == (["the", " the"], [0, 3])
    assert found["top_logprobs"] == [{"the": -1.0, " the": -2.0}, {" the": -3.0}]
    chat = ChatReply(handler, SimpleNamespace(answers=[None]))._logs(SimpleNamespace(logs=logs))  # type: ignore[arg-type]
    assert bytes(byte for entry in chat for byte in entry["bytes"]) == b"the the"


def test_the_chosen_token_is_among_the_likeliest_ones() -> None:
    found = _Reply(handler_of(Words()), None, [""])._logs(0, [TokenLog(5, -9.0, [(0, -1.0), (1, -2.0)])])  # type: ignore[arg-type]
    assert found["top_logprobs"] == [{"the": -1.0, "token_id:1": -2.0, "x": -9.0}]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_log_probability_is_a_number_of_json(logprob: float) -> None:
    logs = [TokenLog(0, logprob, [(5, logprob)])]
    handler = handler_of(Words())
    completion = _Reply(handler, None, [""])._logs(0, logs)  # type: ignore[arg-type]
    chat = ChatReply(handler, SimpleNamespace(answers=[None]))._logs(SimpleNamespace(logs=logs))  # type: ignore[arg-type]
    json.dumps([completion, chat], allow_nan=False)
    assert completion["token_logprobs"] == [-9999.0]


def test_parts_of_characters_have_their_bytes(running: Running, trained: tuple[Any, Any]) -> None:
    """The model is made to write a character whose tokens are its bytes."""
    tokenizer = trained[1]
    parts = tokenizer(SMILE)["input_ids"]
    assert len(parts) == 4, "it has a token of its own"
    bias = {str(token): 100 for token in parts}
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 4, "temperature": 0, "logit_bias": bias}
    done = running.client().completions.create(**asked, prompt="x = ", logprobs=5)
    logs = done.choices[0].logprobs
    assert all(name.startswith("bytes:\\x") for name in logs.tokens)
    assert all(token in top for token, top in zip(logs.tokens, logs.top_logprobs, strict=True))
    ids = [next(t for t in parts if f"bytes:\\x{SMILE.encode()[parts.index(t)]:02x}" == name) for name in logs.tokens]
    with torch.no_grad():
        row = trained[0](torch.tensor([tokenizer("x = ")["input_ids"]])).logits[0, -1].log_softmax(-1)
    assert logs.token_logprobs[0] == pytest.approx(float(row[ids[0]]), abs=1e-4)
    chat = running.client().chat.completions.create(**asked, messages=[{"role": "user", "content": "x"}], logprobs=True)
    for entry in chat.choices[0].logprobs.content:
        assert bytes(entry.bytes) in [bytes([x]) for x in SMILE.encode()]
