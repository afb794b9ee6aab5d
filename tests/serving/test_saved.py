"""Of a request whose store saves, the price of preemption counts the disk: what is there, and what loads took."""

from __future__ import annotations

import math
from pathlib import Path

from families import build_model

from kvtier import ConversationStore, Engine
from kvtier.serving.request import Request

PROMPT = list(range(1, 70))


def computed(engine: Engine, prompt: list[int]) -> Request:
    """A request that runs and has its prompt."""
    name = engine.add_request(prompt, max_new_tokens=5, do_sample=False)
    request = engine._requests.named[name]
    while not request.output.generated_tokens:
        engine.step()
    return request


def test_a_saved_prompt_is_priced_by_what_loads_took(tmp_path: Path) -> None:
    model = build_model("llama", "sdpa")
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4) as store:
        engine = Engine(model, store=store)
        assert math.isinf(engine._costs.prices().load), "nothing was loaded yet"
        request = computed(engine, PROMPT)
        assert request.job.saved == len(PROMPT)
        while engine.step():
            pass
        engine.close()
    with ConversationStore(model, directory=tmp_path, host_budget="8MiB", block_size=4, loading="always") as store:
        engine = Engine(model, store=store)
        again = computed(engine, [*PROMPT, 5, 6, 7])
        assert again.output.cached_tokens >= len(PROMPT), "it was loaded"
        prices = engine._costs.prices()
        assert prices.load_fixed + prices.load > 0
        assert math.isfinite(prices.load)
        assert math.isfinite(prices.from_disk(again.job.saved))
        secret = engine.add_request(PROMPT, max_new_tokens=5, do_sample=False, salt=object())
        job = engine._requests.named[secret].job
        while engine.step():
            pass
        assert job.saved == 0, "nobody could find it on the disk"
        engine.close()


def test_without_a_disk_nothing_is_saved() -> None:
    engine = Engine(build_model("llama", "sdpa"), host_budget="8MiB", block_size=4)
    request = computed(engine, PROMPT)
    assert request.job.saved == 0
    assert math.isinf(engine._costs.prices().load)
    engine.close()
