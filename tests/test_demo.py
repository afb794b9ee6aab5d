"""The demo shows what it says, draws it, and fails when tokens differ."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib", reason="the demo's plot is drawn with matplotlib")
FILE = Path(__file__).resolve().parent.parent / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_demo_compares_four_ways_and_draws_them(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--context", "256", "--new-tokens", "4", "--block-size", "16", "--plot", str(tmp_path / "out.png")]
    assert demo.main(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("  equal\n") == 4
    assert "All tokens equal those of DynamicCache." in printed
    assert "75% less" in printed
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_what_cannot_be_done_is_a_sentence(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--context", "64", "--budget", "1KiB"]) == 2
    assert "device_budget" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["nowhere/out.png", "."])
def test_a_file_that_cannot_be_drawn_into_is_said_before_anything_is_computed(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
) -> None:
    monkeypatch.delattr(demo, "load")
    assert demo.main(["--plot", str(tmp_path / file)]) == 2
    assert "name a file in a folder that is there" in capsys.readouterr().err


def test_other_tokens_are_a_failure(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    good = demo.Way("DynamicCache", 100, 1.0, True)
    stats = demo.CacheStats()
    assert demo.report(stats, [good] * 4, 0.5, 100)
    assert not demo.report(stats, [good, demo.Way("TieredKVCache", 50, 2.0, False), good, good], 0.5, 100)
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed
    assert "slower than DynamicCache here" in printed
