"""How often the model is looked at: once in each change of the requests. What is found is all that was changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import build_model

import kvtier.hf.models.generation as of
from kvtier import ConversationStore, Engine

PROMPT = list(range(1, 40))
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The walks over the modules of a model."""
    found, walk = list[Any](), of._modules

    def counted(model: Any) -> list[Any]:
        found.append(model)
        return walk(model)

    monkeypatch.setattr(of, "_modules", counted)
    return found


@pytest.fixture(params=[False, True], ids=["own", "store"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Engine]]:
    """A model and its engine, with and without a store."""
    model = build_model("llama", "sdpa")
    store = ConversationStore(model, host_budget="8MiB", block_size=4) if request.param else None
    engine = Engine(model, store=store) if store else Engine(model, host_budget="8MiB", block_size=4)
    yield model, engine
    engine.close()
    if store is not None:
        store.close()


def run(engine: Engine, prompt: list[int]) -> Any:
    name = engine.add_request(prompt, **OPTIONS)
    while engine.step():
        pass
    output = engine.output(name)
    assert output.error is None
    return output


def test_a_model_is_looked_at_once_in_a_change_of_many_requests(made: tuple[Any, Engine], walks: list[Any]) -> None:
    _, engine = made
    names = []
    for i in range(8):
        walks.clear()
        names.append(engine.add_request([i, *PROMPT], **OPTIONS))
        assert len(walks) == 1
    walks.clear()
    while engine.step():
        pass
    # They begin, have their prompts, and end: each in a change of all eight.
    assert all(engine.output(name).finish_reason == "length" for name in names)
    assert len(walks) == 3


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_weights_that_change_at_any_time_are_found(made: tuple[Any, Engine], when: str) -> None:
    model, engine = made
    run(engine, PROMPT)
    assert run(engine, PROMPT).cached_tokens > 0
    name = engine.add_request(PROMPT, **OPTIONS)
    if when == "running":
        engine.step()
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)
    while engine.step():
        pass
    assert engine.output(name).cached_tokens == (0 if when == "waiting" else len(PROMPT) - 1)
    assert run(engine, PROMPT).cached_tokens == (len(PROMPT) - 1 if when == "waiting" else 0)


def test_what_a_model_in_training_mode_has_computed_is_nobody_elses(made: tuple[Any, Engine]) -> None:
    model, engine = made
    run(engine, PROMPT)
    model.train()
    assert [run(engine, PROMPT).cached_tokens for _ in range(2)] == [0, 0]
    model.eval()
    assert run(engine, PROMPT).cached_tokens > 0
