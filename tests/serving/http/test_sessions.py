"""Sessions that end: when they are forgotten, and what becomes of their keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import NAME, Running, Start
from test_server_faults import PROMPT, held, until

from kvtier.conversation.index import packed
from kvtier.conversation.kept import retention


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


def test_what_is_kept_of_a_session_goes_first_when_it_is_forgotten_and_from_the_disk_at_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "TOKENS", 16)
    with start(ttl=100.0, directory=str(tmp_path)) as running:
        manager, passes = running.server.manager, clock(running)
        store, order = manager._store, manager._store.kept.retention
        disk = store.disk_tier.disk
        late = [0.0]
        order._clock = lambda: time.monotonic() + late[0]
        disk.clock = lambda: time.time() + late[0]
        ask(running, None, "# of nobody\n" + PROMPT * 3)
        store.flush()
        others = disk.chunks
        ask(running, "old", "# of old\n" + PROMPT * 3)
        store.flush()
        assert disk.chunks > others
        late[0] += 150.0
        passes(150.0)
        assert store.names == []
        assert disk.chunks == others == len(list(tmp_path.glob("*.safetensors")))
        with store.memory.lock, store.memory.change:
            for sequence, length in order.evict():
                assert manager.tokenizer.decode(_ids(store.kept.entries[sequence].ids)).startswith("# of old")
                store.kept.parked.shorten(sequence, length)
        store.check_integrity()


def _ids(ids: bytes) -> list[int]:
    width = len(packed([0]))
    return [int.from_bytes(ids[i : i + width], "little") for i in range(0, len(ids), width)]
