"""Budgets that change while requests run, down to less than a block: tokens stay, and what has no room says so."""

from __future__ import annotations

import random
from typing import Any

import pytest
from workloads import _bytes_of_a_block, model_of, same, stream_of_tokens

from kvtier import BudgetError, Engine

SIZE = 4


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("llama", 1), ("jamba", 1)])
def test_budgets_that_change_at_any_step_change_no_token(name: str, seed: int) -> None:
    r, one = random.Random(f"{name} {seed}"), _bytes_of_a_block(name, SIZE)
    budgets = {"host_budget": 40 * one, "device_budget": 20 * one}
    options = {"max_batch_tokens": r.choice((5, 16, 2048)), "spill": seed % 2 == 0}
    engine = Engine(model_of(name), block_size=SIZE, **budgets, **options)  # type: ignore[arg-type]
    asked, coming, done = dict[str, tuple[tuple[int, ...], int]](), 6, dict.fromkeys(("resized", "refused"), 0)
    try:
        while engine.step() or coming:
            if coming and r.random() < 0.5:
                coming, count, new = coming - 1, r.choice((1, 1, 3)), r.randint(1, 18)
                prompt = tuple(stream_of_tokens(r.choice((1, 2)))[: r.randint(1, 30)])
                asks: dict[str, Any] = {"do_sample": count > 1, "top_k": 1, "num_return_sequences": count}
                try:
                    first = engine.add_request(list(prompt), max_new_tokens=new, **asks)
                except BudgetError:
                    continue
                asked |= {f"{first}#{i}" if i else first: (prompt, new) for i in range(count)}
            if r.random() < 0.5:
                which, blocks = r.choice(tuple(budgets)), r.choice((0.01, 0.9, 1, 3, 8, 40))
                try:
                    engine.memory.resize(**{which: int(blocks * one)})
                    done["resized"] += 1
                except BudgetError:
                    done["refused"] += 1
            if asked and r.random() < 0.03:
                engine.cancel(r.choice(list(asked)))
            engine.check_integrity()
            assert engine.steps < 2000, "it does not end"
        assert all(done.values())
        for each, (prompt, new) in asked.items():
            output = engine.output(each)
            assert same(name, prompt, output.generated_tokens)
            assert len(output.generated_tokens) == new or output.finish_reason in ("cancelled", "error")
            assert output.error is None or isinstance(output.error, BudgetError)
        assert not engine.load.blocks, "nobody holds any"
    finally:
        engine.close()
    assert not any(slabs.budget.used for slabs in engine.memory._tier_slabs())
