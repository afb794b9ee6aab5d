"""The demo shows what it says, draws it, and fails when tokens differ."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen3NextConfig

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


@pytest.mark.parametrize("budget", ["inf", "nan", "nan%"])
def test_a_number_that_is_none_is_no_budget(demo: ModuleType, capsys: pytest.CaptureFixture[str], budget: str) -> None:
    assert demo.main(["--context", "16", "--new-tokens", "2", "--budget", budget]) == 2
    assert "budget" in capsys.readouterr().err


def test_a_rate_needs_a_token_behind_the_first(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--new-tokens", "1"])
    assert "--new-tokens: at least 2" in capsys.readouterr().err


@pytest.fixture
def model_in(tmp_path: Path) -> Callable[[Any], str]:
    """Saves a model with the example's tokenizer."""

    def save(config: Any) -> str:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(FILE.parent / "pylm").save_pretrained(tmp_path)
        return str(tmp_path)

    return save


SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_a_model_with_recurrent_states_is_compared_too(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], model_in: Callable[[Any], str]
) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    heads |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    heads |= {"shared_expert_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"]
    model = model_in(Qwen3NextConfig(**SMALL, **heads, layer_types=kinds))
    assert demo.main(["--model", model, "--context", "64", "--new-tokens", "4", "--block-size", "4"]) == 0
    assert "All tokens equal" in capsys.readouterr().out


def test_a_model_of_windows_alone_has_nothing_to_compare(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], model_in: Callable[[Any], str]
) -> None:
    model = model_in(MistralConfig(**SMALL, sliding_window=8))
    assert demo.main(["--model", model, "--context", "64", "--new-tokens", "2"]) == 2
    assert "no layer of it keeps the whole context" in capsys.readouterr().err


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
