"""What a model's own generation config asks for, and what a client is given of that."""

from __future__ import annotations

from typing import Any

import pytest
from servers import NAME, Running, Start, by_generate

PROMPT = "def first(items):\n    return"
OWN: list[dict[str, Any]] = [
    {"num_return_sequences": 3, "do_sample": True},
    {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    {"output_scores": True, "output_logits": True},
]


def set_own(patch: pytest.MonkeyPatch, running: Running, own: dict[str, Any]) -> None:
    for name, value in own.items():
        patch.setattr(running.engine.model.generation_config, name, value)


@pytest.mark.parametrize("own", OWN, ids=str)
def test_a_client_is_given_as_many_answers_as_it_asks_for(
    running: Running,
    trained: tuple[Any, Any],
    own: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    likeliest = by_generate(trained, PROMPT, 3)
    set_own(monkeypatch, running, own)
    ask = running.client().completions.create
    for asked in ({"temperature": 0}, {"temperature": 0, "n": 2}, {"temperature": 0.9}, {"n": 2, "seed": 1}, {}):
        done = ask(model=NAME, prompt=PROMPT, max_tokens=3, **asked)  # type: ignore[call-overload]
        assert len(done.choices) == asked.get("n", 1)
        assert done.usage.completion_tokens == 3 * asked.get("n", 1)
        if asked.get("temperature") == 0:
            assert {each.text for each in done.choices} == {likeliest}
    assert not [x for x in caplog.records if x.name == "kvtier.serving"], "no listener has failed"


def test_a_stop_string_of_the_model_s_own_is_no_text_of_an_answer(
    running: Running, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = by_generate(trained, PROMPT, 8), {"model": NAME, "prompt": PROMPT, "max_tokens": 8}
    across, inside, other = PROMPT[-3:] + whole[:1], whole[4:6], whole[2:4]
    set_own(monkeypatch, running, {"stop_strings": [across, inside]})
    ask = running.client().completions.create
    found = [ask(**asked, temperature=0, stop=stop).choices[0] for stop in (None, other)]  # type: ignore[call-overload]
    assert [(x.text, x.finish_reason) for x in found] == [
        (whole[: whole.index(inside)], "stop"),
        (whole[: whole.index(other)], "stop"),
    ]


def test_beams_that_are_not_served_are_said_once(
    start: Start, trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trained[0].generation_config, "num_beams", 3)
    with start() as running:
        for _ in range(2):
            running.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
    (said,) = [x.message for x in caplog.records if x.levelname == "WARNING" and x.name == "kvtier.serving"]
    assert "sets num_beams=3, which is not served: answers are decoded with num_beams=1" in said
