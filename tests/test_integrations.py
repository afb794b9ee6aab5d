"""Scripts for other libraries: all are run by `make integrations`, and what needs no other package runs here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import ClosedError

FOLDER = Path(__file__).resolve().parent.parent / "integrations"


@pytest.fixture
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("integrations_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_every_script_is_run_and_listed(runner: ModuleType) -> None:
    scripts = {path.name for path in FOLDER.glob("*.py")} - {"run.py", "judge.py"}
    assert {x.script for x in runner.INTEGRATIONS.values()} == scripts
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in sorted(scripts) if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", ["pipeline", "tensor-parallel"])
def test_a_script_that_needs_no_other_package_gives_what_generate_gives(name: str, runner: ModuleType) -> None:
    """A pipeline with several prompts; two processes with half of the heads each."""
    result, said = runner.run(name)
    assert result == "passed", said
    assert f"the same {'answers' if name == 'pipeline' else 'tokens'}: yes" in said


def test_replicas_of_ray_serve_keep_their_conversations(runner: ModuleType) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed here; `make integrations ARGS=ray` installs it in an environment of its own")
    result, said = runner.run("ray")
    assert result == "passed", said
    assert "the same tokens: yes" in said


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A replica's object of `ray_serve.py`, without Ray."""
    pytest.importorskip("starlette", reason="Ray Serve brings it, and so does the extra `serve`")
    serve = SimpleNamespace(
        deployment=lambda **_: lambda kind: kind, get_replica_context=lambda: SimpleNamespace(rank=0)
    )
    router = SimpleNamespace(ConsistentHashRouter=None)
    for name, module in {
        "ray": SimpleNamespace(serve=serve),
        "ray.serve": serve,
        "ray.serve.config": SimpleNamespace(RequestRouterConfig=lambda **_: None),
        "ray.serve.experimental.consistent_hash_router": router,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    script = runpy.run_path(str(FOLDER / "ray_serve.py"))
    threads = torch.get_num_threads()
    made = script["Chat"](str(script["PYLM"]), str(tmp_path))
    yield made
    made.engine.close()
    made.store.close()
    torch.set_num_threads(threads)


def test_a_replica_computes_nothing_more_for_a_client_that_has_left(chat: Any) -> None:
    async def leave() -> None:
        asked = asyncio.create_task(chat.answer([5, 6, 7], "ada", 2000))
        while not chat.engine.steps:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(leave())
    deadline = time.monotonic() + 20
    while chat.engine.load.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert chat.engine.load.running == 0
    assert chat.engine.steps < 1500


def test_an_answer_of_a_replica_comes_when_it_is_there_however_many_others_are_waited_for(chat: Any) -> None:
    async def ask() -> None:
        # More than the threads that Python has for what blocks.
        long = [asyncio.create_task(chat.answer([5, 6, 8 + i], f"long {i}", 60)) for i in range(40)]
        await asyncio.sleep(0)
        assert len((await chat.answer([9, 9], "short", 1))["tokens"]) == 1
        assert not any(each.done() for each in long)
        assert {len(each["tokens"]) for each in await asyncio.gather(*long)} == {60}

    asyncio.run(ask())


RIGHT: dict[str, Any] = {"ids": [5, 6], "conversation": "ada", "max_new_tokens": 2}


MALFORMED: list[Any] = [
    *(b"", b"{", b"[]", b"5", b"\xff\xfe", b"[" * 100_000, b"{}"),
    *({name: x for name, x in RIGHT.items() if name != left} for left in RIGHT),
    RIGHT | {"other": 1},
    *(RIGHT | {"ids": x} for x in ("abc", None, {}, [], ["a"], [1.5], [-1], [10**6])),
    *(RIGHT | {"conversation": x} for x in (5, None, "")),
    *(RIGHT | {"max_new_tokens": x} for x in ("x", None, 1.5, True, 0, 10**12)),
]


def test_a_malformed_request_to_a_replica_is_a_400_that_says_why(chat: Any) -> None:
    for body in MALFORMED:
        refused = ask_over_http(chat, body if isinstance(body, bytes) else json.dumps(body).encode())
        assert refused.status_code == 400, body
        error = json.loads(refused.body)["error"]
        assert error["message"], body
        assert error["type"] == "invalid_request_error"


def test_a_replica_takes_what_is_right_and_says_when_its_queue_is_full(chat: Any) -> None:
    data = json.dumps(RIGHT).encode()
    assert len(ask_over_http(chat, data)["tokens"]) == 2
    chat.engine.stop()
    chat.engine._requests.max_waiting = 1
    chat.engine.add_request([5, 6], max_new_tokens=2)
    refused = ask_over_http(chat, data)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    chat.engine.close()
    refused = ask_over_http(chat, data)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert json.loads(refused.body)["error"]["type"] == "server_error"


def test_an_answer_that_its_replica_did_not_finish_is_none(chat: Any) -> None:
    async def ask() -> None:
        asked = asyncio.create_task(chat.answer([5, 6, 7], "ada", 2000))
        while not chat.engine.steps:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(chat.engine.close)
        with pytest.raises(ClosedError, match="Ask again"):
            await asked

    asyncio.run(ask())


def ask_over_http(chat: Any, data: bytes) -> Any:
    async def body() -> bytes:
        return data

    return asyncio.run(chat(SimpleNamespace(body=body)))


def test_what_cannot_be_installed_is_skipped_with_the_reason(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pip(command: list[Any], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: No matching distribution found for peft\n")

    made: list[Path] = []

    def create(folder: Path, **options: Any) -> None:
        made.append(folder)
        own = runner.sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(own).mkdir(parents=True)

    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.venv, "create", create)
    monkeypatch.setattr(runner.subprocess, "run", pip)
    assert runner.run("peft") == ("skipped", "ERROR: No matching distribution found for peft")
    assert made == [tmp_path / "peft"]
    constraints = (tmp_path / "peft" / "constraints.txt").read_text(encoding="utf-8").split()
    assert any(line.startswith("torch==") for line in constraints)


@pytest.mark.parametrize("error", [OSError("read-only"), subprocess.CalledProcessError(1, "ensurepip")], ids=type)
def test_a_python_that_makes_no_environment_skips_what_needs_one(
    error: Exception, runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def create(folder: Path, **options: Any) -> None:
        raise error

    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.venv, "create", create)
    assert runner.run("peft") == ("skipped", f"no environment can be made: {error}")


def test_a_tool_that_does_not_start_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    judge = runpy.run_path(str(FOLDER / "judge.py"))
    monkeypatch.setitem(judge["judge"].__globals__, "counted", lambda url: {})
    assert not judge["judge"](judge["CASES"][0], str(tmp_path / "bin" / "python"), "http://127.0.0.1:9")
    assert "failed: FileNotFoundError" in capsys.readouterr().out


def test_an_environment_that_shares_nothing_is_held_to_the_version_of_torch_alone(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(runner, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(runner.venv, "create", lambda folder, **options: folder.mkdir())
    monkeypatch.setattr(runner.subprocess, "run", lambda command, **options: done)
    runner.python_for("judge", ("aiperf",), shared=False)
    (pin,) = (tmp_path / "judge" / "constraints.txt").read_text(encoding="utf-8").split()
    assert pin.startswith("torch==")
    assert not list((tmp_path / "judge").rglob("*.pth"))


def test_a_script_that_fails_or_takes_too_long_is_a_failure(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[Any], **options: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "the same tokens: no\n", "")

    monkeypatch.setattr(runner.subprocess, "run", fails)
    assert runner.run("pipeline") == ("failed", "the same tokens: no\n")

    def hangs(command: list[Any], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(runner.subprocess, "run", hangs)
    assert runner.run("pipeline")[0] == "failed"
