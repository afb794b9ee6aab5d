"""Fixtures of the tests of attention over a cache."""

import sys
from pathlib import Path

import pytest

for _folder in ("cpu", "kernels", "hf"):  # `problems`, `paged_problems`, `families`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / _folder))


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """All of them are."""
