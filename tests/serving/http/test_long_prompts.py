"""A prompt of many megabytes costs no more than one that fits, and nothing once its client has left."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import NAME, Running, Start
from test_many_prompts import connected, until

from kvtier.serving.http.requests.keys import VISIT, Visit

CONTEXT = 1000
MANY = 4 << 20


class Tokenizing:
    """What the server's tokenizer is given.

    Attributes:
        lengths: of texts, in characters.
        visit: that the last one is of.
        ids: given for each text; None: its own.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.lengths = list[int]()
        self.visit = Visit()
        self.ids: list[int] | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self._call = call

    def __call__(self, tokenizer: Any, text: str, **options: Any) -> Any:
        self.visit = VISIT.get(Visit())
        self.lengths.append(len(text))
        assert self.go_on.wait(120)
        return self._call(tokenizer, text, **options) if self.ids is None else {"input_ids": list(self.ids)}


@pytest.fixture
def tokenizing(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizing]:
    kind = type(trained[1])
    found = Tokenizing(kind.__call__)
    monkeypatch.setattr(kind, "__call__", lambda *args, **options: found(*args, **options))
    yield found
    found.go_on.set()


@pytest.fixture(scope="module")
def small(start: Start) -> Iterator[Running]:
    """A server of short sequences."""
    with start(context=CONTEXT) as server:
        yield server


def post(running: Running, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    data = json.dumps({"model": NAME, **body}).encode()
    request = urllib.request.Request(f"{running.url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.parametrize(
    ("path", "field"), [("/completions", "prompt"), ("/chat/completions", "messages"), ("/responses", "input")]
)
def test_what_cannot_fit_is_refused_before_all_of_it_is_tokenised(
    small: Running, tokenizing: Tokenizing, path: str, field: str
) -> None:
    text = "def first(items):\n" * (MANY // 18)
    status, error = post(small, path, **{field: [{"role": "user", "content": text}] if field == "messages" else text})
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "context length is 1000 tokens: the prompt has more than" in error["message"]
    assert sum(tokenizing.lengths) < MANY // 10


def test_ids_that_cannot_fit_are_not_decoded(small: Running, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any, **__: Any) -> str:
        raise AssertionError("decoded")

    monkeypatch.setattr(type(trained[1]), "decode", decode)
    status, error = post(small, "/completions", prompt=[5] * (CONTEXT + 1), echo=True, max_tokens=1)
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_text_of_few_tokens_is_taken_however_long_it_is(small: Running, tokenizing: Tokenizing) -> None:
    """As of a vocabulary with long runs of spaces: characters alone show nothing."""
    tokenizing.ids = [5]
    status, found = post(small, "/completions", prompt=" " * MANY, max_tokens=1)
    assert (status, found.get("usage", {}).get("prompt_tokens")) == (200, 1)
    assert tokenizing.lengths[-1] == MANY


def test_nothing_more_is_tokenised_for_a_client_that_has_left(small: Running, tokenizing: Tokenizing) -> None:
    tokenizing.ids = [5]
    tokenizing.go_on.clear()
    with connected(small, prompt=" " * MANY, max_tokens=1):
        until(lambda: tokenizing.lengths)
    until(lambda: tokenizing.visit.left)
    tokenizing.go_on.set()
    readers = small.server.manager._readers
    met = threading.Barrier(3)  # at which all of the threads that read are done with it
    for _ in range(2):
        readers.submit(met.wait, 120)
    met.wait(120)
    assert sum(tokenizing.lengths) < MANY // 10
