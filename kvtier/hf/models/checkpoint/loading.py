"""A model and its tokenizer, by name: for commands, which say in a sentence what cannot be loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from logging import ERROR, getLogger
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvtier.errors import ConfigError


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a model.

    Raises:
        ConfigError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of each reader its own: those of damaged files are often an `Exception` and no more
        raise ConfigError(_refused(name, "tokenizer", error)) from error


def model_of(name: str, dtype: str | None = None, device: str | None = None) -> Any:
    """A model that generates text, on a device.

    Args:
        name: a folder, or a name on the model hub.
        dtype: such as "bfloat16"; None: its own on a GPU, float32 on the CPU.
        device: such as "cuda:1"; None: a GPU, if there is one.

    Raises:
        ConfigError: it cannot be loaded, or there is no such dtype or device.
    """
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigError(f"--device {device}: {_first_line(error)}") from error
    kind: Any = "auto" if where.type != "cpu" else torch.float32
    if dtype is not None:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ConfigError(f"--dtype {dtype!r} is no floating-point dtype of torch, such as bfloat16 or float32.")
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=kind).to(where).eval()
    except Exception as error:  # the same
        raise ConfigError(_refused(name, "model", error)) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and progress bars of Transformers and the hub, which come between what a command says."""
    level, bars, hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _refused(name: str, what: str, error: Exception) -> str:
    why = _first_line(error)
    return f"The {what} of {name!r} cannot be loaded: {why} Give a folder with a model, or its name on the hub."


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    first = text.split("\n", 1)[0].strip()
    text = " ".join(text.split()) if first.endswith(":") else first  # what a colon promises is on the lines behind it
    return text if text.endswith((".", "!", "?")) else f"{text}."
