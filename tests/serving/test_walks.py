"""How often the model is looked at: once in each change of the requests. What is found is all that was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import build_model

from kvtier import ConversationStore, Engine
from kvtier.hf.models.identity import dependence

PROMPT = list(range(1, 40))
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The walks over the modules of a model."""
    found, walk = list[Any](), dependence._modules

    def counted(model: Any) -> list[Any]:
        found.append(model)
        return walk(model)

    monkeypatch.setattr(dependence, "_modules", counted)
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


class Added(torch.nn.Module):
    """A module with two adapters, as adapter libraries have them."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.active_adapters = ["a"]
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) * (1 if self.active_adapters == ["a"] else 3)


@pytest.fixture
def switch(made: tuple[Any, Engine]) -> Callable[[str], None]:
    """Lets the model have one of two adapters."""
    model, _ = made
    modules = []
    for layer in model.model.layers:
        layer.self_attn.k_proj = Added(layer.self_attn.k_proj)
        modules.append(layer.self_attn.k_proj)

    def to(name: str) -> None:
        for module in modules:
            module.active_adapters = [name]

    return to


def expected(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, len(prompt) :].tolist()


def test_a_request_begins_with_what_the_adapter_has_computed_that_computes_the_rest(
    made: tuple[Any, Engine], switch: Callable[[str], None]
) -> None:
    model, engine = made
    run(engine, PROMPT)
    switch("b")
    right = expected(model, PROMPT)
    switch("a")
    assert expected(model, PROMPT) != right
    name = engine.add_request(PROMPT, **OPTIONS)
    switch("b")
    while engine.step():
        pass
    assert engine.output(name).cached_tokens == 0
    assert engine.output(name).generated_tokens == right
    assert run(engine, PROMPT).cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize(
    ("back", "others"),
    [(False, False), (True, True), (True, False)],
    ids=["until it ends", "for a while in which others come", "for a step"],
)
def test_what_two_adapters_have_computed_is_of_neither(
    back: bool, others: bool, made: tuple[Any, Engine], switch: Callable[[str], None]
) -> None:
    _, engine = made
    name = engine.add_request(PROMPT, max_new_tokens=6, do_sample=False)
    engine.step()
    switch("b")
    if others:
        engine.add_request(PROMPT[::-1], **OPTIONS)
    engine.step()
    if back:
        switch("a")
    while engine.step():
        pass
    longer = PROMPT + engine.output(name).generated_tokens
    for adapter, cached in (("a", len(PROMPT)), ("b", 0)):
        switch(adapter)
        assert run(engine, longer).cached_tokens <= cached


def test_what_an_autocast_of_one_step_has_computed_is_of_no_other_request(made: tuple[Any, Engine]) -> None:
    _, engine = made
    name = engine.add_request(PROMPT, max_new_tokens=6, do_sample=False)
    engine.step()
    with torch.autocast("cpu", torch.bfloat16):
        engine.step()
    while engine.step():
        pass
    assert run(engine, PROMPT + engine.output(name).generated_tokens).cached_tokens <= len(PROMPT)


def test_what_an_autocast_elsewhere_computes_is_not_what_a_step_computes(made: tuple[Any, Engine]) -> None:
    _, engine = made
    first = engine.add_request(PROMPT, **OPTIONS)
    engine.step()
    with torch.autocast("cpu", torch.bfloat16):
        engine.add_request(PROMPT[::-1], **OPTIONS)
    while engine.step():
        pass
    assert run(engine, PROMPT + engine.output(first).generated_tokens).cached_tokens == len(PROMPT) + 2
    assert run(engine, PROMPT[::-1]).cached_tokens == len(PROMPT) - 1


def test_each_sequence_of_a_prompt_can_be_gone_on_with(made: tuple[Any, Engine]) -> None:
    _, engine = made
    name = engine.add_request(PROMPT, max_new_tokens=5, do_sample=True, seed=1, num_return_sequences=3, salt="ab")
    while engine.step():
        pass
    for each in (name, f"{name}#1", f"{name}#2"):
        longer = PROMPT + engine.output(each).generated_tokens
        again = engine.add_request(longer, **OPTIONS, salt="ab")
        while engine.step():
            pass
        assert engine.output(again).cached_tokens == len(longer) - 1
