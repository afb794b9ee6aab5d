"""Storage tests move tiny blocks."""

import pytest


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """All of them are."""
