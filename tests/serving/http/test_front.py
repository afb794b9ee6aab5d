"""The door alone: bodies that nobody with a key has sent, and strings that are no text."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from kvtier.serving.http import front
from kvtier.serving.http.front import Door, Receive, Send
from kvtier.serving.http.metrics import Metrics
from kvtier.serving.http.requests.keys import Keys
from kvtier.serving.http.requests.refusals import Refusal

PAIR = b"\\ud83d\\ude00"


class Client:
    """Sends a body in parts, and hears what is answered.

    Attributes:
        left: parts that were not taken.
        read: bodies as the app has read them.
        late: parts that were not taken when the app was asked.
        status, headers: of the answer.
    """

    def __init__(self, *parts: bytes) -> None:
        self.left = list(parts)
        self.read = list[bytes]()
        self.late = 0
        self.status = 0
        self.headers = list[tuple[bytes, bytes]]()

    def ask(self, path: str, key: str | None = None, *, max_body: int = 1000, name: bytes | None = None) -> Client:
        """The door's answer has come when this returns."""
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        headers += [] if name is None else [(b"x-request-id", name)]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        keys = Keys({"key": "alice"}, b"x" * 32)
        door = Door(self._app, keys, Metrics("m"), max_body=max_body, timeout=60.0)
        asyncio.run(asyncio.wait_for(door(scope, self._receive, self._send), 60.0))
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.left.pop(0), "more_body": bool(self.left)}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers += message.get("headers", [])

    async def _app(self, _: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.late = len(self.left)
        self.read.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("path", ["/health", "/metrics", "/docs", "/chat/completions"])
@pytest.mark.parametrize("key", [None, "key"])
def test_a_body_where_no_key_is_needed_is_neither_held_nor_looked_at(path: str, key: str | None) -> None:
    for parts in ([b'["\\ud800"]'], [b"x" * 900] * 3):
        client = Client(*parts).ask(path, key)
        assert (client.status, client.read, client.left) == (200, [b""], [])
    client = Client(*[b"x" * 900] * 100).ask(path, key)
    assert (client.status, client.read) == (200, [b""])
    assert client.late, "a body without an end is read for ever"


def test_a_body_where_a_key_is_needed_is_read_with_one_only() -> None:
    client = Client(b"[", b"]").ask("/v1/completions")
    assert (client.status, client.read, client.left) == (401, [], [b"[", b"]"])
    client = Client(b"[", b"]").ask("/v1/completions", "key")
    assert (client.status, client.read) == (200, [b"[]"])


def test_a_body_that_has_come_whole_is_refused_at_once_where_it_is_too_large() -> None:
    assert Client(b"x" * 900, b"x" * 900).ask("/v1/completions", "key").status == 413


@pytest.mark.parametrize(("key", "body", "status"), [("key", b"{}", 200), (None, b"{}", 401), ("key", b"x" * 9, 413)])
def test_an_answer_and_a_refusal_have_the_name_of_the_request(key: str | None, body: bytes, status: int) -> None:
    client = Client(body).ask("/v1/completions", key, max_body=8, name=b"mine")
    assert client.status == status
    assert [value for name, value in client.headers if name == b"x-request-id"] == [b"mine"]
    assert b"x-request-id" not in dict(Client(body).ask("/v1/completions", key, max_body=8).headers)


def test_whole_pairs_of_surrogates_cost_no_second_reading_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(_: object) -> None:
        raise AssertionError("it is read")

    monkeypatch.setattr(front, "json", type("_", (), {**vars(json), "loads": loads}))
    for text in (b'["%s%s"]' % (PAIR, PAIR), b'["\\n%s", "\\\\ud800", "\\\\%s"]' % (PAIR, PAIR)):
        front._check_text(text)
        front._check_text(text.decode().encode("utf-16"))


def test_what_is_text_is_what_has_bytes() -> None:
    parts = ("\\ud83d", "\\uDE00", "\\\\", "\\n", "\\u0041", "\\u", "ud83d", '"', "x", "\ud83d", "\ude00", "🙂")
    for some in itertools.chain.from_iterable(itertools.product(parts, repeat=n) for n in range(5)):
        body = f'["{"".join(some)}"]'.encode("utf-8", "surrogatepass")
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            with pytest.raises(Refusal, match="surrogate"):
                front._check_text(body)
        except ValueError:  # no JSON: the app says so
            front._check_text(body)
        else:
            front._check_text(body)


def test_bytes_that_only_look_like_halves_are_left_to_the_app() -> None:
    for body in (b"\0\xd8\0\xd8\0\xd8", b"name=\\ud800", b"\x1f\x8b\0\0\xd8\xd8\xed\xa0\x80", b'{"a": "\\'):
        front._check_text(body)
