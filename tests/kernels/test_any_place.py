"""Any partition, attended by all who attend on a device: programs on the device, the native library on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from behind import behind_the_cpus_back
from partitioned import Sequences, ragged_spec
from problems import DTYPES, Case

from kvtier.cpu import native
from kvtier.kernels import forms
from kvtier.memory.tiered import EngineFactory, default_engine
from kvtier.testing import held

# The interpreter is numpy, which warns of what is meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not native.available(), reason="the native library is not compiled"),
]

CASES = 1  # random problems of each dtype and engine: the interpreter is slow

ENGINES: dict[str, EngineFactory] = {
    "its own": default_engine,
    "behind the CPU's back": behind_the_cpus_back(held(1, eagerness=0.0, late=True)),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of the programs that attend, of those that merge, and of the native library."""
    calls: Counter[str] = Counter()
    for owner, name, what in (
        (forms.AttendForm, "launch", "programs"),
        (forms.MergeForm, "launch", "merges"),
        (native.Call, "run", "library"),
        (native.Call, "submit", "library"),
        (native, "attend", "library"),
        (native, "merge", "merges on the host"),
    ):
        function = getattr(owner, name)

        def counted(*args: Any, function: Callable[..., Any] = function, what: str = what, **options: Any) -> Any:
            calls[what] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_are_attended_to_where_they_are_by_who_reads_there(
    engine: str, dtype: torch.dtype, device: torch.device, served: Counter[str]
) -> None:
    found: list[str] = []
    met: set[str] = set()
    for number in range(CASES):
        spec, counts = ragged_spec(300 + number, dtype)
        lengths = tuple(min(n, spec.queries + 24) for n in spec.lengths)
        spec = replace(spec, lengths=lengths, first_valid=None, k_dim=min(spec.k_dim, 33), block_size=7)
        own = device.type == "cuda" or engine == "its own"  # on a real device transfers are the real ones
        sequences = Sequences(Case(spec), number, device=device, engine=None if own else ENGINES[engine])
        for four in (True, False):
            sequences.scatter()
            with sequences.memory.lock:
                parts = sequences.reader.partition(spec.lengths)
            served.clear()
            found += sequences.attend(counts, four=four)
            assert served["programs"] == bool(parts.device) + bool(parts.arriving)
            assert served["library"] == bool(parts.host)
            met.update(name for name in ("device", "arriving", "host") if getattr(parts, name))
            counts.reverse()
            assert not served["merges on the host"]
            sequences.check_integrity()
        sequences.close()
    assert not found, "\n".join(found)
    if device.type == "cuda":  # what is on its way may have come
        assert {"device", "host"} <= met
    else:
        assert met == {"device", "arriving", "host"} - ({"arriving"} if own else set())
