"""Tests of tables write tiny blocks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "memory"))  # `test_interrupts`


@pytest.fixture(autouse=True)
def _tiny(one_thread: None, on_the_host: None) -> None:
    """All of them are, and on the host."""
