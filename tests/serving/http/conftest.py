"""A server on a port of this machine, in a thread, with the trained model."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="kvtier serve needs the extra `serve`")
pytest.importorskip("uvicorn", reason="kvtier serve needs the extra `serve`")
pytest.importorskip("openai", reason="these tests need OpenAI's client")

import torch
from servers import NAME, PYLM, Running, Start
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier.serving.http.server import Server, ServerOptions, bind


@pytest.fixture(scope="session")
def trained() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(PYLM)


@pytest.fixture(scope="session")
def start(trained: tuple[Any, Any]) -> Start:
    """Starts a server; at the end nothing of it is left."""

    @contextlib.contextmanager
    def started(*, send_buffer: int | None = None, **options: Any) -> Iterator[Running]:
        options = {"store": {"host_budget": "256MiB", "block_size": 16}, "drain": 5.0} | options
        ready, listening = threading.Event(), bind("127.0.0.1", 0)
        if send_buffer is not None:  # of the connections, which inherit it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        with listening, Server(*trained, ServerOptions(NAME, **options)) as server:
            thread = threading.Thread(target=server.run, args=(listening, ready.set), daemon=True)
            thread.start()
            assert ready.wait(120)
            try:
                yield Running(server, listening.getsockname()[1])
            finally:
                server.stop()
                thread.join(180)
                assert not thread.is_alive()

    return started


@pytest.fixture(scope="module")
def running(start: Start) -> Iterator[Running]:
    """A server for the tests of a module."""
    with start() as server:
        yield server
