"""Sessions that end: when they are forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import NAME, Running, Start
from test_server_faults import PROMPT, held, until

from kvtier import ConfigError, MismatchError
from kvtier.serving.http import manager


def ask(running: Running, session: str | None, prompt: str = PROMPT, **options: Any) -> str:
    """The text of an answer, of a session."""
    body: dict[str, Any] = {} if session is None else {"session_id": session}
    asked: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0} | options
    return str(running.client().completions.create(**asked, extra_body=body).choices[0].text)


def clock(running: Running) -> Callable[[float], None]:
    """Lets time pass for the sessions of a server, and has those forgotten that it then forgets."""
    manager, late = running.server.manager, [0.0]
    manager._sessions._now = lambda: time.monotonic() + late[0]

    def passes(seconds: float) -> None:
        late[0] += seconds
        manager._adder.submit(manager._sessions.forget_unused).result(120)

    return passes


def test_a_session_is_not_forgotten_while_its_request_waits_or_runs(start: Start) -> None:
    with start(ttl=100.0) as running, ThreadPoolExecutor(2) as clients:
        passes, names = clock(running), lambda: running.server.manager._store.names
        with held(running):
            asked = [clients.submit(ask, running, "alice", max_tokens=most) for most in (4, 40)]
            assert until(lambda: running.engine.load.running + running.engine.load.waiting == 2)
            passes(150.0)
            assert names() == ["serve//alice"]
        texts = [each.result(120) for each in asked]
        assert until(lambda: not running.server.manager._sessions._running)  # an answer is there before that
        passes(90.0)
        assert names() == ["serve//alice"], "its time begins at the end of its last request"
        ids = running.server.manager._store.open("serve//alice").ids
        assert any(running.server.manager.tokenizer.decode(ids).endswith(text) for text in texts)
        passes(20.0)
        assert names() == []
        assert running.server.manager._sessions._running == {}


def test_sessions_with_requests_make_no_room_for_others(start: Start) -> None:
    with start(sessions=1) as running, ThreadPoolExecutor(3) as clients:
        store = running.server.manager._store
        with held(running):
            asked = [clients.submit(ask, running, session) for session in "abc"]
            assert until(lambda: running.engine.load.running + running.engine.load.waiting == 3)
            assert sorted(store.names) == ["serve//a", "serve//b", "serve//c"]
        for each in asked:
            each.result(120)
        assert until(lambda: len(store.names) == 1)


def test_a_session_whose_request_is_cancelled_ends_too(start: Start) -> None:
    with start(ttl=100.0) as running:
        passes = clock(running)
        stream = running.client().completions.create(
            model=NAME, prompt=PROMPT, max_tokens=2000, stream=True, user="alice", extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        assert until(lambda: not running.server.manager._sessions._running)
        passes(150.0)
        assert running.server.manager._store.names == []


def test_only_what_a_disk_raises_lets_a_client_try_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise MismatchError("/home/somebody")

    with start() as running:
        manager = running.server.manager
        with pytest.raises(ConfigError, match="characters"):  # a name that no conversation can ever have
            manager._adder.submit(manager._sessions.open, "é" * 20_000, "a", None).result(120)
        with monkeypatch.context() as patch:
            patch.setattr(manager._store, "open", fails)
            with pytest.raises(openai.InternalServerError, match="MismatchError: the log") as refused:
                ask(running, "alice")
        assert (refused.value.status_code, refused.value.code) == (500, "generation_failed")
        assert "somebody" in caplog.text
        assert ask(running, "alice")


def test_what_the_store_cannot_save_is_in_the_log_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def said() -> list[str]:
        return [x.message for x in caplog.records if x.levelname == "WARNING" and x.name == "kvtier.serving"]

    monkeypatch.setattr(manager, "_LOOKS", 0.01)
    with start(directory=str(tmp_path / "sessions")) as running:
        looks = running.server.manager
        told: list[str] = []
        disk = looks._store.disk_tier.disk
        for problem in ("No space left on device: a sequence was not saved", "the disk is too slow"):
            disk.problem = problem
            told.append(f"The store: {problem}")
            assert until(lambda: len(said()) == len(told), 30.0)
            for _ in range(3):
                looks._lookers.submit(looks.tell_problem).result(120)
            assert said() == told
