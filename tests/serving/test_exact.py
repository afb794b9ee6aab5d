"""Whatever comes when, however it is cut, wherever it is and whoever gives way: the tokens of `generate`.

KVTIER_TEST_WORKLOADS=100 plays a hundred times as many loads.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import transformers
from workloads import MODELS, Load, model_of

from kvtier import Engine

#: Loads of each model.
LOADS = {"llama": 6, "qwen3_next": 2, "jamba": 2, "deepseek_v3": 2, "phi3_longrope": 1, "falcon": 1}
TIMES = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))


@pytest.mark.parametrize("name", MODELS)
def test_every_request_gets_the_tokens_of_generate(name: str) -> None:
    if name == "phi3_longrope" and transformers.__version__.startswith("5.17."):
        pytest.skip("its `generate` forgets the past where the rotary embedding changes")
    counts: Counter[str] = Counter()
    for seed in range(LOADS.get(name, 2) * TIMES):
        load = Load(name, seed)
        load.play()
        counts.update(load.counts)
    print(name, dict(counts))
    assert counts["requests"]


@pytest.mark.parametrize("name", MODELS)
def test_the_check_at_the_start_chooses_the_runner(name: str) -> None:
    engine = Engine(model_of(name), host_budget="64MiB")
    try:
        assert engine.runner == MODELS[name][3]
    finally:
        engine.close()
