"""Whatever comes when, however it is cut, wherever it is and whoever gives way: the tokens of `generate`.

KVTIER_TEST_LOADS=500 plays so many loads, and KVTIER_TEST_SEED=1000 others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import transformers
from mllama import mllama
from workloads import COUNTED, MODELS, Load, model_of, stream_of_tokens

from kvtier import Engine
from kvtier.cpu import native

#: Loads of all models together, and the seed of the first one.
LOADS = int(os.environ.get("KVTIER_TEST_LOADS", "25"))
FIRST = int(os.environ.get("KVTIER_TEST_SEED", "0"))
NAMES = list(MODELS)
#: Loads from which on all that they count has come about, whatever the seeds.
MANY = 200


@pytest.fixture(scope="module")
def came_about() -> Iterator[Counter[str]]:
    """What came about in all loads of this run."""
    counts: Counter[str] = Counter()
    yield counts
    print(f"{counts['loads']} loads: {dict(counts)}")
    if counts["loads"] >= MANY:
        assert all(counts[each] for each in COUNTED), "some of what loads are made for was never seen"


@pytest.mark.parametrize("name", NAMES)
def test_every_request_gets_the_tokens_of_generate(name: str, came_about: Counter[str]) -> None:
    if name == "phi3_longrope" and transformers.__version__.startswith("5.17."):
        pytest.skip("its `generate` forgets the past where the rotary embedding changes")
    some = Counter[str]()
    for number in range(NAMES.index(name), LOADS, len(NAMES)):
        load = Load(name, FIRST + number)
        load.play()
        some.update(load.counts)
        some["loads"] += 1
    came_about.update(some)
    assert some["requests"] or not some["loads"]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_at_the_start_chooses_the_runner(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """And warns of the one that is slow."""
    engine = Engine(model_of(name), host_budget="64MiB")
    try:
        assert engine.runner == MODELS[name][3]
        assert ("is run one sequence at a time: " in caplog.text) == (engine.runner == "single")
    finally:
        engine.close()


@pytest.mark.parametrize("device_budget", [None, "64KiB"], ids=["host", "spilled"])
def test_without_the_native_library_requests_are_packed_too(
    device_budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a device: attention by the paged programs, or what stands in for them in torch."""
    monkeypatch.setattr(native, "available", lambda: False)
    model, prompts = model_of("llama"), [stream_of_tokens(n)[: 9 + 20 * n] for n in range(4)]
    engine = Engine(model, device_budget=device_budget, host_budget="64MiB", block_size=4)
    try:
        assert engine.runner == "packed"
        outputs = list(engine.generate_batch(prompts, max_new_tokens=12, do_sample=False).values())
    finally:
        engine.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("runner", ["packed", "single"])
def test_text_passes_over_cross_attention_in_the_last_layer(runner: Literal["packed", "single"]) -> None:
    model, prompts = mllama((1, 3)), [list(range(20, 29)), list(range(40, 61))]
    with Engine(model, host_budget="16MiB", block_size=4, runner=runner) as engine:
        assert engine.runner == runner
        outputs = list(engine.generate_batch(prompts, max_new_tokens=6, do_sample=False).values())
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()
