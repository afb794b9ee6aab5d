"""Tests of tables write tiny blocks."""

import pytest


@pytest.fixture(autouse=True)
def _tiny(one_thread: None, on_the_host: None) -> None:
    """All of them are, and on the host."""
