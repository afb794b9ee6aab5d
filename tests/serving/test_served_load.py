"""A load that an engine serves on the machine's clock: prompts share what keys say, and times count from when a request
was due."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from families import build_model, tiny_model

from kvtier import BudgetError, ClosedError, ConfigError, Engine
from kvtier.scheduling.simulation.loads import conversations, uniform
from kvtier.scheduling.simulation.outcome import Request
from kvtier.serving.replay import replay
from kvtier.serving.request import RequestOutput

BLOCK = 8


class Spied(Engine):
    """An engine that remembers what it was asked for, warm-up aside, and what became of it."""

    asked: list[list[int]]
    outputs: list[RequestOutput]
    #: Seconds that each request takes to be added.
    slow = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked, self.outputs = [], []
        super().__init__(*args, **kwargs)

    def add_request(self, ids: Any, *args: Any, listener: Any = None, **kwargs: Any) -> str:
        if listener is None:
            return super().add_request(ids, *args, **kwargs)
        self.asked.append(list(ids))
        time.sleep(self.slow)

        def hear(output: RequestOutput) -> None:
            if output.is_finished():
                self.outputs.append(output)
            listener(output)

        return super().add_request(ids, *args, listener=hear, **kwargs)


@pytest.fixture
def engine() -> Iterator[Spied]:
    with Spied(tiny_model("llama"), host_budget="100MB", block_size=BLOCK, scheduler="fcfs") as made:
        yield made


def test_prompts_begin_alike_where_keys_are_alike_and_such_tokens_are_used_again(engine: Spied) -> None:
    alike = [Request(0.0, 30, 3, ("a", "b", "c")), Request(0.3, 21, 2, ("a", "b")), Request(0.3, 20, 2, ("x", "b"))]
    outcome = replay(engine, alike, block_size=BLOCK)
    first, second, third = sorted(engine.asked, key=len, reverse=True)
    assert (len(first), len(second), len(third)) == (30, 21, 20)
    assert first[:16] == second[:16]
    assert first[16:21] != second[16:21], "behind its keys a prompt is its own"
    assert third[8:16] == first[8:16]
    assert third[:8] != first[:8]
    assert [x.reused for x in outcome.requests] == [0, 16, 0], "a block is the same only where all before it is"
    assert [len(x.generated_tokens) for x in engine.outputs] == [x.output for x in outcome.requests], "to the length"


def test_a_stateless_replay_uses_nothing_again(engine: Spied) -> None:
    alike = [Request(0.0, 30, 2, ("a", "b", "c")), Request(0.2, 30, 2, ("a", "b", "c"))]
    outcome = replay(engine, alike, block_size=BLOCK, stateful=False)
    assert engine.asked[0][:24] == engine.asked[1][:24]
    assert [x.reused for x in outcome.requests] == [0, 0]


def test_a_turn_begins_with_what_was_really_said_and_comes_after_its_answer(engine: Spied) -> None:
    lengths: dict[str, Any] = {"prompt": uniform(12), "output": uniform(5), "most": 100, "block_size": BLOCK}
    load = conversations(3, 50.0, turns=3, think=0.05, least_think=0.02, **lengths)
    outcome = replay(engine, load, block_size=BLOCK)
    said = {tuple(x.prompt_ids): [*x.prompt_ids, *x.generated_tokens] for x in engine.outputs}
    turns = 0
    for request, served in zip(load, outcome.requests, strict=True):
        assert served.arrived <= served.scheduled <= served.first <= served.finished <= outcome.seconds
        if request.after is None:
            assert served.arrived == request.arrived
            continue
        before = outcome.requests[request.after]
        assert served.arrived == before.finished + request.arrived
        mine = [ids for ids in engine.asked if len(ids) == request.prompt]
        begins = [ids for prompt, ids in said.items() if len(prompt) == load[request.after].prompt]
        assert any(ids[: len(b)] == b for ids in mine for b in begins), request
        assert served.reused >= (before.prompt + before.output - 1) // BLOCK * BLOCK
        turns += 1
    assert turns >= 3


def test_a_request_counts_from_when_it_was_due_not_from_when_the_engine_took_it(engine: Spied) -> None:
    engine.slow = 0.1
    outcome = replay(engine, [Request(0.0, 6, 1)] * 4, block_size=BLOCK)
    assert [x.arrived for x in outcome.requests] == [0.0] * 4
    assert sorted(x.first for x in outcome.requests)[-1] >= 0.4, "four were added, one after the other"


def test_steps_rows_and_tokens_are_those_of_the_load(engine: Spied) -> None:
    outcome = replay(engine, [Request(0.0, 10, 4)], block_size=BLOCK)
    assert (outcome.steps, outcome.rows, outcome.computed) == (4, 4, 13)
    figures = outcome.figures()
    assert figures["rows"] == 1.0
    assert all(map(math.isfinite, figures.values()))


def test_a_load_whose_longest_request_never_fits_is_refused_before_anything_is_computed() -> None:
    with Spied(tiny_model("llama"), host_budget="300KB", block_size=BLOCK) as engine:
        with pytest.raises(BudgetError, match="does not fit"):
            replay(engine, [Request(0.0, 5, 2), Request(9.0, 100_000, 2)], block_size=BLOCK)
        assert engine.asked == []
        assert engine.steps == 0


def test_a_load_of_nothing_or_for_an_engine_that_does_not_run_is_refused(engine: Spied) -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        replay(engine, [], block_size=BLOCK)
    engine.stop()
    with pytest.raises(ClosedError, match="call `start`"):
        replay(engine, [Request(0.0, 6, 2)], block_size=BLOCK)


def test_what_a_request_failed_with_is_raised() -> None:
    model = build_model("llama", "sdpa")
    with Spied(model, host_budget="100MB", block_size=BLOCK) as engine:

        def break_it(*_: Any) -> None:
            if engine.asked:
                raise RuntimeError("a broken forward")

        model.model.layers[0].register_forward_pre_hook(break_it)
        with pytest.raises(RuntimeError, match="a broken forward"):
            replay(engine, [Request(0.0, 6, 2)], block_size=BLOCK)


def test_an_engine_that_is_closed_meanwhile_ends_the_replay(engine: Spied) -> None:
    closing = threading.Timer(0.3, engine.close)
    closing.start()
    with pytest.raises(ClosedError):
        replay(engine, [Request(0.0, 6, 2), Request(60.0, 6, 2)], block_size=BLOCK)
    closing.join()


def test_a_request_that_is_cancelled_in_the_middle_of_its_answer_counts_as_no_whole_one(engine: Spied) -> None:
    add = engine.add_request

    def spied(ids: Any, *args: Any, listener: Any = None, **kwargs: Any) -> str:
        if listener is None:
            return add(ids, *args, **kwargs)

        def hear(output: RequestOutput) -> None:
            engine.cancel(output.request_id)
            listener(output)

        return add(ids, *args, listener=hear, **kwargs)

    engine.add_request = spied  # type: ignore[method-assign]
    with pytest.raises(ClosedError, match="Request 0 was cancelled"):
        replay(engine, [Request(0.0, 6, 50)], block_size=BLOCK)


@pytest.mark.parametrize(
    "own", [{"num_beams": 4}, {"output_scores": True}, {"stop_strings": ["a"]}, {"max_time": 1e-9}]
)
def test_what_a_models_own_generation_config_asks_for_keeps_no_answer_from_its_length(own: dict[str, Any]) -> None:
    model = build_model("llama", "sdpa")
    vars(model.generation_config).update(own)
    with Spied(model, host_budget="100MB", block_size=BLOCK) as engine:
        replay(engine, [Request(0.0, 6, 5)], block_size=BLOCK)
    assert [len(x.generated_tokens) for x in engine.outputs] == [5]


def test_a_load_that_fits_is_served_where_the_warm_up_would_not_fit() -> None:
    with Engine(tiny_model("llama"), host_budget="28KB", block_size=BLOCK) as engine:
        most = engine.load.total_blocks * BLOCK
        assert most < 64
        outcome = replay(engine, [Request(0.0, 6, 2), Request(0.0, most - 2, 2)], block_size=BLOCK)
    assert all(math.isfinite(x.finished) for x in outcome.requests)


def test_tokens_that_mean_something_to_a_model_are_in_no_prompt() -> None:
    model = build_model("llama", "sdpa")
    model.config.image_token_id, model.generation_config.eos_token_id = 7, [3, 4]
    with Spied(model, host_budget="100MB", block_size=BLOCK) as engine:
        replay(engine, [Request(0.0, 400, 1)], block_size=BLOCK)
    assert not {3, 4, 7} & set(engine.asked[0])
    assert len(set(engine.asked[0])) > 20


def test_where_every_token_means_something_any_will_do() -> None:
    model = build_model("llama", "sdpa")
    model.config.own_token_ids = list(range(model.config.vocab_size))
    with Spied(model, host_budget="100MB", block_size=BLOCK) as engine:
        assert replay(engine, [Request(0.0, 9, 2)], block_size=BLOCK).requests[0].finished > 0
