"""A request of many prompts keeps nobody out, ends with its client, and is refused where it could never be taken."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest
from servers import NAME, Running, Start, answer_on

PROMPTS = 200


@pytest.fixture
def added(running: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of prompts that were added, each of which takes a while."""
    found, add = list[int](), running.engine.add_request

    def slow(ids: Any, **options: Any) -> str:
        time.sleep(0.01)
        found.append(len(ids))
        return str(add(ids, **options))

    monkeypatch.setattr(running.engine, "add_request", slow)
    return found


def connected(running: Running, **body: Any) -> socket.socket:
    data = json.dumps({"model": NAME, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def until(what: Any) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("n", [1, 2])
def test_another_client_is_let_in_between_many_prompts(running: Running, added: list[int], n: int) -> None:
    asked = {"prompt": ["a b c"] * (PROMPTS // n), "max_tokens": 1, "temperature": 0, "n": n}
    client = running.client()  # it takes a while to make one
    many = connected(running, **asked)
    until(lambda: added)
    client.completions.create(model=NAME, prompt=[5] * 33, max_tokens=1, temperature=0)
    assert 33 in added
    assert added.index(33) < PROMPTS // 2
    until(lambda: len(added) == PROMPTS + 1)
    assert answer_on(many)[0] == 200
    many.close()


def test_nothing_more_is_added_for_a_client_that_has_left(running: Running, added: list[int]) -> None:
    many = connected(running, prompt=["a b c"] * PROMPTS, max_tokens=1)
    until(lambda: added)
    many.close()
    until(lambda: not running.server.manager._names)
    count = len(added)
    threading.Event().wait(0.2)
    assert len(added) == count < PROMPTS
    until(lambda: not running.engine.load.running + running.engine.load.waiting)


def test_who_is_cancelled_while_its_prompts_are_added_hears_that_the_server_ends(
    running: Running, added: list[int]
) -> None:
    many = connected(running, prompt=["a b c"] * PROMPTS, max_tokens=1)
    until(lambda: added)
    running.server.manager.cancel_everything()
    status, text = answer_on(many)
    many.close()
    assert status == 503
    assert "The server is shutting down." in text
    until(lambda: not running.engine.load.running + running.engine.load.waiting)
    assert not running.server.manager._names


def test_more_answers_than_may_ever_wait_are_no_busy_server(start: Start) -> None:
    with start(engine={"max_waiting": 8}) as running:

        def status_of(**body: Any) -> tuple[int, str | None]:
            data = json.dumps({"max_tokens": 1, **body}).encode()
            request = urllib.request.Request(f"{running.url}/completions", data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.status, None
            except HTTPError as error:
                return error.code, json.load(error)["error"]["param"]

        assert status_of(prompt=["x"] * 9) == (400, "prompt")
        assert status_of(prompt=["x"] * 3, n=3, temperature=1) == (400, "n")
        assert status_of(prompt=["x"] * 3, n=3, temperature=0) == (400, "n")
        assert status_of(prompt=["x"] * 4, n=2, temperature=1) == (200, None)
