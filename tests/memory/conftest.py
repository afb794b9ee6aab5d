"""Tests of memory move tiny blocks. Those of mutations run tests of the parts, and of what is parked."""

import sys
from pathlib import Path

import pytest

for _folder in ("blocks", "../tables"):
    sys.path.insert(0, str((Path(__file__).resolve().parent / _folder).resolve()))


@pytest.fixture(autouse=True)
def _tiny(one_thread: None, on_the_host: None) -> None:
    """All of them are, and on the host."""
