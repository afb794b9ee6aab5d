"""A request of many prompts keeps nobody out, ends with its client, and is refused where it could never be taken."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest
from servers import NAME, Running, Start, answer_on

PROMPTS = 200


class Adding:
    """The requests of an engine whose adding has begun; none is added before `go_on` is set.

    Attributes:
        lengths: of their prompts.
    """

    def __init__(self, running: Running) -> None:
        self.lengths, self.go_on = list[int](), threading.Event()
        self._add, self._adder = running.engine.add_request, running.server.manager._adder

    def __call__(self, ids: Any, **options: Any) -> str:
        self.lengths.append(len(ids))
        assert self.go_on.wait(120)
        return str(self._add(ids, **options))

    def go_on_when_somebody_waits(self) -> None:
        """For what is added: one who has many prompts waits for one of them at a time, so it is somebody else."""
        until(lambda: self._adder._work_queue.qsize())
        self.go_on.set()


@pytest.fixture
def adding(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adding]:
    found = Adding(running)
    monkeypatch.setattr(running.engine, "add_request", found)
    yield found
    found.go_on.set()


def connected(running: Running, **body: Any) -> socket.socket:
    data = json.dumps({"model": NAME, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=120)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return connection


def until(what: Any) -> None:
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("n", [1, 2])
def test_another_client_is_let_in_between_many_prompts(running: Running, adding: Adding, n: int) -> None:
    asked = {"prompt": ["a b c"] * (PROMPTS // n), "max_tokens": 1, "temperature": 0, "n": n}
    with connected(running, **asked) as many:
        until(lambda: adding.lengths)
        with connected(running, prompt=[5] * 33, max_tokens=1, temperature=0) as other:
            adding.go_on_when_somebody_waits()
            assert answer_on(other)[0] == 200
        assert adding.lengths.index(33) < PROMPTS // 20
        assert answer_on(many)[0] == 200
    assert len(adding.lengths) == PROMPTS + 1


def test_nothing_more_is_added_for_a_client_that_has_left(running: Running, adding: Adding) -> None:
    with connected(running, prompt=["a b c"] * PROMPTS, max_tokens=1):
        until(lambda: adding.lengths)
    adding.go_on_when_somebody_waits()
    until(lambda: not running.server.manager._names)
    count = len(adding.lengths)
    threading.Event().wait(0.2)
    assert len(adding.lengths) == count < PROMPTS // 20
    until(lambda: not running.engine.load.running + running.engine.load.waiting)


def test_who_is_cancelled_while_its_prompts_are_added_hears_that_the_server_ends(
    running: Running, adding: Adding
) -> None:
    with connected(running, prompt=["a b c"] * PROMPTS, max_tokens=1) as many:
        until(lambda: adding.lengths)
        running.server.manager.cancel_everything()
        adding.go_on.set()
        status, text = answer_on(many)
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
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return answer.status, None
            except HTTPError as error:
                return error.code, json.load(error)["error"]["param"]

        assert status_of(prompt=["x"] * 9) == (400, "prompt")
        assert status_of(prompt=["x"] * 3, n=3, temperature=1) == (400, "n")
        assert status_of(prompt=["x"] * 3, n=3, temperature=0) == (400, "n")
        assert status_of(prompt=["x"] * 4, n=2, temperature=1) == (200, None)
