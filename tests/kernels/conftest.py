"""Where the kernels run: in Triton's interpreter on the CPU, or compiled, with KVTIER_TEST_DEVICE=cuda.

A process either interprets Triton programs or compiles them, as it is told when the programs are first imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for _folder in ("cpu", "attention"):  # `problems`, `partitioned`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / _folder))

DEVICE = torch.device("cuda" if os.environ.get("KVTIER_TEST_DEVICE") == "cuda" else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules and importlib.util.find_spec("triton"):
        # Other tests had it imported: Triton's own library (`tl.sum`, ...) is made for the interpreter after the fact.
        importlib.reload(sys.modules["triton.language.standard"])
        importlib.reload(sys.modules["triton.language"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type != "cpu":
        return
    skipped = pytest.mark.skip(reason="this process interprets; KVTIER_TEST_DEVICE=cuda compiles")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("cuda"):
            item.add_marker(skipped)
        # The interpreter computes in numpy: to it, fp16 is one more narrow type.
        if "torch.float16" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _problems_are_made_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setenv("KVTIER_KERNELS", "triton")
    with torch.device("cpu"):
        yield


@pytest.fixture
def device() -> torch.device:
    return DEVICE
