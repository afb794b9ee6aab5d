"""`kvtier chat --url`: a conversation with a server, and whatever is wrong is a sentence."""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

import pytest
from servers import Running, Start, by_generate

from kvtier.cli.chat.remote import Connection, RemoteLoop
from kvtier.cli.main import main
from kvtier.cli.store import plain
from kvtier.serving.http.requests.keys import read_keys

STATUS = re.compile(r"\[([\d,]+) cached · ([\d,]+) computed")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with lines on stdin. Gives status, answers, and what was said besides."""

    def run(*args: str, lines: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", *args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def test_turns_go_on_from_one_another_and_the_server_keeps_them(
    start: Start, trained: tuple[Any, Any], talk: Any
) -> None:
    with start() as running:
        asked = ("--url", f"http://127.0.0.1:{running.port}", "--max-new-tokens", "12", "--temperature", "0")
        status, out, err = talk(*asked, "--name", "x", lines="def first(items):\n/regenerate\n class A:\n/history\n")
        first = by_generate(trained, "def first(items):", 12)
        second = by_generate(trained, f"def first(items):{first} class A:", 12)
        assert (status, out) == (0, f"{first}\n{first}\n{second}\n")
        cached = [int(found[0]) for found in STATUS.findall(err)]
        assert cached[1] > 0
        assert cached[2] > 0
        assert f"\nassistant: {plain(second, lines=True)}\n" in err
        assert running.server.manager._store.names == ["serve//x"]


def test_commands_of_a_conversation_with_a_server(running: Running, talk: Any) -> None:
    lines = "\n".join(
        (
            "import os",
            "/rewind",
            "/history",
            "/rewind 5",
            "/rewind x",
            "/regenerate",
            "/open y",
            "/name",
            "/no",
            "/help",
            "/quit",
            "x",
        )
    )
    status, out, err = talk("--url", running.url, "--max-new-tokens", "3", lines=lines)
    assert status == 2, "/no is no command, and nothing has answered it"
    assert out.count("\n") >= 1
    for said in ("has 0 messages of yours", "/rewind takes a number", "no answer to generate", "y\n", "/regenerate  "):
        assert said in err
    assert "user: import os" not in err


def test_a_server_without_models_and_a_key_that_is_none_are_sentences(
    running: Running, talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "models", lambda self: [])
        for model, said in (((), "serves no model."), (("m",), "serves no model, and not 'm'.")):
            status, _, err = talk("--url", running.url, *model)
            assert (status, said in err) == (2, True)
    for key in ("two\nlines", "\u20ac"):
        monkeypatch.setenv("KVTIER_API_KEY", key)
        status, _, err = talk("--url", running.url)
        assert (status, "The key in KVTIER_API_KEY has characters" in err) == (2, True)


def test_what_the_template_reads_is_the_servers_to_judge(running: Running, talk: Any) -> None:
    status, _, err = talk("--url", running.url, "--chat-template-kwargs", '{"mood": 1}', lines="import os\n")
    assert status == 2
    assert "the server says 400: mood: the model's chat template does not read it" in err


def test_only_data_is_read_of_the_events_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = b': ping\n\nevent: message\nid: 1\nretry: 5\ndata: {"a": 1}\n\n:\n\ndata:{"a": 2}\r\n\r\ndata: [DONE]\n\n'
    monkeypatch.setattr(Connection, "_answer", lambda *args: io.BytesIO(sent))
    assert list(Connection("http://127.0.0.1:1").stream({})) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("path", "lines"), [("/models", ""), ("/chat/completions", "import os\n")], ids=["models", "error"]
)
def test_what_a_server_says_does_not_move_the_cursor(
    path: str, lines: str, running: Running, talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    escape = "\\u001b]0;title\\u0007\\u001b[2J"  # as JSON
    sent = {
        "/models": f'{{"data": [{{"id": "m{escape}"}}]}}',
        "/chat/completions": f'data: {{"error": {{"message": "no{escape}"}}}}\n\n',
    }
    real = Connection._answer

    def answer(self: Connection, connection: Any, method: str, at: str, body: Any = None) -> Any:
        return io.BytesIO(sent[at].encode()) if at == path else real(self, connection, method, at, body)

    monkeypatch.setattr(Connection, "_answer", answer)
    status, _, err = talk("--url", running.url, *(() if lines else ("other",)), lines=lines)
    assert (status, "\x1b" in err, "\x07" in err) == (2, False, False)
    assert "\\x1b]0;title\\x07\\x1b[2J" in err


def test_an_error_of_the_system_does_not_move_the_cursor(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def models(self: Connection) -> Any:
        raise OSError("\x1b[2J")

    monkeypatch.setattr(Connection, "models", models)
    status, _, err = talk("--url", "http://127.0.0.1:1")
    assert (status, err) == (2, "kvtier: \\x1b[2J\n")


class Scripted:
    """A server whose answers are given, each part with when it comes."""

    def __init__(self, clock: list[float], *parts: tuple[float, dict[str, Any]]) -> None:
        self.clock, self.parts, self.bodies = clock, parts, list[dict[str, Any]]()

    def stream(self, body: dict[str, Any]) -> Any:
        self.bodies.append(body)
        for when, part in self.parts:
            self.clock[0] = when
            if part.get("delta") is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield part if "usage" in part else {"choices": [{"index": 0, **part}]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: found[0])
    return found


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_a_model_thinks_is_shown_next_to_its_answer_and_counts(
    clock: list[float], capsys: pytest.CaptureFixture[str], field: str
) -> None:
    parts = [
        (0.5, {"delta": {"role": "assistant", "content": ""}}),
        (1.0, {"delta": {field: "It is"}}),
        (2.0, {"delta": {field: " a word.\x1b"}}),
        (3.0, {"delta": {"content": "A"}}),
        (4.0, {"delta": {"content": " word."}}),
        (5.0, {"delta": {}, "finish_reason": "stop"}),
        (9.0, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 81}}),
    ]
    server = Scripted(clock, *parts)
    loop = RemoteLoop(server, "x", None, {"model": "m"})  # type: ignore[arg-type]
    loop.send("What?")
    out, err = capsys.readouterr()
    assert out == "A word.\n"
    assert err == "It is a word.\\x1b\n[0 cached · 7 computed · first token 1.00 s · 20.0 tokens/s]\n"
    assert loop.messages == [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A word."}]
    assert server.bodies[0].keys() == {"model", "messages", "stream", "stream_options", "prompt_cache_key"}


def test_a_thought_that_is_interrupted_is_no_answer(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    server = Scripted(clock, (1.0, {"delta": {"reasoning": "Hm"}}), (2.0, {"delta": KeyboardInterrupt}))
    loop = RemoteLoop(server, "x", None, {})  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        loop.send("What?")
    assert capsys.readouterr() == ("", "Hm\n")
    assert loop.messages == []


def test_what_is_wrong_is_a_sentence(running: Running, talk: Any, start: Start, tmp_path: Any) -> None:
    for args, said in (
        (("--url", "ftp://x"), "give http://HOST:PORT"),
        (("--url", "http://127.0.0.1:port"), "Give http://HOST:PORT"),
        (("--url", "http://127.0.0.1:70000"), "Give http://HOST:PORT"),
        (("--url", "http://[::1"), "Give http://HOST:PORT"),
        (("--url", "http://127.0.0.1:1"), "Is a server running there?"),
        (("--url", running.url, "other"), "and not 'other'"),
        (("--url", running.url, "--dtype", "bfloat16"), "--dtype is the server's"),
        (("--url", running.url, "--list"), "--list is of a store"),
        (("--no-store",), "Give a MODEL"),
    ):
        status, _, err = talk(*args)
        assert status == 2
        assert said in err
    _, _, err = talk("--url", running.url, "--max-new-tokens", "4096", lines="import os\n")
    assert "the server says 400: This model's maximum context length is 4096 tokens" in err
    keys = tmp_path / "keys"
    keys.write_text("alice key-a\n")
    with start(keys=read_keys(keys)) as guarded:
        status, _, err = talk("--url", guarded.url)
        assert (status, "the server says 401" in err) == (2, True)
