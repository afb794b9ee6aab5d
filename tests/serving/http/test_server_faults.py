"""Clients that leave, do not read, come in crowds; forwards that raise; keys; the end: no wrong token, no hang.

KVTIER_TEST_CLIENTS=200 sends as many at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from servers import NAME, Running, Start, answer_on, by_generate

from kvtier import ConfigError
from kvtier.conversation.disk.rows.conversations import ConversationRows
from kvtier.serving.http import server
from kvtier.serving.http.requests.keys import read_keys
from kvtier.serving.http.server import _Connection

CLIENTS = int(os.environ.get("KVTIER_TEST_CLIENTS", "30"))
PROMPT = "def first(items):\n"


def until(what: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def wait_for_requests(running: Running, seconds: float) -> None:
    """A connection without a request ends after so long, whatever the server's own limit."""
    running.server._uvicorn.config.http_protocol_class.seconds = seconds  # type: ignore[union-attr]


@contextlib.contextmanager
def held(running: Running) -> Iterator[None]:
    """No step is computed meanwhile."""
    runner, go_on = running.engine._runner, threading.Event()
    step = runner.step
    runner.step = lambda work: step(work) if go_on.wait(120) else []
    try:
        yield
    finally:
        runner.step = step
        go_on.set()


def idle(running: Running) -> bool:
    """Nothing is computed, and nothing is known of any request."""
    manager = running.server.manager
    return until(lambda: running.engine.load.running + running.engine.load.waiting == 0 and not manager._names)


def raw(
    running: Running,
    body: dict[str, Any],
    path: str = "/v1/completions",
    *,
    receive_buffer: int | None = None,
    **headers: str,
) -> socket.socket:
    """A request on a connection of its own, of which nothing is read yet."""
    data = json.dumps({"model": NAME, **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection = socket.socket()
    connection.settimeout(120)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", running.port))
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(start: Start, stream: bool) -> None:
    with start() as running:
        connection = raw(running, {"prompt": PROMPT, "max_tokens": 3000, "stream": stream, "ignore_eos": True})
        assert until(lambda: running.engine.load.running == 1)
        connection.close()
        assert idle(running)
        steps = running.engine.steps
        assert steps < 2500, "it was computed to its end"
        assert running.server.manager.metrics._ended == {"cancelled": 1}
        running.engine.check_integrity()


def test_a_stream_that_the_client_closes_ends_its_request(running: Running) -> None:
    stream = running.client().completions.create(
        model=NAME, prompt=PROMPT, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert idle(running)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_left(start: Start, stream: bool) -> None:
    """Though it keeps its connection, and though the server may have been done with its answer."""
    with start(timeout=2.0, send_buffer=4096) as running:
        # A stream that is left while it is computed; an answer that is not computed to its end is none.
        most = 3000 if stream else 200
        body = {"prompt": [PROMPT] * 2, "max_tokens": most, "stream": stream, "logprobs": 20, "ignore_eos": True}
        with raw(running, body, receive_buffer=4096) as connection:
            assert until(lambda: running.engine.load.running > 0)
            connections = running.server._uvicorn.server_state.connections  # type: ignore[union-attr]
            assert until(lambda: not connections)
            assert idle(running)
            assert running.server.manager.metrics._ended == {"cancelled" if stream else "length": 2}
            done = running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2)
            assert done.usage.completion_tokens == 2
            with pytest.raises(http.client.IncompleteRead):
                answer_on(connection)


def test_a_client_that_reads_slowly_is_not_left() -> None:
    left, looks, aborted = [100, 90, 1, 1], list[tuple[Any, ...]](), []
    connection = _Connection.__new__(_Connection)
    connection.seconds = 1.0
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: left.pop(0), abort=lambda: aborted.append(1))
    connection.loop = SimpleNamespace(call_later=lambda seconds, *call: looks.append((seconds, *call)))
    connection._watch()
    while looks:
        seconds, look, *rest = looks.pop()
        assert (seconds, aborted) == (1.0, [])
        look(*rest)
    assert (left, aborted) == ([], [1])


def test_a_client_that_does_not_send_its_request_is_left(start: Start) -> None:
    with start(timeout=0.3) as running:
        wait_for_requests(running, 600.0)
        with socket.create_connection(("127.0.0.1", running.port), timeout=120) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert answer_on(connection)[0] == 408


@pytest.mark.parametrize(("length", "sent"), [(1 << 40, 1), (1 << 40, 20_000), (None, 20_000)])
def test_a_body_that_is_too_large_is_said_to_be_so_though_it_does_not_all_come(
    start: Start, length: int | None, sent: int
) -> None:
    with start(timeout=0.5, max_body=10_000) as running:
        wait_for_requests(running, 600.0)
        kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n" + ("" if length else f"{sent:x}\r\n")
        with socket.create_connection(("127.0.0.1", running.port), timeout=120) as connection:
            connection.sendall(head.encode() + b"x" * sent)
            assert answer_on(connection)[0] == 413


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_on_which_no_request_comes_in_time_ends(start: Start, sent: bytes) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    def ends(connection: socket.socket, sent: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # what is sent behind its end
            connection.sendall(sent)
            assert connection.recv(4096) == b""

    with start(timeout=0.5) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=120) as connection:
            ends(connection, sent)
        # A later one of a connection, too, though it may be without one for longer.
        wait_for_requests(running, 600.0)
        with socket.create_connection(("127.0.0.1", running.port), timeout=120) as again:
            for _ in range(3):
                again.sendall(whole)
                assert answer_on(again)[0] == 200
                wait_for_requests(running, 0.2)
                time.sleep(0.4)
            ends(again, sent or b"G")


def test_calls_of_tools_that_nest_too_deeply_are_refused(running: Running) -> None:
    arguments: dict[str, Any] = {}
    for _ in range(800):
        arguments = {"a": arguments}
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    client = running.client()
    with pytest.raises(openai.BadRequestError, match="nest too deeply"):
        client.chat.completions.create(model=NAME, messages=[message])


def test_two_requests_with_one_id_are_both_answered(running: Running, trained: tuple[Any, Any]) -> None:
    def ask(prompt: str) -> tuple[str, str]:
        done = running.client(default_headers={"x-request-id": "the-same"}).completions.create(
            model=NAME, prompt=prompt, max_tokens=16, temperature=0
        )
        return done.id, done.choices[0].text

    prompts = [PROMPT, "class A:\n"]
    with ThreadPoolExecutor(2) as pool:
        (first, a), (second, b) = pool.map(ask, prompts)
    assert first != second
    assert [a, b] == [by_generate(trained, prompt, 16) for prompt in prompts]


def test_a_forward_that_raises_fails_its_requests_and_no_later_one(
    start: Start, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as running:
        runner, failing = running.engine._runner, [True]
        step = runner.step

        def raises(work: Any) -> Any:
            if failing[0]:
                raise RuntimeError('a "quoted"\nfault')
            return step(work)

        monkeypatch.setattr(runner, "step", raises)
        client = running.client()
        with pytest.raises(openai.InternalServerError, match="RuntimeError: the log"):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4)
        with pytest.raises(openai.APIError, match="RuntimeError: the log"):
            list(client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": PROMPT}], max_tokens=4, stream=True
            ))  # fmt: skip
        events = list(client.responses.create(model=NAME, input=PROMPT, stream=True))
        assert [x.type for x in events[-2:]] == ["error", "response.failed"]
        assert (events[-2].code, events[-2].param) == ("generation_failed", None)
        assert events[-1].response.error.message == "RuntimeError: the log of the server has the rest."
        logged = [str(x.exc_info and x.exc_info[1]) for x in caplog.records if x.levelname == "ERROR"]
        assert logged == ['a "quoted"\nfault'] * 3, "whoever runs the server sees where it failed"
        caplog.clear()
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=10**9)
        assert not caplog.records, "what a client may not ask is no failure"
        failing[0] = False
        done = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
        assert done.choices[0].text == by_generate(trained, PROMPT, 8)
        assert idle(running)


def test_a_fault_of_the_server_itself_is_named_to_clients_and_told_in_the_log_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as running:

        def breaks(*_: Any) -> Any:
            raise OSError(5, "Input/output error", "/home/somebody/sessions")

        monkeypatch.setattr(running.server.manager, "text_of_metrics", breaks)
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(f"http://127.0.0.1:{running.port}/metrics", timeout=120)
        error = json.load(found.value)["error"]
        assert (found.value.code, error["code"]) == (500, "internal_error")
        assert error["message"] == "OSError: the log of the server has the rest."
        assert any("somebody" in str(x.exc_info and x.exc_info[1]) for x in caplog.records), "whoever runs it sees it"


def test_health_says_that_the_engine_has_ended_and_requests_are_refused(start: Start) -> None:
    with start() as running:
        health = f"http://127.0.0.1:{running.port}/health"
        with urllib.request.urlopen(health) as answer:
            assert json.load(answer)["status"] == "ok"
        running.engine.stop()
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(health)
        assert (found.value.code, "thread has ended" in json.load(found.value)["status"]) == (503, True)
        with pytest.raises(openai.InternalServerError, match="engine has ended"):
            running.client().completions.create(model=NAME, prompt=PROMPT)
        assert idle(running)


def test_an_error_in_a_stream_is_escaped_and_the_stream_has_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as running:
        monkeypatch.setattr(running.engine._runner, "step", lambda work: 1 / 0)
        connection = raw(running, {"prompt": PROMPT, "stream": True}, Connection="close")
        answer = b""
        while part := connection.recv(65536):
            answer += part
        events = [line for line in answer.decode().splitlines() if line.startswith("data: ")]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert events[-1] == "data: [DONE]"


def test_a_full_queue_is_a_429_with_when_to_try_again(start: Start, trained: tuple[Any, Any]) -> None:
    with start(engine={"max_running": 1, "max_waiting": 2}, sessions=1) as running:
        running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user="known")
        assert idle(running)  # a client has its answer before the engine has let go of the request
        long = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
        held = [raw(running, long)]
        assert until(lambda: running.engine.load.running == 1)
        held += [raw(running, long) for _ in range(2)]
        assert until(lambda: running.engine.load.waiting == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2)
        assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 30
        for user in ("known", "new"):  # takes no room from others, and is none itself
            with pytest.raises(openai.RateLimitError):
                running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user=user)
            assert running.server.manager._store.names == ["serve//known"]
        with pytest.raises(openai.RateLimitError):  # none of the two runs
            running.client().completions.create(model=NAME, prompt=[PROMPT, PROMPT], max_tokens=2)
        ended = sum(running.server.manager.metrics._ended.values())
        assert ended == 1, "what was refused has not ended"
        for connection in held:
            connection.close()
        assert idle(running)
        done = running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
        assert done.choices[0].text == by_generate(trained, PROMPT, 8)


def test_a_crowd_of_which_a_third_leaves_gets_no_wrong_token(start: Start, trained: tuple[Any, Any]) -> None:
    rng = random.Random(CLIENTS)
    prompts = [f"def {name}(items, count):\n    " for name in ("first", "last", "head", "tail", "sort", "unique")]
    expected = {prompt: by_generate(trained, prompt, 16) for prompt in prompts}
    plans = [(i, rng.choice(prompts), rng.random() < 1 / 3, rng.random() < 0.5) for i in range(CLIENTS)]

    async def ask(client: openai.AsyncOpenAI, i: int, prompt: str, leaves: bool, stream: bool) -> str | None:
        await asyncio.sleep(rng.random() * CLIENTS / 100)
        asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "user": str(i)}
        if leaves:
            task = asyncio.ensure_future(client.completions.create(**asked | {"max_tokens": 1500}, stream=stream))
            await asyncio.wait({task}, timeout=rng.random() * 0.3)
            task.cancel()
            if task.done() and not task.cancelled() and stream:
                await task.result().close()
            return None
        if not stream:
            return (await client.completions.create(**asked)).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(**asked, stream=True)])

    async def all_of_them(running: Running) -> list[str | None]:
        url, key = running.url, "none"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=240) as client:
            return await asyncio.gather(*(ask(client, *plan) for plan in plans))

    with start(store={"host_budget": "8MiB", "block_size": 16}, engine={"max_batch_tokens": 128}) as running:
        found = asyncio.run(all_of_them(running))
        assert idle(running)
        running.engine.check_integrity()
        assert [text for text, (_, _, leaves, _) in zip(found, plans, strict=True) if not leaves] == [
            expected[prompt] for _, prompt, leaves, _ in plans if not leaves
        ]
        assert running.engine.load.alive
        assert not running.engine._requests.ended, "outputs of requests that have ended are not kept"


def test_keys_guard_and_share_nothing(start: Start, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may ask\nalice key-a\nbob   key-b\n")
    with start(keys=read_keys(keys)) as running:
        for key in ("none", "key-c"):
            with pytest.raises(openai.AuthenticationError):
                running.client(key).completions.create(model=NAME, prompt=PROMPT, max_tokens=2)

        def cached(key: str, **extra: Any) -> int:
            done = running.client(key).completions.create(
                model=NAME, prompt=PROMPT * 6, max_tokens=2, user="session", extra_body=extra
            )
            return int(done.usage.prompt_tokens_details.cached_tokens)

        assert cached("key-a") == 0
        assert cached("key-a") > 20
        assert cached("key-b") == 0, "what another tenant has left is not found"
        assert cached("key-b") > 20
        assert cached("key-a", cache_salt="apart", session_id="other") == 0
        salt = running.server.keys.salt
        alice, bob = (running.server.keys.caller(key) for key in ("key-a", "key-b"))
        assert len({salt(alice), salt(bob), salt(alice, "bob"), salt(alice, "x"), salt(bob, "x")}) == 5
        with pytest.raises(openai.AuthenticationError):
            running.client("x").models.list()
        assert running.server.manager.metrics._refused == {401: 3}


def test_names_of_tenants_and_sessions_do_not_run_together(start: Start, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a key-1\na/b key-2\na%2Fb key-3\n")
    with start(keys=read_keys(keys)) as running:
        for key, session in (("key-1", "b/c"), ("key-2", "c"), ("key-3", "c"), ("key-1", "%2Fb/c")):
            running.client(key).completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user=session)
        assert len(running.server.manager._store.names) == 4


def test_a_key_that_no_header_can_hold_is_refused(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("alice schlüssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="ASCII"):
        read_keys(tmp_path / "keys")


def test_what_is_not_there_is_said_with_what_is(running: Running) -> None:
    for path, status, said in (
        ("/chat/completions", 404, "There is no /chat/completions here: clients ask below /v1, such as /v1/models."),
        ("/v1/embeddings", 404, "There is no /v1/embeddings here"),
        ("/v1/completions", 405, "/v1/completions takes POST, and not GET."),
    ):
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(f"http://127.0.0.1:{running.port}{path}", timeout=60)
        assert found.value.code == status
        assert said in json.load(found.value)["error"]["message"]


def test_a_file_of_keys_that_is_no_text_is_refused_in_a_sentence(tmp_path: Any) -> None:
    (tmp_path / "keys").write_bytes("älice key-a\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"keys is no text: .*\. Write it in UTF-8"):
        read_keys(tmp_path / "keys")


def test_a_session_of_another_salt_begins_anew(start: Start, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice key-a\n")
    for lost in (False, True):
        if lost:
            (tmp_path / "store" / "server.secret").unlink()
        with start(keys=read_keys(keys), directory=str(tmp_path / "store")) as running:

            def cached(**extra: Any) -> int:
                done = running.client("key-a").completions.create(
                    model=NAME, prompt=PROMPT * 6, max_tokens=2, user="session", extra_body=extra
                )
                return int(done.usage.prompt_tokens_details.cached_tokens)

            assert cached() == 0, "nothing is found of what was saved under another secret"
            assert cached() > 20
            assert cached(cache_salt="other") == 0
            assert cached(cache_salt="other") > 20


def test_two_salts_of_a_session_that_come_together_are_both_answered(start: Start) -> None:
    with start() as running, ThreadPoolExecutor(2) as clients:
        adder, gate = running.server.manager._adder, threading.Event()
        adder.submit(gate.wait)
        asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "user": "session"}
        answers = [
            clients.submit(running.client().completions.create, **asked, extra_body={"cache_salt": salt})
            for salt in ("a", "b")
        ]
        assert until(lambda: adder._work_queue.qsize() == 2)
        gate.set()
        assert [answer.result().choices[0].finish_reason for answer in answers] == ["length", "length"]


def test_a_session_that_cannot_be_read_now_is_not_forgotten(
    start: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A long prompt: a short one may be computed before it is read from a busy disk.
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT * 150, "max_tokens": 2, "user": "alice"}
    with start(directory=str(tmp_path)) as running:
        running.client().completions.create(**asked)

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with start(directory=str(tmp_path)) as running:
        with monkeypatch.context() as patch:
            patch.setattr(ConversationRows, "read", fails)
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="try again") as refused:
                    list(running.client().completions.create(**asked, stream=stream))
                assert (refused.value.status_code, refused.value.code) == (503, "session_unavailable")
                assert refused.value.response.headers["Retry-After"]
                assert str(tmp_path) not in refused.value.response.text
        assert caplog.text.count(str(tmp_path)) >= 2, "whoever runs it sees where"
        assert running.server.manager._store.names == ["serve//alice"]
        done = running.client().completions.create(**asked)
        assert done.usage.prompt_tokens_details.cached_tokens > 20


def test_a_request_that_a_store_lets_fail_is_no_fault_of_its_client(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is added, as it begins and where sessions are forgotten: no client reads of the server's files."""
    secret = ConfigError("/home/somebody/sessions cannot be read: no space is left. Make room.")

    def fails(*_: object, **__: object) -> Any:
        raise secret

    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "user": "alice"}
    with start() as running:
        client, engine = running.client(), running.engine
        for owner, name in ((engine._runner, "add"), (engine._requests, "admit")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                with pytest.raises(openai.InternalServerError, match="ConfigError: the log") as found:
                    client.completions.create(**asked)
                assert (found.value.status_code, found.value.code) == (500, "generation_failed")
                parts = client.chat.completions.create(
                    model=NAME, messages=[{"role": "user", "content": PROMPT}], stream=True
                )
                with pytest.raises(openai.APIError, match="ConfigError: the log"):
                    list(parts)
                *_, last = client.responses.create(model=NAME, input=PROMPT, stream=True)
                assert "somebody" not in last.model_dump_json()
        assert "somebody" in caplog.text
        with monkeypatch.context() as patch:
            patch.setattr(running.server.manager._store, "forget", fails)
            wrong = {"generation_config": {"do_sample": True, "min_p": 3.0}}  # of a session that is new
            with pytest.raises(openai.BadRequestError, match="min_p"):
                client.completions.create(**asked | {"user": "bob"}, extra_body=wrong)
            assert "bob' is not forgotten" in caplog.text
            assert client.completions.create(**asked).choices[0].finish_reason == "length"


def test_blocks_that_samples_share_count_once(start: Start) -> None:
    with start() as running:
        runner, blocks = running.engine._runner, list[int]()
        step = runner.step

        def counted(work: Any) -> Any:
            load = running.engine.load
            blocks.append(load.blocks if load.running == 16 else 0)
            return step(work)

        runner.step = counted
        prompt = running.client().completions.create(
            model=NAME, prompt=PROMPT * 30, max_tokens=60, n=16, temperature=1.0, seed=1
        ).usage.prompt_tokens  # fmt: skip
        most = max(blocks)
        assert 0 < most <= prompt // 16 + 1 + 16 * (60 // 16 + 2)
        assert prompt > 160, "a prompt of few blocks shows nothing"


def test_a_session_is_a_conversation_of_the_store_and_is_forgotten_in_time(start: Start) -> None:
    with start(ttl=1.0) as running:
        store, now = running.server.manager._store, [time.monotonic()]
        running.server.manager._sessions._now = lambda: now[0]
        client = running.client(default_headers={"x-session-id": "by-header"})
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4)
        client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, extra_body={"session_id": "by-body"})
        assert store.names == ["serve//by-header", "serve//by-body"]
        assert len(store.open("serve//by-body", salt=None).ids) > 4
        assert store.open("serve//by-body", salt=None).ttl == 1.0
        now[0] += 2.0
        running.server.manager._sessions.forget_unused()
        assert store.names == []


def test_sessions_are_bounded_and_the_longest_unused_goes_first(start: Start) -> None:
    with start(sessions=2) as running:
        for session in ("a", "b", "a", "c"):
            running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user=session)
        assert sorted(running.server.manager._store.names) == ["serve//a", "serve//c"]


@pytest.mark.parametrize("lives", [False, True])
def test_sessions_of_before_a_restart_are_known_by_when_they_were_used(
    start: Start, tmp_path: Any, lives: bool
) -> None:
    options: dict[str, Any] = {"directory": str(tmp_path)} | ({"ttl": 3600.0} if lives else {})
    with start(**options) as running:
        for session in ("a", "b", "x", "c", "a", "d"):
            running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user=session)
    with start(**options, sessions=3) as running:
        store, sessions = running.server.manager._store, running.server.manager._sessions
        assert sorted(store.names) == ["serve//a", "serve//c", "serve//d"], "as many as are known are kept"
        running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, user="e")
        assert sorted(store.names) == ["serve//a", "serve//d", "serve//e"]
        now = time.monotonic()
        sessions._now = lambda: now + 3590.0
        sessions.forget_unused()
        assert len(store.names) == 3
    with start(**options) as running:
        store, sessions = running.server.manager._store, running.server.manager._sessions
        store.open("serve//d", salt=None).used -= 3000.0
        store.conversations.changed(store.open("serve//d", salt=None))
    with start(**options) as running:
        store, sessions = running.server.manager._store, running.server.manager._sessions
        now = time.monotonic()
        sessions._now = lambda: now + 600.0
        sessions.forget_unused()
        assert sorted(store.names) == ["serve//a", *([] if lives else ["serve//d"]), "serve//e"]


def test_the_end_lets_requests_finish_and_refuses_new_ones(
    start: Start, trained: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvtier.serving")
    with start(drain=120.0) as running, ThreadPoolExecutor(1) as pool:
        client, asked = running.client(), {"model": NAME, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        with held(running):
            slow = pool.submit(client.completions.create, **asked)
            assert until(lambda: running.engine.load.running == 1)
            unasked, begun = (socket.create_connection(("127.0.0.1", running.port), timeout=120) for _ in range(2))
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            with unasked, begun:
                begun.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body[:5])
                connections = running.server._uvicorn.server_state.connections  # type: ignore[union-attr]
                assert until(lambda: sum(bool(each.cycle) for each in connections) == 2)
                running.server.stop()
                assert until(lambda: running.server.manager.draining)
                assert unasked.recv(1) == b"", "on which nothing was asked"
                begun.sendall(body[5:])
                with http.client.HTTPResponse(begun) as answer:
                    answer.begin()
                    found = json.loads(answer.read())["error"]["code"], answer.status, answer.headers["Retry-After"]
                assert found == ("shutting_down", 503, "1")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", running.port), timeout=120)
            assert not slow.done()
            assert "1 request may finish, within 120 s. A second Ctrl-C cancels it." in caplog.text
        assert slow.result().choices[0].text == by_generate(trained, PROMPT, 30)


def test_the_end_cancels_what_does_not_finish(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LAST_WORDS", 60)  # if the machine is slow
    with start(drain=1.0, engine={"max_batch_tokens": 16}) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            running.client().completions.create,
            **{"model": NAME, "prompt": PROMPT, "max_tokens": 4000, "temperature": 0},
            extra_body={"ignore_eos": True},
        )
        assert until(lambda: running.engine.load.running == 1)
        running.server.stop()
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            asked.result()
        assert running.engine.steps < 3500, "it was computed to its end"


def test_a_third_interrupt_ends_without_a_traceback(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with start(drain=120.0) as running, ThreadPoolExecutor(1) as pool:
        with held(running):
            asked = pool.submit(running.client().completions.create, model=NAME, prompt=PROMPT, max_tokens=30)
            assert until(lambda: running.engine.load.running == 1)
            uvicorn = running.server._uvicorn
            for _ in range(3):
                uvicorn.handle_exit(signal.SIGINT, None)  # type: ignore[union-attr]
        with pytest.raises(openai.OpenAIError):
            asked.result()
    assert not [x.getMessage() for x in caplog.records if x.levelname == "ERROR"]


def test_the_handlers_of_transformers_work_on_the_same_manager(running: Running, trained: tuple[Any, Any]) -> None:
    """Those of its own server, which ask for generation as `transformers serve` does."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler

    from kvtier.serving.http.app import State, build
    from kvtier.serving.http.handlers.handler import Served

    served = Served(NAME, *trained, 0, 4096, {})
    manager = running.server.manager
    handler = ChatCompletionHandler(served, State(manager))
    assert build(served, manager).router.routes
    tokenizer = trained[1]
    before, tokenizer.chat_template = tokenizer.chat_template, "{% for m in messages %}{{ m.content }}{% endfor %}"
    body = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}

    async def ask(stream: bool) -> str:
        answer = await handler.handle_request({**body, "stream": stream}, "an-id")
        if not stream:
            return json.loads(answer.body)["choices"][0]["message"]["content"]
        events = [event async for event in answer.body_iterator]
        lines = [line for event in events for line in event.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
        return "".join(delta.get("content", "") for delta in deltas)

    try:
        found = [asyncio.run(ask(stream)) for stream in (False, True)]
    finally:
        tokenizer.chat_template = before
    assert found == [by_generate(trained, PROMPT, 12)] * 2
