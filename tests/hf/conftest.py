"""Fixtures of the tests that run real Transformers models."""

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors only lose by threads, badly so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _only_errors_are_logged() -> Iterator[None]:
    """Random models of every family would fill the report with advice about kernels and sampling flags."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
