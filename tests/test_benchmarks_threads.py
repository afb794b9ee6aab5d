"""Contenders of a comparison get the same number of threads and cores."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cores
from benchmarks.__main__ import main
from benchmarks.scenarios import host, update
from benchmarks.scenarios.host import arena, calls
from kvtier.cpu import fallback, native

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")


@pytest.fixture(autouse=True)
def _restored_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class OneTurn:
    """Stands in for `Bench`: every contender of a comparison is built and measured once."""

    settings = SimpleNamespace(quick=True)

    def __init__(self) -> None:
        self.titles: list[str] = []

    def rounds(self, usual: int) -> int:
        """One."""
        return 1

    def compare_plain(self, scenario: str, title: str, starts: Any, **more: Any) -> None:
        """Measure each once."""
        self.titles.append(title)
        for name, start in starts.items():
            if name != host.CEILING:
                trial = start()
                trial.measure()
                trial.close()


@pytest.mark.skipif(not native.available(), reason="the native library is not compiled")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_host_attention_and_its_peers_have_the_threads_of_the_title(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    seen: dict[str, set[int]] = {}

    def spy(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(f"{module.__name__}.{name}", set()).add(kwargs.get("threads", torch.get_num_threads()))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(native, "attend")
    spy(fallback, "attend")
    spy(F, "scaled_dot_product_attention")
    small = 2**23
    monkeypatch.setattr(calls, "ARENA", small)
    monkeypatch.setattr(arena, "TURN_SECONDS", 0.0)
    problems = [(replace(shape, threads=threads), makes) for shape, makes in host.problems(quick=True)]
    monkeypatch.setattr(host, "problems", lambda quick: problems)
    memory: Any = SimpleNamespace(data=torch.zeros(small, dtype=torch.uint8), fill=lambda dtype: None)
    torch.set_num_threads(threads + 1)
    bench: Any = OneTurn()
    host.run_shapes(bench, memory)
    assert len(seen) == 3
    assert set.union(*seen.values()) == {threads}
    assert bench.titles[0].endswith("one thread" if threads == 1 else f"{threads} threads")
    assert torch.get_num_threads() == threads + 1


@needs_affinity
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one core")
def test_caches_on_a_cpu_are_compared_on_as_many_cores_as_torch_has_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split attention with one thread of torch has another thread of its own: both have one core."""
    seen: dict[str, set[int]] = {}
    real = update.UpdateSession.run_turn

    def run_turn(session: update.UpdateSession) -> float:
        for task in Path("/proc/self/task").iterdir():
            seen.setdefault(type(session.cache).__name__, set()).add(len(os.sched_getaffinity(int(task.name))))
        return real(session)

    monkeypatch.setattr(update.UpdateSession, "run_turn", run_turn)
    before = os.sched_getaffinity(0)
    arguments = ["--model=qwen3-tiny", "--device=cpu", "--rounds=1", "--new-tokens=1", "--threads=1"]
    arguments += ["--contexts=128", "--block-size=8", "--contenders=dynamic,kvtier@50%", "--cases=attend"]
    assert main(["update", *arguments, f"--out={tmp_path / 'r.jsonl'}"]) == 0
    assert seen == {"DynamicCache": {1}, "TieredKVCache": {1}}
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_cores_are_given_back_after_an_error() -> None:
    before = os.sched_getaffinity(0)

    def fail() -> None:
        with cores.limited_to(1):
            assert len(os.sched_getaffinity(0)) == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.sched_getaffinity(0) == before


def test_physical_cores_come_before_their_second_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        (tmp_path / str(cpu)).write_text(siblings + "\n")
    monkeypatch.setattr(cores, "_SIBLINGS", str(tmp_path / "{}"))
    assert cores.chosen({0, 1, 2, 3}, 2) == {0, 2}
    assert cores.chosen({0, 1, 2, 3}, 3) == {0, 1, 2}
    assert cores.chosen({1, 2, 3, 9}, 3) == {1, 2, 9}  # nothing is known of CPU 9
