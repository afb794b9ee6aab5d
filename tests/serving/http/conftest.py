"""A server on a port of this machine, in a thread, with the trained model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="kvtier serve needs the extra `serve`")
pytest.importorskip("uvicorn", reason="kvtier serve needs the extra `serve`")
pytest.importorskip("openai", reason="these tests need OpenAI's client")

import torch
from servers import PYLM, Running, Start, serving
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def trained() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(PYLM, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(PYLM)


@pytest.fixture(scope="session")
def start(trained: tuple[Any, Any]) -> Start:
    """Starts a server; at the end nothing of it is left."""
    return functools.partial(serving, trained)


@pytest.fixture(scope="module")
def running(start: Start) -> Iterator[Running]:
    """A server for the tests of a module."""
    with start() as server:
        yield server
