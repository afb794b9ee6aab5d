"""Two forwards that take turns on a real device: greedy tokens are those of one forward."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier import Engine

pytestmark = pytest.mark.cuda


def test_two_forwards_that_take_turns_give_the_tokens_of_one(llama: Any, prompts: list[list[int]]) -> None:
    pytest.importorskip("greenlet")
    found = []
    for apart in (False, True):
        engine = Engine(llama, device_budget="2MB", host_budget="64MiB", block_size=16, sub_batches=apart)
        try:
            if apart:  # whatever is predicted
                decider = engine._runner.sub_batches  # type: ignore[attr-defined]
                decider.second = lambda batch: {0} if len(batch) > 1 else ()
            outputs = engine.generate_batch(prompts, max_new_tokens=32, do_sample=False)
            found.append([output.generated_tokens for output in outputs.values()])
            assert engine._runner.forward.counters.host_blocks  # type: ignore[attr-defined]
        finally:
            engine.close()
    assert found[0] == found[1]
