"""What the tests of the server share."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import torch

from kvtier.serving.http.server import Server, ServerOptions, bind

PYLM = Path(__file__).resolve().parents[3] / "examples" / "pylm"
NAME = "pylm"

Start = Callable[..., contextlib.AbstractContextManager["Running"]]


class Running:
    """A server that takes requests.

    Attributes:
        server: of this process.
        url: of its interface.
    """

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=120, **options)

    @property
    def engine(self) -> Any:
        """Behind it."""
        return self.server.manager.engine


@contextlib.contextmanager
def serving(trained: tuple[Any, Any], *, send_buffer: int | None = None, **options: Any) -> Iterator[Running]:
    """A server of a model and its tokenizer, on a port of this machine, in a thread."""
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


def answer_on(connection: socket.socket) -> tuple[int, str]:
    """The status and the body of the next answer, whole, in as many pieces as it comes."""
    with http.client.HTTPResponse(connection) as answer:
        answer.begin()
        return answer.status, answer.read().decode()


def by_generate(trained: tuple[Any, Any], prompt: str, count: int, **options: Any) -> str:
    """What `generate` writes behind a prompt, greedily."""
    model, tokenizer = trained
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
