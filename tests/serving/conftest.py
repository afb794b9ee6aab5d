"""The tiny models of the tests of `hf`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))


@pytest.fixture(autouse=True)
def _tiny(one_thread: None, on_the_host: None) -> None:
    """All models are, and on the host."""


@pytest.fixture(scope="session", autouse=True)
def _only_errors_are_logged() -> Iterator[None]:
    """Random models would fill the report with advice."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
