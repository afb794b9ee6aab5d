"""Where the tests run: on the CPU, or with KVTIER_TEST_DEVICE=cuda everything that torch makes is made there."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Before collection, so that tensors made at import time follow too.
    if device := os.environ.get("KVTIER_TEST_DEVICE"):
        torch.set_default_device(device)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
