"""Calibration writes profiles: each test has a folder of its own, and nothing is chosen yet."""

import sys
from pathlib import Path

import pytest

from kvtier import profile
from kvtier.kernels import forms, tiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "transfer"))  # `stream_model`


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the profiles."""
    path = tmp_path / "profiles"
    monkeypatch.setenv(profile.VARIABLE, str(path))
    monkeypatch.setattr(tiles, "_chosen", {})
    monkeypatch.setattr(forms, "_variants", {})
    return path


@pytest.fixture(autouse=True)
def _tiny(on_the_host: None, one_thread: None) -> None:
    """Nothing here needs a device, or more than tiny tensors."""
