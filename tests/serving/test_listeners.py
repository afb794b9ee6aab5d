"""A listener hears of every token and of the end; log-probabilities are of the model's own scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_model

from kvtier import ConcurrentUseError, Engine
from kvtier.serving.request import Request, RequestOptions, RequestOutput

PROMPT = [5, 9, 2, 7, 11, 3]


def heard_by(engine: Engine, heard: list[tuple[str, int, str]], **options: Any) -> str:
    return engine.add_request(
        PROMPT,
        max_new_tokens=4,
        eos_token_id=-1,
        listener=lambda output: heard.append((output.request_id, len(output.generated_tokens), output.finish_reason)),
        **options,
    )


def test_a_listener_hears_of_each_token_of_each_sequence_and_of_the_end_once() -> None:
    heard: list[tuple[str, int, str]] = []
    with Engine(tiny_model("llama"), host_budget="100MB") as engine:
        name = heard_by(engine, heard, num_return_sequences=2, do_sample=True, request_id="a")
        engine.generate_batch([PROMPT[:3]], max_new_tokens=8)
        while engine.load.running or engine.load.waiting:
            pass
    for each in (name, f"{name}#1"):
        assert [(n, why) for who, n, why in heard if who == each] == [(1, ""), (2, ""), (3, ""), (4, "length")]


def test_a_request_that_is_cancelled_or_fails_tells_its_listener() -> None:
    heard: list[tuple[str, int, str]] = []

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    engine = Engine(tiny_model("llama"), host_budget="100MB")
    heard_by(engine, heard, request_id="cancelled")
    heard_by(engine, heard, request_id="failed", logits_processor=[fails])
    engine.step()
    engine.cancel("cancelled")
    while engine.step():
        pass
    assert [(who, why) for who, _, why in heard if why] == [("failed", "error"), ("cancelled", "cancelled")]
    engine.close()


def test_a_listener_that_raises_takes_no_request_with_it() -> None:
    def raises(_: Any) -> None:
        raise RuntimeError("not of the engine")

    with Engine(tiny_model("llama"), host_budget="100MB") as engine:
        engine.add_request(PROMPT, max_new_tokens=4, listener=raises)
        output = engine.wait(engine.add_request(PROMPT, max_new_tokens=4))
    assert len(output.generated_tokens) == 4


def test_top_logprobs_are_those_of_the_models_own_scores() -> None:
    model = tiny_model("llama")
    with Engine(model, host_budget="100MB") as engine:
        output = engine.wait(
            engine.add_request(PROMPT, max_new_tokens=4, do_sample=True, seed=3, temperature=2.0, top_logprobs=3)
        )
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT + output.generated_tokens])).logits[0].log_softmax(-1)
    for i, (token, top) in enumerate(zip(output.generated_tokens, output.top_logprobs, strict=True)):
        row = scores[len(PROMPT) - 1 + i]
        assert abs(output.logprobs[i] - float(row[token])) < 1e-4
        assert [t for t, _ in top] == row.topk(3).indices.tolist()
        assert all(abs(value - float(row[t])) < 1e-4 for t, value in top)


def test_the_load_is_what_there_is_to_do() -> None:
    engine = Engine(tiny_model("llama"), host_budget="100MB")
    for i in range(3):
        engine.add_request(PROMPT, max_new_tokens=4, request_id=str(i))
    assert (engine.load.running, engine.load.waiting, engine.load.alive) == (0, 3, False)
    engine.step()
    assert engine.load.running
    while engine.step():
        pass
    assert (engine.load.running, engine.load.waiting) == (0, 0)
    engine.close()


def test_a_listener_adds_and_cancels_in_the_midst_of_a_step() -> None:
    engine, added = Engine(tiny_model("llama"), host_budget="100MB"), list[str]()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1}

    def hears(output: RequestOutput) -> None:
        if len(output.generated_tokens) == 2 and not output.is_finished():
            added.append(engine.add_request(PROMPT[:4], **options))
            engine.cancel(output.request_id)

    def resets() -> None:
        raise AssertionError("no interrupt came")

    engine._runner.reset = resets  # type: ignore[method-assign]
    engine.add_request(PROMPT, **options, listener=hears)
    other = engine.add_request(PROMPT[::-1], **options)
    while engine.step():
        pass
    engine.check_integrity()
    assert engine.output(other).finish_reason == "length"
    assert [engine.output(name).finish_reason for name in added] == ["length"]
    engine.close()


@pytest.mark.parametrize("what", ["step", "stop", "close", "wait", "generate_batch"])
@pytest.mark.parametrize("started", [False, True])
def test_a_listener_cannot_wait_for_its_own_step(what: str, started: bool) -> None:
    engine, heard = Engine(tiny_model("llama"), host_budget="100MB"), list[type]()
    other = engine.add_request(PROMPT[::-1], max_new_tokens=6)
    arguments: dict[str, list[Any]] = {"wait": [other], "generate_batch": [[PROMPT]]}

    def hears(output: RequestOutput) -> None:
        try:
            getattr(engine, what)(*arguments.get(what, []))
        except Exception as error:
            heard.append(type(error))

    engine.add_request(PROMPT, max_new_tokens=1, listener=hears)
    if started:
        engine.start()
    assert engine.wait(other, timeout=60).finish_reason
    assert heard == [ConcurrentUseError]
    engine.close()


@pytest.mark.parametrize("what", ["step", "stop", "close", "generate_batch"])
@pytest.mark.parametrize("ends", ["fails", "closes"])
def test_nor_can_one_that_hears_that_all_requests_end(what: str, ends: str) -> None:
    engine, heard = Engine(tiny_model("llama"), host_budget="100MB"), list[tuple[str, type]]()
    arguments: dict[str, list[Any]] = {"generate_batch": [[PROMPT]]}

    def fails(*_: Any) -> None:
        raise RuntimeError("a step fails")

    def hears(output: RequestOutput) -> None:
        if output.is_finished():
            try:
                getattr(engine, what)(*arguments.get(what, []))
            except Exception as error:
                heard.append((output.finish_reason, type(error)))

    for name in ("first", "later"):
        engine.add_request(PROMPT, max_new_tokens=4, eos_token_id=-1, listener=hears, request_id=name)
    if ends == "fails":
        engine._costs.observe = fails  # type: ignore[method-assign]
        done = engine._requests.named["later"].done
        engine.start()
        assert done.wait(60)
    engine.close()
    assert heard == [("error" if ends == "fails" else "cancelled", ConcurrentUseError)] * 2


def test_who_reads_that_a_request_has_ended_reads_how() -> None:
    """Another thread may read between any two lines."""
    seen = []

    class Watched(RequestOutput):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if getattr(self, "finish_reason", "") and getattr(self, "finished", None) != 1.0:
                seen.append(name)

    output = Watched("a", [1])
    sampling, job = SimpleNamespace(), SimpleNamespace()
    request = Request(output, sampling, job, RequestOptions())  # type: ignore[arg-type]
    request.end("error", 1.0, ValueError("x"))
    assert (output.finish_reason, str(output.error), seen) == ("error", "x", [])
