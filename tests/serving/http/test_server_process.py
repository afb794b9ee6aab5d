"""`kvtier serve` as a process: killed in the middle and started again on its store; SIGTERM in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forks
import openai
import pytest
from servers import PYLM, by_generate

from kvtier.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
TURN = "def first(items):\n    " * 12
#: A request that neither ends by itself nor by a token that is drawn.
LONG: dict[str, Any] = {"model": "m", "max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def served(*options: str) -> Iterator[tuple[forks.Fork, openai.OpenAI]]:
    """A process, and a client of it."""
    code = "import runpy; runpy.run_module('kvtier', run_name='__main__', alter_sys=True)"
    process = forks.Fork(code, "serve", str(PYLM), "--port", "0", "--served-model-name", "m", *options, cwd=ROOT)
    try:
        lines = []
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/v1", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        yield process, openai.OpenAI(base_url=found[0], api_key="none", max_retries=0, timeout=120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.close()


def wait_until(client: openai.OpenAI, metric: str, least: float) -> None:
    """The server says so much of this metric."""
    end = time.monotonic() + 120
    while True:
        with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics"), timeout=60) as answer:
            found = re.search(rf"^kvtier:{metric}\{{.*\}} (.+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        if float(found[1]) >= least:
            return
        assert time.monotonic() < end, found[0]
        time.sleep(0.05)


def test_killed_in_the_middle_it_goes_on_from_its_store_and_ends_in_good_order(
    tmp_path: Path, trained: tuple[Any, Any]
) -> None:
    options = ("--store", str(tmp_path / "store"), "--host-budget", "128MiB", "--block-size", "16")
    options += ("--drain-timeout", "120")
    asked: dict[str, Any] = {"model": "m", "max_tokens": 16, "temperature": 0, "user": "alice"}
    with served(*options) as (process, client):
        first = client.completions.create(prompt=TURN, **asked)
        assert first.choices[0].text == by_generate(trained, TURN, 16)
        wait_until(client, "disk_bytes", 100_000)  # what is on the disk and not counted yet is not found again
        stream = client.completions.create(prompt="class A:", **(LONG | {"max_tokens": 3000}), stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Exception, match="onnection"):
            list(stream)
    with served(*options) as (process, client), ThreadPoolExecutor(1) as pool:
        second = client.completions.create(prompt=TURN + first.choices[0].text + "\n", **asked)
        assert second.usage.prompt_tokens_details.cached_tokens > 40, "nothing was found of what was saved"
        assert second.choices[0].text == by_generate(trained, TURN + first.choices[0].text + "\n", 16)
        slow = pool.submit(client.completions.create, prompt="class A:", **LONG)
        wait_until(client, "num_requests_running", 1)
        process.send_signal(signal.SIGTERM)
        assert slow.result().choices[0].text == by_generate(trained, "class A:", LONG["max_tokens"])
        assert process.wait(120) == 0


def test_keys_come_through_a_pipe_too_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier import ConfigError
    from kvtier.serving.http import server

    seen = list[server.ServerOptions]()

    def made(model: Any, tokenizer: Any, options: server.ServerOptions) -> None:
        seen.append(options)
        raise ConfigError("seen")

    monkeypatch.setattr(server, "Server", made)
    read, write = os.pipe()
    os.write(write, b"alice key-a\n")
    os.close(write)
    assert main(["serve", str(PYLM), "--port", "0", "--api-key-file", f"/dev/fd/{read}"]) == 2
    os.close(read)
    assert seen[0].keys == {"key-a": "alice"}
    assert "key-a" not in repr(seen[0])


def test_a_port_that_is_taken_and_packages_that_are_missing_are_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from kvtier.cli import serve
    from kvtier.serving.http.server import bind

    with bind("127.0.0.1", 0) as taken:
        assert main(["serve", str(PYLM), "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use. Give another --port" in capsys.readouterr().err
    keys = tmp_path / "keys"
    for text, said in (("alice", ":1: give a name and a key"), ("a k\na l\n", ":2: the name 'a'"), ("# x\n", "no key")):
        keys.write_text(text)
        assert main(["serve", str(PYLM), "--api-key-file", str(keys)]) == 2
        assert said in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--max-body", "3x"]) == 2, "before the model is looked at, which is none"
    assert "--max-body='3x'" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--served-model-name", ""]) == 2
    assert "--served-model-name: give a name" in capsys.readouterr().err
    template = tmp_path / "template"
    template.write_bytes(b"{{ messages }}\xff")
    assert main(["serve", str(PYLM), "--chat-template", str(template)]) == 2
    assert "is no text" in capsys.readouterr().err
    template.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    assert main(["serve", str(PYLM), "--chat-template", str(template)]) == 2
    assert f"--chat-template {template}, line 2: " in capsys.readouterr().err
    assert main(["serve", str(PYLM), "--default-chat-template-kwargs", '{"enable_thinking": false}']) == 2
    assert "enable_thinking: leave it out" in capsys.readouterr().err
    monkeypatch.setattr(serve, "_PACKAGES", ("no_such_package",))
    assert main(["serve", str(PYLM)]) == 2
    assert "pip install 'kvtier[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--host", "--served-model-name"])
def test_bytes_that_are_no_text_are_refused_in_a_sentence(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "none", option, os.fsdecode(b"a\xff")])
    assert f"{option}: 'a\\udcff' is no text" in capsys.readouterr().err


def test_a_host_that_no_name_can_be_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(PYLM), "--port", "0", "--host", "\u00e9" * 300]) == 2
    assert "it is no address, nor the name of one." in capsys.readouterr().err


def test_an_empty_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: the server would listen at all addresses."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "none", "--host", ""])
    assert "--host: it is empty; 0.0.0.0 is all addresses" in capsys.readouterr().err
