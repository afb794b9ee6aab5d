"""Where the native kernel is not compiled its tests are skipped; each leaves it as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from problems import instruction_sets

from kvtier.cpu import native

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    AVAILABLE = native.available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", instruction_sets() if AVAILABLE else ["missing"], indirect=True)


@pytest.fixture(autouse=True)
def _on_the_host() -> Iterator[None]:
    """Whatever device the other tests make their tensors on."""
    with torch.device("cpu"):
        yield


@pytest.fixture
def kernel() -> None:
    if not AVAILABLE:
        pytest.skip("the native kernel is not compiled: `python -m kvtier.cpu.build`")


@pytest.fixture
def isa(request: pytest.FixtureRequest, kernel: None) -> Iterator[str]:
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)
