"""Fixtures of the tests that run real Transformers models."""

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """All models are."""


@pytest.fixture(scope="session", autouse=True)
def _only_errors_are_logged() -> Iterator[None]:
    """Random models of every family would fill the report with advice about kernels and sampling flags."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
