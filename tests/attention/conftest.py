"""Fixtures of the tests of attention over a cache."""

import pytest


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """All of them are."""
